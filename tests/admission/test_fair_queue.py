"""The order of those who wait, against a plain list of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_gateway.admission._fair_queue import FairQueue


@dataclass(frozen=True, eq=False)
class Waiting:
    tenant: str
    model: str
    number: int
    size: int = 10


class QueueStory(RuleBasedStateMachine):
    """Waiters come, leave and come back in any order; a list keeps them all."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Waiting] = FairQueue()
        self.waiting: list[Waiting] = []
        self.left: list[Waiting] = []
        self.number = 0

    @rule(tenant=st.sampled_from("abc"), model=st.sampled_from(["m1", "m2"]), size=st.integers(0, 99))
    def comes(self, tenant: str, model: str, size: int) -> None:
        self.number += 1
        waiter = Waiting(tenant, model, self.number, size)
        self.queue.add(waiter)
        self.waiting.append(waiter)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(waiter)
        self.waiting.remove(waiter)
        self.left.append(waiter)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def is_sent_back(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.left))
        self.queue.add(waiter)
        self.left.remove(waiter)
        self.waiting.append(waiter)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def leaves_twice(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.left))
        with pytest.raises(KeyError):
            self.queue.remove(waiter)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def somebody_with_the_same_number_is_somebody_else(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        with pytest.raises(KeyError):
            self.queue.remove(Waiting(waiter.tenant, waiter.model, waiter.number, waiter.size))

    @invariant()
    def counts_are_those_of_the_list(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.bytes == sum(waiter.size for waiter in self.waiting)
        depths = Counter(waiter.tenant for waiter in self.waiting)
        assert self.queue.tenants() == depths
        assert all(self.queue.depth_of(tenant) == depths[tenant] for tenant in "abcd")

    @invariant()
    def order_is_by_arrival(self) -> None:
        by_arrival = sorted(self.waiting, key=lambda waiter: waiter.number)
        assert list(self.queue) == by_arrival
        for waiter in self.waiting:
            ahead = [w for w in by_arrival if w.model == waiter.model and w.number < waiter.number]
            assert self.queue.place_of(waiter) == len(ahead) + 1

    @invariant()
    def lines_are_of_one_tenant_and_model_and_the_oldest_heads_come_first(self) -> None:
        lines = self.queue.lines()
        assert [w for line in lines for w in line] == [
            waiter
            for _, line in sorted(
                (min(w.number for w in line), line)
                for line in (
                    [w for w in sorted(self.waiting, key=lambda w: w.number) if (w.tenant, w.model) == key]
                    for key in {(w.tenant, w.model) for w in self.waiting}
                )
            )
            for waiter in line
        ]
        assert all(len({(w.tenant, w.model) for w in line}) == 1 for line in lines)


TestQueueStory = QueueStory.TestCase


def test_an_empty_queue_has_nothing() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    assert (len(queue), queue.bytes, queue.tenants(), queue.lines(), list(queue)) == (0, 0, {}, [], [])
    assert queue.depth_of("a") == 0


def test_who_was_sent_back_stands_in_front_again() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    first, second, third = (Waiting("a", "m", number) for number in (1, 2, 3))
    for waiter in (first, second, third):
        queue.add(waiter)
    queue.remove(first)
    assert queue.place_of(second) == 1
    queue.add(first)
    assert [queue.place_of(waiter) for waiter in (first, second, third)] == [1, 2, 3]


def test_a_full_model_does_not_stand_in_the_line_of_another() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    for waiter in (
        Waiting("a", "m1", 1),
        Waiting("a", "m1", 2),
        Waiting("a", "m2", 3),
        Waiting("b", "m2", 4),
    ):
        queue.add(waiter)
    assert [[w.number for w in line] for line in queue.lines()] == [[1, 2], [3], [4]]
    assert [queue.place_of(waiter) for waiter in queue] == [1, 2, 1, 2]


def test_leaving_does_not_disturb_who_walks_through_the_queue() -> None:
    queue: FairQueue[Waiting] = FairQueue()
    for number in range(6):
        queue.add(Waiting("a", f"m{number % 2}", number))
    for waiter in queue:
        queue.remove(waiter)
    assert len(queue) == 0
