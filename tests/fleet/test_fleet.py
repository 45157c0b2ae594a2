"""Which worker is taken, what is known of its room, and what attempts teach about it."""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import MockClock

from trio_gateway.contract import EMBEDDINGS, InternalRequest, Rejection, Worker
from trio_gateway.fleet import Fleet, Route
from trio_gateway.fleet._snapshot import Snapshot, Source
from trio_gateway.testing import make_request, make_worker

ANY: frozenset[str] = frozenset()


def fleet_of(*workers: Worker, models: dict[str, tuple[str, ...]] | None = None) -> Fleet:
    everybody = tuple(worker.id for worker in workers)
    routes = [Route(model, model, names) for model, names in (models or {"m1": everybody}).items()]
    return Fleet(workers, routes, trio.current_time)


def choose(fleet: Fleet, request: InternalRequest | None = None, without: frozenset[str] = ANY) -> str | None:
    worker = fleet.choose(request or make_request(), without)
    return None if worker is None else worker.id


def place(fleet: Fleet, request: InternalRequest | None = None) -> tuple[InternalRequest, Worker, int]:
    """Choose and hold, as admission does."""
    request = request or make_request()
    worker = fleet.choose(request, ANY)
    assert worker is not None
    return request, worker, fleet.hold(request, worker)


# The choice -----------------------------------------------------------------------------------------------


async def test_equal_workers_are_taken_in_file_order() -> None:
    fleet = fleet_of(make_worker("w2"), make_worker("w1"), make_worker("w3"))
    assert [place(fleet)[1].id for _ in range(6)] == ["w2", "w1", "w3"] * 2


async def test_the_worker_with_the_smallest_share_of_its_slots_in_use_is_taken() -> None:
    fleet = fleet_of(make_worker("small", slots=2), make_worker("large", slots=8))
    assert [place(fleet)[1].id for _ in range(6)] == ["small", "large", "large", "large", "large", "small"]


async def test_draining_slots_are_in_use() -> None:
    fleet = fleet_of(make_worker("w1", slots=1), make_worker("w2", slots=2))
    request, worker, slots = place(fleet)
    fleet.drain(request, worker, slots)
    assert (fleet.books["w1"].held, fleet.books["w1"].draining, fleet.books["w1"].free) == (0, 1, 0)
    assert choose(fleet) == "w2"
    fleet.free(request, worker, slots, drained=True)
    assert (fleet.books["w1"].draining, fleet.books["w1"].free) == (0, 1)
    assert choose(fleet) == "w1"


async def test_what_drains_takes_room_but_makes_no_worker_look_busier() -> None:
    fleet = fleet_of(make_worker("w1", slots=2), make_worker("w2", slots=2))
    request, worker, slots = place(fleet)
    fleet.drain(request, worker, slots)
    assert choose(fleet) == "w1"


async def test_of_hundreds_the_only_one_with_room_is_found() -> None:
    workers = [make_worker(f"w{number}", slots=1) for number in range(300)]
    found = Fleet(workers, [Route("m1", "m1")], trio.current_time)
    placed = []
    for _ in workers:
        worker = found.choose(make_request(), frozenset())
        assert worker is not None
        found.hold(make_request(), worker)
        placed.append(worker.id)
    assert len(set(placed)) == len(workers)
    assert found.choose(make_request(), frozenset()) is None


async def test_of_hundreds_a_little_loaded_one_is_taken_and_not_always_the_same() -> None:
    workers = [make_worker(f"w{number}", slots=8) for number in range(300)]
    found = Fleet(workers, [Route("m1", "m1")], trio.current_time)
    for worker in workers[::2]:
        for _ in range(4):
            found.hold(make_request(), worker)
    idle = {worker.id for worker in workers[1::2]}
    taken = {choose(found) for _ in range(50)}
    assert taken <= idle
    assert len(taken) > 5


async def test_a_full_worker_is_not_taken() -> None:
    fleet = fleet_of(make_worker("w1", slots=1), make_worker("w2", slots=1))
    held = [place(fleet) for _ in range(2)]
    assert choose(fleet) is None
    request, worker, slots = held.pop()
    fleet.free(request, worker, slots, drained=False)
    assert choose(fleet) == "w2"


async def test_an_excluded_worker_is_not_taken() -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    assert choose(fleet, without=frozenset({"w1"})) == "w2"
    assert choose(fleet, without=frozenset({"w1", "w2"})) is None


async def test_only_workers_of_the_model_are_taken() -> None:
    fleet = fleet_of(
        make_worker("w1"), make_worker("w2"), models={"m1": ("w1",), "m2": ("w2", "w1"), "m3": ()}
    )
    assert choose(fleet, make_request("m1")) == "w1"
    assert choose(fleet, make_request("m2")) == "w2"
    assert choose(fleet, make_request("m3")) is None
    assert choose(fleet, make_request("nobody knows")) is None
    assert [fleet.serves(model) for model in ("m1", "m2", "m3", "m4")] == [True, True, False, False]


