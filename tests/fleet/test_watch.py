"""Workers are probed, their lists and gauges read, and what agents let go of is followed, on a fake clock."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from trio_gateway.contract import Rejection, Worker
from trio_gateway.errors import UpstreamFailed, UpstreamFault
from trio_gateway.fleet import (
    DrainKeeper,
    Fleet,
    FleetSettings,
    FleetWatch,
    Route,
    WatchSettings,
    Ways,
    WorkerBook,
)
from trio_gateway.fleet._watch import HEALTH, MODELS, model_names
from trio_gateway.testing import make_request, make_worker

ANY: frozenset[str] = frozenset()
DEAD = UpstreamFailed(UpstreamFault.UNREACHABLE, "nobody there")
SILENT = "silent"
OK = (200, b"{}")
EVENTS = "/internal/v1/events"

Said = tuple[int, bytes] | UpstreamFailed | str


def listing(*names: str) -> tuple[int, bytes]:
    return 200, json.dumps({"object": "list", "data": [{"id": name} for name in names]}).encode()


class Engines:
    """All workers' pages, and what was asked of them.

    Attributes:
        pages: by path; what has none is a 404.
        asked: seconds since the start, worker and path of each question, orders among them.
        streams: what followers read: bytes, or a failure that ends the stream.
        following: streams that are being read now.
    """

    def __init__(self, **pages: Said) -> None:
        self.pages: dict[str, Said] = {"/health": OK, MODELS: listing("m1")}
        self.asked: list[tuple[float, str, str]] = []
        self.streams, self._lines = trio.open_memory_channel[bytes | UpstreamFailed](100)
        self.following: list[str] = []
        self._began = trio.current_time()

    async def _answer(self, worker: Worker, path: str) -> tuple[int, bytes]:
        self.asked.append((round(trio.current_time() - self._began, 3), worker.id, path))
        await trio.lowlevel.checkpoint()
        match self.pages.get(path, (404, b"")):
            case UpstreamFailed() as failure:
                raise failure
            case str():
                await trio.sleep_forever()
                raise AssertionError("unreachable")
            case said:
                return said

    async def _order(self, worker: Worker, path: str) -> int:
        status, _ = await self._answer(worker, path)
        return status

    async def _follow(self, worker: Worker, path: str, take: Any) -> None:
        self.asked.append((round(trio.current_time() - self._began, 3), worker.id, path))
        self.following.append(worker.id)
        try:
            while True:
                match await self._lines.receive():
                    case UpstreamFailed() as failure:
                        raise failure
                    case b"":
                        return
                    case data:
                        if not take(data):
                            return
        finally:
            self.following.remove(worker.id)

    @property
    def ways(self) -> Ways:
        return Ways(self._answer, self._order, self._follow)

    def times(self, path: str) -> list[float]:
        """When a page was asked for; forgets it."""
        found = [at for at, _, asked in self.asked if asked == path]
        self.asked = [each for each in self.asked if each[2] != path]
        return found


class Watched:
    """A fleet that is watched, and what was told of it."""

    def __init__(self, fleet: Fleet, engines: Engines, settings: WatchSettings) -> None:
        self.fleet = fleet
        self.engines = engines
        self.drain = DrainKeeper()
        self.told: list[tuple[str, str]] = []
        self.watch = FleetWatch(
            fleet,
            self.drain,
            engines.ways,
            settings,
            lambda *about: self.told.append(about),
            lambda: 1.0,
        )
        self.released: list[str] = []

    @property
    def book(self) -> WorkerBook:
        return self.fleet.books["w1"]

    def chosen(self) -> str | None:
        worker = self.fleet.choose(make_request(), ANY)
        return None if worker is None else worker.id

    def keep(self, attempt_id: str, worker: Worker | None = None) -> None:
        """Have an attempt drain."""
        worker = worker or self.book.worker
        self.drain.keep(worker, attempt_id, lambda: self.released.append(attempt_id))

    def reject(self, reason: str) -> None:
        request = make_request()
        slots = self.fleet.hold(request, self.book.worker)
        told = Rejection(reason, 503, None, trio.current_time())
        self.fleet.rejected(self.book.worker, request, told)
        self.fleet.free(request, self.book.worker, slots, drained=False)

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            request = make_request()
            slots = self.fleet.hold(request, self.book.worker)
            self.fleet.fault(self.book.worker, request)
            self.fleet.free(request, self.book.worker, slots, drained=False)


@asynccontextmanager
async def watching(
    *workers: Worker,
    interval: float = 5.0,
    pages: dict[str, Said] | None = None,
    **settings: Any,
) -> AsyncIterator[Watched]:
    """Watch workers for the length of the block; afterwards nothing of it may run."""
    fleet = Fleet(
        workers or (make_worker(kind="vllm"),),
        (Route("m1", "m1"),),
        trio.current_time,
        FleetSettings(probed=interval > 0, probe_interval=interval, consecutive_faults=2, **settings),
        lambda: 0.5,
    )
    engines = Engines()
    engines.pages |= pages or {}
    watched = Watched(fleet, engines, WatchSettings(interval, 2.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.drain.run)  # noqa: ASYNC113 - they are waited for
        nursery.start_soon(watched.watch.run)  # noqa: ASYNC113 - they are waited for
        yield watched
        nursery.cancel_scope.cancel()
    assert engines.following == []


def register(watched: Watched, name: str = "w1") -> WorkerBook:
    """Take an agent in as registrations do."""
    book = watched.fleet.add(make_worker(name, kind="agent", cancel_grace=60.0), ["m1"])
    book.expires_at = trio.current_time() + 1e6
    watched.watch.begin(book)
    return book


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


# Probes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in HEALTH if kind != "agent"])
async def test_every_kind_is_asked_for_its_own_page_at_every_interval(
    kind: str, autojump_clock: MockClock
) -> None:
    async with watching(make_worker(kind=kind), pages={HEALTH[kind]: OK}) as watched:
        await trio.sleep(16)
        assert watched.engines.times(HEALTH[kind]) == [0, 5, 10, 15]


async def test_workers_are_probed_beside_each_other(autojump_clock: MockClock) -> None:
    slow = make_worker("slow", kind="sglang")
    async with watching(make_worker("w1", kind="vllm"), slow, pages={"/health": SILENT}) as watched:
        await trio.sleep(6.5)
        assert sorted((at, name) for at, name, _ in watched.engines.asked) == [(0, "slow"), (0, "w1")]
        await trio.sleep(1)
        assert sorted((at, name) for at, name, _ in watched.engines.asked[2:]) == [(7, "slow"), (7, "w1")]


async def test_a_worker_is_dead_after_some_bad_probes_in_a_row_and_alive_after_one_good(
    autojump_clock: MockClock,
) -> None:
    async with watching() as watched:
        await trio.sleep(1)
        watched.engines.pages["/health"] = DEAD
        await trio.sleep(10)
        assert watched.chosen() == "w1"  # two
        await trio.sleep(5)
        assert watched.chosen() is None  # three
        watched.engines.pages["/health"] = OK
        await trio.sleep(5)
        assert watched.chosen() == "w1"
        assert watched.told == [("w1", "probe: no answer"), ("w1", "healthy again")]


async def test_how_many_probes_it_takes_is_a_setting(autojump_clock: MockClock) -> None:
    async with watching(probe_failures=1, probe_successes=2, pages={"/health": DEAD}) as watched:
        await trio.sleep(1)
        assert watched.chosen() is None
        watched.engines.pages["/health"] = OK
        await trio.sleep(5)
        assert watched.chosen() is None
        await trio.sleep(5)
        assert watched.chosen() == "w1"


async def test_one_good_probe_between_bad_ones_keeps_a_worker(autojump_clock: MockClock) -> None:
    async with watching() as watched:
        for _ in range(4):
            for said in (DEAD, DEAD, OK):
                watched.engines.pages["/health"] = said
                await trio.sleep(5)
                assert watched.chosen() == "w1"


async def test_a_silent_worker_is_a_bad_probe(autojump_clock: MockClock) -> None:
    async with watching(probe_failures=1, pages={"/health": SILENT}) as watched:
        await trio.sleep(1.9)
        assert watched.chosen() == "w1"
        await trio.sleep(0.2)
        assert watched.chosen() is None


@pytest.mark.parametrize(
    ("status", "alive"),
    [
        (200, True),
        (204, True),
        (401, True),
        (404, True),
        (405, True),
        (501, True),
        (500, False),
        (503, False),
    ],
)
async def test_a_status_says_whether_a_worker_is_well(
    status: int, alive: bool, autojump_clock: MockClock
) -> None:
    """A page that an engine has not, or a credential that it refuses, is no reason to take it for dead."""
    async with watching(probe_failures=1, pages={"/health": (status, b"")}) as watched:
        await trio.sleep(1)
        assert (watched.chosen() is not None) is alive
        assert watched.book.probe.alive(trio.current_time()) is alive


async def test_a_credential_that_a_worker_refuses_is_told_once(autojump_clock: MockClock) -> None:
    async with watching(pages={"/health": (401, b"")}) as watched:
        await trio.sleep(12)
        assert watched.told == [("w1", "probe: the worker refuses the credential with status 401")]


async def test_a_worker_whose_streams_live_is_alive_whatever_its_probes_say(
    autojump_clock: MockClock,
) -> None:
    async with watching(pages={"/health": SILENT}) as watched:
        request = make_request()
        watched.fleet.hold(request, watched.book.worker)
        for _ in range(60):
            await trio.sleep(1)
            watched.fleet.progressed(watched.book.worker, request.exchange_id, trio.current_time(), 1)
        assert watched.chosen() == "w1"
        await trio.sleep(16)
        assert watched.chosen() is None


async def test_with_an_interval_of_0_nobody_is_asked(autojump_clock: MockClock) -> None:
    async with watching(interval=0) as watched:
        watched.reject("draining")
        watched.fail(2)
        await trio.sleep(1000)
        assert watched.engines.asked == []
        assert watched.chosen() == "w1"


async def test_whoever_wants_a_probe_gets_it_soon_but_not_more_than_four_a_second(
    autojump_clock: MockClock,
) -> None:
    async with watching() as watched:
        await trio.sleep(2)
        watched.engines.times("/health")
        watched.reject("draining")
        assert not watched.fleet.ready()
        await trio.sleep(0.01)
        assert watched.fleet.ready()
        assert watched.engines.times("/health") == [2]
        for _ in range(200):
            watched.reject("draining")
            await trio.sleep(0.01)
        asked = watched.engines.times("/health")
        assert len(asked) in (8, 9)
        assert min(b - a for a, b in itertools.pairwise(asked)) >= 0.25


async def test_what_is_learnt_during_a_probe_is_worth_another(autojump_clock: MockClock) -> None:
    """The answer that is on its way may be older than what was learnt."""
    async with watching(pages={"/health": SILENT}) as watched:
        await trio.sleep(1)
        watched.reject("engine_unready")
        await trio.sleep(1.2)
        assert watched.engines.times("/health") == [0]
        await trio.sleep(0.1)
        assert watched.engines.times("/health") == [2.25]


# Breakers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "openai", "registered"])
@pytest.mark.parametrize(("interval", "cooldown"), [(5.0, 12.0), (5.0, 10.0), (60.0, 1.0), (60.0, 7.0)])
async def test_a_probe_is_made_at_the_end_of_a_cooldown_and_then_one_exchange_goes_through(
    interval: float, cooldown: float, kind: str, autojump_clock: MockClock
) -> None:
    pages: dict[str, Said] = {"/livez": OK}
    async with watching(
        make_worker(kind="openai" if kind == "registered" else kind),
        interval=interval,
        cooldown=cooldown,
        pages=pages,
    ) as watched:
        if kind == "registered":
            register(watched)
        await trio.sleep(1)
        watched.fail(2)
        await trio.sleep(cooldown - 0.05)
        assert watched.chosen() is None
        await trio.sleep(0.1)
        assert watched.chosen() == "w1"
        watched.fleet.hold(make_request(), watched.book.worker)
        assert watched.chosen() is None


async def test_a_bad_probe_at_the_end_of_a_cooldown_begins_another(autojump_clock: MockClock) -> None:
    async with watching(cooldown=4.0) as watched:
        await trio.sleep(1)
        watched.engines.pages["/health"] = (500, b"")
        watched.fail(2)
        await trio.sleep(4.1)
        watched.engines.pages["/health"] = OK
        await trio.sleep(3.8)
        assert watched.chosen() is None
        await trio.sleep(0.2)
        assert watched.chosen() == "w1"


@pytest.mark.parametrize("registered", [False, True])
async def test_suspicion_ends_with_the_next_good_probe(registered: bool, autojump_clock: MockClock) -> None:
    async with watching(make_worker(kind="vllm"), make_worker("w2", kind="vllm")) as watched:
        watched.engines.pages["/livez"] = (500, b"")
        watched.engines.pages["/health"] = (500, b"")
        if registered:
            register(watched)
        await trio.sleep(1)
        watched.fail()
        await trio.sleep(5)
        assert watched.book.snapshot.suspect
        watched.engines.pages |= {"/livez": OK, "/health": OK}
        await trio.sleep(5)
        assert not watched.book.snapshot.suspect


# Lists of models ----------------------------------------------------------------------------------------


async def test_the_list_of_models_is_read_at_first_and_now_and_then(autojump_clock: MockClock) -> None:
    async with watching() as watched:
        await trio.sleep(61)
        assert watched.engines.times(MODELS) == [0, 30, 60]
        assert watched.book.models == ("m1",)


async def test_a_list_without_any_configured_model_is_told_once(autojump_clock: MockClock) -> None:
    """The likeliest mistake of a configuration: the engine has another name for it."""
    async with watching(pages={MODELS: listing(*"abcdefg")}) as watched:
        await trio.sleep(70)
        assert watched.told == [("w1", "it lists a, b, c, d, e, which no model has as its `upstream`")]
        assert watched.chosen() is None


async def test_a_list_without_any_configured_model_is_read_again_with_every_probe(
    autojump_clock: MockClock,
) -> None:
    """Its engine is soon started again, with the name that is configured."""
    async with watching(pages={MODELS: listing("a")}) as watched:
        await trio.sleep(11)
        assert watched.engines.times(MODELS) == [0, 5, 10]
        watched.engines.pages[MODELS] = listing("m1")
        await trio.sleep(5)
        assert watched.chosen() is not None
        await trio.sleep(20)
        assert watched.engines.times(MODELS) == [15, 30]
        watched.engines.pages[MODELS] = listing("b")
        await trio.sleep(30)
        assert [words for _, words in watched.told] == [
            "it lists a, which no model has as its `upstream`",
            "it lists b, which no model has as its `upstream`",
        ]


async def test_where_the_list_is_the_health_page_it_is_read_with_every_probe(
    autojump_clock: MockClock,
) -> None:
    async with watching(make_worker(kind="openai")) as watched:
        await trio.sleep(11)
        assert watched.engines.times(MODELS) == [0, 5, 10]
        watched.engines.pages[MODELS] = listing("m2")
        await trio.sleep(5)
        assert watched.chosen() is None
        assert not watched.fleet.serves("m1")


async def test_a_missing_model_comes_back_when_it_is_listed(autojump_clock: MockClock) -> None:
    async with watching() as watched:
        await trio.sleep(1)
        watched.engines.pages[MODELS] = listing("other")
        watched.reject("model_not_loaded")
        assert watched.chosen() is None
        await trio.sleep(5.5)
        assert watched.book.models == ("other",)
        assert watched.chosen() is None
        watched.engines.pages[MODELS] = listing("m1", "other")
        await trio.sleep(30)
        assert watched.chosen() == "w1"


@pytest.mark.parametrize("said", [(404, b""), (200, b"<html>"), (200, b'{"data": 1}'), DEAD, SILENT])
async def test_a_worker_without_a_list_is_believed_to_have_what_is_configured(
    said: Said, autojump_clock: MockClock
) -> None:
    async with watching(pages={MODELS: said}) as watched:
        await trio.sleep(3)
        assert watched.book.models is None
        assert watched.chosen() == "w1"
        watched.reject("model_not_loaded")
        assert watched.chosen() is None
        await trio.sleep(10)
        assert watched.chosen() == "w1"


async def test_a_model_that_a_configured_agent_lacked_is_asked_for_again(autojump_clock: MockClock) -> None:
    """It has no list to read."""
    async with watching(make_worker(kind="agent"), pages={"/readyz": OK}) as watched:
        await trio.sleep(1)
        watched.reject("model_not_loaded")
        await trio.sleep(20)
        assert watched.chosen() is None
        await trio.sleep(11)
        assert watched.chosen() == "w1"
        assert watched.engines.times(MODELS) == []


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"data": [{"id": "a"}, {"id": "b/c"}]}', ["a", "b/c"]),
        (b'{"data": []}', []),
        (b'{"data": [{"id": 1}, {"id": ""}, {"id": "a", "x": {}}, {"id": null}]}', ["a"]),
        (b'{"data": [{"name": "a"}]}', None),
        (b'{"data": ["a"]}', None),
        (b'{"data": "ab"}', None),
        (b'{"data": null}', None),
        (b"[]", None),
        (b"1", None),
        (b"", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b'{"data": [{"id": %b}]}' % (b"1" * 5000), None),
    ],
)
def test_a_list_of_models_is_read_or_is_none(body: bytes, names: list[str] | None) -> None:
    assert model_names(body) == names


@given(st.binary(max_size=60))
def test_whatever_a_page_holds_nobody_falls_over_it(body: bytes) -> None:
    found = model_names(body)
    assert found is None or all(isinstance(name, str) for name in found)


def test_long_lists_and_names_are_cut() -> None:
    _, body = listing("x" * 513, *(f"m{number}" for number in range(5000)))
    found = model_names(body)
    assert found is not None
    assert (len(found), found[0]) == (1024, "m0")


# Gauges -------------------------------------------------------------------------------------------------

VLLM = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"


async def test_gauges_are_read_with_every_good_probe(autojump_clock: MockClock) -> None:
    async with watching(pages={"/metrics": (200, VLLM)}) as watched:
        await trio.sleep(11)
        assert watched.engines.times("/metrics") == [0, 5, 10]
        snapshot = watched.book.snapshot
        assert (snapshot.running, snapshot.queued, snapshot.kv_usage) == (3, 2, 0.5)
        assert snapshot.age(trio.current_time()) == 1


async def test_a_page_of_gauges_that_a_worker_has_not_is_not_asked_for_soon(
    autojump_clock: MockClock,
) -> None:
    async with watching() as watched:
        await trio.sleep(61)
        assert watched.engines.times("/metrics") == [0, 30, 60]
        assert watched.chosen() == "w1"


async def test_the_first_page_of_gauges_that_a_worker_has_counts(autojump_clock: MockClock) -> None:
    page = b"sglang:num_running_reqs 4\nsglang:num_queue_reqs 1\nsglang:token_usage 0.25\n"
    async with watching(make_worker(kind="sglang"), pages={"/metrics": (200, page)}) as watched:
        await trio.sleep(11)
        assert watched.engines.times("/v1/loads") == [0]
        assert watched.engines.times("/metrics") == [0, 5, 10]
        assert watched.book.snapshot.running == 4


async def test_a_busier_worker_is_taken_later(autojump_clock: MockClock) -> None:
    async with watching(make_worker("w1", kind="vllm"), make_worker("w2", kind="openai")) as watched:
        watched.engines.pages["/metrics"] = (200, VLLM)
        await trio.sleep(1)
        assert watched.chosen() == "w2"


# Agents -------------------------------------------------------------------------------------------------


def released(attempt_id: str, attempt: int = 1) -> bytes:
    told = {"id": attempt_id, "attempt": attempt, "generated": 1, "kv_released": True}
    return json.dumps({"released": told}).encode() + b"\n"


async def test_a_registered_worker_says_itself_how_it_is_and_is_not_probed(autojump_clock: MockClock) -> None:
    async with watching() as watched:
        watched.fleet.remove("w1")
        register(watched, "a1")
        await trio.sleep(100)
        assert {path for _, name, path in watched.engines.asked if name == "a1"} == {EVENTS}


async def test_a_configured_agent_is_asked_whether_it_is_ready(autojump_clock: MockClock) -> None:
    async with watching(make_worker(kind="agent"), pages={"/readyz": OK}, probe_failures=1) as watched:
        await trio.sleep(11)
        assert watched.engines.times("/readyz") == [0, 5, 10]
        watched.engines.pages["/readyz"] = (503, b"")
        await trio.sleep(5)
        assert watched.chosen() is None
        assert not watched.fleet.ready()


async def test_what_an_agent_let_go_of_is_given_back_at_once(autojump_clock: MockClock) -> None:
    async with watching(interval=0) as watched:
        register(watched)
        await trio.sleep(1)
        for name in ("a" * 32 + "-01", "b" * 32 + "-02", "c" * 32 + "-01"):
            watched.keep(name)
        line = released("a" * 32)
        for piece in (b"\n", line[:20], line[20:] + released("b" * 32, 2) + released("d" * 32)):
            await watched.engines.streams.send(piece)
        await trio.sleep(0.1)
        assert watched.released == ["a" * 32 + "-01", "b" * 32 + "-02"]


async def test_a_stream_of_events_that_breaks_is_asked_for_again(autojump_clock: MockClock) -> None:
    async with watching(interval=0) as watched:
        register(watched)
        await trio.sleep(0.05)
        for _ in range(4):
            await trio.sleep(3)  # it held for a while, so it is worth asking for again soon
            await watched.engines.streams.send(DEAD)
        await trio.sleep(1)
        assert watched.engines.times(EVENTS) == [0, 3.15, 6.15, 9.15, 12.15]
        watched.keep("a" * 32 + "-01")
        await watched.engines.streams.send(released("a" * 32))
        await trio.sleep(0.1)
        assert watched.released == ["a" * 32 + "-01"]


async def test_a_stream_of_events_that_never_holds_is_asked_for_less_and_less_often(
    autojump_clock: MockClock,
) -> None:
    async with watching(interval=0) as watched:
        for _ in range(8):
            await watched.engines.streams.send(DEAD)
        register(watched)
        await trio.sleep(20)
        times = watched.engines.times(EVENTS)
        gaps = [round(b - a, 3) for a, b in itertools.pairwise(times)]
        assert gaps == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("ended", [b"", b"x" * 100_000])
async def test_a_stream_of_events_that_ends_or_is_no_such_stream_is_asked_for_again(
    ended: bytes, autojump_clock: MockClock
) -> None:
    async with watching(interval=0) as watched:
        register(watched)
        await watched.engines.streams.send(ended)
        await trio.sleep(1)
        assert len(watched.engines.times(EVENTS)) == 2
        assert watched.engines.following == ["w1"]


async def test_an_agent_that_did_not_hear_that_an_attempt_is_over_is_told_again(
    autojump_clock: MockClock,
) -> None:
    known, lost = "a" * 32, "b" * 32
    async with watching(interval=0) as watched:
        watched.engines.pages[f"/internal/v1/requests/{known}/1/cancel"] = (202, b"")
        register(watched)
        watched.keep(f"{known}-01")
        watched.keep(f"{lost}-02")
        await trio.sleep(0.9)
        assert watched.released == []
        await trio.sleep(0.3)
        assert watched.released == [f"{lost}-02"]  # it is not known there: whatever it was, it is over
        await trio.sleep(3)
        assert watched.engines.times(f"/internal/v1/requests/{known}/1/cancel") == [1, 2, 3, 4]
        assert watched.engines.times(f"/internal/v1/requests/{lost}/2/cancel") == [1]


@pytest.mark.parametrize("said", [DEAD, SILENT, (500, b""), (401, b"")])
async def test_an_agent_that_can_not_be_told_is_told_later_and_gets_its_grace(
    said: Said, autojump_clock: MockClock
) -> None:
    async with watching(interval=0) as watched:
        watched.engines.pages[f"/internal/v1/requests/{'a' * 32}/1/cancel"] = said
        register(watched)
        watched.keep("a" * 32 + "-01")
        await trio.sleep(59)
        assert watched.released == []
        await trio.sleep(1.1)
        assert watched.released == ["a" * 32 + "-01"]


# Workers that go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0.0, 5.0, 3600.0])
@pytest.mark.parametrize("kind", ["agent", "vllm"])
async def test_nothing_runs_for_a_worker_that_was_removed(
    kind: str, interval: float, autojump_clock: MockClock
) -> None:
    async with watching(interval=interval) as watched:
        await trio.sleep(1)
        before = tasks()
        for number in range(5):
            book = watched.fleet.add(make_worker(f"x{number}", kind=kind), ["m1"])
            watched.watch.begin(book)
            watched.watch.begin(book)  # a second time is one time
        await trio.sleep(7)
        assert tasks() > before
        for number in range(5):
            watched.fleet.remove(f"x{number}")
        await trio.sleep(2)
        assert tasks() == before
        assert watched.engines.following == []
        watched.engines.asked.clear()
        await trio.sleep(20)
        assert not [name for _, name, _ in watched.engines.asked if name.startswith("x")]


async def test_an_agent_is_followed_until_what_drains_there_is_released(autojump_clock: MockClock) -> None:
    async with watching(interval=0) as watched:
        book = register(watched)
        await trio.sleep(1)
        watched.keep("a" * 32 + "-01", book.worker)
        watched.engines.pages[f"/internal/v1/requests/{'a' * 32}/1/cancel"] = (202, b"")
        watched.fleet.remove("w1")
        await trio.sleep(30)
        assert watched.engines.following == ["w1"]
        await watched.engines.streams.send(released("a" * 32))
        await trio.sleep(2)
        assert watched.released == ["a" * 32 + "-01"]
        assert watched.engines.following == []


async def test_a_worker_that_came_before_the_watch_began_is_watched_too(autojump_clock: MockClock) -> None:
    fleet = Fleet((), (), trio.current_time, FleetSettings(probed=True))
    engines = Engines()
    watched = Watched(fleet, engines, WatchSettings(5.0, 2.0))
    register(watched)  # nobody runs yet
    assert engines.asked == []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watched.watch.run)
        await trio.sleep(1)
        assert engines.following == ["w1"]
        nursery.cancel_scope.cancel()
