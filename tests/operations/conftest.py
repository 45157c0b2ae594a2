"""The fixtures of this folder."""

from tests.ledger.databases import postgres as postgres
from tests.ledger.databases import url as url
