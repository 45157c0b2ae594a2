"""Of hundreds of workers a request looks at a few, and finds who may take it all the same."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fleet.test_placement import ANY, COOLDOWN, Placed, choose, fail
from trio_gateway.contract import InternalRequest, Rejection
from trio_gateway.fleet import Fleet, FleetSettings, Route
from trio_gateway.fleet.cores import LOOKED_AT, MANY
from trio_gateway.testing import make_request, make_worker

HUNDREDS = 300


def fleet_of(number: int, *, slots: int = 4, now: Callable[[], float] | None = None, **asked: Any) -> Fleet:
    workers = [make_worker(f"w{n}", slots=slots, **asked) for n in range(number)]
    configured = FleetSettings(consecutive_faults=2, cooldown=COOLDOWN, window=1e-3)
    clock = now or trio.current_time
    return Fleet(workers, [Route("m1", "m1")], clock, configured, random.Random(1).random)


def of(session: str) -> InternalRequest:
    return dataclasses.replace(make_request(), session=session)


def homes(fleet: Fleet, sessions: int = 400) -> dict[str, str | None]:
    return {name: choose(fleet, of(name)) for name in (f"s{n}" for n in range(sessions))}


# Keys -----------------------------------------------------------------------------------------------------


async def test_a_key_leads_to_the_same_worker_in_every_gateway_and_whatever_the_order_of_the_file() -> None:
    first, second = fleet_of(HUNDREDS), fleet_of(HUNDREDS)
    second.arrange(f"w{n}" for n in reversed(range(HUNDREDS)))
    assert homes(first) == homes(second)


async def test_keys_are_spread_over_all_workers() -> None:
    found = Counter(homes(fleet_of(HUNDREDS), 6000).values())
    assert len(found) == HUNDREDS
    assert max(found.values()) < 3 * 6000 / HUNDREDS


@pytest.mark.parametrize("number", [MANY, MANY + 1, HUNDREDS])
async def test_a_worker_more_or_less_moves_few_keys(number: int) -> None:
    fleet = fleet_of(number)
    before = homes(fleet, 2000)
    fleet.add(make_worker("one more", slots=4))
    after = homes(fleet, 2000)
    moved = [name for name, home in before.items() if after[name] != home]
    assert 0 < len(moved) < 4 * 2000 / number
    fleet.remove("one more")
    assert homes(fleet, 2000) == before


async def test_larger_workers_are_home_to_more_keys() -> None:
    fleet = fleet_of(HUNDREDS)
    for n in range(100):
        fleet.describe(dataclasses.replace(fleet.books[f"w{n}"].worker, weight=4.0))
    found = Counter(homes(fleet, 6000).values())
    large = sum(found[f"w{n}"] for n in range(100))
    assert 0.55 < large / 6000 < 0.75  # 400 of 600


async def test_a_popular_key_passes_on_to_the_next_in_its_order_and_to_as_many_as_it_needs() -> None:
    fleet = fleet_of(HUNDREDS, slots=8)
    placed = [Placed(fleet, of("popular")) for _ in range(5 * HUNDREDS)]
    loads = Counter(each.worker.id for each in placed)
    assert len(loads) > HUNDREDS / 2
    assert max(loads.values()) <= 8


async def test_where_a_key_leads_nobody_is_taken_who_may_not_be() -> None:
    fleet = fleet_of(HUNDREDS)
    home = homes(fleet, 100)
    names = sorted({name for name in home.values() if name is not None})
    for at, name in enumerate(names):
        book = fleet.books[name]
        match at % 4:
            case 0:
                fleet.touch(name, "drained")
            case 1:
                book.snapshot = book.snapshot.faulted()
            case 2:
                fail(fleet, name, 2)  # its breaker is open
            case _:
                book.snapshot = dataclasses.replace(book.snapshot, state="draining")
    assert set(homes(fleet, 100).values()).isdisjoint(names)


async def test_a_key_leads_somewhere_while_all_that_are_near_it_are_out() -> None:
    fleet = fleet_of(MANY + 8)
    home = choose(fleet, of("s"))
    for name in list(fleet.books)[: MANY + 7]:
        fleet.touch(name, "ejected")
    assert choose(fleet, of("s")) == f"w{MANY + 7}"
    for name in list(fleet.books):
        fleet.touch(name, "none")
    assert choose(fleet, of("s")) == home


async def test_a_key_leads_on_where_nobody_that_was_drawn_is_up() -> None:
    fleet = fleet_of(1000)
    home = choose(fleet, of("s"))
    for name in fleet.books:
        if name != home:
            fleet.touch(name, "drained")
    assert choose(fleet, of("s")) == home


# Room -----------------------------------------------------------------------------------------------------


async def test_suspect_workers_are_taken_where_no_other_has_room() -> None:
    fleet = fleet_of(MANY + 1, slots=1)
    suspect = fleet.books["w7"]
    suspect.snapshot = suspect.snapshot.faulted()
    found = {Placed(fleet).worker.id for _ in range(MANY)}
    assert "w7" not in found
    assert choose(fleet) == "w7"


async def test_a_slot_that_comes_back_is_found_at_once() -> None:
    fleet = fleet_of(HUNDREDS, slots=1)
    placed = [Placed(fleet) for _ in range(HUNDREDS)]
    assert choose(fleet) is None
    placed[17].free()
    assert choose(fleet) == placed[17].worker.id
    assert choose(fleet, of("s")) == placed[17].worker.id
    assert choose(fleet, without=frozenset({placed[17].worker.id})) is None


async def test_a_drained_slot_is_no_room() -> None:
    fleet = fleet_of(HUNDREDS, slots=1)
    placed = [Placed(fleet) for _ in range(HUNDREDS)]
    placed[3].drain()
    assert choose(fleet) is None
    placed[3].free()
    assert choose(fleet) == placed[3].worker.id


async def test_slots_of_workers_of_other_models_are_no_room() -> None:
    fleet = fleet_of(HUNDREDS, slots=1)
    for n in range(3):
        fleet.report_models(fleet.books[f"w{n}"], ["another"])
    for _ in range(HUNDREDS - 3):
        Placed(fleet)
    assert choose(fleet) is None


async def test_less_is_looked_at_than_there_is() -> None:
    fleet = fleet_of(HUNDREDS)
    looked: list[str] = []
    for book in fleet.books.values():

        def noting(*args: Any, candidate: Callable[..., Any] = book.candidate, **named: Any) -> Any:
            looked.append("")
            return candidate(*args, **named)

        book.candidate = noting  # type: ignore[method-assign]
    choose(fleet)
    assert len(looked) == LOOKED_AT
    looked.clear()
    choose(fleet, of("s"))
    assert len(looked) <= LOOKED_AT + MANY


# What is kept up to date is what a look at all workers says -------------------------------------------------

KINDS = "place free drain fault reject output touch untouch withhold remove add describe time"
steps = st.lists(st.tuples(st.sampled_from(["place", *KINDS.split()]), st.integers(0, 5)), max_size=60)


class Watched:
    """A fleet of six workers, and what runs there."""

    def __init__(self) -> None:
        self.time = 100.0
        self.fleet = fleet_of(6, slots=2, now=lambda: self.time)
        self.placed: list[Placed] = []

    def step(self, what: str, which: int) -> None:
        name, fleet = f"w{which}", self.fleet
        running = self.placed[which % len(self.placed)] if self.placed else None
        match what:
            case "place":
                if fleet.choose(request := make_request(), ANY) is not None:
                    self.placed.append(Placed(fleet, request))
            case "free" if running is not None:
                self.placed.remove(running)
                running.free()
            case "drain" if running is not None and not running.drained:
                running.drain()
            case "fault" if running is not None and not running.drained:
                running.fault()
            case "reject" if running is not None and not running.drained:
                fleet.rejected(
                    running.worker,
                    running.request,
                    Rejection("capacity", 503, float(which) or None, self.time),
                )
            case "output" if running is not None and not running.drained:
                running.output()
            case "remove":
                fleet.remove(name)
            case "add":
                fleet.add(make_worker(name, slots=which + 1))
            case "time":
                self.time += which
            case "touch" | "untouch" | "withhold" | "describe" if name in fleet.books:
                self._say(what, name, which)

    def _say(self, what: str, name: str, which: int) -> None:
        match what:
            case "touch":
                self.fleet.touch(name, "drained")
            case "untouch":
                self.fleet.touch(name, "none")
                self.fleet.withhold(name, None)
            case "withhold":
                self.fleet.withhold(name, "not ready")
            case _:
                self.fleet.describe(dataclasses.replace(self.fleet.books[name].worker, slots=which + 1))

    def check(self) -> None:
        fleet, now = self.fleet, self.time
        books = list(fleet.books.values())
        assert set(fleet._roomy) == {book for book in books if book.slots > book.held + book.draining}
        outages = [each.opens_at() for book in books for each in book.outages.values()]
        breakers = [each.opens_at() for book in books for each in book.breakers.values()]
        due = [at for at in (*outages, *breakers) if at is not None and at > now]
        assert fleet.next_opening(now) == min(due, default=None)
        size = sum(book.size if book.placeable else book.held for book in fleet.serving("m1"))
        assert fleet.pool_slots(fleet.pool_of("m1")) == size


@given(steps)
@settings(max_examples=150, deadline=None)
async def test_room_and_openings_are_known_without_a_look_at_all(steps: list[tuple[str, int]]) -> None:
    watched = Watched()
    for what, which in steps:
        watched.step(what, which)
        watched.check()
