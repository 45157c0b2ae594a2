"""The order of those who wait: against a plain list of them, and against the paper's promise of fairness."""

from __future__ import annotations

import itertools
import random
import weakref
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trio_gateway.admission._scheduler import Group, Scheduler

PROMOTE_AFTER = 30.0
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 1.0}
TENANTS = st.sampled_from("abc")


@dataclass(eq=False)
class Waiting:
    tenant: str
    model: str = "m1"
    number: int = 0
    tier: int = 1
    size: int = 10
    pool: str = field(default="")

    def __post_init__(self) -> None:
        self.pool = self.pool or f"pool of {self.model}"


def scheduler() -> Scheduler[Waiting]:
    return Scheduler(3, PROMOTE_AFTER, WEIGHTS.__getitem__)


def order(queue: Scheduler[Waiting], pool: str = "pool of m1") -> list[int]:
    """Numbers in the order of the lines, tier after tier."""
    return [w.number for _, group in queue.groups(pool) for line in group.lines() for w in line]


class Story(RuleBasedStateMachine):
    """Waiters come, leave, rise, are set aside and come back in any order; a list keeps them all."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = dict(WEIGHTS)
        self.queue: Scheduler[Waiting] = Scheduler(3, PROMOTE_AFTER, self.weights.__getitem__)
        self.waiting: list[Waiting] = []
        self.left: list[Waiting] = []
        self.charged: list[tuple[Group[Waiting], str, float]] = []
        self.number = 0
        self.now = 0.0

    @rule(
        tenant=TENANTS, model=st.sampled_from(["m1", "m2"]), tier=st.integers(0, 2), size=st.integers(0, 99)
    )
    def comes(self, tenant: str, model: str, tier: int, size: int) -> None:
        self.number += 1
        waiter = Waiting(tenant, model, self.number, tier, size)
        self.queue.add(waiter, self.now)
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
        self.queue.add(waiter, self.now)
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
            self.queue.remove(Waiting(waiter.tenant, waiter.model, waiter.number, waiter.tier))

    @rule(
        tenant=TENANTS, model=st.sampled_from(["m1", "m2"]), tier=st.integers(0, 2), cost=st.integers(1, 50)
    )
    def is_served(self, tenant: str, model: str, tier: int, cost: int) -> None:
        group = self.queue.group(f"pool of {model}", tier)
        before = group.counter(tenant)
        charged = group.charge(tenant, cost)
        assert charged == cost / self.weights[tenant]
        assert group.counter(tenant) >= before + charged - 1e-6
        self.charged.append((group, tenant, charged))

    @precondition(lambda self: self.charged)
    @rule(data=st.data(), used=st.integers(0, 50))
    def is_settled(self, data: st.DataObject, used: int) -> None:
        group, tenant, charged = self.charged.pop(data.draw(st.integers(0, len(self.charged) - 1)))
        before = group.settled(tenant), group.counter(tenant)
        group.settle(tenant, charged, used)
        weighed = used / self.weights[tenant]
        assert group.settled(tenant) == pytest.approx(before[0] + weighed)
        assert group.counter(tenant) == pytest.approx(before[1] + weighed - charged, abs=1e-5)
        if not any(one[:2] == (group, tenant) for one in self.charged):
            assert group.counter(tenant) == group.settled(tenant)

    @rule(tenant=TENANTS, weight=st.sampled_from([0.5, 1.0, 4.0]))
    def is_given_another_weight(self, tenant: str, weight: float) -> None:
        self.weights[tenant] = weight

    @rule(tenant=TENANTS)
    def is_set_aside(self, tenant: str) -> None:
        for pool in ("pool of m1", "pool of m2"):
            self.queue.set_aside(tenant, pool)

    @rule(tenant=TENANTS)
    def is_taken_back(self, tenant: str) -> None:
        self.queue.take_back(tenant)

    @rule(seconds=st.sampled_from([1.0, 20.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.queue.promote(self.now)

    @invariant()
    def counts_are_those_of_the_list(self) -> None:
        queue = self.queue
        assert len(queue) == len(self.waiting)
        assert queue.bytes == sum(waiter.size for waiter in self.waiting)
        depths = Counter(waiter.tenant for waiter in self.waiting)
        assert queue.tenants() == depths
        assert all(queue.depth_of(tenant) == depths[tenant] for tenant in "abcd")
        assert queue.depths() == [sum(w.tier == tier for w in self.waiting) for tier in range(3)]
        assert queue.waiting_for("m1") == sum(w.model == "m1" for w in self.waiting)
        assert set(queue.pools()) == {w.pool for w in self.waiting}

    @invariant()
    def places_are_by_arrival(self) -> None:
        by_arrival = sorted(self.waiting, key=lambda waiter: waiter.number)
        assert list(self.queue) == by_arrival
        for waiter in self.waiting:
            ahead = [w for w in by_arrival if w.model == waiter.model and w.number < waiter.number]
            assert self.queue.place_of(waiter) == len(ahead) + 1
            assert self.queue.waits(waiter)

    @invariant()
    def lines_come_by_tier_and_counter_and_hold_whoever_waits(self) -> None:
        for pool in ("pool of m1", "pool of m2"):
            for tier, group in self.queue.groups(pool):
                lines = list(group.lines())
                counters = [group.counter(line[0].tenant) for line in lines]
                assert counters == sorted(counters)
                for line in lines:
                    assert {(w.tenant, w.pool, w.tier) for w in line} == {(line[0].tenant, pool, tier)}
                    assert [w.number for w in line] == sorted(w.number for w in line)
                    assert group.has_line(line[0].tenant, line[0].model)
                everybody = {w.number for w in self.waiting if (w.pool, w.tier) == (pool, tier)}
                assert {w.number for line in group.all_lines() for w in line} == everybody


TestStory = Story.TestCase
TestStory.settings = settings(max_examples=60, stateful_step_count=30)


def test_an_empty_queue_has_nothing() -> None:
    queue = scheduler()
    assert (len(queue), queue.bytes, queue.tenants(), queue.pools(), list(queue)) == (0, 0, {}, [], [])
    assert (queue.depth_of("a"), queue.waiting_for("m1"), list(queue.groups("pool of m1"))) == (0, 0, [])


def test_who_was_sent_back_stands_in_front_again() -> None:
    queue = scheduler()
    first, second, third = (Waiting("a", number=number) for number in (1, 2, 3))
    for waiter in (first, second, third):
        queue.add(waiter, 0.0)
    queue.remove(first)
    queue.add(first, 1.0)
    assert order(queue) == [1, 2, 3]


def test_who_waits_for_a_model_follows_it_to_another_pool_and_gets_no_younger() -> None:
    queue = scheduler()
    for number, model in enumerate(("m1", "m2", "m1"), 1):
        queue.add(Waiting("a", model, number), 0.0)
    queue.move("m1", "pool of m2")
    queue.move("m1", "pool of m2")
    queue.move("nobody's", "pool of m2")
    assert (queue.pools(), order(queue, "pool of m2")) == (["pool of m2"], [1, 3, 2])
    queue.promote(PROMOTE_AFTER)
    assert queue.depths() == [3, 0, 0]


def test_a_full_model_does_not_stand_in_the_line_of_another() -> None:
    queue = scheduler()
    for number, model in enumerate(("m1", "m1", "m2", "m1"), 1):
        queue.add(Waiting("a", model, number, pool="shared"), 0.0)
    ((_, group),) = queue.groups("shared")
    assert [[w.number for w in line] for line in group.lines()] == [[1, 2, 4], [3]]


def test_tiers_are_strict_until_age_lets_a_waiter_rise() -> None:
    queue = scheduler()
    queue.add(Waiting("a", number=1, tier=2), 0.0)
    queue.add(Waiting("b", number=2, tier=1), 10.0)
    queue.add(Waiting("c", number=3, tier=0), 20.0)
    assert order(queue) == [3, 2, 1]
    queue.promote(29.0)
    assert order(queue) == [3, 2, 1]
    queue.promote(30.0)  # 1 rises to the middle, where its tenant was served no more than the other
    assert queue.depths() == [1, 2, 0]
    queue.promote(60.0)  # both rise: 2 at 40, 1 thirty seconds after it came to the middle
    assert queue.depths() == [3, 0, 0]


def test_one_that_left_and_came_back_does_not_rise_twice() -> None:
    queue = scheduler()
    waiter = Waiting("a", number=1, tier=2)
    queue.add(waiter, 0.0)
    queue.remove(waiter)
    queue.add(waiter, 1.0)
    queue.promote(31.0)
    assert waiter.tier == 1


@pytest.mark.parametrize("rises_at", [2.0, 40.0])
@pytest.mark.parametrize("tier", range(3))
def test_who_left_is_not_kept_by_whoever_still_waits(tier: int, rises_at: float) -> None:
    queue = scheduler()
    queue.add(Waiting("a", number=0, tier=tier), 0.0)
    left = Waiting("a", number=1, tier=tier)
    queue.add(left, 1.0)
    queue.promote(rises_at)
    queue.remove(left)
    kept = weakref.ref(left)
    del left
    assert kept() is None


def test_who_was_served_less_for_its_weight_comes_first() -> None:
    queue = scheduler()
    group = queue.group("pool of m1", 1)
    for number, tenant in enumerate("abc", 1):
        queue.add(Waiting(tenant, number=number), 0.0)
    charged = {tenant: group.charge(tenant, cost) for tenant, cost in (("a", 10), ("b", 30), ("c", 20))}
    assert [line[0].tenant for line in group.lines()] == ["c", "a", "b"]  # 5, 10, 15
    group.settle("b", charged["b"], 2)
    assert [line[0].tenant for line in group.lines()] == ["b", "c", "a"]
    group.set_aside("b")
    assert [line[0].tenant for line in group.lines()] == ["c", "a"]
    queue.take_back("b")
    assert [line[0].tenant for line in group.lines()] == ["b", "c", "a"]


def test_who_comes_does_not_pay_for_what_others_were_only_charged() -> None:
    group: Group[Waiting] = Group(WEIGHTS.__getitem__)
    group.add(Waiting("a", number=1))
    charged = group.charge("a", 500)  # of which it will be given back nearly all
    group.add(Waiting("d", number=2))
    assert next(group.lines())[0].tenant == "d"
    group.settle("a", charged, 10)
    assert (group.counter("a"), group.counter("d")) == (10, 0)


def serve(group: Group[Waiting], tenant: str, cost: float) -> None:
    group.settle(tenant, group.charge(tenant, cost), cost)


def test_who_is_charged_for_one_weight_and_settled_for_another_owes_and_keeps_nothing() -> None:
    weights = {"a": 1.0}
    group: Group[Waiting] = Group(weights.__getitem__)
    group.add(Waiting("a", number=1))
    charges = [group.charge("a", 100), group.charge("a", 100)]
    for weight in (4.0, 0.5):
        weights["a"] = weight
        group.settle("a", charges.pop(), 10)
    assert group.counter("a") == group.settled("a") == 10 / 4.0 + 10 / 0.5


def test_idleness_saves_nothing_up() -> None:
    group: Group[Waiting] = Group(WEIGHTS.__getitem__)
    group.add(Waiting("a", number=1))
    serve(group, "a", 100)
    group.add(Waiting("d", number=2))
    assert group.counter("d") == group.counter("a") == 100
    alone: Group[Waiting] = Group(WEIGHTS.__getitem__)
    last = Waiting("a", number=1)
    alone.add(last)
    serve(alone, "a", 100)
    alone.remove(last)
    alone.add(Waiting("d", number=2))  # the set was empty: the counter of who left last
    assert alone.counter("d") == 100


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 100)), min_size=60, max_size=200),
    st.integers(0, 2**32),
)
def test_two_tenants_that_wait_are_never_further_apart_than_twice_the_largest_request(
    jobs: list[tuple[str, int]], seed: int
) -> None:
    """The bound of Sheng et al., theorem 4.8, for service that is charged when it is given."""
    dice = random.Random(seed)
    group: Group[Waiting] = Group(WEIGHTS.__getitem__)
    backlog: dict[str, list[int]] = {tenant: [] for tenant in "abcd"}
    served = Counter[str]()
    since: dict[str, dict[str, float]] = {}  # for each tenant that waits: all service when it began to
    numbers = itertools.count(1)
    largest = max(cost for _, cost in jobs)
    for tenant, cost in jobs:
        if not backlog[tenant]:
            since[tenant] = {name: served[name] / WEIGHTS[name] for name in backlog}
        backlog[tenant].append(cost)
        group.add(Waiting(tenant, number=next(numbers)))
        while dice.random() < 0.5 and group:
            _serve_one(group, backlog, served, since)
            _expect_fair(served, since, largest)


def _serve_one(
    group: Group[Waiting],
    backlog: dict[str, list[int]],
    served: Counter[str],
    since: dict[str, dict[str, float]],
) -> None:
    waiter = next(group.lines())[0]
    cost = backlog[waiter.tenant].pop(0)
    serve(group, waiter.tenant, cost)
    group.remove(waiter)
    served[waiter.tenant] += cost
    if not backlog[waiter.tenant]:
        del since[waiter.tenant]


def _expect_fair(served: Counter[str], since: dict[str, dict[str, float]], largest: int) -> None:
    for one, other in itertools.combinations(since, 2):
        begun = max(since[one][one], since[other][one]), max(since[one][other], since[other][other])
        gained = [served[name] / WEIGHTS[name] - at for name, at in zip((one, other), begun, strict=True)]
        assert abs(gained[0] - gained[1]) <= 2 * largest


def test_a_hundred_thousand_waiters_slow_no_decision() -> None:
    """Steps, not seconds: the lines that a decision looks at do not grow with those who wait."""
    queue = Scheduler[Waiting](3, PROMOTE_AFTER, lambda tenant: 1.0)
    for number in range(20_000):
        queue.add(Waiting(f"t{number % 1000}", number=number), 0.0)
    ((_, group),) = queue.groups("pool of m1")
    for _ in range(1000):
        line = next(group.lines())
        waiter = line[0]
        group.charge(waiter.tenant, 10)
        queue.remove(waiter)
    assert len(queue) == 19_000
    assert max(group.counter(f"t{number}") for number in range(1000)) == 10
