"""Who calls: tenants, their keys, what they may ask for, and how much of it in a minute.

Some stand in the configuration file, others in a database (`_roster`, whose entries
`_stored` describes), which `_follower` watches for changes.
"""

from typing import TYPE_CHECKING

from ._follower import Follower, open_roster
from ._keyring import Caller, Keyring
from ._new_key import new_key
from ._rate_book import RateBook
from ._rates import FAILURES_A_MINUTE, FailedKeys, RateLimits
from ._stored import RosterRefused, Stored, StoredKey, StoredTenant
from ._tenant import ANONYMOUS, Tenant

if TYPE_CHECKING:
    from ._roster import Roster as Roster  # `open_roster` makes it

__all__ = [
    "ANONYMOUS",
    "FAILURES_A_MINUTE",
    "Caller",
    "FailedKeys",
    "Follower",
    "Keyring",
    "RateBook",
    "RateLimits",
    "RosterRefused",
    "Stored",
    "StoredKey",
    "StoredTenant",
    "Tenant",
    "new_key",
    "open_roster",
]
