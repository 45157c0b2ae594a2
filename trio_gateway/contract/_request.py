"""The internal request: what the caller wants, and all that the gateway adds to it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

# The bytes of a JSON value; of a long one a view of the body it came in, since copies of megabytes take time.
RawJson = bytes | memoryview


class Style(enum.Enum):
    """How the answers of an operation say that they are whole."""

    CHOICES = enum.auto()  # each choice has a finish reason; a stream ends with [DONE]
    RESPONSES = enum.auto()  # OpenAI's Responses: a status, or a terminal event
    MESSAGES = enum.auto()  # Anthropic's Messages: a stop reason, or a terminal event
    PLAIN = enum.auto()  # the HTTP message is the answer


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """One kind of work that engines do.

    Attributes:
        name: as it stands in records and metrics.
        path: of the public route and, below the worker's prefix, of the engine's.
        streams: whether it can be asked for as a stream of events.
        style: how its answers end.
        input: the body field without which there is nothing to do.
        instead: fields of which any one will do in its place.
        multipart: the body is a form with files, not JSON.
    """

    name: str
    path: str
    streams: bool
    style: Style
    input: str
    instead: tuple[str, ...] = ()
    multipart: bool = False

    @property
    def choices(self) -> bool:
        """Whether its answers hold choices that each need a finish reason."""
        return self.style is Style.CHOICES

    @property
    def anthropic(self) -> bool:
        """Whether its callers speak Anthropic's API."""
        return self.path.startswith("/v1/messages")


CHAT: Final = Operation("chat.completions", "/v1/chat/completions", True, Style.CHOICES, "messages")
COMPLETIONS: Final = Operation("completions", "/v1/completions", True, Style.CHOICES, "prompt")
EMBEDDINGS: Final = Operation("embeddings", "/v1/embeddings", False, Style.PLAIN, "input")
RESPONSES: Final = Operation(
    "responses", "/v1/responses", True, Style.RESPONSES, "input", ("prompt", "previous_response_id")
)
MESSAGES: Final = Operation("messages", "/v1/messages", True, Style.MESSAGES, "messages")
COUNT_TOKENS: Final = Operation(
    "messages.count_tokens", "/v1/messages/count_tokens", False, Style.PLAIN, "messages"
)
RERANK: Final = Operation("rerank", "/v1/rerank", False, Style.PLAIN, "query")
SCORE: Final = Operation("score", "/v1/score", False, Style.PLAIN, "text_1", ("queries", "query", "data_1"))
TOKENIZE: Final = Operation(
    "tokenize", "/tokenize", False, Style.PLAIN, "prompt", ("messages", "content", "text")
)
DETOKENIZE: Final = Operation("detokenize", "/detokenize", False, Style.PLAIN, "tokens")
TRANSCRIPTIONS: Final = Operation(
    "audio.transcriptions", "/v1/audio/transcriptions", False, Style.PLAIN, "file", multipart=True
)
OPERATIONS: Final = (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    MESSAGES,
    COUNT_TOKENS,
    RERANK,
    SCORE,
    TOKENIZE,
    DETOKENIZE,
    TRANSCRIPTIONS,
)


@dataclass(frozen=True, slots=True)
class Form:
    """A multipart body, kept as it came.

    Attributes:
        body: all of it.
        content_type: with its boundary, as the caller wrote it.
        model: where the value of the field ``model`` stands in ``body``, as start and end.
    """

    body: bytes
    content_type: bytes
    model: tuple[int, int]


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
        receipt: the caller wants a receipt of what was delivered.
        form: the body of an operation that is no JSON; ``members`` then has its field names.
        output_limit: the model's bound of output tokens, for a caller that names none.
        defaults: fields of the model's configuration for a caller that names none.
        tokens: most output tokens that the caller asked for.
        session: what the caller named to be led to the same worker again.
        affinity: keys that lead to workers, once they were needed.
        full_timeout: seconds that a full buffer may keep the engine from being read; None: no such limit.
        last_try: it was rejected before, and has one attempt left.
    """

    exchange_id: str
    client_request_id: str | None
    tenant: str
    key_id: str | None
    operation: Operation
    model: str
    upstream_model: str
    members: dict[str, RawJson]
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
    receipt: bool = False
    form: Form | None = None
    output_limit: int | None = None
    defaults: dict[str, bytes] = field(default_factory=dict)
    tokens: int | None = None
    session: str | None = None
    affinity: tuple[bytes, ...] | None = None
    last_try: bool = False
    full_timeout: float | None = None

    def attempt_id(self, number: int) -> str:
        """Name the ``number``-th attempt (from 1): unique, fixed length, never a prefix of another."""
        return f"{self.exchange_id}-{number:02d}"
