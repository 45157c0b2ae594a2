"""Settings that the contract names and this version does not have.

Accepting one silently would promise what is not kept, so each is an error that says what to do meanwhile.
Whoever builds the thing deletes its row here and adds the field.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

_NO_WEBSOCKET: Final = "there is no WebSocket endpoint"

# Keys without list positions ("tenants.requests_per_minute").
NOT_YET: Final = MappingProxyType(
    {
        "admin.tokens": "the admin listener stays on loopback addresses and unix sockets",
        "delivery.resume_window": "answers cannot be resumed",
        "websocket.max_message_bytes": _NO_WEBSOCKET,
        "websocket.ping_interval": _NO_WEBSOCKET,
        "websocket.ping_timeout": _NO_WEBSOCKET,
        "websocket.auth_timeout": _NO_WEBSOCKET,
        "websocket.max_streams": _NO_WEBSOCKET,
    }
)
