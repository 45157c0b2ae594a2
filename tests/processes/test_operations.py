"""What operators do in several processes, while one of them starts: it misses nothing."""

from __future__ import annotations

import io
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

from tests.e2e.serving import configuration
from trio_gateway.admin import Access, Actor, Row
from trio_gateway.config import Source
from trio_gateway.errors import Refused
from trio_gateway.lending import Broker, Place
from trio_gateway.operations import Trail
from trio_gateway.processes._child import Child
from trio_gateway.processes._operations import ManyOperations
from trio_gateway.telemetry import Log
from trio_gateway.testing import CloseFin, Json, ScriptedEngine, WaitFor, open_engine

ACTOR: Final = Actor("someone", "operator", "bearer")
DONE: Final = Json({"done": True, "before": {}, "after": {"live_values_dropped": []}})
FREEZE, DRAIN, RELOAD = "tenants/acme/freeze", "workers/w1/drain", "reload"


class House:
    """A supervisor of two processes: one serves, the other is about to."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "gateway.toml"
        self.file.write_text(configuration("http://127.0.0.1:1"))
        self.boot_id, self.started, self.capacity, self.stopping = "boot", 0.0, "shared", False
        self.source = Source.read(self.file)
        self.settings = self.source.settings
        self.ended: list[Row] = []
        self.broker = Broker()
        self.access = Access([], [], local=True)
        self.log = Log(io.StringIO())
        self.copy = folder / "copy.toml"
        self.copy.write_text(self.source.text)
        self.children: Sequence[Child] = [Child(place_in(folder, number)) for number in range(2)]
        self.operations = ManyOperations(self, Trail("boot", self.log))
        self.servers: list[ScriptedEngine] = []
        first, self.new = self.children
        first.ready = first.welcomed = True

    def replace(self) -> bool:
        return False

    def told(self, number: int) -> list[str]:
        """What a process was told, in order."""
        return [each.target.removeprefix("/admin/v1/") for each in self.servers[number].page_requests]

    async def act(self, action: Any, target: str | None) -> None:
        await self.operations.act(ACTOR, action, target, {})


def place_in(folder: Path, number: int) -> Place:
    return Place(
        number=number,
        of=2,
        capacity="shared",
        listeners=(),
        control=-1,
        crowd=-1,
        folder=str(folder),
        secret="s",
    )


@asynccontextmanager
async def house_in(folder: Path) -> AsyncIterator[House]:
    house = House(folder)
    pages = {"/": (DONE,)}
    first, second = (Path(child.place.admin_path) for child in house.children)
    async with (
        open_engine(pages=pages, socket_path=first) as one,
        open_engine(pages=pages, socket_path=second) as other,
    ):
        house.servers = [one, other]
        yield house
        for child in house.children:
            await child.close()
    await trio.to_thread.run_sync(house.log.close)


async def test_what_is_done_while_a_process_is_told_what_was_done_is_told_it_too(tmp_path: Path) -> None:
    go = trio.Event()
    async with house_in(tmp_path) as house:
        await house.act("tenants.freeze", "acme")
        house.servers[1].pages = {"/": (WaitFor(go), DONE)}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.operations.welcome, house.new, house.source.digest)
            await house.servers[1].page_request(f"/admin/v1/{FREEZE}")
            nursery.start_soon(house.act, "workers.drain", "w1")
            await trio.testing.wait_all_tasks_blocked()
            go.set()
        assert [house.told(number) for number in range(2)] == [[FREEZE, DRAIN]] * 2


async def test_what_is_done_before_a_process_that_knows_all_serves_is_told_it_too(tmp_path: Path) -> None:
    async with house_in(tmp_path) as house:
        await house.operations.welcome(house.new, house.source.digest)
        assert house.told(1) == []
        await house.act("tenants.freeze", "acme")
        await house.act("reload", None)
        assert [house.told(number) for number in range(2)] == [[FREEZE, RELOAD]] * 2


async def test_a_process_that_has_read_another_configuration_than_the_others_reads_again(
    tmp_path: Path,
) -> None:
    async with house_in(tmp_path) as house:
        read = house.source.digest
        house.file.write_text(house.source.text + "\n# another one\n")
        await house.act("reload", None)
        assert house.copy.read_text().endswith("# another one\n")
        await house.operations.welcome(house.new, read)
        assert house.told(1) == [RELOAD]


async def test_a_copy_that_can_not_be_written_is_told_and_the_one_before_stays(tmp_path: Path) -> None:
    async with house_in(tmp_path) as house:
        before = house.copy.read_text()
        house.copy.with_suffix(".new").mkdir()  # as good as a full disk
        house.file.write_text(house.source.text + "\n# another one\n")
        with pytest.raises(Refused) as refused:
            await house.act("reload", None)
        assert "the copy for the processes can not be written" in refused.value.problem.message
        assert house.copy.read_text() == before
        assert house.told(0) == []


async def test_a_request_is_not_called_unknown_while_a_process_that_may_have_it_is_silent(
    tmp_path: Path,
) -> None:
    error = {"code": "not_found", "message": "none", "type": "invalid_request_error", "param": None}
    async with house_in(tmp_path) as house:
        house.new.ready = house.new.welcomed = True
        for server in house.servers:
            server.pages = {"/": (Json({"error": error}, status=404),)}
        for code in ("not_found", "not_possible"):
            with pytest.raises(Refused, match=code):
                await house.operations.timeline("r1")
            with pytest.raises(Refused, match=code):
                await house.act("requests.cancel", "r1")
            house.servers[1].pages = {"/": (CloseFin(),)}


async def test_whoever_looks_does_not_wait_for_a_process_that_hangs_while_another_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.processes._child.ASK_LIMIT", math.inf)
    go = trio.Event()
    async with house_in(tmp_path) as house:
        house.new.ready = True
        house.servers[0].pages = {"/": (Json({"request": {"id": "r1"}}),)}
        house.servers[1].pages = {"/": (WaitFor(go), DONE)}
        assert await house.operations.timeline("r1") == {"request": {"id": "r1", "process": 0}}
        go.set()


async def test_what_was_begun_is_done_and_remembered_though_whoever_asked_leaves(tmp_path: Path) -> None:
    go = trio.Event()
    async with house_in(tmp_path) as house:
        house.new.ready = house.new.welcomed = True
        house.servers[1].pages = {"/": (WaitFor(go), DONE)}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.act, "tenants.freeze", "acme")
            await house.servers[1].page_request(f"/admin/v1/{FREEZE}")
            nursery.cancel_scope.cancel()
            go.set()
        (noted,) = await house.operations.audit(10)
        assert (noted["action"], noted["outcome"]) == ("tenants.freeze", "done")
        await house.operations.welcome(house.children[0], house.source.digest)
        assert house.told(0) == [FREEZE, FREEZE]
