"""Log lines: one for each event, whatever is in it, and never a wait for whoever reads them."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.telemetry import Log, _log
from trio_gateway.telemetry._log import LEVELS, MAX_WAITING

PATIENCE = 20  # seconds that a test waits for the log's thread, which needs none


class Flushed(io.StringIO):
    """A stream whose lines are only there once they were flushed, as in a buffered file."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.flushed = threading.Event()

    def flush(self) -> None:
        self.text = self.getvalue()
        self.flushed.set()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


class Stuck(Flushed):
    """A stream that takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.let_go.wait(PATIENCE)
        return super().write(text)


@contextmanager
def logging_to(stream: io.StringIO, **options: str) -> Iterator[Log]:
    log = Log(stream, **options)
    try:
        yield log
    finally:
        log.close()


def logged(level: str, event: str, *, style: str = "json", **fields: Any) -> str:
    """The one line that an event becomes."""
    stream = Flushed()
    with logging_to(stream, style=style, level="debug") as log:
        log.write(level, event, **fields)
    (line,) = stream.text.split("\n")[:-1]
    assert stream.text == line + "\n"
    return line


def test_a_line_is_an_object_with_a_time_a_level_and_the_fields() -> None:
    value = json.loads(logged("warning", "fault", worker="gpu-0", count=3, none=None, deep={"a": [1]}))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(Z|\+00:00)", value.pop("at"))
    assert value == {
        "level": "warning",
        "event": "fault",
        "worker": "gpu-0",
        "count": 3,
        "none": None,
        "deep": {"a": [1]},
    }


def test_what_json_has_no_word_for_is_written_as_text() -> None:
    value = json.loads(logged("info", "x", path=io, number=2**70, nothing=float("nan")))
    assert value["path"].startswith("<module 'io'")
    assert (value["number"], value["nothing"]) == (2**70, None)


def test_a_line_for_people_says_the_same_in_words() -> None:
    line = logged("info", "listening", style="console", public=["a:1"], count=3)
    assert re.fullmatch(r"\S+ info    listening public=\['a:1'\] count=3", line)
    assert logged("error", "bug", style="console").endswith(" error   bug")


TEXTS = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    ["a\nb", "\r", "\u2028", "\ud800", "\x1b[31m"]
)


@given(TEXTS, st.sampled_from(["json", "console"]))
def test_any_text_stays_on_one_line_that_can_be_printed(text: str, style: str) -> None:
    line = logged("info", "event", style=style, text=text)
    assert len(line.splitlines()) == 1 or style == "json"
    assert not re.search(r"[\x00-\x1f]", line)
    line.encode()
    if style == "json":
        assert json.loads(line)["text"] == text


@pytest.mark.parametrize("least", LEVELS)
def test_what_is_less_severe_than_asked_for_is_not_written(least: str) -> None:
    stream = Flushed()
    with logging_to(stream, level=least) as log:
        for level in LEVELS:
            log.write(level, "x")
    written = [json.loads(line)["level"] for line in stream.lines]
    assert written == [level for level, number in LEVELS.items() if number >= LEVELS[least]]


def test_lines_come_in_order_and_all_of_them_by_the_end() -> None:
    stream = Flushed()
    with logging_to(stream) as log:
        for number in range(500):
            log.write("info", "x", number=number)
    assert [json.loads(line)["number"] for line in stream.lines] == list(range(500))
    assert log.dropped == 0


def test_a_line_can_be_read_before_the_next_one_comes() -> None:
    stream = Flushed()
    with logging_to(stream) as log:
        log.write("info", "x")
        assert stream.flushed.wait(PATIENCE)
        assert len(stream.lines) == 1


def test_an_error_and_what_came_before_it_wait_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_log, "GATHERING", 2 * PATIENCE)
    stream = Flushed()
    with logging_to(stream) as log:
        log.write("info", "first")
        assert stream.flushed.wait(PATIENCE)
        for number in (1, 2):  # the second time, it was in a hurry before
            log.write("info", "then")
            log.write("error", "bug")
            while stream.text.count("bug") < number:
                stream.flushed.clear()
                assert stream.text.count("bug") == number or stream.flushed.wait(PATIENCE)
    events = [json.loads(line)["event"] for line in stream.lines]
    assert events == ["first", "then", "bug", "then", "bug"]


def test_the_end_does_not_wait_for_further_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_log, "GATHERING", 2 * PATIENCE)
    stream = Flushed()
    log = Log(stream)
    log.write("info", "first")
    assert stream.flushed.wait(PATIENCE)
    log.write("info", "last")
    log.close()
    assert [json.loads(line)["event"] for line in stream.lines] == ["first", "last"]


# Streams that do not take lines -----------------------------------------------------------------------------


def test_a_stuck_stream_costs_lines_and_not_time() -> None:
    stream = Stuck()
    log = Log(stream)
    log.write("info", "first")
    assert stream.entered.wait(PATIENCE)
    for _ in range(MAX_WAITING):
        log.write("info", "waiting")
    assert log.dropped == 0
    log.write("info", "too many")
    log.write("info", "too many")
    assert log.dropped == 2
    stream.let_go.set()
    log.close()
    assert len(stream.lines) == MAX_WAITING + 1


def test_closing_does_not_wait_for_a_stuck_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_log, "CLOSE_LIMIT", 0.01)
    stream = Stuck()
    log = Log(stream)
    log.write("info", "first")
    assert stream.entered.wait(PATIENCE)
    log.close()  # the end is queued, and its thread is not waited for
    for _ in range(MAX_WAITING):
        log.write("info", "waiting")
    log.close()  # not even the end can be queued
    assert stream.lines == []
    stream.let_go.set()


def test_a_process_without_an_output_drops_all_lines_and_counts_them() -> None:
    log = Log(None)
    log.write("info", "first")
    log.write("debug", "below the level")
    log.write("info", "second")
    log.close()
    assert log.dropped == 2


class Failing(Flushed):
    """A stream whose reader is gone for a while."""

    def write(self, text: str) -> int:
        if "lost" in text:
            raise BrokenPipeError
        return super().write(text)


def test_a_line_that_could_not_be_written_is_counted_and_the_next_one_is_tried() -> None:
    stream = Failing()
    with logging_to(stream) as log:
        for event in ("kept", "lost", "kept", "lost"):
            log.write("info", event)
    assert [json.loads(line)["event"] for line in stream.lines] == ["kept", "kept"]
    assert log.dropped == 2


def test_a_closed_stream_is_no_reason_to_fail() -> None:
    stream = Flushed()
    stream.close()
    with logging_to(stream) as log:
        log.write("info", "x")
    assert log.dropped == 1


# Exceptions -------------------------------------------------------------------------------------------------


def fail() -> None:
    raise ValueError("sk-secret")


def bug_line(exc: BaseException) -> dict[str, Any]:
    stream = Flushed()
    with logging_to(stream) as writer:
        writer.exception("bug", exc, where="here")
    value: dict[str, Any] = json.loads(stream.text)
    assert "sk-secret" not in stream.text
    assert (value["level"], value["event"], value["where"]) == ("error", "bug", "here")
    return value


def test_an_exception_tells_where_it_came_from_and_not_what_it_said() -> None:
    with pytest.raises(ValueError, match="secret") as caught:
        fail()
    value = bug_line(caught.value)
    assert value["error"] == "ValueError"
    assert re.fullmatch(r"test_log\.py:\d+ fail", value["frames"][-1])
    assert "causes" not in value


def test_the_causes_in_groups_of_groups_are_told() -> None:
    with pytest.raises(ValueError, match="secret") as caught:
        fail()
    inner = BaseExceptionGroup("sk-secret", [caught.value, KeyboardInterrupt()])
    value = bug_line(BaseExceptionGroup("sk-secret", [inner, KeyError("sk-secret")]))
    assert value["error"] == "BaseExceptionGroup"
    assert value["causes"] == ["ValueError", "KeyboardInterrupt", "KeyError"]
    assert any(frame.endswith(" fail") for frame in value["frames"])


def test_only_the_innermost_frames_are_told() -> None:
    def dive(depth: int) -> None:
        if not depth:
            fail()
        dive(depth - 1)

    with pytest.raises(ValueError, match="secret") as caught:
        dive(30)
    frames = bug_line(caught.value)["frames"]
    assert len(frames) == 12
    assert frames[-1].endswith(" fail")
