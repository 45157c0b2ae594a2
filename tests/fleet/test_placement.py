"""What decides which worker gets an exchange: breaker, suspicion, models, state, affinity, room, reports."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trio_gateway.contract import InternalRequest, Rejection, Worker, WorkerStatus
from trio_gateway.fleet import Fleet, FleetSettings, Route, WorkerBook
from trio_gateway.fleet.cores import BreakerState, Source
from trio_gateway.testing import make_request, make_worker
from trio_gateway.wire import Gauges

ANY: frozenset[str] = frozenset()
COOLDOWN = 10.0


def fleet_of(*workers: Worker, routes: tuple[Route, ...] = (), dice: float = 0.5, **settings: Any) -> Fleet:
    """A fleet whose workers serve what they report; of nothing configured, ``m1`` is configured."""
    configured = {"consecutive_faults": 2, "cooldown": COOLDOWN, "window": 1e-3, **settings}
    return Fleet(
        workers,
        routes or (Route("m1", "m1"),),
        trio.current_time,
        FleetSettings(**configured),
        lambda: dice,
    )


def choose(fleet: Fleet, request: InternalRequest | None = None, without: frozenset[str] = ANY) -> str | None:
    worker = fleet.choose(request or make_request(), without)
    return None if worker is None else worker.id


class Placed:
    """One exchange that was placed, as admission and an attempt do it."""

    def __init__(self, fleet: Fleet, request: InternalRequest | None = None, at: str | None = None) -> None:
        self.fleet = fleet
        self.request = request or make_request()
        worker = fleet.books[at].worker if at is not None else fleet.choose(self.request, ANY)
        assert worker is not None
        self.worker = worker
        self.slots = fleet.hold(self.request, worker)
        self.drained = False

    def output(self) -> None:
        self.fleet.output(self.worker, self.request)

    def fault(self) -> None:
        self.fleet.fault(self.worker, self.request)

    def reject(self, reason: str, retry_after: float | None = None) -> None:
        rejection = Rejection(reason, 503, retry_after, trio.current_time())
        self.fleet.rejected(self.worker, self.request, rejection)

    def drain(self) -> None:
        self.drained = True
        self.fleet.drain(self.request, self.worker, self.slots)

    def free(self) -> None:
        self.fleet.free(self.request, self.worker, self.slots, drained=self.drained)


def fail(fleet: Fleet, at: str, times: int = 1, model: str = "m1") -> None:
    for _ in range(times):
        placed = Placed(fleet, make_request(model), at)
        placed.fault()
        placed.free()


def refuse(fleet: Fleet, at: str, reason: str, model: str = "m1") -> None:
    placed = Placed(fleet, make_request(model), at)
    placed.reject(reason)
    placed.free()


def agent(name: str = "w1", **others: Any) -> Worker:
    """A worker as registrations make it."""
    return make_worker(name, kind="agent", **{"slots_unknown": True, **others})


def join(fleet: Fleet, worker: Worker, *models: str) -> WorkerBook:
    """Take a worker in as registrations do."""
    book = fleet.add(worker, models or ("m1",))
    book.expires_at = trio.current_time() + 3600
    return book


def status(
    seq: int = 1,
    *,
    incarnation: int = 1,
    state: Any = "ready",
    models: tuple[str, ...] = ("m1",),
    slots: int = 4,
    running: int = 0,
    queued: int = 0,
    requests: tuple[str, ...] | None = (),
    kv_usage: float | None = None,
) -> WorkerStatus:
    listed = None if requests is None else frozenset(requests)
    return WorkerStatus(
        incarnation, seq, state, models, slots, running, queued, kv_usage, None, requests=listed
    )


# The breaker ----------------------------------------------------------------------------------------------


async def test_a_worker_that_fails_again_and_again_is_spared_and_the_others_are_taken(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    fail(fleet, "w1", 2)
    assert [choose(fleet) for _ in range(3)] == ["w2"] * 3
    assert choose(fleet, without=frozenset({"w2"})) is None
    assert fleet.tries_at(make_request(), frozenset({"w2"})) is None


async def test_when_all_workers_are_spared_callers_are_told_when_the_first_cooldown_ends(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    fail(fleet, "w1", 2)
    await trio.sleep(3)
    fail(fleet, "w2", 2)
    await trio.sleep(4.5)
    assert fleet.tries_at(make_request(), ANY) is None
    problem = fleet.obstacle(make_request())
    assert (problem.code, problem.status, problem.retry_after) == ("engine_unavailable", 503, 2.5)
    assert not fleet.ready()
    await trio.sleep(2.3)
    assert fleet.obstacle(make_request()).retry_after == 1  # never less, so that nobody spins


async def test_a_breaker_is_of_one_model_at_one_worker(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker(), routes=(Route("m1", "m1"), Route("m2", "m2")))
    fail(fleet, "w1", 2, "m1")
    assert choose(fleet, make_request("m1")) is None
    assert choose(fleet, make_request("m2")) == "w1"
    fail(fleet, "w1", 1, "m2")
    assert fleet.ready()  # one breaker that lets through is enough
    fail(fleet, "w1", 1, "m2")
    assert not fleet.ready()


async def test_after_the_cooldown_exactly_one_exchange_goes_through_and_its_output_closes_it(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker())
    fail(fleet, "w1", 2)
    await trio.sleep(COOLDOWN)
    assert fleet.ready()  # half-open is ready
    trial = Placed(fleet)
    assert choose(fleet) is None
    assert fleet.tries_at(make_request(), ANY) == 0  # others wait: it may be over at any moment
    told: list[str] = []
    fleet.changed = lambda: told.append("changed")
    trial.output()
    assert told  # whoever waits has to be looked at again
    assert choose(fleet) == "w1"
    assert fleet.books["w1"].breaker("m1").state(trio.current_time()) is BreakerState.CLOSED


async def test_a_trial_that_fails_opens_it_again_for_a_whole_cooldown(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker())
    fail(fleet, "w1", 2)
    await trio.sleep(COOLDOWN)
    fail(fleet, "w1")
    assert fleet.tries_at(make_request(), ANY) is None
    assert fleet.obstacle(make_request()).retry_after == COOLDOWN


@pytest.mark.parametrize("how", ["free", "drain", "reject"])
async def test_a_trial_that_ends_without_telling_anything_frees_the_half_open_slot(
    how: str, autojump_clock: MockClock
) -> None:
    """Its client left, a 4xx was passed on, or there was no room: none of that closes or opens it."""
    fleet = fleet_of(make_worker())
    fail(fleet, "w1", 2)
    await trio.sleep(COOLDOWN)
    trial = Placed(fleet)
    if how == "drain":
        trial.drain()
    elif how == "reject":
        trial.reject("capacity", retry_after=0.0)
    if how != "drain":
        trial.free()
    breaker = fleet.books["w1"].breaker("m1")
    assert breaker.state(trio.current_time()) is BreakerState.HALF_OPEN
    Placed(fleet)
    assert choose(fleet) is None  # again one at a time


async def test_output_of_an_exchange_that_was_placed_before_does_not_close_it(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker())
    old = Placed(fleet)
    fail(fleet, "w1", 2)
    await trio.sleep(COOLDOWN)
    old.output()
    Placed(fleet)
    assert choose(fleet) is None


async def test_a_worker_with_probes_is_tried_only_after_a_good_one(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker(), probed=True)
    book = fleet.books["w1"]
    fail(fleet, "w1", 2)
    assert fleet.wants_probe(book) == trio.current_time() + COOLDOWN
    fleet.probed(book, healthy=True)  # nobody asked yet
    await trio.sleep(COOLDOWN)
    assert choose(fleet) is None
    fleet.probed(book, healthy=False)
    assert fleet.wants_probe(book) == trio.current_time() + COOLDOWN
    await trio.sleep(COOLDOWN)
    fleet.probed(book, healthy=True)
    assert choose(fleet) == "w1"
    assert fleet.wants_probe(book) is None


async def test_a_breaker_that_opens_asks_for_the_watchers_attention(autojump_clock: MockClock) -> None:
    """Else a cooldown that is shorter than the interval of probes would end without one."""
    fleet = fleet_of(make_worker(), probed=True)
    asked: list[WorkerBook] = []
    fleet.asked = asked.append
    fail(fleet, "w1", 1)
    assert asked == []
    fail(fleet, "w1", 1)
    assert asked == [fleet.books["w1"]]


async def test_where_nobody_probes_the_end_of_a_cooldown_is_a_moment_to_place_again(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2", slots=1))
    fail(fleet, "w1", 2)
    assert fleet.next_opening(trio.current_time()) == trio.current_time() + COOLDOWN
    await trio.sleep(COOLDOWN)
    assert fleet.next_opening(trio.current_time()) is None


# Suspicion, models, states --------------------------------------------------------------------------------


async def test_a_suspect_worker_is_taken_only_when_no_other_can_be(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2", slots=2))
    fail(fleet, "w1")
    assert [Placed(fleet).worker.id for _ in range(3)] == ["w2", "w2", "w1"]


@pytest.mark.parametrize("by", ["output", "a probe"])
async def test_suspicion_ends_with_output_or_a_good_probe(by: str, autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    fail(fleet, "w1")
    if by == "output":
        Placed(fleet, at="w1").output()
        assert not fleet.books["w1"].snapshot.suspect
    else:
        fleet.probed(fleet.books["w1"], healthy=False)
        assert choose(fleet) == "w2"
        fleet.probed(fleet.books["w1"], healthy=True)
        assert choose(fleet) == "w1"


async def test_a_worker_whose_streams_stand_still_is_suspect_until_they_go_on(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    stream = Placed(fleet, at="w1")
    for _ in range(100):
        await trio.sleep(0.1)
        fleet.progressed(stream.worker, stream.request.exchange_id, trio.current_time(), 1)
    Placed(fleet, at="w2")
    Placed(fleet, at="w2")
    assert choose(fleet) == "w1"
    await trio.sleep(10)
    assert choose(fleet) == "w2"
    fleet.progressed(stream.worker, stream.request.exchange_id, trio.current_time(), 1)
    assert choose(fleet) == "w1"
    await trio.sleep(10)
    fleet.progressed(stream.worker, stream.request.exchange_id, trio.current_time(), None)  # not read
    assert choose(fleet) == "w1"


async def test_a_model_that_turned_out_to_be_missing_comes_back_with_the_list(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker("w1"), routes=(Route("m1", "m1"), Route("m2", "m2")), probed=True)
    book = fleet.books["w1"]
    refuse(fleet, "w1", "model_not_loaded", "m1")
    assert fleet.tries_at(make_request("m1"), ANY) is None
    assert fleet.obstacle(make_request("m1")).code == "no_worker"
    assert choose(fleet, make_request("m2")) == "w1"
    fleet.report_models(book, ["m1", "m2"])
    assert choose(fleet, make_request("m1")) == "w1"
    fleet.report_models(book, ["m2"])
    assert choose(fleet, make_request("m1")) is None
    assert not fleet.serves("m1")


async def test_a_model_whose_load_failed_is_a_fault_of_that_pair_alone(autojump_clock: MockClock) -> None:
    fleet = fleet_of(
        make_worker("w1"), make_worker("w2"), routes=(Route("m1", "m1"), Route("m2", "m2")), probed=True
    )
    placed = Placed(fleet, make_request("m1"), "w1")
    placed.fault()
    placed.reject("model_load_failed")
    placed.free()
    assert choose(fleet, make_request("m1"), frozenset({"w2"})) is None
    assert choose(fleet, make_request("m2"), frozenset({"w2"})) == "w1"
    assert fleet.books["w1"].faults == 1


@pytest.mark.parametrize("reason", ["draining", "shutting_down", "engine_unready"])
async def test_a_state_that_a_rejection_told_ends_with_a_good_probe(
    reason: str, autojump_clock: MockClock
) -> None:
    fleet = fleet_of(make_worker(), probed=True)
    asked: list[WorkerBook] = []
    fleet.asked = asked.append
    refuse(fleet, "w1", reason)
    book = fleet.books["w1"]
    await trio.sleep(100)
    assert choose(fleet) is None
    assert not fleet.ready()
    assert asked == [book]  # it is worth a look at once
    fleet.probed(book, healthy=True)
    assert choose(fleet) == "w1"
    assert fleet.ready()


async def test_where_nobody_probes_a_rejection_is_an_outage_and_nothing_that_lasts(
    autojump_clock: MockClock,
) -> None:
    for kind in ("openai", "agent"):
        fleet = fleet_of(make_worker(kind=kind))
        for reason in ("draining", "engine_unready", "model_not_loaded", "model_load_failed", "capacity"):
            refuse(fleet, "w1", reason)
            await trio.sleep(10)
            assert choose(fleet) == "w1", (kind, reason)


async def test_a_probe_that_fails_often_enough_removes_a_worker_unless_its_streams_live(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker(), probed=True, probe_interval=5.0, probe_failures=3)
    stream = Placed(fleet)
    stream.output()
    book = fleet.books["w1"]
    for _ in range(3):
        fleet.probed(book, healthy=False)
    assert choose(fleet) == "w1"
    await trio.sleep(15.1)
    assert choose(fleet) is None
    fleet.progressed(stream.worker, stream.request.exchange_id, trio.current_time(), 2)
    assert choose(fleet) == "w1"


# Fallbacks ------------------------------------------------------------------------------------------------

BIG_AND_SMALL = (
    Route("big", "big", ("w1",), fallbacks=("small",)),
    Route("small", "small", ("w2",)),
)


def _open_breaker(fleet: Fleet) -> None:
    fail(fleet, "w1", 2, "big")


@pytest.mark.parametrize(
    "trouble",
    [
        _open_breaker,
        lambda fleet: refuse(fleet, "w1", "draining", "big"),
        lambda fleet: refuse(fleet, "w1", "engine_unready", "big"),
        lambda fleet: refuse(fleet, "w1", "model_not_loaded", "big"),
        lambda fleet: refuse(fleet, "w1", "model_load_failed", "big"),
        lambda fleet: fleet.remove("w1"),
        lambda fleet: [fleet.probed(fleet.books["w1"], healthy=False) for _ in range(3)],
    ],
    ids=["breaker", "draining", "unready", "not loaded", "load failed", "removed", "dead"],
)
async def test_a_fallback_is_asked_while_no_worker_of_the_model_can_be(
    trouble: Callable[[Fleet], object], autojump_clock: MockClock
) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"), routes=BIG_AND_SMALL, probed=True)
    big, small = fleet.routes["big"], fleet.routes["small"]
    assert fleet.route_or_fallback(big, lambda model: True) is big
    trouble(fleet)
    assert fleet.route_or_fallback(big, lambda model: True) is small
    assert fleet.route_or_fallback(big, lambda model: model != "small") is big  # the tenant may not
    assert fleet.route_or_fallback(small, lambda model: True) is small


async def test_a_busy_model_has_no_need_of_a_fallback(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker("w1", slots=1), make_worker("w2"), routes=BIG_AND_SMALL)
    Placed(fleet, make_request("big"))
    assert fleet.route_or_fallback(fleet.routes["big"], lambda model: True).model == "big"


async def test_when_no_fallback_can_be_asked_either_the_model_stays(autojump_clock: MockClock) -> None:
    fleet = fleet_of(routes=BIG_AND_SMALL)
    assert fleet.route_or_fallback(fleet.routes["big"], lambda model: True).model == "big"


# Affinity -------------------------------------------------------------------------------------------------

HOUSE = tuple(f"w{number}" for number in range(8))


def long_request(text: str, tenant: str = "t1", **others: Any) -> InternalRequest:
    messages = b'[{"role":"system","content":"%b"}]' % (text.encode() * 3000)
    members = {"model": b'"m1"', "messages": messages}
    return make_request(tenant=tenant, members=members, size=len(messages), **others)


def workers_of(fleet: Fleet, make: Callable[[str], InternalRequest], keys: int = 24) -> list[str]:
    """Where each of some keys leads in an idle fleet; asked twice, since it must stay so."""
    found = [[choose(fleet, make(chr(97 + key))) or "" for key in range(keys)] for _ in range(2)]
    assert found[0] == found[1]
    return found[0]


async def test_one_session_meets_one_worker_and_sessions_spread(autojump_clock: MockClock) -> None:
    fleet = fleet_of(*map(make_worker, HOUSE))
    assert len(set(workers_of(fleet, lambda key: make_request(session=key)))) > 4


async def test_a_session_of_another_tenant_is_another(autojump_clock: MockClock) -> None:
    fleet = fleet_of(*map(make_worker, HOUSE))
    mine = workers_of(fleet, lambda key: make_request(session=key))
    theirs = workers_of(fleet, lambda key: make_request(session=key, tenant="t2"))
    assert mine != theirs


async def test_long_texts_with_one_beginning_meet_one_worker(autojump_clock: MockClock) -> None:
    fleet = fleet_of(*map(make_worker, HOUSE))
    mine = workers_of(fleet, long_request)
    assert len(set(mine)) > 4
    assert workers_of(fleet, lambda key: long_request(key, "t2")) != mine


async def test_short_texts_are_placed_by_load_alone(autojump_clock: MockClock) -> None:
    fleet = fleet_of(*map(make_worker, HOUSE))
    assert set(workers_of(fleet, lambda key: make_request())) == {"w0"}


@pytest.mark.parametrize(
    ("affinity", "session", "prefix"),
    [("prefix", True, True), ("session", True, False), ("none", False, False)],
)
async def test_what_leads_a_request_is_a_setting(
    affinity: str, session: bool, prefix: bool, autojump_clock: MockClock
) -> None:
    fleet = fleet_of(*map(make_worker, HOUSE), affinity=affinity)
    assert (len(set(workers_of(fleet, lambda key: make_request(session=key)))) > 1) is session
    assert (len(set(workers_of(fleet, long_request))) > 1) is prefix


async def test_a_session_passes_on_when_its_worker_can_not_take_it(autojump_clock: MockClock) -> None:
    fleet = fleet_of(*map(make_worker, HOUSE))
    home = choose(fleet, make_request(session="a"))
    assert home is not None
    fail(fleet, home, 2)
    next_home = choose(fleet, make_request(session="a"))
    assert next_home not in (home, None)
    fleet.remove(next_home or "")
    assert choose(fleet, make_request(session="a")) not in (home, next_home, None)


async def test_a_popular_session_does_not_flood_its_worker(autojump_clock: MockClock) -> None:
    fleet = fleet_of(*(make_worker(name, slots=8) for name in HOUSE))
    taken = [Placed(fleet, make_request(session="a")).worker.id for _ in range(32)]
    most = max(taken.count(name) for name in HOUSE)
    assert len(set(taken)) > 4
    assert most <= 6  # a mean of 4, and whole requests


# Room: slots, shares, weights, reports ----------------------------------------------------------------------


async def test_a_heavier_worker_gets_as_much_more(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker("w1", slots=30), make_worker("w2", slots=30, weight=2.0))
    taken = [Placed(fleet).worker.id for _ in range(30)]
    assert (taken.count("w1"), taken.count("w2")) == (10, 20)


@pytest.mark.parametrize(
    ("share", "slots", "usable"), [("1", 8, 8), ("1/4", 8, 2), ("1/3", 8, 2), ("1/16", 8, 1), ("1/2", 1, 1)]
)
async def test_a_process_uses_its_share_of_each_workers_slots_and_at_least_one(
    share: str, slots: int, usable: int, autojump_clock: MockClock
) -> None:
    fleet = fleet_of(make_worker(slots=slots), share=Fraction(share))
    for _ in range(usable):
        Placed(fleet)
    assert choose(fleet) is None


async def test_what_other_gateways_run_in_their_shares_takes_nothing_from_ours(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(share=Fraction(1, 4))
    book = join(fleet, agent(slots=16))
    fleet.reported(book.worker, status(slots=16, running=12))
    assert book.free == 4
    fleet.reported(book.worker, status(2, slots=16, running=15))
    assert book.free == 1  # somebody took more than a share: the worker has no more all the same


@pytest.mark.parametrize(("unknown", "usable"), [(True, 2), (False, 4)])
async def test_slots_that_a_worker_tells_count_where_none_were_configured(
    unknown: bool, usable: int, autojump_clock: MockClock
) -> None:
    fleet = fleet_of()
    book = join(fleet, agent(slots=4, slots_unknown=unknown))
    fleet.reported(book.worker, status(slots=2))
    assert book.slots == usable


async def test_requests_of_others_take_room_as_long_as_they_are_reported(autojump_clock: MockClock) -> None:
    fleet = fleet_of()
    book = join(fleet, agent(slots=4))
    mine = Placed(fleet)
    fleet.reported(
        book.worker, status(1, running=3, requests=(mine.request.attempt_id(1), "e" * 32 + "-01", "f-02"))
    )
    assert book.free == 1  # ours is counted once
    Placed(fleet)
    assert book.free == 0
    assert choose(fleet) is None
    fleet.reported(book.worker, status(2, running=1, requests=(mine.request.attempt_id(1),)))
    assert book.free == 2


async def test_a_report_that_lists_what_has_ended_meanwhile_does_not_make_it_somebody_elses(
    autojump_clock: MockClock,
) -> None:
    """The report was on its way when the slot came back."""
    fleet = fleet_of()
    book = join(fleet, agent(slots=4))
    ended = Placed(fleet)
    ended.free()
    await trio.sleep(0.5)
    fleet.reported(book.worker, status(running=1, requests=(ended.request.attempt_id(1),)))
    assert book.free == 4
    await trio.sleep(60)  # so long after, it is a request that we know nothing of
    fleet.reported(book.worker, status(2, running=1, requests=(ended.request.attempt_id(1),)))
    assert book.free == 3


async def test_an_exchange_that_is_at_a_worker_twice_stays_ours_until_both_attempts_are_over(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of()
    book = join(fleet, agent(slots=4))
    request = make_request()
    first = Placed(fleet, request)
    first.drain()
    Placed(fleet, request)
    first.free()
    await trio.sleep(60)
    fleet.reported(book.worker, status(running=1, requests=(request.attempt_id(2),)))
    assert book.free == 3


async def test_a_report_that_lists_nothing_counts_ours_as_far_as_they_can_be_there(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of()
    book = join(fleet, agent(slots=4))
    Placed(fleet)
    fleet.reported(book.worker, status(1, running=2, requests=None))
    assert book.free == 2
    fleet.reported(book.worker, status(2, running=0, requests=None))
    assert book.free == 3


async def test_nothing_is_kept_of_exchanges_that_ended_long_ago(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker(), make_worker("w2", kind="agent"))
    for at in ("w1", "w2"):
        for _ in range(50):
            Placed(fleet, at=at).free()
            await trio.sleep(1)
    assert all(book.remembered <= 12 for book in fleet.books.values())


async def test_an_older_report_changes_nothing(autojump_clock: MockClock) -> None:
    fleet = fleet_of(probed=True)
    book = join(fleet, agent(slots=4), "m1")
    fleet.reported(book.worker, status(5, slots=2, running=1))
    refuse(fleet, "w1", "model_not_loaded")
    fleet.reported(book.worker, status(4, slots=8, models=("m1", "m9")))
    assert (book.slots, book.models, book.snapshot.running) == (2, ("m1",), 1)
    assert choose(fleet) is None
    fleet.reported(book.worker, status(6, slots=8, models=("m1", "m9")))
    assert (book.slots, book.models) == (8, ("m1", "m9"))
    assert choose(fleet) == "w1"


async def test_a_worker_that_has_not_reported_for_long_counts_as_loaded_and_is_still_taken(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(stale_after=15.0)
    old, new = join(fleet, agent("w1")), join(fleet, agent("w2"))
    fleet.reported(old.worker, status())
    await trio.sleep(10)
    fleet.reported(new.worker, status(running=2))
    assert choose(fleet) == "w1"
    await trio.sleep(5.1)
    assert choose(fleet) == "w2"
    assert choose(fleet, without=frozenset({"w2"})) == "w1"


async def test_a_worker_whose_cache_is_full_counts_as_loaded(autojump_clock: MockClock) -> None:
    fleet = fleet_of()
    first, second = join(fleet, agent("w1")), join(fleet, agent("w2"))
    fleet.reported(first.worker, status(kv_usage=0.99))
    fleet.reported(second.worker, status(running=2, kv_usage=0.1))
    assert choose(fleet) == "w2"


@pytest.mark.parametrize("state", ["starting", "draining", "stopping"])
async def test_a_worker_says_itself_when_it_takes_no_work(state: str, autojump_clock: MockClock) -> None:
    fleet = fleet_of(probed=True)
    book = join(fleet, agent())
    fleet.reported(book.worker, status(1, state=state))
    fleet.probed(book, healthy=True)  # its HTTP server is well, and still it takes nothing
    assert choose(fleet) is None
    assert not fleet.ready()
    fleet.reported(book.worker, status(2, state="ready"))
    assert choose(fleet) == "w1"
    assert fleet.ready()


async def test_room_that_a_report_shows_ends_an_outage_that_named_no_time(autojump_clock: MockClock) -> None:
    fleet = fleet_of()
    book = join(fleet, agent(slots=1))
    refuse(fleet, "w1", "capacity")
    assert book.free == 0 or choose(fleet) is None
    await trio.sleep(0.1)
    fleet.reported(book.worker, status(1, slots=1, running=1))
    assert choose(fleet) is None
    fleet.reported(book.worker, status(2, slots=1))
    assert choose(fleet) == "w1"


async def test_room_does_not_end_an_outage_whose_time_was_named(autojump_clock: MockClock) -> None:
    fleet = fleet_of()
    book = join(fleet, agent(slots=1))
    placed = Placed(fleet)
    placed.reject("capacity", retry_after=5.0)
    placed.free()
    await trio.sleep(1)
    fleet.reported(book.worker, status(slots=1))
    assert choose(fleet) is None
    await trio.sleep(4)
    assert choose(fleet) == "w1"


async def test_a_configured_agent_sends_no_reports_so_what_comes_with_its_rejections_does_not_last(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker(kind="agent", slots=4), probed=True)
    book = fleet.books["w1"]
    for seq, state in enumerate(("starting", "draining", "ready"), 1):
        placed = Placed(fleet)
        told = status(seq, state=state, models=(), slots=4, running=4, requests=None)
        fleet.reported(placed.worker, told)
        placed.reject("draining" if state == "draining" else "capacity")
        placed.free()
        await trio.sleep(10)
        fleet.probed(book, healthy=True)
        assert choose(fleet) == "w1", state
        Placed(fleet).output()
        assert fleet.serves("m1")


async def test_gauges_say_who_is_busier_but_not_who_has_room(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker("w1", slots=2), make_worker("w2", slots=2))
    fleet.scraped(fleet.books["w1"], Gauges(running=2, queued=3))
    assert fleet.books["w1"].snapshot.source is Source.SCRAPED
    assert choose(fleet) == "w2"
    assert choose(fleet, without=frozenset({"w2"})) == "w1"


# Workers that come and go ---------------------------------------------------------------------------------


async def test_a_worker_that_was_removed_gets_nothing_and_its_leases_come_back_to_its_own_book(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(routes=(Route("m1", "m1"),))
    first = join(fleet, agent())
    held, draining = Placed(fleet), Placed(fleet)
    draining.drain()
    second = join(fleet, agent())
    assert fleet.books == {"w1": second}
    assert (first.held, first.draining, second.held, second.draining) == (1, 1, 0, 0)
    new = Placed(fleet)
    assert new.worker is second.worker
    fleet.attempted(held.worker)
    held.output()
    held.fault()
    held.reject("draining")
    fleet.reported(held.worker, status(9, incarnation=9, state="stopping", running=7))
    fleet.progressed(held.worker, held.request.exchange_id, trio.current_time(), 1)
    held.free()
    draining.free()
    assert (first.held, first.draining, first.attempts, first.faults) == (0, 0, 1, 1)
    assert (second.held, second.attempts, second.faults, second.snapshot.seq) == (1, 0, 0, 0)
    assert (second.snapshot.suspect, second.snapshot.state) == (False, "ready")
    assert choose(fleet) == "w1"


async def test_the_last_lease_of_a_removed_worker_takes_its_book_along(autojump_clock: MockClock) -> None:
    fleet = fleet_of()
    join(fleet, agent())
    held = Placed(fleet)
    fleet.remove("w1")
    held.drain()
    held.free()
    with pytest.raises(KeyError):
        fleet.attempted(held.worker)
    fleet.reported(held.worker, status())  # late news of it find nothing, and do no harm
    fleet.progressed(held.worker, held.request.exchange_id, trio.current_time(), 1)
    assert fleet.remove("w1") is None


async def test_what_a_removed_workers_process_still_runs_is_work_of_others_for_the_new_book(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of()
    join(fleet, agent(slots=2))
    old = Placed(fleet)
    book = join(fleet, agent(slots=2))  # the same process registered again after it was forgotten
    fleet.reported(book.worker, status(slots=2, running=1, requests=(old.request.attempt_id(1),)))
    assert book.free == 1


async def test_workers_are_told_of_when_they_come_and_go(autojump_clock: MockClock) -> None:
    fleet = fleet_of()
    told: list[bool] = []
    fleet.changed = lambda: told.append(choose(fleet) is not None)
    join(fleet, agent())
    assert told[-1] is True
    fleet.remove("w1")
    assert told[-1] is False
    assert not fleet.ready()


async def test_only_registered_workers_expire(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker("static"))
    late, early = join(fleet, agent("late")), join(fleet, agent("early"))
    early.expires_at, late.expires_at = trio.current_time() + 5, trio.current_time() + 6
    await trio.sleep(5)
    assert fleet.expire() == [early]
    assert list(fleet.books) == ["static", "late"]
    assert early.removed


# Names ------------------------------------------------------------------------------------------------------


def unnamed(*workers: Worker) -> Fleet:
    """A fleet without configured models: every name that is reported is public."""
    return Fleet(workers, (), trio.current_time, FleetSettings(), lambda: 0.5)


async def test_without_configured_models_every_reported_name_is_public(autojump_clock: MockClock) -> None:
    fleet = unnamed()
    book = join(fleet, agent(), "m1", "org/m2")
    assert list(fleet.models) == ["m1", "org/m2"]
    assert fleet.routes["org/m2"] == Route("org/m2", "org/m2")
    fleet.report_models(book, ["m3"])
    assert (fleet.serves("m1"), fleet.serves("m3")) == (False, True)


async def test_with_configured_models_no_other_name_is_public(autojump_clock: MockClock) -> None:
    fleet = fleet_of(routes=(Route("public", "m1", aliases=("nick",)),))
    join(fleet, agent(), "m1", "m2")
    assert list(fleet.models) == ["public"]
    assert sorted(fleet.routes) == ["nick", "public"]
    assert fleet.serves("public")


@pytest.mark.parametrize("age", [0, 1800, 3599, 7000, 86_400])
async def test_a_name_stays_known_for_an_hour_after_its_last_worker_went(
    age: float, autojump_clock: MockClock
) -> None:
    fleet = unnamed()
    join(fleet, agent(), "m1")
    for _ in range(24):
        await trio.sleep(age / 24)
        fleet.books["w1"].expires_at = trio.current_time() + 15
        assert fleet.expire() == []
    assert fleet.serves("m1")
    fleet.remove("w1")
    await trio.sleep(3599)
    fleet.expire()
    assert list(fleet.routes) == ["m1"]
    assert not fleet.serves("m1")
    assert fleet.obstacle(make_request()).code == "no_worker"
    await trio.sleep(2)
    fleet.expire()
    assert fleet.routes == {}


async def test_a_name_that_a_worker_no_longer_reports_stays_known_for_an_hour_too(
    autojump_clock: MockClock,
) -> None:
    fleet = unnamed()
    book = join(fleet, agent(), "m1", "m2")
    book.expires_at = 1e9
    await trio.sleep(3000)
    fleet.report_models(book, ["m2"])
    await trio.sleep(3599)
    fleet.expire()
    assert sorted(fleet.routes) == ["m1", "m2"]
    await trio.sleep(2)
    fleet.expire()
    assert sorted(fleet.routes) == ["m2"]


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, ["w1", "w2", "w3"]),
        (("w2", "w1"), ["w2", "w1"]),
        (("gpu",), ["w1", "w3"]),
        (("w3", "gpu"), ["w3", "w1"]),
        ((), []),
        (("nobody",), []),
    ],
)
async def test_a_model_names_its_workers_by_id_or_label(
    named: tuple[str, ...] | None, found: list[str], autojump_clock: MockClock
) -> None:
    gpu = frozenset({"gpu"})
    fleet = fleet_of(
        make_worker("w1", labels=gpu),
        make_worker("w2"),
        make_worker("w3", labels=gpu),
        routes=(Route("m1", "m1", named),),
    )
    assert [book.worker.id for book in fleet.serving("m1")] == found


# Obstacles --------------------------------------------------------------------------------------------------


async def test_what_stands_in_the_way_is_told(autojump_clock: MockClock) -> None:
    fleet = fleet_of(make_worker(kind="llamacpp", slots=2), probed=True)
    assert fleet.obstacle(make_request("nobody")).code == "no_worker"
    wide = fleet.obstacle(make_request(n=3))
    assert (wide.code, wide.status, wide.param) == ("invalid_value", 400, "n")
    refuse(fleet, "w1", "draining")
    assert fleet.obstacle(make_request()).code == "no_worker"
    fleet.remove("w1")
    gone = fleet.obstacle(make_request())
    assert (gone.code, gone.status) == ("no_worker", 503)


# What another gateway's breaker says ---------------------------------------------------------------------


async def test_a_worker_that_another_gateway_spares_comes_last_until_its_time_is_over_or_it_gives_output(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"), routes=(Route("m1", "m1"), Route("m2", "m2")))
    for worker, model in (("w1", "m1"), ("w1", "unknown"), ("gone", "m1")):
        fleet.hint(worker, model, 5.0)
    assert {choose(fleet) for _ in range(20)} == {"w2"}
    assert choose(fleet, without=frozenset({"w2"})) == "w1", "it is no reason to refuse"
    assert choose(fleet, make_request(model="m2", upstream_model="m2")) == "w1", (
        "of another model it says nothing"
    )
    placed = Placed(fleet, at="w1")
    placed.output()
    placed.free()
    assert choose(fleet) == "w1"
    fleet.hint("w1", "m1", 5.0)
    assert choose(fleet) == "w2"
    await trio.sleep(5.0)
    assert choose(fleet) == "w1"


async def test_other_gateways_are_told_of_a_breaker_that_faults_opened_for_as_long_as_it_is_open(
    autojump_clock: MockClock,
) -> None:
    fleet = fleet_of(make_worker("w1"), make_worker("w2"))
    fail(fleet, "w1", 2)
    ((worker, model, seconds, before),) = fleet.spared()
    assert (worker, model, seconds) == ("w1", "m1", COOLDOWN)
    await trio.sleep(COOLDOWN)
    assert fleet.spared() == []
    fail(fleet, "w1")
    assert [each[3] for each in fleet.spared()] > [before], "it opened anew"
    fleet.force_breaker("w2", "m1")
    assert [each[0] for each in fleet.spared()] == ["w1"], "what operators say is not told so"
