"""The public door: listeners, connections, routes, and the client ports that own the sockets' writers."""

from ._generate import GenerateSettings, Generator
from ._http_server import HttpServer, ServerLimits
from ._listener import AcceptLoop, open_listeners
from ._routes import Door, DoorSettings
from ._tls import server_context
from ._watch import HangupWatch

__all__ = [
    "AcceptLoop",
    "Door",
    "DoorSettings",
    "GenerateSettings",
    "Generator",
    "HangupWatch",
    "HttpServer",
    "ServerLimits",
    "open_listeners",
    "server_context",
]
