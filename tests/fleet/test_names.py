"""Workers behind a name: one for each of its addresses, kept up to date."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from trio_gateway.fleet import Fleet, FleetSettings, NamedWorkers, Route, WorkerBook
from trio_gateway.testing import make_request, make_worker

WEB = make_worker("web", host="web.example", port=80, labels=frozenset({"gpu"}))


class Names:
    """What names resolve to, and how often was asked."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.addresses = dict(addresses)
        self.asked: list[tuple[float, str]] = []
        self._began = trio.current_time()

    async def resolve(self, host: str) -> Sequence[str]:
        self.asked.append((trio.current_time() - self._began, host))
        await trio.lowlevel.checkpoint()
        return self.addresses.get(host.partition(".")[0], ())


class Set:
    """A fleet of the workers of some names."""

    def __init__(self, names: Names, *templates: object, routes: tuple[Route, ...] = ()) -> None:
        self.fleet = Fleet(
            (), routes or (Route("m1", "m1", ("web",)),), trio.current_time, FleetSettings(), lambda: 0.5
        )
        self.begun: list[WorkerBook] = []
        self.told: list[tuple[str, str]] = []
        self.named = NamedWorkers(
            self.fleet,
            templates or (WEB,),  # type: ignore[arg-type]
            5.0,
            names.resolve,
            self.begun.append,
            lambda *about: self.told.append(about),
        )

    @property
    def ids(self) -> list[str]:
        return list(self.fleet.books)


async def test_each_address_of_a_name_is_a_worker(autojump_clock: MockClock) -> None:
    fleet = Set(Names())
    fleet.named.take(WEB, ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.2"])
    assert fleet.ids == ["web@10.0.0.1", "web@10.0.0.2", "web@fd00::1"]
    worker = fleet.fleet.books["web@10.0.0.1"].worker
    assert (worker.address, worker.host, worker.port, worker.authority) == (
        "10.0.0.1",
        "web.example",
        80,
        WEB.authority,  # what certificates and virtual hosts are for
    )
    assert worker.labels == {"gpu", "web"}
    assert [book.worker.id for book in fleet.begun] == fleet.ids
    assert fleet.fleet.serves("m1")


async def test_addresses_come_and_go_and_those_that_stay_keep_their_books(autojump_clock: MockClock) -> None:
    fleet = Set(Names())
    fleet.named.take(WEB, ["10.0.0.1", "10.0.0.2"])
    stays, goes = (fleet.fleet.books[f"web@10.0.0.{number}"] for number in (1, 2))
    request = make_request()
    slots = fleet.fleet.hold(request, goes.worker)
    fleet.named.take(WEB, ["10.0.0.3", "10.0.0.1"])
    assert fleet.ids == ["web@10.0.0.1", "web@10.0.0.3"]
    assert fleet.fleet.books["web@10.0.0.1"] is stays
    assert goes.removed
    assert goes.held == 1  # what streams there may finish
    fleet.fleet.free(request, goes.worker, slots, drained=False)
    assert fleet.told == [("web", "an address is gone from its name")]
    fleet.named.take(WEB, ["10.0.0.2"])
    again = fleet.fleet.books["web@10.0.0.2"]
    assert again is not goes
    assert again.held == 0


async def test_a_name_that_resolves_no_more_keeps_its_last_addresses_and_says_so(
    autojump_clock: MockClock,
) -> None:
    fleet = Set(Names())
    fleet.named.take(WEB, ["10.0.0.1"])
    for _ in range(3):
        fleet.named.take(WEB, [])
    assert fleet.ids == ["web@10.0.0.1"]
    fleet.named.take(WEB, ["10.0.0.1"])
    assert fleet.told == [("web", "its name does not resolve"), ("web", "its name resolves again")]


async def test_a_name_that_never_resolved_has_no_worker(autojump_clock: MockClock) -> None:
    fleet = Set(Names())
    fleet.named.take(WEB, [])
    assert fleet.ids == []
    assert fleet.told == [("web", "its name does not resolve")]
    assert fleet.fleet.obstacle(make_request()).code == "no_worker"


async def test_more_addresses_than_anybody_has_are_not_looked_at(autojump_clock: MockClock) -> None:
    fleet = Set(Names())
    fleet.named.take(WEB, [f"10.0.{number >> 8}.{number & 255}" for number in range(2000)])
    assert len(fleet.ids) == 1024


async def test_names_are_asked_for_again_and_again_each_on_its_own(autojump_clock: MockClock) -> None:
    names = Names(web=["10.0.0.1"], db=["10.0.1.1"])
    db = make_worker("db", host="db.example")
    fleet = Set(names, WEB, db)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.named.run)
        await trio.sleep(1)
        assert sorted(fleet.ids) == ["db@10.0.1.1", "web@10.0.0.1"]
        names.addresses["web"] = ["10.0.0.2"]
        await trio.sleep(5)
        assert sorted(fleet.ids) == ["db@10.0.1.1", "web@10.0.0.2"]
        assert sorted(names.asked) == [
            (0.0, "db.example"),
            (0.0, "web.example"),
            (5.0, "db.example"),
            (5.0, "web.example"),
        ]
        nursery.cancel_scope.cancel()


async def test_a_name_that_hangs_holds_up_no_other(autojump_clock: MockClock) -> None:
    names = Names(web=["10.0.0.1"])
    slow = make_worker("slow", host="slow.example")

    async def resolve(host: str) -> Sequence[str]:
        if host.startswith("slow"):
            await trio.sleep_forever()
        return await names.resolve(host)

    fleet = Set(names, slow, WEB)
    fleet.named = NamedWorkers(
        fleet.fleet, (slow, WEB), 5.0, resolve, fleet.begun.append, lambda *about: None
    )
    with trio.move_on_after(11):
        await fleet.named.run()
    assert fleet.ids == ["web@10.0.0.1"]
    assert len(names.asked) == 3


@pytest.mark.parametrize("workers", [("web",), ("gpu",), ("web@10.0.0.2",), None])
async def test_a_model_names_them_by_the_name_a_label_or_one_address(
    workers: tuple[str, ...] | None, autojump_clock: MockClock
) -> None:
    fleet = Set(Names(), routes=(Route("m1", "m1", workers),))
    fleet.named.take(WEB, ["10.0.0.1", "10.0.0.2"])
    found = [book.worker.id for book in fleet.fleet.serving("m1")]
    assert found == (["web@10.0.0.2"] if workers == ("web@10.0.0.2",) else ["web@10.0.0.1", "web@10.0.0.2"])
