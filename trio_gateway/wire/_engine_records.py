"""An engine's own answer as records of the worker protocol, on the agent's side. Sans-IO.

The relays judge the stream (errors, finishes, usage, its end), as they do for a
gateway that speaks to the engine itself; what they let pass is taken apart here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from ..contract import Operation
from ._answers import MOST_TOKENS, EngineError
from ._named_relay import NamedRelay
from ._ollama import OllamaRelay
from ._relay import StreamRelay
from ._sse import EventReader
from ._worker_messages import (
    Delta,
    EngineRecord,
    Failed,
    Finish,
    NamedEvent,
    RawFields,
    ToolCall,
    UsageCounts,
)

_Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(_Fields)
_list = msgspec.json.Decoder(list[_Fields])
_NULL: Final = b"null"


class EngineRecords:
    """One stream of an engine.

    Args:
        relay: fresh, for the form of the engine's stream; asked for usage, without a receipt.

    Attributes:
        over: nothing more is read from the engine's stream.
    """

    def __init__(self, relay: StreamRelay | NamedRelay | OllamaRelay, operation: Operation) -> None:
        self._relay = relay
        self._choices = operation.choices
        self._events = EventReader(2**62)  # the relay has bounded them
        self._told_usage = False

    @property
    def over(self) -> bool:
        """Whether nothing more is read from the engine's stream."""
        return self._relay.over

    @property
    def progress(self) -> int:
        """Grows with each event of the engine."""
        return self._relay.progress

    def feed(self, data: bytes) -> list[EngineRecord]:
        """Take in bytes of the engine and answer the records in them."""
        return list(self._records(self._relay.feed(data)))

    def end(self) -> list[EngineRecord]:
        """Take the end of what is read, proper or not, and answer what is left to say.

        That is the terminal event, or why the answer is not whole.
        """
        relay = self._relay
        found = list(self._records(relay.end() if not relay.over else b""))
        if relay.fault is not None:
            return [*found, failed_of(relay.fault)]
        if relay.aborted:
            return [*found, Failed("aborted", "the engine gave the request up")]
        if not relay.all_finished:
            return [*found, Failed("engine_protocol_error", "the engine's answer was cut")]
        if not self._choices:
            return [*found, *self._records(relay.closing)]
        usage = relay.usage
        if usage is not None and not self._told_usage:
            # It stood in an event that the relay has passed on without it.
            found.append(UsageCounts(usage.prompt, usage.generated, usage.cached))
        return found

    def _records(self, block: bytes) -> Iterator[EngineRecord]:
        for event in self._events.feed(block) if block else ():
            if self._choices:
                for record in _records_of(event.data):
                    self._told_usage |= isinstance(record, UsageCounts)
                    yield record
            else:
                name = event.name.decode("ascii", "replace") if event.name else msgspec.UNSET
                yield NamedEvent(event.data.decode("utf-8", "replace"), name)


def failed_of(error: EngineError) -> Failed:
    """Say an engine's own error as a record; `failure_of` reads it back."""
    status = error.status
    if error.gave_up:
        return Failed("aborted", "the engine gave the request up")
    if error.lacked_memory:
        return Failed("out_of_memory", "the engine is out of memory", "never")
    if status in (429, 503):
        return Failed("capacity" if status == 429 else "overloaded", "the engine has no room")
    if status in (401, 403) or 300 <= status < 400:
        return Failed("engine_credentials", "the agent could not use its engine", "never")
    if status == 404:
        return Failed("model_not_loaded", "the engine does not have the model")
    if error.code == "engine_protocol_error":
        return Failed("engine_protocol_error", error.message)
    if (status >= 500 and status != 501) or status == 424:
        return Failed("engine_failed", "the engine failed", "elsewhere", status)
    code = error.code if error.code and not error.code.isdigit() else "invalid_value"
    told = {name: getattr(error, name) or msgspec.UNSET for name in ("type", "param")}
    return Failed(code, error.message, "never", status, **told)


