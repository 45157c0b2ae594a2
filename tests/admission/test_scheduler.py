"""The order of those who wait: against a plain list of them, and against the paper's promise of fairness."""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

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
        charged = group.charge(tenant, model, cost)
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
    def who_comes_is_told_how_many_come_before_it(self) -> None:
        for tenant, tier in itertools.product("ac", range(3)):
            new = Waiting(tenant, number=self.number + 1, tier=tier)
            there = [w for w in self.waiting if w.model == "m1" and w.tenant != "b"]
            lines = Counter(w.tenant for w in there if w.tier == tier)
            before = sum(w.tier < tier for w in there) + lines[tenant]
            for other in lines.keys() - {tenant}:
                share = self.weights[other] / self.weights[tenant]
                before += min(lines[other], math.ceil((lines[tenant] + 1) * share))
            assert self.queue.comes_within(new, before + 1, ["b"])
            assert not self.queue.comes_within(new, before + 0.9, ["b"])

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
    for number, (tenant, model) in enumerate((("a", "m1"), ("a", "m2"), ("b", "m1")), 1):
        queue.add(Waiting(tenant, model, number), 0.0)
    queue.move("m1", "pool of m2")
    queue.move("m1", "pool of m2")
    queue.move("nobody's", "pool of m2")
    assert (queue.pools(), order(queue, "pool of m2")) == (["pool of m2"], [1, 2, 3])
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


def test_of_a_line_that_stands_still_one_rises_at_a_time() -> None:
    queue = scheduler()
    for number in range(3):
        queue.add(Waiting("a", number=number, tier=2), float(number))
    queue.add(Waiting("a", "m2", number=3, tier=2), 3.0)
    queue.add(Waiting("d", number=4, tier=2), 4.0)
    tiers = {}
    for now in (29.9, 30.0, 33.0, 34.0, 59.9, 60.0, 64.0, 90.0, 150.0, 150.0):
        queue.promote(now)
        tiers[now] = [waiter.tier for waiter in queue]
    assert tiers[29.9] == [2, 2, 2, 2, 2]
    assert tiers[30.0] == [1, 2, 2, 2, 2]  # the eldest of the first line
    assert tiers[33.0] == [1, 2, 2, 1, 2]  # and of each other one, when its own time has come
    assert tiers[34.0] == tiers[59.9] == [1, 2, 2, 1, 1]
    assert tiers[60.0] == [0, 1, 2, 1, 1]  # the next in the line, and once more the first
    assert tiers[64.0] == [0, 1, 2, 0, 0]
    assert tiers[90.0] == [0, 0, 1, 0, 0]
    assert tiers[150.0] == [0, 0, 0, 0, 0]


def test_a_line_that_moves_does_not_rise_however_long_it_is() -> None:
    queue = scheduler()
    waiting = [Waiting("a", number=number) for number in range(10)]
    for waiter in waiting:
        queue.add(waiter, 0.0)
    small = Waiting("d", number=10)
    for now in range(20, 200, 20):  # each waits longer than the age, and one is placed each twenty seconds
        queue.promote(float(now))
        assert {waiter.tier for waiter in waiting} == {1}
        queue.remove(first := waiting.pop(0))
        queue.charge(first, 10, float(now))
        if now == 100:
            queue.add(small, 100.0)
        assert small.tier == (0 if now >= 130 else 1)


def test_who_leaves_without_being_placed_does_not_move_its_line() -> None:
    queue = scheduler()
    gone, left = Waiting("a", number=0), Waiting("a", number=1)
    queue.add(gone, 0.0)
    queue.add(left, 10.0)
    queue.remove(gone)
    queue.promote(39.9)
    assert left.tier == 1
    queue.promote(40.0)
    assert left.tier == 0


def test_a_group_does_not_let_go_of_one_that_is_not_in_it() -> None:
    group: Group[Waiting] = Group(WEIGHTS.__getitem__)
    with pytest.raises(KeyError):
        group.remove(Waiting("a"))


def test_a_line_that_was_empty_begins_anew() -> None:
    queue = scheduler()
    waiter = Waiting("a", number=0)
    queue.add(waiter, 0.0)
    queue.remove(waiter)
    queue.promote(30.0)
    queue.add(waiter, 31.0)
    queue.promote(60.9)
    assert waiter.tier == 1
    queue.promote(61.0)
    assert waiter.tier == 0


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
    charged = {tenant: group.charge(tenant, "m1", cost) for tenant, cost in (("a", 10), ("b", 30), ("c", 20))}
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
    charged = group.charge("a", "m1", 500)  # of which it will be given back nearly all
    group.add(Waiting("d", number=2))
    assert next(group.lines())[0].tenant == "d"
    group.settle("a", charged, 10)
    assert (group.counter("a"), group.counter("d")) == (10, 0)