# Slots ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "n", "slots"), [("llamacpp", 3, 3), ("llamacpp", 1, 1), ("vllm", 3, 1), ("openai", 3, 1)]
)
async def test_choices_need_slots_of_their_own_where_the_engine_needs_that(
    kind: str, n: int, slots: int
) -> None:
    fleet = fleet_of(make_worker(kind=kind, slots=4))
    assert place(fleet, make_request(n=n))[2] == slots
    assert fleet.books["w1"].held == slots


async def test_operations_without_choices_take_one_slot() -> None:
    fleet = fleet_of(make_worker(kind="llamacpp", slots=4))
    assert place(fleet, make_request(operation=EMBEDDINGS, n=3, stream=False))[2] == 1


async def test_a_worker_that_is_too_small_is_never_tried() -> None:
    fleet = fleet_of(make_worker("w1", kind="llamacpp", slots=2), make_worker("w2", kind="llamacpp", slots=4))
    wide = make_request(n=3)
    assert choose(fleet, wide) == "w2"
    assert fleet.tries_at(wide, ANY) == 0
    assert fleet.tries_at(wide, frozenset({"w2"})) is None
    assert fleet.tries_at(make_request(n=5), ANY) is None


# Outages --------------------------------------------------------------------------------------------------


async def reject(
    fleet: Fleet, worker: Worker, retry_after: float | None = None, *, status: int = 503
) -> None:
    """Say that an attempt which began now was rejected."""
    fleet.rejected(worker, make_request(), Rejection("capacity", status, retry_after, trio.current_time()))


