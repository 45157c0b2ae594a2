"""The one database of a gateway, as the rooms above use it: who calls, and what was used.

What connects to it is `sql`, which is imported only where a database is configured:
SQLAlchemy takes a fifth of a second to import, and few gateways need it. The failures
stand here, so that whoever waits for a database can name them without it.
"""

from ._failures import RowsRefused, StoreFailed
from ._open import open_with

__all__ = ["RowsRefused", "StoreFailed", "open_with"]
