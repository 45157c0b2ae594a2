"""Messages of the worker protocol, version 1: what gateway and agent say to each other. Sans-IO.

Every message is a msgspec struct. Reading is strict in types and bounds and
ignores fields that it does not know, so that a newer peer can say more.
Records are the lines of one answer; their order is `_worker_stream`'s matter.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

PROTOCOL: Final = 1

# Counts that no engine reaches are no counts; they would only break what adds them up.
Count = Annotated[int, Meta(ge=0, le=2**53)]
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
    n: Count = 1
    reasoning: str | None | UnsetType = UNSET
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
    id: str | None | UnsetType = UNSET
    name: str | None | UnsetType = UNSET
    arguments: str = ""
    n: Count = 1
    raw: RawFields | UnsetType = UNSET


class UsageCounts(_Record, frozen=True, tag="usage"):
    """Tokens of the whole request so far; a later record replaces an earlier one.

    Attributes:
        cached_tokens: of the prompt, those whose work was done before.
        details: further fields of the OpenAI usage object.
    """

    prompt_tokens: Count | None | UnsetType = UNSET
    completion_tokens: Count | None | UnsetType = UNSET
    cached_tokens: Count | None | UnsetType = UNSET
    details: dict[str, Raw] | UnsetType = UNSET


class Finish(_Record, frozen=True, tag="finish"):
    """A choice is whole. ``reason`` as OpenAI's: stop, length, tool_calls, content_filter."""

    i: Choice
    reason: Annotated[str, Meta(min_length=1, max_length=64)]
    raw: RawFields | UnsetType = UNSET


class NamedEvent(_Record, frozen=True, tag="event"):
    """One event of a Responses or Messages stream, its data unchanged: a string that holds its JSON."""

    data: str
    event: Annotated[str, Meta(pattern=r"^[\w.-]{1,64}$")] | None | UnsetType = UNSET


class Result(_Record, frozen=True, tag="result"):
    """A buffered answer: the engine's status and its whole body.

    Attributes:
        body: JSON, embedded as its bytes are; with ``content_type`` a string that holds the text.
        content_type: media type of an answer that is no JSON.
    """

    status: Annotated[int, Meta(ge=200, le=599)]
    body: Raw
    content_type: Annotated[str, Meta(pattern=r"^text/[a-z0-9.+-]{1,64}$")] | None | UnsetType = UNSET


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
    status: Annotated[int, Meta(ge=300, le=599)] | None | UnsetType = UNSET
    type: str | None | UnsetType = UNSET
    param: str | None | UnsetType = UNSET


class Ping(_Record, frozen=True, tag="ping"):
    """Nothing to say; ``generated`` tokens so far, ``paused`` while the reader takes nothing."""

    generated: Count = 0
    paused: bool = False


# What an engine gives; the agent adds `Accepted`, `Ping` and `End`.
EngineRecord = Delta | ToolCall | UsageCounts | Finish | NamedEvent | Result | Failed
Record = Accepted | EngineRecord | End | Ping