def serve(group: Group[Waiting], tenant: str, cost: float) -> None:
    group.settle(tenant, group.charge(tenant, "m1", cost), cost)


def test_who_is_charged_for_one_weight_and_settled_for_another_owes_and_keeps_nothing() -> None:
    weights = {"a": 1.0}
    group: Group[Waiting] = Group(weights.__getitem__)
    group.add(Waiting("a", number=1))
    charges = [group.charge("a", "m1", 100), group.charge("a", "m1", 100)]
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


def test_service_without_a_wait_counts_like_any_other() -> None:
    """Who found a slot each time has stood in no line, and yet was served more than who comes now."""
    group: Group[Waiting] = Group(WEIGHTS.__getitem__)
    for _ in range(100):
        serve(group, "a", 10)
    group.add(Waiting("d", number=1))
    group.add(Waiting("a", number=2))
    assert group.settled("d") == group.settled("a") == 1000
    assert group.settled("b") == 0  # has not come yet
    group.charge("b", "m1", 5)  # nor waits, but asks
    assert group.settled("b") == 1000


def test_one_that_its_own_bound_keeps_back_is_nobodys_measure_and_saves_nothing_up() -> None:
    group: Group[Waiting] = Group(WEIGHTS.__getitem__)
    for number, tenant in enumerate("ad"):
        group.add(Waiting(tenant, number=number))
    serve(group, "a", 10)
    group.set_aside("a")
    for _ in range(100):
        serve(group, "d", 10)
    group.add(Waiting("c", number=2))
    assert group.settled("c") == group.settled("d") == 1000
    group.take_back("a")
    assert group.settled("a") == 1000


def test_who_comes_while_all_are_kept_back_begins_where_the_last_was_placed() -> None:
    group: Group[Waiting] = Group(WEIGHTS.__getitem__)
    group.add(Waiting("d", number=0))
    for _ in range(100):
        serve(group, "d", 10)
    group.set_aside("d")
    group.add(Waiting("a", number=1))
    assert group.settled("a") == 990  # what d had when its last one was placed
    group.set_aside("a")
    group.take_back("d")
    assert group.settled("d") == 1000


def test_who_comes_for_a_model_with_few_slots_does_not_stand_behind_those_that_wait_for_it() -> None:
    group: Group[Waiting] = Group(WEIGHTS.__getitem__)
    group.add(Waiting("a", "rare", 0))
    group.settle("a", group.charge("a", "rare", 10), 10)
    for number in range(100):  # of the other model there is plenty
        group.settle("d", group.charge("d", "m1", 10), 10)
        group.add(Waiting("d", "m1", number=number + 1))
    group.add(Waiting("b", "rare", number=200))
    assert group.settled("b") == group.settled("a") == 10
    group.add(Waiting("c", "m1", number=300))
    assert group.settled("c") == group.settled("d") == 1000


class Host:
    """Slots and tenants, as the controller has them: nothing but the order decides who is placed.

    Attributes:
        served: tokens that each tenant was really served, for its weight.
        since: for each tenant that waits, what everybody had been served when it began to.
    """

    def __init__(self, slots: int, bounds: dict[str, int]) -> None:
        self.queue = scheduler()
        self.free = slots
        self.bounds = bounds
        self.running: list[tuple[Job, float]] = []
        self.served = dict.fromkeys(WEIGHTS, 0.0)
        self.since: dict[str, dict[str, float]] = {}
        self.numbers = itertools.count()

    @property
    def group(self) -> Group[Waiting]:
        return self.queue.group("pool of m1", 1)

    def comes(self, tenant: str, estimate: int, used: int) -> None:
        job = Job(tenant, number=next(self.numbers), estimate=estimate, used=used)
        if self.free and not self._is_bound(tenant) and not self.group.has_line(tenant, "m1"):
            self._place(job)
        else:
            self.queue.add(job, 0.0)
            self.since.setdefault(tenant, dict(self.served))
            self._dispatch()

    def ends(self, index: int) -> None:
        job, charged = self.running.pop(index % len(self.running))
        self.free += 1
        self.group.settle(job.tenant, charged, job.used)
        self.served[job.tenant] += job.used / WEIGHTS[job.tenant]
        self.queue.take_back(job.tenant)
        self._dispatch()

    def leaves(self, index: int) -> None:
        waiting = list(self.queue)
        self._leave(waiting[index % len(waiting)])

    def _leave(self, waiter: Waiting) -> None:
        self.queue.remove(waiter)
        if not self.queue.depth_of(waiter.tenant):
            del self.since[waiter.tenant]

    def _is_bound(self, tenant: str) -> bool:
        return sum(job.tenant == tenant for job, _ in self.running) >= self.bounds.get(tenant, 99)

    def _place(self, job: Job) -> None:
        self.free -= 1
        self.running.append((job, self.queue.charge(job, job.estimate, 0.0)))

    def _dispatch(self) -> None:
        while self.free and self._serve():
            pass

    def _serve(self) -> bool:
        for line in self.group.lines():
            job = line[0]
            assert isinstance(job, Job)
            if not self._is_bound(job.tenant):
                self._leave(job)
                self._place(job)
            else:
                self.queue.set_aside(job.tenant, job.pool)
            return True
        return False


