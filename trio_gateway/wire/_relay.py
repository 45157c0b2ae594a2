"""The relay core: an engine's event stream in, the client's event stream out. Sans-IO.

A token costs a scan and no decoding: an event is decoded only where a marker
(finish, usage, error) is found in it, and before the commit. Of all others the
grammar is checked, which costs no object. What leaves here are whole events in
canonical form, ready to be framed.

States: events are *held* until the first that commits; then they pass; after
`done` or `fault` nothing is read any more.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ..contract import COMPLETIONS, Operation
from ..errors import EngineProtocolError
from ._answers import ABORT, NO_FINISH, EngineError, Usage, drop_usage, read_error, read_usage, rename_model
from ._json import may_hold_infinity, with_finite_numbers
from ._sse import DONE, Event, EventReader, receipt_comment, write_event
from ._template import Rendered, Template, lines_of

_decode = msgspec.json.Decoder().decode
_skip = msgspec.json.Decoder(msgspec.Raw).decode  # checks the grammar alone, in a tenth of a microsecond
_LESSONS: Final = 8  # events in a row that are looked at for a form; a stream without one pays no more
_FINISH: Final = b'"finish_reason"'
_NO_FINISH_YET: Final = b'"finish_reason":null'
# Numbers and plain words, in objects at most one level deep: no brace can hide in a string of it.
_PLAIN: Final = rb'[^{}"]*+(?:"\w*+"[^{}"]*+)*+'
_USAGE_AT_END = re.compile(
    rb',\s*+"usage"\s*+:\s*+\{' + _PLAIN + rb"(?:\{" + _PLAIN + rb"\}" + _PLAIN + rb")*+\}\s*+\}\s*+\Z"
)
_MODEL_EARLY = re.compile(
    rb'\{\s*(?:"(?:id|object|created|system_fingerprint)"\s*:\s*(?:"[^"\\]*"|[0-9]+|null)\s*,\s*)*"model"\s*:\s*("[^"\\]*")'
)


def may_hide_marker(data: bytes) -> bool:
    """Whether a marker may stand in the text that a search for its bytes does not find.

    Letters can be written as escapes, all of which begin like this, such as those of a key that is ``error``.
    """
    return b"\\u00" in data


def is_json(data: bytes) -> bool:
    """Whether an event is JSON by its grammar, which knows no infinities. Strings may hold any bytes."""
    try:
        _skip(data)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class StreamShape:
    """What one caller asked for, as far as the stream's form goes.

    Attributes:
        choices: choices that must finish before the answer counts as whole.
        wants_usage: a usage event at the end passes on.
        wants_running_usage: usage inside other events passes on.
        upstream_model, public_model: edited in events if they differ.
        max_event_bytes: bound of one event, and of all that are held together.
        secrets: texts that no error message may pass on.
        receipt: a receipt of what was handed out is kept.
    """

    choices: int
    wants_usage: bool
    wants_running_usage: bool
    upstream_model: str
    public_model: str
    max_event_bytes: int
    secrets: tuple[str, ...] = ()
    receipt: bool = False


class StreamRelay:
    """One attempt's stream.

    Attributes:
        committed: an event with content was handed out.
        done: the engine said ``[DONE]``.
        fault: an error in the stream, or EngineProtocolError text as 502.
        aborted: a choice ended with ``abort``; the engine gave it up.
        events: events handed out; ``content_events`` of them carry output, and the last ``silent_at_end``
            do not.
        progress: events with data seen, held ones included.
        dropped: events that engines send and clients must not see.
    """

    def __init__(self, shape: StreamShape) -> None:
        self._shape = shape
        self._reader = EventReader(shape.max_event_bytes)
        self._rename = shape.upstream_model != shape.public_model
        self._upstream_name = msgspec.json.encode(shape.upstream_model)
        self._public_name = msgspec.json.encode(shape.public_model)
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._finished: set[int] = set()
        self._usage_event: bytes | None = None
        self._hash = hashlib.sha256() if shape.receipt else None
        self._form: Template | None = None
        self._lessons = _LESSONS
        self.committed = False
        self.done = False
        self.fault: EngineError | None = None
        self.aborted = False
        self.events = 0
        self.content_events = 0
        self.silent_at_end = 0
        self.progress = 0
        self.noise = 0

    @property
    def dropped(self) -> int:
        """Blocks without data, and events whose data is neither an object nor ``[DONE]``."""
        return self.noise + self._reader.dropped

    @property
    def all_finished(self) -> bool:
        """Whether every expected choice has its finish reason."""
        whole = self._finished.issuperset(range(self._shape.choices))
        return whole and self.fault is None and not self.aborted

    @property
    def over(self) -> bool:
        """Whether nothing more is read from the engine's stream."""
        return self.done or self.fault is not None or self.aborted

    @property
    def usage(self) -> Usage | None:
        """The last usage that the engine reported."""
        return None if self._usage_event is None else read_usage(self._usage_event)

    @property
    def receipt(self) -> str | None:
        """SHA-256 over the data of each event handed out, each followed by LF; None unless asked for."""
        return None if self._hash is None else self._hash.hexdigest()

    @property
    def closing(self) -> bytes:
        """What the client gets last, once the answer is whole."""
        return DONE if self._hash is None else receipt_comment(self._hash.hexdigest(), self.events) + DONE

    @property
    def sequence(self) -> int:
        """Number of an error event of ours; these streams do not number theirs."""
        return 0

    def feed(self, data: bytes) -> bytes:
        """Take in bytes of the engine and answer whole events for the client.

        Events in front of an error or of ``[DONE]`` are part of the answer; the
        error and ``[DONE]`` themselves are not, the caller says them.
        """
        if self.over:
            return b""
        if b"\r" in data:
            return self._feed_events(data)
        if not self.committed:
            return self._feed_until(data, lambda: self.committed, self.feed)
        if not self._reader.at_boundary:
            completed = self._reader.complete(data)
            if completed is None:
                return self._feed_events(data)
            data = completed
        cut = len(data) if data.endswith(b"\n\n") else data.rfind(b"\n\n") + 2
        if cut < 2:
            return self._feed_events(data)
        if cut == len(data):
            return self._pass_whole(data)
        return self._pass_whole(data[:cut]) + self._feed_events(data[cut:])

    def feed_lines(self, events: list[bytes]) -> bytes:
        """Take in whole events of one line each, without their line ends; else as `feed`."""
        form = self._form
        if form is None or self.over or not self._reader.at_boundary:
            return self.feed(_joined(events))
        return self._pass_all(form, events, None)

    def _feed_events(self, data: bytes) -> bytes:
        """Take in bytes and look at each event that they complete."""
        out: list[bytes] = []
        if self.over:
            return b""
        for event in self._reader.feed(data):
            if not self._take(event, out):
                break
        if self._reader.too_large and not self.over:
            self._malformed(f"an event is over {self._shape.max_event_bytes} bytes")
        return b"".join(out)

    def _feed_until(self, data: bytes, holds: Callable[[], bool], feed: Callable[[bytes], bytes]) -> bytes:
        """Look at one event after the other until something holds; the rest is fed otherwise."""
        out: list[bytes] = []
        done = 0
        while done < len(data) and not holds() and not self.over:
            cut = data.find(b"\n\n", done) + 2
            end = cut if cut > 1 else len(data)
            out.append(self._feed_events(data[done:end]))
            done = end
        if done < len(data) and not self.over:
            out.append(feed(data[done:]))
        return b"".join(out)

    def _pass_whole(self, data: bytes) -> bytes:
        """Pass on whole events, without looking at those that have a form or need no decoding."""
        form = self._form
        if form is None:
            return self._pass_plain(data)
        rendered = form.render_alone(data, keep_usage=self._shape.wants_running_usage)
        if rendered is not None and len(data) <= self._shape.max_event_bytes:
            return self._pass_rendered(rendered)
        events = lines_of(data)
        return self._pass_plain(data) if events is None else self._pass_all(form, events, data)

    def _pass_plain(self, data: bytes) -> bytes:
        """Pass on whole events of which none has a form."""
        if not self._rename and self._hash is None and len(data) <= self._shape.max_event_bytes:
            count = self._plain(data)
            if count:
                if self._lessons:
                    self._learn(data[6 : data.find(b"\n")])
                self._count(count)
                return data
        if self._form is not None or not self._lessons:
            return self._feed_events(data)
        return self._feed_until(data, lambda: self._form is not None or not self._lessons, self._pass_whole)

    def _pass_all(self, form: Template, events: list[bytes], data: bytes | None) -> bytes:
        """Pass on whole events of one line each, which may have the form; ``data``: all of it, if known."""
        if sum(map(len, events)) > self._shape.max_event_bytes:
            return self._feed_events(data or _joined(events))
        rendered = form.render(events, keep_usage=self._shape.wants_running_usage, data=data)
        return self._pass_mixed(events) if rendered is None else self._pass_rendered(rendered)

    def _pass_mixed(self, events: list[bytes]) -> bytes:
        """Pass on events of which some have no form, or another: those are looked at, each by itself."""
        out: list[bytes] = []
        alike: list[bytes] = []
        for event in events:
            if self._form is not None and self._form.fits(event):
                alike.append(event)
                continue
            self._pass_alike(alike, out)
            alike = []
            block = event + b"\n\n"
            out.append(self._feed_events(block) if b"\r" in event else self._pass_plain(block))
            if self.over:
                break
        self._pass_alike(alike, out)
        return b"".join(out)

    def _pass_alike(self, events: list[bytes], out: list[bytes]) -> None:
        """Pass on events that have the form."""
        if events and self._form is not None:
            rendered = self._form.render(events, keep_usage=self._shape.wants_running_usage)
            assert rendered is not None
            out.append(self._pass_rendered(rendered))

    def _pass_rendered(self, rendered: Rendered) -> bytes:
        data, count, usage = rendered
        self._lessons = _LESSONS
        if usage is not None:
            self._usage_event = usage
        if self._hash is not None:
            self._hash.update(data[6:-1].replace(b"\n\ndata: ", b"\n"))
        self._count(count)
        return data

    def _count(self, events: int) -> None:
        self.events += events
        self.content_events += events
        self.silent_at_end = 0
        self.progress += events

    def _learn(self, event: bytes) -> None:
        """Learn what this event, which needs no look, has in common with others."""
        self._lessons -= 1
        form = Template.of(event, self._upstream_name, self._public_name)
        if form is not None or not self._lessons:
            self._form = form

    def end(self) -> bytes:
        """Take the proper end of the engine's message: a last ``[DONE]`` may lack its blank line.

        Answers nothing: an event without its blank line is none.
        """
        last = self._reader.end()
        if not self.over and last is not None and last.data.strip() == b"[DONE]":
            self.done = True
        return b""

    def _plain(self, data: bytes) -> int:
        """How many events in canonical form the bytes are, if none of them needs decoding; else 0."""
        if (
            not data.startswith(b"data: {")
            or not data.endswith(b"}\n\n")
            or b'"error"' in data
            or b'"usage"' in data
            or (b"\\" in data and may_hide_marker(data))
        ):
            return 0
        count = data.count(b"\n\n")
        whole = (
            data.count(b"\n") == 2 * count
            and data.count(b"\n\ndata: {") == count - 1
            and data.count(_FINISH) == data.count(_NO_FINISH_YET)
            and (is_json(data[6:-2]) if count == 1 else all(map(is_json, data[6:-2].split(b"\n\ndata: "))))
        )
        return count if whole else 0

    def _take(self, event: Event, out: list[bytes]) -> bool:
        """Take one event; answers whether more may follow."""
        data = event.data
        if event.name == b"error":
            self.fault = read_error(data, None, self._shape.secrets)
            return False
        if not data.startswith(b"{"):
            data = data.strip()
            if data == b"[DONE]":
                self.done = True
                return False
            if not data.startswith(b"{"):
                self.noise += 1
                return True
        self.progress += 1
        return self._take_object(data, out)

    def _take_object(self, data: bytes, out: list[bytes]) -> bool:
        output, event = True, data
        ordinary = (
            self.committed
            and b'"error"' not in data
            and not may_hide_marker(data)
            and data.count(_FINISH) == data.count(_NO_FINISH_YET)
            and is_json(data)
        )
        if not ordinary or b'"usage"' in data:
            if may_hold_infinity(data):
                data = with_finite_numbers(data)
            value = self._decode(data)
            if value is None or self._is_fault(value, data):
                return False
            usage_only = self._read_usage(value, data)
            if usage_only and not self._shape.wants_usage:
                return True
            if not self._read_choices(value):
                return False
            data = self._without_usage(value, data, usage_only)
            output = any(map(has_output, choices_of(value)))
        if self._rename:
            try:
                data = self._renamed(data)
            except EngineProtocolError:
                self._malformed("an event is not valid JSON")
                return False
        self._pass(data, output, out)
        if ordinary and self._lessons and b"\n" not in event:
            self._learn(event)
        return not self.over

    def _decode(self, data: bytes) -> dict[str, Any] | None:
        try:
            value = _decode(data)
        except (msgspec.MsgspecError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self._malformed("an event is not valid JSON")
            return None
        return value

    def _malformed(self, message: str) -> None:
        self.fault = EngineError(502, message, code="engine_protocol_error")

    def _is_fault(self, value: dict[str, Any], data: bytes) -> bool:
        if value.get("error") or value.get("object") == "error":
            self.fault = read_error(data, None, self._shape.secrets)
            return True
        return False

    def _read_usage(self, value: dict[str, Any], data: bytes) -> bool:
        """Remember the event's usage; answers whether it carries nothing else."""
        if not value.get("usage"):
            return False
        self._usage_event = data
        return not value.get("choices")

    def _read_choices(self, value: dict[str, Any]) -> bool:
        """Note finishes and the commit; False: the engine gave a choice up."""
        commits = bool(value.get("prompt_progress"))
        for choice in choices_of(value):
            reason = choice.get("finish_reason")
            if not isinstance(reason, str):
                reason = ""  # none yet, and what is no word ends nothing
            if reason in NO_FINISH:
                if reason == ABORT and not has_output(choice):
                    self.aborted = True
                else:
                    self.fault = EngineError(500)
                return False
            if reason:
                index = choice.get("index")
                self._finished.add(index if type(index) is int else 0)
            commits = commits or bool(reason) or has_output(choice)
        if commits:
            self.committed = True
        return True

    def _without_usage(self, value: dict[str, Any], data: bytes, usage_only: bool) -> bytes:
        if usage_only or not value.get("usage") or self._shape.wants_running_usage:
            return data
        found = _USAGE_AT_END.search(data)
        return data[: found.start()] + b"}" if found else drop_usage(data)

    def _pass(self, data: bytes, output: bool, out: list[bytes]) -> None:
        if self._hash is not None:
            self._hash.update(data + b"\n")
        if not self.committed:
            self._hold(write_event(data))
            return
        if self._held:
            out.extend(self._held)
            self.events += len(self._held)
            self._held.clear()
        self.events += 1
        self.content_events += output
        self.silent_at_end = 0 if output else self.silent_at_end + 1
        out.append(write_event(data))

    def _hold(self, block: bytes) -> None:
        self._held.append(block)
        self._held_bytes += len(block)
        if self._held_bytes > self._shape.max_event_bytes:
            self._malformed("the engine sends events without end and without content")

    def _renamed(self, data: bytes) -> bytes:
        found = _MODEL_EARLY.match(data)
        if found is None:
            return rename_model(data, self._shape.upstream_model, self._shape.public_model)
        if found[1] != self._upstream_name:
            return data
        return data[: found.start(1)] + self._public_name + data[found.end(1) :]


def _joined(events: list[bytes]) -> bytes:
    return b"\n\n".join([*events, b""])


def choices_of(value: dict[str, Any]) -> list[dict[str, Any]]:
    found = value.get("choices")
    return [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []


def has_output(choice: dict[str, Any]) -> bool:
    """Whether a choice carries anything that a client would call output."""
    if choice.get("text") or choice.get("logprobs") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for key, value in delta.items() if key != "role")


def failed_chunk(operation: Operation) -> bytes:
    """Write a last chunk with the finish reason ``error``, for clients that look nowhere else."""
    delta = b'"text":""' if operation is COMPLETIONS else b'"delta":{}'
    return write_event(b'{"choices":[{"index":0,' + delta + b',"finish_reason":"error"}]}')
