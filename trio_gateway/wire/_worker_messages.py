"""Messages of the worker protocol, version 1: what gateway and agent say to each other. Sans-IO.

Every message is a msgspec struct. Reading is strict in types and bounds and
ignores fields that it does not know, so that a newer peer can say more.
Records are the lines of one answer; their order is `_worker_stream`'s matter.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

PROTOCOL: Final = 1

# Counts that no engine reaches are no counts; they would only break what adds them up.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Tokens = Annotated[int, Meta(ge=0, le=2**31)]  # no request has more, and all that adds them up is spared
TokensOfARecord = Annotated[int, Meta(ge=0, le=2**20)]
Choice = Annotated[int, Meta(ge=0, le=2**20)]

# -- records of an answer ---------------------------------------------------------------------------------


class RawFields(msgspec.Struct, frozen=True):
    """Fields of an engine that have no name here, each a JSON object of fields for one place of a chunk.

    Attributes:
        chunk: beside ``choices``.
        choice: inside the choice, beside ``finish_reason``.
        delta: inside a chat choice's ``delta``.
    """

    chunk: dict[str, Raw] | UnsetType = UNSET
    choice: dict[str, Raw] | UnsetType = UNSET
    delta: dict[str, Raw] | UnsetType = UNSET


class _Record(msgspec.Struct, frozen=True, tag_field="t"):
    """One line of an answer. A field that is UNSET is not written."""


class Accepted(_Record, frozen=True, tag="accepted"):
    """The first record: the request holds a slot. Written by the agent, never by an engine."""

    slot: Count


class Delta(_Record, frozen=True, tag="delta"):
    """Output of one choice.

    Attributes:
        i: the choice, from 0.
        text: output as text; may be empty beside other output.
        n: tokens that it stands for.
        reasoning: output that is thinking.
        logprobs: the OpenAI object of this operation, unchanged.
    """

    i: Choice
    text: str = ""
    n: TokensOfARecord = 1
    reasoning: str | UnsetType | None = UNSET
    logprobs: Raw | UnsetType = UNSET
    raw: RawFields | UnsetType = UNSET


class ToolCall(_Record, frozen=True, tag="tool_call"):
    """A piece of a tool call, or a whole one.

    Attributes:
        i: the choice.
        index: which call of the choice, from 0.
        id, name: stand in the first piece of a call.
        arguments: the next piece of the arguments' JSON text.
        n: tokens that it stands for.
    """

    i: Choice
    index: Count = 0
    id: str | UnsetType | None = UNSET
    name: str | UnsetType | None = UNSET
    arguments: str = ""
    n: TokensOfARecord = 1
    raw: RawFields | UnsetType = UNSET


class UsageCounts(_Record, frozen=True, tag="usage"):
    """Tokens of the whole request so far; a later record replaces an earlier one.

    Attributes:
        cached_tokens: of the prompt, those whose work was done before.
        details: further fields of the OpenAI usage object.
    """

    prompt_tokens: Tokens | UnsetType | None = UNSET
    completion_tokens: Tokens | UnsetType | None = UNSET
    cached_tokens: Tokens | UnsetType | None = UNSET
    details: dict[str, Raw] | UnsetType = UNSET


class Finish(_Record, frozen=True, tag="finish"):
    """A choice is whole. ``reason`` as OpenAI's: stop, length, tool_calls, content_filter."""

    i: Choice
    reason: Annotated[str, Meta(min_length=1, max_length=64)]
    raw: RawFields | UnsetType = UNSET


class NamedEvent(_Record, frozen=True, tag="event"):
    """One event of a Responses or Messages stream, its data unchanged: a string that holds its JSON."""

    data: str
    event: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")] | UnsetType | None = UNSET


class Result(_Record, frozen=True, tag="result"):
    """A buffered answer: the engine's status and its whole body.

    Attributes:
        body: JSON, embedded as its bytes are; with ``content_type`` a string that holds the text.
        content_type: media type of an answer that is no JSON.
    """

    status: Annotated[int, Meta(ge=200, le=599)]
    body: Raw
    content_type: Annotated[str, Meta(pattern=r"^text/[a-z0-9.+-]{1,64}\Z")] | UnsetType | None = UNSET


class End(_Record, frozen=True, tag="end"):
    """The answer is whole, and the engine has let go. Written by the agent, never by an engine."""


class Failed(_Record, frozen=True, tag="error"):
    """The answer ends here and is not whole; nothing follows.

    Attributes:
        code: one of `FAILURES`, or an engine's own word for what the caller did wrong.
        message: for the caller only where ``status`` or ``code`` says that the fault is its own.
        retry: ``elsewhere`` if another worker may do better, ``never`` if none will.
        status: HTTP status that the engine gave, if it gave one.
        type, param: of an engine's 4xx, passed on.
    """

    code: Annotated[str, Meta(min_length=1, max_length=64)]
    message: str = ""
    retry: str = "elsewhere"
    status: Annotated[int, Meta(ge=400, le=599)] | UnsetType | None = UNSET
    type: str | UnsetType | None = UNSET
    param: str | UnsetType | None = UNSET


class Ping(_Record, frozen=True, tag="ping"):
    """Nothing to say; ``generated`` tokens so far, ``paused`` while the reader takes nothing."""

    generated: Tokens = 0
    paused: bool = False


# What an engine gives; the agent adds `Accepted`, `Ping` and `End`.
EngineRecord = Delta | ToolCall | UsageCounts | Finish | NamedEvent | Result | Failed
Record = Accepted | EngineRecord | End | Ping

# -- between gateway and agent ----------------------------------------------------------------------------

