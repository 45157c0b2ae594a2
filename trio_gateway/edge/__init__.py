"""The public door: listeners, connections, routes, and the client ports that own the sockets' writers."""

from ._authenticate import Authenticator
from ._connection import Connection
from ._generate import GenerateSettings, Generator
from ._http_client import HttpClient
from ._http_server import HttpServer, ServerLimits, UnplacedBytes
from ._listener import AcceptLoop, open_listeners
from ._resumable_client import KeepTerms
from ._routes import Door, DoorSettings
from ._socket_streams import SocketStreams
from ._sockets import Sockets, SocketSettings
from ._tls import server_context
from ._tokens import TokenSettings
from ._watch import Hangup, HangupWatch
from ._websocket import SocketLimits

__all__ = [
    "AcceptLoop",
    "Authenticator",
    "Connection",
    "Door",
    "DoorSettings",
    "GenerateSettings",
    "Generator",
    "Hangup",
    "HangupWatch",
    "HttpClient",
    "HttpServer",
    "KeepTerms",
    "ServerLimits",
    "SocketLimits",
    "SocketSettings",
    "SocketStreams",
    "Sockets",
    "TokenSettings",
    "UnplacedBytes",
    "open_listeners",
    "server_context",
]
