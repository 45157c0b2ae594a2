"""What an engine sent of which only times, sizes and causes are known: as many bytes at the same times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, cast

import trio

from ..errors import Problem, Refused, UpstreamFailed, UpstreamFault
from ._answers import usage_object
from ._engine_connection import encode_event
from ._fake_engine import FakeScript
from ._recorded import Failed, Read, Recorded, Try
from ._steps import Chunk, CloseReset, EndChunks, Event, Head, Hold, Json, Step, Wait

MODEL: Final = "m1"
LARGEST: Final = (
    48 * 1024
)  # bytes of a buffered answer; more would be read by a thread, which no clock waits for
JSON_HEADERS: Final = (("content-type", "application/json"), ("transfer-encoding", "chunked"))
_RAISED: Final = {
    "unreachable": UpstreamFault.UNREACHABLE,
    "too_large": UpstreamFault.TOO_LARGE,
    "malformed": UpstreamFault.MALFORMED,
    "broken": UpstreamFault.BROKEN,
}
_SILENT: Final = frozenset({"first_token", "no_progress"})


def play(recorded: Recorded, attempt: Try, began: float) -> FakeScript:
    """Write the script of an attempt.

    Args:
        began: Trio clock, when the exchange arrived.
    """
    return cast("FakeScript", _Played(recorded, attempt, began))


class _Played:
    """A script that waits for moments: it is read while it is played, and a late reader delays nothing."""

    def __init__(self, recorded: Recorded, attempt: Try, began: float) -> None:
        self._recorded = recorded
        self._attempt = attempt
        self._began = began

    def __iter__(self) -> Iterator[Step | Exception]:
        attempt = self._attempt
        if attempt.opened is not None:
            at, status = attempt.opened
            yield self._until(at)
            if status != 200 and attempt.failed is not None:
                yield _error_answer(status, attempt.failed)
                return
            yield _head(self._recorded, attempt)
            yield from self._body()
        yield from self._end()

    def _until(self, at: float) -> Wait:
        return Wait(max(self._began + at - trio.current_time(), 0.0))

    def _body(self) -> Iterator[Step]:
        attempt = self._attempt
        streamed = self._recorded.terms["stream"]
        blocks = _events(attempt) if streamed else _pieces(attempt, self._recorded.ending)
        for read, data in zip(attempt.reads, blocks, strict=True):
            yield self._until(read.at)
            yield Chunk(data)

    def _end(self) -> Iterator[Step | Exception]:
        attempt = self._attempt
        if attempt.whole is not None:
            yield self._until(attempt.whole)
            if self._recorded.terms["stream"]:
                yield Chunk(b"data: [DONE]\n\n")
            yield EndChunks()
        elif attempt.failed is not None and attempt.failed.reason not in _SILENT:
            yield self._until(attempt.failed.at)
            yield from _failure(attempt)
        yield Hold()


def _head(recorded: Recorded, attempt: Try) -> Head:
    if attempt.failed is not None and attempt.failed.reason == "content_type":
        return Head(200, (("content-type", "text/html"), ("transfer-encoding", "chunked")))
    return Head() if recorded.terms["stream"] else Head(200, JSON_HEADERS)


def _failure(attempt: Try) -> Iterator[Step | Exception]:
    failed = attempt.failed
    assert failed is not None
    if (fault := _RAISED.get(failed.reason)) is not None:
        yield UpstreamFailed(fault, "as recorded")
    elif attempt.opened is None:
        yield Refused(
            Problem.of("deadline_exceeded" if failed.reason == "deadline" else failed.code, "as recorded")
        )
    elif failed.reason == "cut":
        yield EndChunks()
    elif failed.reason == "aborted":
        yield Chunk(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}))
    else:
        yield Chunk(_event(_error_body(failed)))
        yield CloseReset()


def _error_answer(status: int, failed: Failed) -> Json:
    return Json(_error_body(failed), status)


def _error_body(failed: Failed) -> dict[str, Any]:
    if failed.reason == "out_of_memory":
        return {"error": {"message": "CUDA out of memory"}}
    status = {"error": 500, "credentials": 401, "unread": 500}.get(failed.reason, failed.status)
    code = "reader_stalled" if failed.reason == "unread" else failed.code
    return {"error": {"message": "as recorded", "code": code, "status": status}}


# Bytes ------------------------------------------------------------------------------------------------------


def _event(value: dict[str, Any]) -> bytes:
    return encode_event(Event(value))


def _chunk(delta: dict[str, str], finish: str | None = None, size: int = 0, **members: Any) -> bytes:
    """One event of a chat, with as much of filling as brings it to a size.

    One without output needs a member that lets it be read closely: others count as output.
    """
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    value: dict[str, Any] = {"choices": [choice], **members}
    lacking = size - len(_event(value))
    if lacking >= len(',"fill":""'):
        value["fill"] = "x" * (lacking - len(',"fill":""'))
    elif lacking > 0 and "content" in delta:
        choice["delta"] = {"content": delta["content"] + "x" * lacking}
    return _event(value)


def _usage(counts: dict[str, Any] | Any) -> bytes:
    """An event that only tells the tokens, which goes no further; nothing if the engine told none."""
    prompt, generated = counts["usage"] if counts else (None, None)
    if generated is None:
        return b""
    return _event({"choices": [], "usage": usage_object((prompt or 0, generated))})


def _events(attempt: Try) -> Iterator[bytes]:
    """Answer for each read events of as many bytes as passed on, of the kinds that were counted."""
    reads, counts = attempt.reads, attempt.counts
    kinds = _kinds(attempt)
    last = len(reads) - 1
    for number, read in enumerate(reads):
        yield b"".join(_sized(read, kinds)) + (_usage(counts) if number == last else b"")


def _kinds(attempt: Try) -> Iterator[str]:
    """Name what each event was: those without output stand in front and behind.

    Where none of a whole answer stands behind, its last output said why it ended, as some engines do.
    """
    counts = attempt.counts or {"events": 0, "content": 0, "silent": 0}
    content, silent = counts["content"], counts["silent"]
    whole = attempt.whole is not None
    kinds = ["role"] * (counts["events"] - content - silent)
    kinds += ["content"] * content
    kinds += ["finish" if whole else "role"] * silent
    if whole and not silent and content:
        kinds[-1] = "last"
    yield from kinds
    while True:
        yield "content"


def _sized(read: Read, kinds: Iterator[str]) -> Iterator[bytes]:
    for number in range(read.events):
        size = read.size * (number + 1) // read.events - read.size * number // read.events
        match next(kinds):
            case "role":
                yield _chunk({"role": "assistant"}, size=size, usage=None)
            case "finish":
                yield _chunk({}, "stop", size=size)
            case "last":
                yield _chunk({"content": "x"}, "stop", size=size)
            case _:
                yield _chunk({"content": "x"}, size=size)


def _pieces(attempt: Try, ending: dict[str, Any]) -> Iterator[bytes]:
    """Cut a buffered answer as it came: all of it, if it was whole."""
    sizes = [read.size for read in attempt.reads]
    total = min(sum(sizes), LARGEST)
    body = _answer(total, ending) if attempt.whole is not None else b"{" + b" " * total
    sent, come = 0, 0
    for size in sizes:
        come += size
        end = len(body) * come // sum(sizes)
        yield body[sent:end] or b" "
        sent = end


def _answer(size: int, ending: dict[str, Any]) -> bytes:
    message = {"role": "assistant", "content": "x"}
    value: dict[str, Any] = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    if ending["usage_source"] == "engine":
        value["usage"] = usage_object((ending["tokens_prompt"] or 0, ending["tokens_generated"]))
    body = json.dumps(value).encode()
    return body + b" " * max(size - len(body), 0)