# Answers of an agent that turns a request away before any engine work, with the HTTP status of each.
REJECTIONS: Final[dict[str, int]] = {
    "capacity": 429,
    "draining": 503,
    "shutting_down": 503,
    "model_not_loaded": 409,
    "model_load_failed": 503,
    "engine_unready": 503,
    "deadline": 409,
}

WorkerState = Literal["starting", "ready", "draining", "stopping"]
WorkerId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
AttemptNumber = Annotated[int, Meta(ge=1, le=99)]
_Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")]
_Names = Annotated[list[Annotated[str, Meta(min_length=1, max_length=512)]], Meta(max_length=1024)]
_Slots = Annotated[int, Meta(ge=0, le=65_536)]
_Rate = Annotated[float, Meta(ge=0, le=1e12)]


class EngineKind(msgspec.Struct, frozen=True):
    """What generates there. ``version`` is for people."""

    kind: _Word
    version: Annotated[str, Meta(max_length=128)] = ""


class Registration(msgspec.Struct, frozen=True):
    """An agent says who it is. Sent with the join token.

    Attributes:
        incarnation: grows with each start of this agent; a lower one is an old process.
        url: where gateways reach it.
    """

    worker_id: WorkerId
    incarnation: Count
    url: Annotated[str, Meta(pattern=r"^https?://[A-Za-z0-9.\[\]:_-]{1,255}/?\Z")]
    models: _Names
    slots: _Slots
    engine: EngineKind
    labels: Annotated[list[_Word], Meta(max_length=64)] = msgspec.field(default_factory=list)
    protocol: Literal[1] = PROTOCOL


class Registered(msgspec.Struct, frozen=True):
    """The gateway's answer to a `Registration`.

    Attributes:
        secret: the gateway sends it with every call to this agent, and the agent with its heartbeats.
        heartbeat_interval, ttl: seconds; without a heartbeat for ``ttl`` the worker is forgotten.
    """

    secret: Annotated[str, Meta(min_length=16, max_length=256, pattern=r"^[\x21-\x7e]+\Z")]
    heartbeat_interval: Annotated[float, Meta(gt=0, le=3600)]
    ttl: Annotated[float, Meta(gt=0, le=86_400)]


class RunningRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that holds a slot, cancelled or not, with the tokens generated for it.

    Attributes:
        paused: its engine waits for its reader.
    """

    id: RequestId
    attempt: AttemptNumber
    generated: Tokens
    paused: bool = False


class WorkerReport(msgspec.Struct, frozen=True):
    """How a worker is at one moment: a heartbeat, and what comes with a rejection.

    Attributes:
        seq: grows with each report of one incarnation; a lower one is older news.
        running, queued: inside the engine, draining ones included.
        kv_usage_ratio: 0 to 1; null where nothing tells.
        tokens_per_second: null where nothing tells.
        requests: all that hold a slot; left out of rejections.
    """

    incarnation: Count
    seq: Count
    state: WorkerState
    models: _Names
    slots: _Slots
    running: Count
    queued: Count
    kv_usage_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    tokens_per_second: _Rate | None = None
    requests: Annotated[list[RunningRequest], Meta(max_length=65_536)] | UnsetType = UNSET


class WorkerNews(msgspec.Struct, frozen=True):
    """What one gateway tells others of a worker that reports to it.

    Attributes:
        registration: as it registered, with the models and slots that it reported last.
        state, seq: as it reported last.
        gone: it signed off.
    """

    registration: Registration
    state: WorkerState
    seq: Count
    gone: bool = False


class Generate(msgspec.Struct, frozen=True):
    """One attempt, on its way to an agent.

    Attributes:
        deadline_ms: milliseconds that remain.
        priority: the tier.
        body: the engine's request, embedded as its bytes are; a string in base64 with ``content_type``.
        content_type: of a body that is no JSON.
    """

    request_id: RequestId
    attempt: AttemptNumber
    operation: _Word
    model: Annotated[str, Meta(min_length=1, max_length=512)]
    deadline_ms: Annotated[int, Meta(ge=0, le=2**32)]
    priority: _Word
    stream: bool
    body: Raw
    content_type: Annotated[str, Meta(min_length=1, max_length=256)] | UnsetType = UNSET
    protocol: Literal[1] = PROTOCOL


class Rejection(msgspec.Struct, frozen=True):
    """A request was not taken. ``rejected`` is a key of `REJECTIONS`; newer agents may say others."""

    rejected: _Word
    worker: WorkerReport | None = None


class ReleasedRequest(msgspec.Struct, frozen=True):
    """The engine let go of an attempt; ``kv_released`` tells whether its memory is free, too."""

    id: RequestId
    attempt: AttemptNumber
    generated: Tokens
    kv_released: bool


class Release(msgspec.Struct, frozen=True):
    """One line of the stream of events. Lines without ``released`` are for newer gateways."""

    released: ReleasedRequest | UnsetType = UNSET


_M = TypeVar("_M", bound=msgspec.Struct)
_write = msgspec.json.Encoder().encode
_DECODERS: Final[dict[type, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (Registration, Registered, WorkerReport, WorkerNews, Generate, Rejection, Release)
}


def write_message(message: msgspec.Struct) -> bytes:
    """Write a message, or a record without its line end; the bytes of embedded bodies stay as they are."""
    return _write(message)


def read_message(data: bytes, kind: type[_M]) -> _M:
    """Read a message of the given kind.

    Raises:
        ValueError: it is none. The text names the field and what is wrong with it, never its value.
    """
    try:
        if not data.isascii():
            data.decode()  # strings that are skipped, or embedded, are not looked into
        return cast("_M", _DECODERS[kind].decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(_explain(exc)) from None


def _explain(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        what, at, where = str(error).rpartition(" - at `")
        # msgspec quotes values in some of its messages.
        return f"not a value of this field{at}{where}" if what.startswith("Invalid") else str(error)
    return "not valid JSON"
