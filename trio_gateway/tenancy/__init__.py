"""Who calls: tenants, their keys, what they may ask for, and how much of it in a minute."""

from ._keyring import Caller, Keyring
from ._new_key import new_key
from ._rate_book import RateBook
from ._rates import FAILURES_A_MINUTE, FailedKeys, RateLimits
from ._tenant import ANONYMOUS, Tenant

__all__ = [
    "ANONYMOUS",
    "FAILURES_A_MINUTE",
    "Caller",
    "FailedKeys",
    "Keyring",
    "RateBook",
    "RateLimits",
    "Tenant",
    "new_key",
]
