"""What an engine says in each operation, whole or broken off, for engines that answer whatever is asked.

A `Voice` is made from a request and speaks its operation's language, so that one failure
can be scripted once for all operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trio_gateway.testing import (
    DONE,
    EndChunks,
    EngineRequest,
    Event,
    Head,
    Json,
    Script,
    Step,
    chat_answer,
    chat_chunk,
    completion_answer,
    embedding_answer,
    error_answer,
    error_body,
)

TEXT: Final = "onetwo"
CREATED: Final = 1_700_000_000


@dataclass(frozen=True, slots=True)
class Voice:
    """One operation's language.

    Attributes:
        quiet: events that carry no output, with which a stream begins.
        words: events that carry the output `TEXT`.
        last: events by which a stream says that it is whole.
        whole: the buffered answer.
        unfinished: a buffered answer that lacks the sign that it is whole; None: there is no such sign.
        streams: whether a stream was asked for.
    """

    quiet: tuple[Step, ...]
    words: tuple[Step, ...]
    last: tuple[Step, ...]
    whole: Json
    unfinished: Json | None
    streams: bool

    @property
    def good(self) -> Script:
        """The whole answer as it was asked for."""
        return (Head(), *self.quiet, *self.words, *self.last, EndChunks()) if self.streams else (self.whole,)

    @property
    def begun(self) -> Script:
        """A stream up to its last word; its message is left open."""
        return (Head(), *self.quiet, *self.words)

    @property
    def rest(self) -> Script:
        """What a stream lacks that was only `begun`."""
        return (*self.last, EndChunks())


def voice_of(request: EngineRequest) -> Voice:
    """Answer in the language of what was asked."""
    body = request.json()
    make = _VOICES[request.target.removeprefix("/v1/")]
    return make(bool(body.get("stream")), str(body["model"]))


def speak(request: EngineRequest) -> Script:
    """Answer whatever is asked, whole."""
    return voice_of(request).good


def refuse(status: int, message: str = "engine says no", **headers: str) -> Script:
    """Refuse with a status and perhaps headers, underscores for hyphens."""
    fields = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return error_answer(status, message, headers=fields)


def refuse_on_200(request: EngineRequest, status: int) -> Script:
    """Refuse as engines do that have said 200 already, or that always say 200."""
    body = error_body("engine says no", code=status)
    if voice_of(request).streams:
        return (Head(), _error_event(request, body), EndChunks())
    return (Json(body),)


def break_in_band(request: EngineRequest) -> Step:
    """The event by which an engine says that its stream broke."""
    return _error_event(request, error_body("engine broke", code=500))


def _error_event(request: EngineRequest, body: Mapping[str, object]) -> Event:
    named = request.target.endswith(("/responses", "/messages"))
    return Event({"type": "error", **body}, "error") if named else Event(body)


# The operations ---------------------------------------------------------------------------------------------


def _chat(streams: bool, model: str) -> Voice:
    (whole,) = chat_answer(TEXT, model=model)
    (unfinished,) = chat_answer(TEXT, model=model, finish="")
    assert isinstance(whole, Json)
    assert isinstance(unfinished, Json)
    return Voice(
        quiet=(chat_chunk({"role": "assistant", "content": ""}, model=model),),
        words=tuple(chat_chunk({"content": word}, model=model) for word in ("one", "two")),
        last=(chat_chunk({}, finish="stop", model=model), DONE),
        whole=whole,
        unfinished=unfinished,
        streams=streams,
    )


def _completions(streams: bool, model: str) -> Voice:
    def chunk(text: str, finish: str | None) -> Event:
        choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
        head = {"id": "cmpl-1", "object": "text_completion", "created": CREATED, "model": model}
        return Event({**head, "choices": [choice]})

    (whole,) = completion_answer(TEXT, model=model)
    (unfinished,) = completion_answer(TEXT, model=model, finish="")
    assert isinstance(whole, Json)
    assert isinstance(unfinished, Json)
    return Voice(
        quiet=(chunk("", None),),
        words=(chunk("one", None), chunk("two", None)),
        last=(chunk("", "stop"), DONE),
        whole=whole,
        unfinished=unfinished,
        streams=streams,
    )


def _embeddings(streams: bool, model: str) -> Voice:
    (whole,) = embedding_answer([0.5, 1.5], model=model)
    assert isinstance(whole, Json)
    return Voice((), (), (), whole, None, streams)


def _responses(streams: bool, model: str) -> Voice:
    part = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }
    usage = {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}

    def response(status: str, *output: Mapping[str, object], **more: Any) -> dict[str, object]:
        head = {"id": "resp_1", "object": "response", "created_at": CREATED, "model": model, "status": status}
        settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None}
        return {**head, **settings, "output": list(output), **more}

    def event(name: str, number: int, **fields: Any) -> Event:
        return Event({"type": name, "sequence_number": number, **fields}, name)

    where = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    empty = {**message, "status": "in_progress", "content": []}
    done = response("completed", message, usage={**usage, **details})
    return Voice(
        quiet=(
            event("response.created", 0, response=response("in_progress")),
            event("response.output_item.added", 1, output_index=0, item=empty),
            event("response.content_part.added", 2, **where, part={**part, "text": ""}),
        ),
        words=(
            event("response.output_text.delta", 3, **where, delta="one", logprobs=[]),
            event("response.output_text.delta", 4, **where, delta="two", logprobs=[]),
        ),
        last=(
            event("response.output_text.done", 5, **where, text=TEXT, logprobs=[]),
            event("response.output_item.done", 6, output_index=0, item=message),
            event("response.completed", 7, response=done),
        ),
        whole=Json(done),
        unfinished=Json(response("in_progress", message)),
        streams=streams,
    )


def _messages(streams: bool, model: str) -> Voice:
    def message(*content: Mapping[str, object], stop: str | None) -> dict[str, object]:
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": model}
        usage = {"input_tokens": 3, "output_tokens": 2}
        return {**head, "content": list(content), "stop_reason": stop, "stop_sequence": None, "usage": usage}

    def event(name: str, **fields: Any) -> Event:
        return Event({"type": name, **fields}, name)

    text = {"type": "text", "text": TEXT}
    return Voice(
        quiet=(
            event("message_start", message=message(stop=None)),
            event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            event("ping"),
        ),
        words=tuple(
            event("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
            for word in ("one", "two")
        ),
        last=(
            event("content_block_stop", index=0),
            event(
                "message_delta",
                delta={"stop_reason": "end_turn", "stop_sequence": None},
                usage={"output_tokens": 2},
            ),
            event("message_stop"),
        ),
        whole=Json(message(text, stop="end_turn")),
        unfinished=Json(message(text, stop=None)),
        streams=streams,
    )


def _count_tokens(streams: bool, _: str) -> Voice:
    return Voice((), (), (), Json({"input_tokens": 3}), None, streams)


_VOICES: Final = {
    "chat/completions": _chat,
    "completions": _completions,
    "embeddings": _embeddings,
    "responses": _responses,
    "messages": _messages,
    "messages/count_tokens": _count_tokens,
}
