"""Who calls: tenants, their keys and what they may ask for."""

from ._keyring import Caller, Keyring
from ._tenant import ANONYMOUS, Tenant

__all__ = ["ANONYMOUS", "Caller", "Keyring", "Tenant"]
