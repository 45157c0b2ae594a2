"""The internal request: what the caller wants, and all that the gateway adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of work that engines do.

    Attributes:
        name: as it stands in records and metrics.
        path: of the public route and, below the worker's prefix, of the engine's.
        streams: whether it can be asked for as a stream of events.
        choices: whether its answers hold choices that each need a finish reason.
        input: the body field without which there is nothing to do.
    """

    name: str
    path: str
    streams: bool
    choices: bool
    input: str


CHAT: Final = Operation("chat.completions", "/v1/chat/completions", True, True, "messages")
COMPLETIONS: Final = Operation("completions", "/v1/completions", True, True, "prompt")
EMBEDDINGS: Final = Operation("embeddings", "/v1/embeddings", False, False, "input")
OPERATIONS: Final = (CHAT, COMPLETIONS, EMBEDDINGS)


@dataclass(slots=True, eq=False)
class InternalRequest:
    """One accepted body with the identity that the gateway gave it.

    Attributes:
        exchange_id: ours, 32 hexadecimal digits, the only key of this exchange.
        members: the body's top-level fields in order, each as the caller's bytes.
        size: of the caller's body, in bytes.
        model: public name; ``upstream_model`` is the one the engine knows.
        choices: how many choices must finish (``prompts x n``); 0 for operations without.
        n: choices per prompt, which some engines count as slots.
        wants_usage: the caller asked for a usage event at the end of its stream.
        wants_running_usage: the caller asked for usage in every event.
        arrived, deadline: Trio clock, seconds.
    """

    exchange_id: str
    client_request_id: str | None
    tenant: str
    key_id: str | None
    operation: Operation
    model: str
    upstream_model: str
    members: dict[str, bytes]
    size: int
    stream: bool
    choices: int
    n: int
    wants_usage: bool
    wants_running_usage: bool
    arrived: float
    deadline: float
    tier: str = "standard"
    trace: tuple[tuple[bytes, bytes], ...] = ()

    def attempt_id(self, number: int) -> str:
        """Name the ``number``-th attempt (from 1): unique, fixed length, never a prefix of another."""
        return f"{self.exchange_id}-{number:02d}"
