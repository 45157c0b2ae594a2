"""What can go wrong for a user of the client.

* ``TokensError``
    * ``StreamFailed`` - the gateway refused a stream or could not finish it
        * ``StreamCancelled`` - somebody cancelled it
    * ``SocketRejected`` - the gateway refused the handshake
    * ``SocketLost`` - the socket can not be opened, or is gone
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

UNREACHABLE: Final = "unreachable"
LOST: Final = "socket_lost"
CLOSED: Final = "socket_closed"
BROKEN: Final = "protocol_broken"


class TokensError(Exception):
    """Base class.

    Attributes:
        code: a code of the gateway's reference of errors, or one of the client's own.
        message: for people.
        retry_after: seconds after which trying again makes sense; None: nothing is known.
        request_id: of the stream, once it has one.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retry_after: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
        self.retry_after = retry_after
        self.request_id = request_id

    def of_stream(self, request_id: str) -> Self:
        """Answer a copy for one of several streams that ended by it."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.args = self.args
        copy.request_id = request_id or self.request_id
        return copy


class StreamFailed(TokensError):
    """The gateway has ended a stream with an error; deltas that came before were handed out.

    Attributes:
        type: class of the error in OpenAI's sense.
        param: the field at fault, as a dotted path.
        delivery: tokens ``generated``, ``delivered`` and ``acknowledged``.
        gateway: what the gateway adds to errors of accepted requests, as ``retryable``.
    """

    def __init__(
        self,
        error: Mapping[str, Any],
        *,
        delivery: Mapping[str, int | None] | None = None,
        retry_after: float | None = None,
        request_id: str | None = None,
    ) -> None:
        code, message = str(error.get("code")), str(error.get("message"))
        super().__init__(code, message, retry_after=retry_after, request_id=request_id)
        self.type: str | None = error.get("type")
        self.param: str | None = error.get("param")
        self.delivery = delivery
        self.gateway: Mapping[str, Any] = error.get("gateway") or {}


class StreamCancelled(StreamFailed):
    """The stream was cancelled, but not by leaving its block: its owner did it elsewhere."""


class SocketRejected(TokensError):
    """The handshake got another answer than a socket.

    Attributes:
        status: of that HTTP answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        retry_after: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(code, message, retry_after=retry_after, request_id=request_id)
        self.status = status


class SocketLost(TokensError):
    """There is no socket, and what was under way on it can not go on.

    Attributes:
        close_code: of the WebSocket: 1006 if it went without a word; None: it was never open.
    """

    def __init__(self, code: str, message: str, close_code: int | None = None) -> None:
        super().__init__(code, message)
        self.close_code = close_code