def _records_of(data: bytes) -> Iterator[EngineRecord]:
    """Take one chunk apart; the relay has seen that it is one, as far as it goes."""
    try:
        chunk = _fields.decode(data)
        choices = _list.decode(chunk.pop("choices", b"[]"))
    except msgspec.MsgspecError:
        return  # another object, which holds nothing that has a place here
    if usage := _usage_of(bytes(chunk.pop("usage", msgspec.Raw(_NULL)))):
        yield usage
    beside = _others(chunk, "id", "object", "created", "model")
    for choice in choices:
        for record in _choice_records(choice, beside):
            yield record
            beside = {}  # said once


def _choice_records(choice: _Fields, beside: _Fields) -> Iterator[EngineRecord]:
    index = _number(choice.pop("index", None))
    delta = _object(choice.pop("delta", None))
    text = _text(delta.pop("content", None) or choice.pop("text", None))
    reasoning = _text(delta.pop("reasoning", None))
    calls = _objects(delta.pop("tool_calls", None))
    logprobs = choice.pop("logprobs", msgspec.Raw(_NULL))
    reason = _text(choice.pop("finish_reason", None))
    said = _others(delta, "role")
    around = _others(choice)
    has_logprobs = bytes(logprobs).strip() != _NULL
    if text or reasoning or said or has_logprobs or (not reason and not calls and (around or beside)):
        tokens = _tokens(logprobs) if has_logprobs else int(bool(text or reasoning))
        yield Delta(
            index,
            text,
            tokens,
            reasoning or msgspec.UNSET,
            logprobs if has_logprobs else msgspec.UNSET,
            _raw(beside, {} if reason or calls else around, said),
        )
        beside = {}
    for call in calls:
        function = _object(call.get("function"))
        yield ToolCall(
            index,
            _number(call.get("index")),
            _text(call.get("id")) or msgspec.UNSET,
            _text(function.get("name")) or msgspec.UNSET,
            _text(function.get("arguments")),
            1,
            _raw(beside, {} if reason else around, {}),
        )
        beside, around = {}, around if reason else {}
    if reason:
        yield Finish(index, reason[:64], _raw(beside, around, {}))


def _raw(chunk: _Fields, choice: _Fields, delta: _Fields) -> RawFields | msgspec.UnsetType:
    if not (chunk or choice or delta):
        return msgspec.UNSET
    return RawFields(chunk or msgspec.UNSET, choice or msgspec.UNSET, delta or msgspec.UNSET)


def _others(fields: _Fields, *known: str) -> _Fields:
    """The fields that say something and are not known here; null equals absent."""
    return {key: raw for key, raw in fields.items() if key not in known and bytes(raw).strip() != _NULL}


def _usage_of(raw: bytes) -> UsageCounts | None:
    try:
        fields = _fields.decode(raw)
    except msgspec.MsgspecError:
        return None
    known = ("prompt_tokens", "completion_tokens", "total_tokens")
    details = _others(fields, *known)
    inner = _object(details.get("prompt_tokens_details"))
    cached = _count(inner.get("cached_tokens"))
    if list(inner) == ["cached_tokens"]:
        del details["prompt_tokens_details"]  # it is said by its own name
    prompt, generated = (_count(fields.get(name)) for name in known[:2])
    if prompt is generated is cached is None:
        return None
    return UsageCounts(prompt, generated, cached, details or msgspec.UNSET)


def _tokens(logprobs: msgspec.Raw) -> int:
    listed = _object(logprobs)
    return len(_objects(listed.get("content"))) or 1


def _object(raw: msgspec.Raw | None) -> _Fields:
    try:
        return _fields.decode(raw or b"{}")
    except msgspec.MsgspecError:
        return {}


def _objects(raw: msgspec.Raw | None) -> list[_Fields]:
    try:
        return _list.decode(raw or b"[]")
    except msgspec.MsgspecError:
        return []


def _text(raw: msgspec.Raw | None) -> str:
    try:
        return msgspec.json.decode(raw or b'""', type=str)
    except msgspec.MsgspecError:
        return ""


def _count(raw: msgspec.Raw | None) -> int | None:
    try:
        count = msgspec.json.decode(raw or b"null", type=float | None)
    except msgspec.MsgspecError:
        return None
    return int(count) if count is not None and math.isfinite(count) and 0 <= count <= MOST_TOKENS else None


def _number(raw: msgspec.Raw | None) -> int:
    return min(_count(raw) or 0, 2**20)
