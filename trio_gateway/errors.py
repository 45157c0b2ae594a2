"""What can go wrong on purpose, and how it is told to a caller.

* ``GatewayError``
    * ``Refused`` - the caller gets a `Problem`; nothing of an answer was sent
    * ``WireError`` - bytes of a peer broke a rule of their protocol
        * ``BadFraming`` - a client's HTTP head or body framing
        * ``EngineProtocolError`` - an engine's head, framing or event stream
    * ``UpstreamFailed`` - an engine was not reached, or did not keep its side
    * ``ClientGone`` - the client's connection does not take bytes any more

`trio.Cancelled` is not in the tree: it always belongs to the scope that caused it.
`CODES` is the one table from an error code to its HTTP status and type
(contracts section 4).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final, NamedTuple


class CodeInfo(NamedTuple):
    """Status and type of an error code, and whether repeating the same request can help."""

    status: int
    type: str
    final: bool


_INVALID: Final = "invalid_request_error"
_OVERLOADED: Final = "overloaded_error"

CODES: Final[dict[str, CodeInfo]] = {
    "invalid_json": CodeInfo(400, _INVALID, True),
    "invalid_value": CodeInfo(400, _INVALID, True),
    "missing_field": CodeInfo(400, _INVALID, True),
    "field_not_allowed": CodeInfo(400, _INVALID, True),
    "bad_framing": CodeInfo(400, _INVALID, True),
    "context_length_exceeded": CodeInfo(400, _INVALID, True),
    "websocket_stream_limit_reached": CodeInfo(400, _INVALID, False),
    "invalid_api_key": CodeInfo(401, "authentication_error", True),
    "model_not_allowed": CodeInfo(403, "permission_error", True),
    "priority_not_allowed": CodeInfo(403, "permission_error", True),
    "origin_not_allowed": CodeInfo(403, "permission_error", True),
    "model_not_found": CodeInfo(404, _INVALID, True),
    "previous_response_not_found": CodeInfo(404, _INVALID, True),
    "unknown_route": CodeInfo(404, _INVALID, True),
    "request_not_found": CodeInfo(404, _INVALID, True),
    "method_not_allowed": CodeInfo(405, _INVALID, True),
    "request_timeout": CodeInfo(408, _INVALID, False),
    "client_stalled": CodeInfo(408, _INVALID, False),
    "request_cancelled": CodeInfo(409, _INVALID, True),
    "request_too_large": CodeInfo(413, _INVALID, True),
    "unsupported_media_type": CodeInfo(415, _INVALID, True),
    "upgrade_required": CodeInfo(426, _INVALID, True),
    "rate_limit_exceeded": CodeInfo(429, "rate_limit_error", False),
    "queue_full": CodeInfo(429, "rate_limit_error", False),
    "wait_exceeds_deadline": CodeInfo(429, "rate_limit_error", False),
    "headers_too_large": CodeInfo(431, _INVALID, True),
    "internal_error": CodeInfo(500, "server_error", True),
    "engine_failed": CodeInfo(502, "upstream_error", False),
    "engine_protocol_error": CodeInfo(502, "upstream_error", False),
    "engine_credentials": CodeInfo(502, "upstream_error", True),
    "no_worker": CodeInfo(503, _OVERLOADED, False),
    "engine_unavailable": CodeInfo(503, _OVERLOADED, False),
    "engine_overloaded": CodeInfo(503, _OVERLOADED, False),
    "queue_timeout": CodeInfo(503, _OVERLOADED, False),
    "gateway_draining": CodeInfo(503, _OVERLOADED, False),
    "records_unavailable": CodeInfo(503, _OVERLOADED, False),
    "keys_unavailable": CodeInfo(503, _OVERLOADED, False),
    "operator_cancelled": CodeInfo(503, _OVERLOADED, True),
    "engine_out_of_memory": CodeInfo(503, "engine_out_of_memory", True),
    "deadline_exceeded": CodeInfo(504, "timeout_error", False),
    "first_token_timeout": CodeInfo(504, "timeout_error", False),
    "loop_detected": CodeInfo(508, _INVALID, True),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One refusal or failure as its caller is told it.

    Attributes:
        code: a key of `CODES`, or an engine's own code that is passed on.
        message: for people; holds no prompt, key or internal address.
        status: HTTP status, where the answer has not begun.
        type: class of the error in OpenAI's sense.
        param: the field at fault, as a dotted path.
        retry_after: seconds after which trying again makes sense; every 429
            and 503 has one, except the codes that are final.
        final: the same request can not succeed later (``x-should-retry: false``).
        headers: further answer headers.
    """

    code: str
    message: str
    status: int
    type: str
    param: str | None = None
    retry_after: float | None = None
    final: bool = False
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> Problem:
        """Make the problem that `CODES` describes under ``code``."""
        info = CODES[code]
        return cls(code, message, info.status, info.type, param, retry_after, info.final, headers)

    def but(self, **changes: object) -> Problem:
        """Answer a copy with some attributes changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


class GatewayError(Exception):
    """Base class; catch it only where an answer is being written."""


class Refused(GatewayError):
    """The caller is told ``problem`` instead of an answer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.code)
        self.problem = problem


class WireError(GatewayError):
    """A peer's bytes broke a rule of its protocol."""


class BadFraming(WireError):
    """A client's head or framing is one that two parsers may read differently."""

    def __init__(self, message: str, code: str = "bad_framing") -> None:
        super().__init__(message)
        self.code = code


class EngineProtocolError(WireError):
    """An engine's head, framing or events can not be read."""


class UpstreamFault(enum.Enum):
    """How an attempt failed below the meaning of any answer."""

    UNREACHABLE = "unreachable"  # no connection: nothing was executed
    BROKEN = "broken"  # the connection died, or the message was cut
    MALFORMED = "malformed"  # what came can not be read
    TOO_LARGE = "too_large"  # over one of our bounds


class UpstreamFailed(GatewayError):
    """An engine was not reached, or did not keep its side of the exchange.

    The message is for logs: it may name addresses, so no caller ever sees it.
    """

    def __init__(self, fault: UpstreamFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


class ClientGone(GatewayError):
    """The client's connection was reset, or a write to it failed."""


# OpenSSL's names of alerts by which a peer refuses a certificate of ours.
_REFUSED: Final = (
    "CERTIFICATE_REQUIRED",
    "BAD_CERTIFICATE",
    "UNSUPPORTED_CERTIFICATE",
    "CERTIFICATE_REVOKED",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_UNKNOWN",
    "UNKNOWN_CA",
    "ACCESS_DENIED",
)


def spoken_tls(exc: BaseException | None) -> str:
    """Say what went wrong with TLS, in words that tell whose certificate it was."""
    verdict = getattr(exc, "verify_message", None)
    if verdict:
        return f"its certificate is not accepted: {verdict}"
    reason = getattr(exc, "reason", None)
    if not isinstance(reason, str):
        return str(exc)
    words = reason.lower().replace("_", " ")
    if "ALERT" in reason:
        alert = words.partition("alert ")[2]
        refused = any(name in reason for name in _REFUSED)
        return f"it does not accept our certificate: {alert}" if refused else f"it sent the alert {alert}"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it shows no certificate"
    if reason == "HTTP_REQUEST":
        return "it speaks HTTP without TLS"
    if reason == "UNEXPECTED_EOF_WHILE_READING":
        return "it closed the connection, as some do that do not accept our certificate"
    return words
