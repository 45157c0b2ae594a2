"""One response on its way to a lane: what leaves, what is taken back, and how it ends, without a socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from trio_gateway.contract import AnswerHead, Ending, Outcome
from trio_gateway.edge._response_stream import ResponseStream
from trio_gateway.errors import ClientGone, Problem

WORD = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"hi"}\n\n'
DONE = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
LATE = Problem.of("deadline_exceeded", "too late")
COMPLETED = Ending(Outcome.COMPLETED)


class Line:
    """Stands for a socket that takes a message only when it is told to."""

    def __init__(self) -> None:
        self.senders: list[ResponseStream] = []
        self.taken: list[bytes] = []
        self.said: list[dict[str, Any]] = []
        self.moves = 0
        self.end = 0
        self.there = 0

    def attach(self, sender: ResponseStream) -> None:
        self.senders.append(sender)

    def detach(self, sender: ResponseStream) -> None:
        self.senders.remove(sender)

    def wake(self, sender: ResponseStream) -> None:
        pass

    def say(self, message: bytes) -> None:
        self.said.append(json.loads(message))

    def progress(self) -> int:
        return self.moves

    def acknowledged(self) -> int:
        return self.there

    def take(self) -> bool:
        """Take the next message whole, if there is one."""
        (sender,) = self.senders
        frame = sender.next_frame()
        if frame is None:
            return False
        self.taken.append(frame)
        self.end += len(frame)
        self.moves += 1
        sender.sent(self.end)
        return True

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All that was taken."""
        return [json.loads(frame[frame.index(b"{") :]) for frame in self.taken]


class Stage:
    """A stream that was begun on such a socket."""

    def __init__(self) -> None:
        self.line = Line()
        self.overs = 0
        socket: Any = self.line
        self.stream = ResponseStream("a", socket, self.note_over)
        self.stream.request_id = "r1"
        self.stream.begin(AnswerHead(200))

    def note_over(self) -> None:
        self.overs += 1


async def test_it_is_over_once_when_the_last_message_is_taken_and_leaves_when_its_exchange_has_ended() -> (
    None
):
    at = Stage()
    at.stream.push(WORD)
    assert at.line.take()
    assert not at.line.take()
    assert (at.stream.ended, at.overs) == (False, 0)
    at.stream.push(DONE, last=True)
    assert (at.stream.ended, at.stream.finished, at.overs) == (True, False, 0)
    assert at.stream.pending > 0
    assert at.line.take()
    await at.stream.flush()
    assert (at.stream.pending, at.stream.finished, at.overs) == (0, True, 1)
    at.line.there = at.line.end
    assert at.stream.delivered() == (2, len(b'{"type":"response.output_text.delta","delta":"hi"}') + 29)
    at.stream.settle(COMPLETED)
    assert (at.overs, at.line.senders, at.line.said) == (1, [], [])
    assert at.stream.delivered()[0] == 2


async def test_an_end_that_brings_nothing_more_ends_it_too() -> None:
    at = Stage()
    at.stream.push(WORD)
    at.line.take()
    at.stream.push(b": a comment\n\n", last=True)
    assert (at.stream.finished, at.overs) == (True, 1)


async def test_what_was_not_taken_is_taken_back_and_only_the_reason_follows() -> None:
    at = Stage()
    at.stream.push(WORD + WORD[:20])
    at.line.take()
    at.stream.push(WORD[20:] + WORD)
    at.stream.withdraw()
    at.stream.push(WORD + at.stream.error_event(LATE, {"phase": "after_content"}, 7), last=True)
    while at.line.take():
        pass
    first, last = at.line.messages
    assert (first["stream_id"], first["delta"]) == ("a", "hi")
    assert (last["type"], last["stream_id"], last["status"], last["sequence_number"]) == (
        "error",
        "a",
        504,
        7,
    )
    assert last["error"]["gateway"] == {"phase": "after_content"}
    assert last["error"]["headers"]["x-request-id"] == "r1"
    at.stream.settle(Ending(Outcome.DEADLINE_EXCEEDED, LATE))
    assert at.line.said == []


async def test_a_refusal_is_its_only_message_and_counts_as_no_event() -> None:
    at = Stage()
    at.stream.respond(Problem.of("queue_full", "no room"), None)
    assert at.line.take()
    at.stream.settle(Ending(Outcome.REFUSED, None))
    (told,) = at.line.messages
    assert (told["status"], told["error"]["code"]) == (429, "queue_full")
    assert "sequence_number" not in told
    assert (at.overs, at.line.senders) == (1, [])
    at.line.there = at.line.end
    assert at.stream.delivered() == (0, 0)


@pytest.mark.parametrize("ended", [False, True])
async def test_an_answer_that_was_cut_never_looks_finished(ended: bool) -> None:
    at = Stage()
    at.stream.push(WORD + DONE, last=ended)
    at.line.take()
    at.stream.cut()
    assert not at.line.take()
    assert not at.stream.finished
    with pytest.raises(ClientGone):
        at.stream.push(DONE, last=True)
    at.stream.settle(Ending(Outcome.CLIENT_STALLED))
    (told,) = at.line.said
    assert (told["type"], told["error"]["code"]) == ("error", "client_stalled")
    assert (at.overs, at.line.senders) == (1, [])


async def test_whoever_ends_before_anything_was_said_says_why() -> None:
    at = Stage()
    at.stream.settle(Ending(Outcome.DEADLINE_EXCEEDED, LATE))
    assert [told["error"]["code"] for told in at.line.said] == ["deadline_exceeded"]
    assert at.overs == 1


async def test_its_figure_grows_with_the_socket_only_while_something_waits() -> None:
    at = Stage()
    before = at.stream.taken()
    at.line.moves += 1
    assert at.stream.taken() == before
    at.stream.push(WORD)
    waiting = at.stream.taken()
    assert at.stream.taken() == waiting
    at.line.moves += 1
    assert at.stream.taken() > waiting


async def test_a_lost_socket_is_a_client_that_left() -> None:
    at = Stage()
    at.stream.push(WORD)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(at.stream.wait_gone)

        async def flush() -> None:
            with pytest.raises(ClientGone):
                await at.stream.flush()

        nursery.start_soon(flush)
        await trio.testing.wait_all_tasks_blocked()
        at.stream.lost()
    assert (at.stream.pending, at.overs) == (0, 0)
    with pytest.raises(ClientGone):
        at.stream.push(WORD)
    at.stream.settle(Ending(Outcome.CLIENT_GONE))
    assert (at.overs, at.line.said) == (1, [])