@dataclass(eq=False)
class Job(Waiting):
    estimate: int = 0
    used: int = 0


TOKENS = st.integers(1, 100)
STEPS = st.one_of(
    st.tuples(st.just("comes"), st.sampled_from("abcd"), TOKENS, TOKENS),
    st.tuples(st.just("ends"), st.integers(0, 9)),
    st.tuples(st.just("leaves"), st.integers(0, 99)),
    # Stretches that single steps do not come to: one alone for long, and a flood of two.
    st.tuples(st.just("is alone"), st.sampled_from("abcd"), TOKENS, st.integers(5, 60)),
    st.tuples(st.just("flood"), st.sampled_from("abcd"), st.sampled_from("abcd"), TOKENS),
)


@given(st.integers(1, 5), st.booleans(), st.lists(STEPS, min_size=5, max_size=40))
@settings(max_examples=150)
def test_two_tenants_that_wait_are_never_further_apart_than_twice_what_runs_at_a_time(
    slots: int, bounded: bool, steps: list[tuple[Any, ...]]
) -> None:
    """The bound of Sheng et al. (OSDI 2024, theorem 4.8): 2 max(wp Linput, wq M), over the weights.

    M is what can run at a time: here so many slots, each with the most tokens that one is
    served, or charged: estimates are as wrong as can be. Tenants go, come back, wait or find a slot, and
    leave their place; one may be kept back by a bound of its own, and promises hold for the others.
    """
    host = Host(slots, {"d": 1} if bounded else {})
    largest = [1]

    def watched(tenant: str, estimate: int, used: int) -> None:
        largest[0] = max(largest[0], estimate, used)
        host.comes(tenant, estimate, used)
        expect()

    def ended(index: int) -> None:
        host.ends(index)
        expect()

    def expect() -> None:
        _expect_fair(host, 2 * slots * largest[0], set("abc" if bounded else "abcd"))

    for step in steps:
        match step:
            case "comes", tenant, estimate, used:
                watched(tenant, estimate, used)
            case "ends", index if host.running:
                ended(index)
            case "leaves", index if len(host.queue):
                host.leaves(index)
            case "is alone", tenant, used, times:
                while host.running:
                    ended(0)
                for _ in range(times):
                    watched(tenant, used, used)
                    ended(0)
            case "flood", one, other, used:
                for _ in range(20):
                    watched(one, used, used)
                    watched(other, used, used)
                for _ in range(30):
                    ended(0)


def test_one_whose_bound_is_just_its_share_gets_all_of_it() -> None:
    host, dice = Host(10, {"d": 5}), random.Random(1)
    now, ends = 0, dict[int, int]()  # a token takes each slot as long
    for _ in range(4000):
        for tenant in "ad":
            while host.queue.depth_of(tenant) < 5:
                host.comes(tenant, 15, dice.randint(5, 25))
        jobs = [job for job, _ in host.running]
        now = min(ends.setdefault(job.number, now + job.used) for job in jobs)
        host.ends(next(at for at, job in enumerate(jobs) if ends[job.number] == now))
    assert host.served["d"] / host.served["a"] == pytest.approx(1.0, abs=0.02)


def _expect_fair(host: Host, most: float, tenants: set[str]) -> None:
    for one, other in itertools.combinations(host.since.keys() & tenants, 2):
        begun = [max(host.since[one][name], host.since[other][name]) for name in (one, other)]
        gained = [host.served[name] - at for name, at in zip((one, other), begun, strict=True)]
        assert abs(gained[0] - gained[1]) <= most + 1e-6


def test_a_hundred_thousand_waiters_slow_no_decision() -> None:
    """Steps, not seconds: the lines that a decision looks at do not grow with those who wait."""
    queue = Scheduler[Waiting](3, PROMOTE_AFTER, lambda tenant: 1.0)
    for number in range(20_000):
        queue.add(Waiting(f"t{number % 1000}", number=number), 0.0)
    ((_, group),) = queue.groups("pool of m1")
    for _ in range(1000):
        line = next(group.lines())
        waiter = line[0]
        group.charge(waiter.tenant, waiter.model, 10)
        queue.remove(waiter)
    assert len(queue) == 19_000
    assert max(group.counter(f"t{number}") for number in range(1000)) == 10
