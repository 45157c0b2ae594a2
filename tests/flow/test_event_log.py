"""A log of events, compared with a list of all: what is taken, what is kept, where a reader can go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.flow import Dropped, EventLog, NotSent

MOST = 30


def block(number: int, size: int) -> bytes:
    return (b"%d:" % number).ljust(size, b"x")


STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(5, 40)),
    st.tuples(st.just("take"), st.integers(1, 60)),
    st.tuples(st.just("seek"), st.integers(0, 12)),
    st.tuples(st.just("drop"), st.just(0)),
)


class Model:
    """All blocks that were ever added, and how far a reader is."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []
        self.position = 0
        self.taken = 0
        self.first = 1  # number of the oldest that is kept

    def drop_old(self) -> None:
        """Drop what was taken from the front, for as long as there is too much."""
        while sum(map(len, self.blocks[self.first - 1 :])) > MOST and self.first <= self.position:
            self.first += 1


@given(st.lists(STEP, max_size=40))
def test_a_reader_gets_every_event_in_order_from_wherever_it_goes_on(steps: list[tuple[str, int]]) -> None:
    log, model = EventLog(MOST), Model()
    for step, value in steps:
        if step == "add":
            model.blocks.append(block(len(model.blocks) + 1, value))
            log.add(model.blocks[-1])
        elif step == "take":
            got = log.take(value)
            expected = b""
            while model.position < len(model.blocks):
                following = model.blocks[model.position]
                if expected and len(expected) + len(following) > value:
                    break
                expected += following
                model.position += 1
            model.taken = max(model.taken, model.position)
            assert got == expected
        elif step == "seek":
            if value > model.taken:
                with pytest.raises(NotSent):
                    log.seek(value)
            elif value < model.first - 1:
                with pytest.raises(Dropped):
                    log.seek(value)
            else:
                log.seek(value)
                model.position = value
        else:
            log.drop_waiting()
            del model.blocks[model.taken :]
        if step in ("add", "take"):
            model.drop_old()
        assert log.position == model.position
        assert (log.last, log.taken) == (len(model.blocks), model.taken)
        assert log.waiting_bytes == sum(map(len, model.blocks[model.position :]))
        assert log.bytes == sum(map(len, model.blocks[model.first - 1 :]))


def test_what_does_not_fit_any_more_is_dropped_from_the_front_and_only_once_it_was_taken() -> None:
    log = EventLog(25)
    for number in range(1, 5):
        log.add(block(number, 10))
    assert log.bytes == 40
    assert log.take(100) == b"".join(block(number, 10) for number in range(1, 5))
    assert log.bytes == 20
    with pytest.raises(Dropped):
        log.seek(1)
    log.seek(2)
    assert log.take(1) == block(3, 10)


def test_after_clearing_nothing_is_left_and_nobody_can_go_back() -> None:
    log = EventLog(100)
    log.add(b"one")
    log.add(b"two")
    assert log.take(3) == b"one"
    log.clear()
    assert (log.bytes, log.waiting_bytes, log.take(9)) == (0, 0, b"")
    with pytest.raises(Dropped):
        log.seek(1)
