"""What operators and new configurations do to workers: take out, describe anew, force, serve otherwise."""

from __future__ import annotations

import pytest
import trio

from trio_gateway.contract import InternalRequest, Worker
from trio_gateway.fleet import DRAINED, EJECTED, UNTOUCHED, Fleet, Route
from trio_gateway.fleet._registry import MOST_NAMES_GONE
from trio_gateway.testing import make_request, make_worker

ANY: frozenset[str] = frozenset()


def fleet_of(*workers: Worker, models: tuple[str, ...] = ("m1",)) -> Fleet:
    return Fleet(workers, [Route(model, model) for model in models], trio.current_time)


def choose(fleet: Fleet, model: str = "m1") -> str | None:
    worker = fleet.choose(make_request(model), ANY)
    return None if worker is None else worker.id


def place(fleet: Fleet) -> tuple[InternalRequest, Worker, int]:
    request = make_request()
    worker = fleet.choose(request, ANY)
    assert worker is not None
    return request, worker, fleet.hold(request, worker)


@pytest.mark.parametrize("how", [DRAINED, EJECTED])
async def test_nothing_is_placed_at_a_worker_that_an_operator_took_out_until_it_is_back(how: str) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    request, worker, slots = place(fleet)
    assert fleet.touch("w1", how) == UNTOUCHED
    assert [choose(fleet) for _ in range(3)] == ["w2"] * 3
    assert not fleet.books["w1"].ready(trio.current_time())
    assert fleet.books["w1"].held == 1  # what runs there goes on
    assert fleet.pool_slots("m1") == 4 + 1
    fleet.free(request, worker, slots, drained=False)
    assert fleet.touch("w1", UNTOUCHED) == how
    assert choose(fleet) == "w1"
    assert fleet.pool_slots("m1") == 8


async def test_where_all_workers_are_taken_out_nobody_waits_for_them() -> None:
    fleet = fleet_of(make_worker("w1"))
    fleet.touch("w1", DRAINED)
    assert fleet.tries_at(make_request(), ANY) is None
    assert fleet.obstacle(make_request()).code == "no_worker"
    assert not fleet.ready()


async def test_another_process_of_the_same_name_is_taken_out_too() -> None:
    fleet = fleet_of()
    fleet.add(make_worker("w1"), ["m1"])
    fleet.touch("w1", DRAINED)
    assert fleet.add(make_worker("w1"), ["m1"]).operator == DRAINED
    fleet.touch("w1", UNTOUCHED)
    assert fleet.add(make_worker("w1"), ["m1"]).operator == UNTOUCHED


async def test_of_those_that_were_taken_out_a_bounded_number_is_remembered() -> None:
    fleet = fleet_of(make_worker("w1"))
    for number in range(MOST_NAMES_GONE + 1):
        fleet.books[f"x{number}"] = fleet.books["w1"]
        fleet.touch(f"x{number}", DRAINED)
    assert len(fleet._touched) == MOST_NAMES_GONE


async def test_who_waits_is_told_that_a_worker_is_back() -> None:
    fleet = fleet_of(make_worker("w1"))
    told: list[str] = []
    fleet.changed = lambda: told.append("changed")
    fleet.touch("w1", DRAINED)
    fleet.touch("w1", UNTOUCHED)
    fleet.describe(make_worker("w1", slots=9))
    fleet.reroute([Route("m2", "m2")])
    fleet.force_breaker("w1", "m2")
    fleet.reset_breakers("w1", ["m2"])
    assert len(told) == 6


async def test_a_worker_that_nobody_knows_can_not_be_taken_out() -> None:
    with pytest.raises(KeyError):
        fleet_of().touch("w1", DRAINED)


async def test_fewer_slots_break_nothing_that_runs_and_let_nothing_more_in() -> None:
    fleet = fleet_of(make_worker("w1", slots=3))
    running = [place(fleet) for _ in range(3)]
    fleet.describe(make_worker("w1", slots=1))
    book = fleet.books["w1"]
    assert (book.slots, book.held) == (1, 3)
    for request, worker, slots in running[:2]:
        fleet.free(request, worker, slots, drained=False)
        assert choose(fleet) is None
    request, worker, slots = running[2]
    fleet.drain(request, worker, slots)
    assert choose(fleet) is None
    fleet.free(request, worker, slots, drained=True)
    assert choose(fleet) == "w1"
    assert book.earlier == []
    assert set(fleet._of_worker) == {book.worker}


async def test_a_worker_that_says_how_many_slots_it_has_goes_on_saying_it() -> None:
    fleet = fleet_of(make_worker("w1", slots=64, slots_unknown=True))
    book = fleet.books["w1"]
    book.report_slots(8)
    fleet.describe(make_worker("w1", slots=64, slots_unknown=True, weight=2.0))
    assert (book.slots, book.worker.weight) == (8, 2.0)
    fleet.describe(make_worker("w1", slots=5))
    book.report_slots(8)
    assert book.slots == 5


async def test_what_attempts_tell_under_the_old_description_counts() -> None:
    fleet = fleet_of(make_worker("w1"))
    request, worker, _ = place(fleet)
    fleet.describe(make_worker("w1", weight=2.0))
    fleet.attempted(worker)
    fleet.fault(worker, request)
    assert (fleet.books["w1"].attempts, fleet.books["w1"].faults) == (1, 1)


async def test_a_removed_worker_is_forgotten_under_all_its_descriptions() -> None:
    fleet = fleet_of(make_worker("w1"))
    request, worker, slots = place(fleet)
    fleet.describe(make_worker("w1", weight=2.0))
    fleet.remove("w1")
    assert len(fleet._of_worker) == 2
    fleet.free(request, worker, slots, drained=False)
    assert fleet._of_worker == {}


async def test_workers_stand_in_the_order_of_the_file_and_others_behind() -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    fleet.add(make_worker("w0"))
    fleet.arrange(["w0", "unknown", "w2"])
    assert list(fleet.books) == ["w0", "w2", "w1"]


async def test_other_models_are_served_at_once() -> None:
    fleet = fleet_of(make_worker("w1"))
    fleet.reroute([Route("m2", "m2", aliases=("other",))])
    assert (choose(fleet, "m1"), choose(fleet, "m2")) == (None, "w1")
    assert set(fleet.routes) == {"m2", "other"}
    fleet.reroute([])
    fleet.report_models(fleet.books["w1"], ["reported"])
    assert choose(fleet, "reported") == "w1"


async def test_a_breaker_can_be_forced_open_and_reset() -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    fleet.force_breaker("w1", "m1")
    assert fleet.breaker_states("w1") == {"m1": "forced"}
    assert choose(fleet) == "w2"
    fleet.reset_breakers("w1", ["m1"])
    assert fleet.breaker_states("w1") == {"m1": "closed"}
    assert choose(fleet) == "w1"
    history = fleet.books["w1"].breakers["m1"].history
    assert [(step.before.value, step.after.value) for step in history] == [
        ("closed", "forced"),
        ("forced", "closed"),
    ]