async def test_a_worker_that_has_no_room_is_out_for_the_time_it_named(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    request, w1, slots = place(fleet)
    began = trio.current_time()
    await reject(fleet, w1, 7.0)
    fleet.free(request, w1, slots, drained=False)
    assert choose(fleet) == "w2"
    assert choose(fleet, without=frozenset({"w2"})) is None
    assert fleet.tries_at(make_request(), frozenset({"w2"})) == began + 7
    assert fleet.tries_at(make_request(), ANY) == 0  # w2 is not out
    assert fleet.next_opening(began) == began + 7
    assert fleet.retry_after("m1") == 7
    await trio.sleep(6.9)
    assert choose(fleet) == "w2"
    await trio.sleep(0.1)
    assert choose(fleet) == "w1"
    assert fleet.next_opening(trio.current_time()) is None  # that moment is past
    assert fleet.next_opening(began) == began + 7  # to who looked before


async def test_a_reporting_worker_that_turned_somebody_away_is_tried_again_before_it_reports(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker("w1", slots=3), models={"m1": ("w1",), "m2": ("w1",)})
    other = make_request(model="m2")
    book = fleet.books["w1"]
    book.snapshot, book.expires_at = Snapshot(source=Source.HEARTBEAT, taken_at=0.0), math.inf
    request, w1, slots = place(fleet)
    await reject(fleet, w1, 2.0)
    fleet.free(request, w1, slots, drained=False)
    await trio.sleep(1.9)
    assert (choose(fleet), choose(fleet, other)) == (None, None)
    await trio.sleep(0.1)
    assert (choose(fleet), choose(fleet, other)) == ("w1", "w1")
    request, w1, slots = place(fleet)
    assert (choose(fleet), choose(fleet, other)) == (None, None)  # one at a time, until something is told
    fleet.output(w1, request)
    fleet.free(request, w1, slots, drained=False)
    assert (choose(fleet), choose(fleet, other)) == ("w1", "w1")


async def test_without_a_named_time_pauses_double_up_to_eight_times_the_first(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker())
    pauses = []
    for _ in range(6):
        request, worker, slots = place(fleet)
        await reject(fleet, worker)
        fleet.free(request, worker, slots, drained=False)
        opens = fleet.tries_at(request, ANY)
        assert opens is not None
        pauses.append(opens - trio.current_time())
        await trio.sleep(pauses[-1])
    assert pauses == [1, 2, 4, 8, 8, 8]
    fleet.output(worker, make_request())
    request, worker, slots = place(fleet)
    await reject(fleet, worker)
    assert fleet.retry_after("m1") == 1  # output began the count anew


async def test_a_burst_of_rejections_is_one_outage(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker())
    began = trio.current_time()
    await trio.sleep(0.1)
    for _ in range(4):  # all of them were placed before the first was rejected
        fleet.rejected(fleet.books["w1"].worker, make_request(), Rejection("capacity", 503, None, began))
    assert fleet.retry_after("m1") == 1


async def test_an_outage_is_of_one_model_at_one_worker(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker("w1"), models={"m1": ("w1",), "m2": ("w1",)})
    await reject(fleet, fleet.books["w1"].worker, 5.0)
    assert choose(fleet, make_request("m1")) is None
    assert choose(fleet, make_request("m2")) == "w1"
    assert (fleet.retry_after("m1"), fleet.retry_after("m2")) == (5, None)


async def test_after_an_outage_one_exchange_tries_and_output_lets_the_others_follow(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker())
    await reject(fleet, fleet.books["w1"].worker, 5.0)
    await trio.sleep(5)
    _, worker, _ = place(fleet)
    assert choose(fleet) is None
    assert fleet.tries_at(make_request(), ANY) == 0  # it may be over at any moment
    fleet.output(worker, make_request())
    assert choose(fleet) == "w1"
    assert fleet.retry_after("m1") is None


@pytest.mark.parametrize("drains", [True, False])
async def test_a_trial_that_ends_without_telling_anything_lets_another_try(
    drains: bool, autojump_clock: MockClock
) -> None:
    fleet = fleet_of(make_worker())
    await reject(fleet, fleet.books["w1"].worker, 5.0)
    await trio.sleep(5)
    request, worker, slots = place(fleet)
    if drains:
        fleet.drain(request, worker, slots)
    else:
        fleet.free(request, worker, slots, drained=False)
    assert choose(fleet) == "w1"
    place(fleet)
    assert choose(fleet) is None  # again one at a time


async def test_the_end_of_an_older_attempt_does_not_end_a_trial(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker())
    old = place(fleet)
    older = place(fleet)
    began = trio.current_time()
    await trio.sleep(1)
    await reject(fleet, old[1], 5.0)
    await trio.sleep(5)
    place(fleet)  # the trial
    fleet.free(*old, drained=False)
    assert choose(fleet) is None
    fleet.rejected(older[1], make_request(), Rejection("capacity", 503, None, began))
    fleet.drain(*older)
    assert choose(fleet) is None


async def test_output_for_another_exchange_ends_an_outage_that_named_no_time(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker())
    _, worker, _ = place(fleet)
    await reject(fleet, worker)
    assert choose(fleet) is None
    fleet.output(worker, make_request())
    assert choose(fleet) == "w1"


async def test_output_does_not_end_an_outage_whose_time_the_worker_named(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker())
    _, worker, _ = place(fleet)
    await reject(fleet, worker, 5.0)
    fleet.output(worker, make_request())
    assert choose(fleet) is None
    await trio.sleep(5)
    fleet.output(worker, make_request())
    assert [place(fleet)[1].id for _ in range(2)] == ["w1", "w1"]


async def test_the_longest_outage_still_running_is_told_and_429_is_the_stronger_class(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"), make_worker("w3"))
    w1, w2, w3 = (fleet.books[name].worker for name in ("w1", "w2", "w3"))
    assert (fleet.retry_after("m1"), fleet.rejection("m1")) == (None, 503)
    await reject(fleet, w1, 10.0)
    await reject(fleet, w2, 4.0, status=429)
    await reject(fleet, w3, 2.0)
    assert (fleet.retry_after("m1"), fleet.rejection("m1")) == (10, 429)
    assert fleet.next_opening(trio.current_time()) == trio.current_time() + 2
    await trio.sleep(3)
    assert fleet.retry_after("m1") == 7
    assert fleet.next_opening(trio.current_time()) == trio.current_time() + 1


async def test_whoever_listens_is_told_when_placements_change(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker())
    worker = fleet.books["w1"].worker
    told: list[str] = []
    fleet.changed = lambda: told.append("changed")
    fleet.output(worker, make_request())
    assert told == []  # nothing held it back
    await reject(fleet, worker)
    assert told == ["changed"]
    fleet.output(worker, make_request())
    assert told == ["changed", "changed"]


# Counts ---------------------------------------------------------------------------------------------------


async def test_attempts_and_faults_are_counted_by_worker() -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    w1, w2 = (fleet.books[name].worker for name in ("w1", "w2"))
    for worker in (w1, w1, w2):
        fleet.attempted(worker)
    fleet.fault(w1, make_request())
    assert [(book.attempts, book.faults) for book in fleet.books.values()] == [(2, 1), (1, 0)]


async def test_fields_that_steer_any_engine_of_a_model_are_its_engine_fields() -> None:
    fleet = fleet_of(
        make_worker("w1", kind="vllm"),
        make_worker("w2", kind="sglang"),
        make_worker("w3", kind="openai"),
        models={"both": ("w1", "w2"), "plain": ("w3",)},
    )
    assert {"kv_transfer_params", "rid", "priority"} <= fleet.engine_fields("both")
    assert fleet.engine_fields("plain") == frozenset()
