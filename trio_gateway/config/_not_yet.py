"""Settings that the contract names and this version does not have.

Accepting one silently would promise what is not kept, so each is an error that says what to do meanwhile.
Whoever builds the thing deletes its row here and adds the field.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

# Keys without list positions ("tenants.requests_per_minute").
NOT_YET: Final = MappingProxyType(
    {
        "admin.tokens": "the admin listener stays on loopback addresses and unix sockets",
    }
)
