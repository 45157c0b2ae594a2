"""The deltas of a stream that a client acknowledges, beside a model that keeps all of them and looks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_gateway.flow import Delta, DeltaLog, Dropped, NotSent

CHUNK = b"0123456789"


def log_of(count: int, credit: int | None = None, most_kept: int = 0) -> DeltaLog:
    log = DeltaLog(credit, most_kept)
    for _ in range(count):
        log.add(CHUNK, 0, 0)
    return log


def take_all(log: DeltaLog) -> list[int]:
    """Take whatever may be sent, and answer the numbers; 0 is the last message."""
    return [delta.seq for delta in iter(log.take, None)]


def test_deltas_are_numbered_from_one_and_carry_what_they_were_given() -> None:
    log = DeltaLog(None, 0)
    log.add(b"a", 1, 10)
    log.add(b"b", 2, 20)
    log.end(b"bye")
    assert [log.take() for _ in range(4)] == [
        Delta(1, b"a", 1, 10),
        Delta(2, b"b", 2, 20),
        Delta(0, b"bye", 0, 0),
        None,
    ]
    assert (log.last, log.sent, log.waiting_bytes, log.kept_bytes) == (2, 2, 0, 0)


def test_without_credit_nothing_but_the_last_message_is_sent() -> None:
    log = log_of(3, credit=2)
    assert take_all(log) == [1, 2]
    assert not log.can_send
    log.drop_waiting()
    log.end(b"bye")
    assert take_all(log) == [0]


def test_a_late_or_repeated_acknowledgement_takes_no_credit_away() -> None:
    log = log_of(20, credit=2)
    take_all(log)
    log.acknowledge(2, 5)
    assert take_all(log) == [3, 4, 5, 6, 7]
    log.acknowledge(2, 1)
    log.acknowledge(1, None)
    assert take_all(log) == []
    log.acknowledge(7, None)
    assert take_all(log) == [8]


def test_the_first_credit_of_a_stream_that_had_no_limit_counts_from_what_was_sent() -> None:
    log = log_of(3)
    take_all(log)
    for _ in range(10):
        log.add(CHUNK, 0, 0)
    log.acknowledge(1, 1)
    assert take_all(log) == []
    log.acknowledge(3, None)
    assert take_all(log) == [4]


@pytest.mark.parametrize("act", [lambda log: log.acknowledge(3, None), lambda log: log.rewind(3, None)])
def test_what_was_not_sent_can_not_be_acknowledged_and_nothing_changes(
    act: Callable[[DeltaLog], Any],
) -> None:
    log = log_of(5, credit=2, most_kept=1000)
    take_all(log)
    with pytest.raises(NotSent):
        act(log)
    assert (log.acked, log.kept_bytes) == (0, 20)


def test_a_log_that_keeps_as_much_as_it_may_sends_nothing_until_some_is_acknowledged() -> None:
    log = log_of(10, most_kept=25)
    assert take_all(log) == [1, 2, 3]
    grants = log.grants
    log.acknowledge(2, None)
    assert log.grants > grants
    assert take_all(log) == [4, 5]


def test_nobody_goes_back_behind_what_was_acknowledged() -> None:
    log = log_of(5, most_kept=1000)
    take_all(log)
    log.acknowledge(3, None)
    with pytest.raises(Dropped):
        log.rewind(2, None)
    log.rewind(3, None)
    assert take_all(log) == [4, 5]


def test_nobody_goes_back_behind_what_was_shed() -> None:
    log = log_of(6, most_kept=1000)
    for _ in range(4):
        log.take()
    log.shed()
    assert log.kept_bytes == 0
    take_all(log)
    with pytest.raises(Dropped):
        log.rewind(3, None)
    log.rewind(4, None)
    assert take_all(log) == [5, 6]


def test_shedding_nothing_forbids_nothing() -> None:
    log = log_of(1, most_kept=1000)
    log.shed()
    log.take()
    log.rewind(0, None)
    assert take_all(log) == [1]


def test_the_last_message_is_kept_whatever_is_acknowledged_or_shed() -> None:
    log = log_of(2, most_kept=1000)
    log.end(b"bye")
    take_all(log)
    log.acknowledge(2, None)
    log.shed()
    log.rewind(2, None)
    assert take_all(log) == [0]


def test_what_was_acknowledged_meanwhile_is_not_sent_again() -> None:
    log = log_of(5, most_kept=1000)
    take_all(log)
    log.rewind(1, None)
    log.acknowledge(3, None)
    assert (log.waiting_bytes, take_all(log)) == (20, [4, 5])


def test_numbers_go_on_behind_the_last_that_was_sent() -> None:
    log = log_of(5, credit=2)
    take_all(log)
    log.drop_waiting()
    assert (log.last, log.waiting_bytes) == (2, 0)


def test_a_cleared_log_holds_nothing() -> None:
    log = log_of(5, credit=2, most_kept=1000)
    take_all(log)
    log.clear()
    assert (log.last, log.waiting_bytes, log.kept_bytes, log.can_send) == (2, 0, 0, False)


@pytest.mark.parametrize("cut", range(13))
@pytest.mark.parametrize("acked", range(0, 13, 3))
def test_a_client_that_comes_back_gets_each_delta_once_wherever_it_was_cut(cut: int, acked: int) -> None:
    if acked > cut:
        return
    log = log_of(12, most_kept=1000)
    log.end(b"bye")
    seen = []
    for _ in range(cut):
        delta = log.take()
        assert delta is not None
        seen.append(delta.seq)
    log.acknowledge(acked, None)
    for lost in range(3):  # that were sent, and did not arrive
        for _ in range(lost):
            log.take()
        log.rewind(cut, None)
    assert [*seen, *take_all(log)] == [*range(1, 13), 0]


@given(credits=st.lists(st.integers(1, 1000), min_size=1, max_size=20), total=st.integers(1, 3000))
@settings(deadline=None)
def test_with_any_credits_all_arrives_in_order_and_never_more_than_was_granted(
    credits: list[int], total: int
) -> None:
    log = log_of(total, credit=credits[0])
    seen: list[int] = []
    granted = credits[0]
    for credit in itertools.cycle(credits):
        new = take_all(log)
        assert len(seen) + len(new) <= granted
        seen += new
        if len(seen) == total:
            break
        log.acknowledge(len(seen), credit)
        granted = max(granted, len(seen) + credit)
    assert seen == list(range(1, total + 1))


class Model(RuleBasedStateMachine):
    """A client and a log, with a naive account beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.most_kept = 0
        self.log = DeltaLog(None, 0)
        self.limit: float = float("inf")
        self.credit: int | None = None
        self.total = self.sent = self.acked = self.next = self.shed = 0
        self.sizes: dict[int, int] = {}
        self.kept: set[int] = set()
        self.begun = self.over = False

    @precondition(lambda self: not self.begun)
    @rule(credit=st.none() | st.integers(1, 5), most_kept=st.sampled_from([0, 20, 1000]))
    def begin(self, credit: int | None, most_kept: int) -> None:
        self.log = DeltaLog(credit, most_kept)
        self.most_kept, self.credit, self.begun = most_kept, credit, True
        self.limit = float("inf") if credit is None else credit

    @precondition(lambda self: self.begun and not self.over)
    @rule(size=st.integers(0, 15))
    def add(self, size: int) -> None:
        self.total += 1
        self.sizes[self.total] = size
        self.log.add(b"x" * size, self.total, self.total)

    @precondition(lambda self: self.begun)
    @rule()
    def take(self) -> None:
        seq = self.next + 1
        full = 0 < self.most_kept <= sum(self.sizes[one] for one in self.kept)
        allowed = seq <= self.total and seq <= self.limit and not full
        delta = self.log.take()
        assert (delta is not None) == allowed
        if delta is not None:
            assert (delta.seq, len(delta.chunk)) == (seq, self.sizes[seq])
            self.next, self.sent = seq, max(self.sent, seq)
            if self.most_kept:
                self.kept.add(seq)

    def granted(self, seq: int, credit: int | None) -> None:
        if credit is not None:
            if self.credit is None:
                self.limit = self.sent
            self.credit = credit
        if self.credit is not None:
            self.limit = max(self.limit, seq + self.credit)
        self.acked = max(self.acked, seq)
        self.kept = {one for one in self.kept if one > self.acked}
        self.next = max(self.next, self.acked)

    @precondition(lambda self: self.begun)
    @rule(seq=st.integers(0, 30), credit=st.none() | st.integers(1, 5))
    def acknowledge(self, seq: int, credit: int | None) -> None:
        if seq > self.sent:
            with pytest.raises(NotSent):
                self.log.acknowledge(seq, credit)
        else:
            self.log.acknowledge(seq, credit)
            self.granted(seq, credit)

    @precondition(lambda self: self.begun and self.most_kept)
    @rule(after=st.integers(0, 30), credit=st.none() | st.integers(1, 5))
    def come_back(self, after: int, credit: int | None) -> None:
        if after > self.sent:
            with pytest.raises(NotSent):
                self.log.rewind(after, credit)
        elif after < max(self.acked, self.shed):
            with pytest.raises(Dropped):
                self.log.rewind(after, credit)
        else:
            self.log.rewind(after, credit)
            self.granted(after, credit)
            self.next, self.kept = after, set()

    @precondition(lambda self: self.begun)
    @rule()
    def be_short_of_memory(self) -> None:
        if self.kept:
            self.shed = max(self.kept)
        self.kept = set()
        self.log.shed()

    @precondition(lambda self: self.begun)
    @rule()
    def withdraw(self) -> None:
        self.log.drop_waiting()
        self.total = self.sent = self.next

    @invariant()
    def counts_agree(self) -> None:
        waiting = range(self.next + 1, self.total + 1)
        assert self.log.waiting_bytes == sum(self.sizes[seq] for seq in waiting)
        assert self.log.kept_bytes == sum(self.sizes[seq] for seq in self.kept)
        assert (self.log.last, self.log.sent, self.log.acked) == (self.total, self.sent, self.acked)


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_sequence_of_events_agrees_with_the_model = Model.TestCase
