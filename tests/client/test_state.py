"""One stream on the client's side: numbers, acknowledgements, and losses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.client import SocketLost, SocketRejected, StreamCancelled, StreamFailed
from trio_gateway.client._messages import (
    Accepted,
    Cancelled,
    Delivery,
    Delta,
    Done,
    Failed,
    Queued,
)
from trio_gateway.client._state import ACK_BYTES, ACK_DELAY, OutOfOrder, Question, StreamState
from trio_gateway.flow import DeltaLog

GONE = SocketLost("socket_lost", "gone", 1006)


def question(**changes: Any) -> Question:
    return Question(**{"body": b'{"model":"m1"}', "credit": 4, **changes})


def fresh(**changes: Any) -> StreamState:
    return StreamState("s1", question(**changes))


def accepted(**changes: Any) -> StreamState:
    state = fresh(**changes)
    assert said(state) is not None
    state.hear(Accepted("s1", "r1", "m1"))
    return state


def delta(seq: int, size: int = 10) -> Delta:
    return Delta("s1", seq, {}, seq, seq * size)


def said(state: StreamState, now: float = 0.0) -> dict[str, Any] | None:
    """The next message, as JSON; what is null is left out."""
    expected = state.has_to_say(now)
    message = state.next_message(now)
    assert expected == (message is not None)
    if message is None:
        return None
    return {name: value for name, value in json.loads(message).items() if value is not None}


def consume(state: StreamState, count: int, now: float = 0.0) -> None:
    """Take ``count`` deltas, and come for the next."""
    for _ in range(count):
        assert state.take(now) is not None
    state.take(now)


# Asking -----------------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_sent_once() -> None:
    state = fresh(resumable=True, timeout_ms=500, priority="batch", session="x", operation="completions")
    assert said(state) == {
        "type": "generate",
        "stream_id": "s1",
        "operation": "completions",
        "body": {"model": "m1"},
        "credit": 4,
        "resumable": True,
        "timeout_ms": 500,
        "priority": "batch",
        "session": "x",
    }
    assert said(state) is None
    assert not state.named


def test_a_place_in_the_queue_is_known_until_a_worker_is_found() -> None:
    state = fresh()
    said(state)
    state.hear(Queued("s1", "r1", 3, 1500))
    assert (state.named, state.request_id, state.model) == (True, "r1", "")
    assert state.queued is not None
    assert state.queued.position == 3
    state.hear(Accepted("s1", "r1", "m1"))
    assert state.queued is None
    assert state.model == "m1"


def test_a_stream_that_was_left_before_it_was_sent_is_never_sent() -> None:
    state = fresh()
    state.leave()
    assert state.over
    assert said(state) is None


# Deltas -----------------------------------------------------------------------------------------------------


def test_deltas_come_in_order_and_a_delta_counts_when_the_next_is_asked_for() -> None:
    state = accepted()
    for seq in (1, 2):
        state.hear(delta(seq))
    first = state.take(0.0)
    assert first is not None
    assert (first.seq, state.consumed) == (1, 0)
    second = state.take(0.0)
    assert second is not None
    assert (second.seq, state.consumed) == (2, 1)
    assert state.take(0.0) is None
    assert state.consumed == 2


def test_a_gap_breaks_the_socket() -> None:
    state = accepted()
    state.hear(delta(1))
    with pytest.raises(OutOfOrder, match="delta 3 came after 1"):
        state.hear(delta(3))


def test_a_delta_without_credit_breaks_the_socket() -> None:
    state = accepted(credit=2)
    state.hear(delta(1))
    state.hear(delta(2))
    with pytest.raises(OutOfOrder, match="without credit"):
        state.hear(delta(3))


def test_what_comes_again_is_dropped() -> None:
    state = accepted()
    state.hear(delta(1))
    state.hear(delta(1))
    assert state.waiting == 1


# Acknowledgements -------------------------------------------------------------------------------------------


def test_half_of_the_credit_is_acknowledged_at_once() -> None:
    state = accepted(credit=4)
    for seq in (1, 2, 3):
        state.hear(delta(seq))
    state.take(0.0)
    state.take(0.0)
    assert said(state) is None
    state.take(0.0)
    assert said(state) == {"type": "ack", "stream_id": "s1", "seq": 2}
    assert said(state) is None


def test_little_is_acknowledged_after_a_delay() -> None:
    state = accepted(credit=100)
    state.hear(delta(1))
    state.hear(delta(2))
    assert state.ack_by == float("inf")
    consume(state, 1, now=5.0)
    state.take(5.1)
    assert state.ack_by == 5.0 + ACK_DELAY
    assert said(state, 5.1) is None
    assert said(state, 5.0 + ACK_DELAY) == {"type": "ack", "stream_id": "s1", "seq": 2}
    assert state.ack_by == float("inf")


def test_many_bytes_are_acknowledged_at_once() -> None:
    state = accepted(credit=100)
    state.hear(delta(1, size=ACK_BYTES))
    consume(state, 1)
    assert said(state) == {"type": "ack", "stream_id": "s1", "seq": 1}


def test_the_last_delta_of_an_answer_is_acknowledged_at_once() -> None:
    state = accepted(credit=100)
    state.hear(delta(1))
    state.hear(delta(2))
    state.hear(Done("s1", "r1", ["stop"]))
    state.take(0.0)
    assert said(state) is None
    consume(state, 1)
    assert said(state) == {"type": "ack", "stream_id": "s1", "seq": 2}


# Leaving ----------------------------------------------------------------------------------------------------


def test_leaving_acknowledges_what_was_consumed_and_cancels_the_rest() -> None:
    state = accepted(credit=100)
    for seq in (1, 2, 3):
        state.hear(delta(seq))
    state.take(0.0)
    state.take(0.0)
    state.leave()
    assert state.waiting == 0
    assert said(state) == {"type": "ack", "stream_id": "s1", "seq": 1}
    assert said(state) == {"type": "cancel", "stream_id": "s1"}
    assert said(state) is None
    state.hear(delta(4))
    assert state.waiting == 0
    state.hear(Cancelled("s1"))
    assert state.over
    assert said(state) is None


def test_leaving_an_answer_that_has_ended_cancels_nothing() -> None:
    state = accepted()
    state.hear(delta(1))
    state.hear(Done("s1", "r1"))
    consume(state, 1)
    assert said(state) is not None
    state.leave()
    assert said(state) is None


# Endings ----------------------------------------------------------------------------------------------------


def test_the_end_is_the_gateways_first_word_about_it() -> None:
    state = accepted()
    done = Done("s1", "r1", ["stop"], {"total_tokens": 3})
    state.hear(done)
    state.hear(Cancelled("s1"))
    state.give_up(GONE)
    assert (state.done, state.error) == (done, None)


def test_an_error_tells_all_that_the_gateway_says() -> None:
    state = fresh()
    said(state)
    error = {
        "code": "queue_full",
        "message": "no",
        "type": "rate_limit_error",
        "param": "p",
        "gateway": {"retryable": True},
    }
    state.hear(Failed(error, "s1", "r1", 1500, Delivery(3, 2, None)))
    failed = state.error
    assert isinstance(failed, StreamFailed)
    assert (failed.code, failed.message, failed.type, failed.param) == (
        "queue_full",
        "no",
        "rate_limit_error",
        "p",
    )
    assert (failed.retry_after, failed.request_id) == (1.5, "r1")
    assert failed.gateway == {"retryable": True}
    assert failed.delivery == {"generated": 3, "delivered": 2, "acknowledged": None}
    assert str(failed) == "no (queue_full)"


def test_an_error_may_say_less() -> None:
    state = fresh()
    said(state)
    state.hear(Failed({"code": "x", "message": "y"}, "s1"))
    failed = state.error
    assert isinstance(failed, StreamFailed)
    assert (failed.retry_after, failed.request_id, failed.delivery, failed.gateway) == (None, None, None, {})


def test_a_stream_that_somebody_cancelled_is_no_finished_one() -> None:
    state = accepted()
    state.hear(Cancelled("s1", "r1", Delivery(1, 1, 1)))
    cancelled = state.error
    assert isinstance(cancelled, StreamCancelled)
    assert (cancelled.code, cancelled.request_id) == ("request_cancelled", "r1")


# Losses -----------------------------------------------------------------------------------------------------


def test_what_was_not_sent_waits_for_the_next_socket() -> None:
    state = fresh()
    state.lose(GONE)
    assert state.wants_socket
    assert not state.over


@pytest.mark.parametrize("resumable", [False, True])
def test_a_question_without_any_word_of_the_gateway_is_lost(resumable: bool) -> None:
    state = fresh(resumable=resumable)
    said(state)
    state.lose(GONE)
    assert isinstance(state.error, SocketLost)
    assert state.error.request_id is None


def test_a_stream_that_is_not_resumable_is_lost_and_says_which_it_was() -> None:
    state = accepted()
    state.lose(GONE)
    assert not state.wants_socket
    assert isinstance(state.error, SocketLost)
    assert (state.error.request_id, state.error.close_code) == ("r1", 1006)
    assert GONE.request_id is None  # it is also the error of others


def test_a_resumable_stream_goes_on_behind_what_was_consumed() -> None:
    state = accepted(resumable=True)
    for seq in (1, 2, 3):
        state.hear(delta(seq))
    consume(state, 1)
    state.lose(GONE)
    assert state.wants_socket
    resume = {"type": "resume", "stream_id": "s1", "request_id": "r1", "after_seq": 1, "credit": 4}
    assert said(state) == resume
    assert not state.wants_socket
    assert said(state, 100.0) is None  # that was an acknowledgement too
    state.hear(Accepted("s1", "r1", "m1"))
    for seq in (2, 3, 4):
        state.hear(delta(seq))
    assert [delta.seq for delta in iter(lambda: state.take(0.0), None)] == [3, 4]


def test_a_stream_that_was_left_is_resumed_to_be_cancelled() -> None:
    state = accepted(resumable=True)
    state.leave()
    assert said(state) == {"type": "cancel", "stream_id": "s1"}
    state.lose(GONE)
    resumed = said(state)
    assert resumed is not None
    assert resumed["type"] == "resume"
    assert said(state) == {"type": "cancel", "stream_id": "s1"}


def test_after_the_end_a_loss_changes_nothing_and_nothing_is_acknowledged_any_more() -> None:
    state = accepted(resumable=True)
    state.hear(delta(1))
    state.hear(Done("s1", "r1"))
    consume(state, 1)
    state.lose(GONE)
    assert state.error is None
    assert said(state, 100.0) is None
    assert state.ack_by == float("inf")


def test_what_arrived_is_handed_out_before_the_loss() -> None:
    state = accepted()
    state.hear(delta(1))
    state.lose(GONE)
    assert state.take(0.0) is not None
    assert state.error is not None


def test_when_no_socket_comes_any_more_a_stream_ends_with_the_reason() -> None:
    state = accepted(resumable=True)
    state.lose(GONE)
    state.give_up(SocketRejected(401, "invalid_api_key", "no"))
    assert isinstance(state.error, SocketRejected)
    assert (state.error.status, state.error.request_id) == (401, "r1")
    assert not state.wants_socket


# Against the gateway's own account --------------------------------------------------------------------------


class Wire:
    """The gateway's log of deltas on the other side, with what is under way in both directions."""

    def __init__(self, credit: int, total: int) -> None:
        self.state = StreamState("s1", question(credit=credit, resumable=True))
        self.log = DeltaLog(credit, 1_000_000)
        for seq in range(1, total + 1):
            self.log.add(b"x" * 10, seq, seq * 10)
        self.log.end(b"{}")
        self.up: list[dict[str, Any]] = []
        self.down: list[Any] = []
        self.got: list[int] = []
        self.attached = False
        self.now = 0.0

    def step(self, action: str) -> None:
        self.now += 0.05
        getattr(self, action)()
        assert self.state.waiting <= self.state.question.credit
        assert self.log.acked <= self.state.consumed

    def speak(self) -> None:
        message = said(self.state, self.now)
        if message is not None:
            self.up.append(message)

    def gateway_reads(self) -> None:
        if not self.up:
            return
        message = self.up.pop(0)
        if message["type"] == "ack":
            self.log.acknowledge(message["seq"], message.get("credit"))
        elif message["type"] == "resume":
            self.log.rewind(message["after_seq"], message["credit"])
        if message["type"] != "ack":
            self.attached = True
            self.down.append(Accepted("s1", "r1", "m1"))

    def gateway_sends(self) -> None:
        sent = self.log.take() if self.attached else None
        if sent is not None:
            self.down.append(delta(sent.seq) if sent.seq else Done("s1", "r1", ["stop"]))

    def hear(self) -> None:
        if self.down:
            self.state.hear(self.down.pop(0))

    def consume(self) -> None:
        taken = self.state.take(self.now)
        if taken is not None:
            self.got.append(taken.seq)

    def cut(self) -> None:
        """Lose what is under way; but never before the gateway's first word, which is the end of it."""
        if self.state.named:
            self.up.clear()
            self.down.clear()
            self.attached = False
            self.state.lose(GONE)


ACTIONS = ("speak", "gateway_reads", "gateway_sends", "hear", "consume")


@given(
    st.integers(1, 9),
    st.integers(0, 30),
    st.lists(st.sampled_from((*ACTIONS, "gateway_sends", "hear", "cut")), max_size=300),
)
def test_each_delta_comes_once_whatever_is_lost_and_never_more_than_the_credit_waits(
    credit: int, total: int, actions: list[str]
) -> None:
    wire = Wire(credit, total)
    wire.step("speak")
    wire.step("gateway_reads")
    for action in actions:
        wire.step(action)
    for _ in range(2 * total + 20):  # then nobody hinders it
        for action in ACTIONS:
            wire.step(action)
    assert wire.got == list(range(1, total + 1))
    assert wire.state.done is not None
    assert wire.state.error is None
    assert wire.log.acked <= total
