"""A whole gateway in the test's own loop: real sockets, the real clock, and an account of it afterwards.

`serving` runs a `Gateway` before scripted engines. While it runs, the equations
of conservation are checked after every step of every task; when the block ends,
nothing may run, wait, be held or buffered, and every descriptor is back.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import trio

from trio_gateway.config import Settings, Source, parse_settings
from trio_gateway.gateway import Gateway
from trio_gateway.ledger import Record, conservation_errors
from trio_gateway.telemetry import Log
from trio_gateway.testing import Address, Answer, RawClient, ScriptedEngine, until

LIMIT: Final = 10.0  # seconds; a wait that takes longer has failed
GRACE: Final = 0.05  # seconds a draining lease is kept here

READ_TOGETHER = "READ_ALONE" not in os.environ
"""Whether one task reads all streams, as is usual, or each is read by its exchange's own."""

Headers = tuple[tuple[str, str], ...]
Leaving = Literal["fin", "reset"]


# Configuration ----------------------------------------------------------------------------------------------


def toml(value: object) -> str:
    """Write a value as TOML; tables are written inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def configuration(*engines: ScriptedEngine | str, **sections: Any) -> str:
    """Write a configuration: a worker for each engine, all of them serving one model, ``m1``.

    Args:
        engines: engines, or URLs of workers.
        sections: laid over that, ``worker`` over each worker.
    """
    each = {"kind": "openai", "slots": 4, "cancel_grace": GRACE, **dict(sections.pop("worker", {}))}
    urls = [engine if isinstance(engine, str) else engine.url for engine in engines]
    tables: dict[str, Any] = {
        "server": {"bind": ["127.0.0.1:0"]},
        "admin": {"bind": ["127.0.0.1:0"], "hosts": ["gateway"]},
        "workers": [{"id": f"w{number}", "url": url, **each} for number, url in enumerate(urls, 1)],
        "models": [{"id": "m1"}],
        "probes": {"interval": 0},  # most tests count connections and requests
        **sections,
    }
    return "\n".join(_members(tables))


def _members(tables: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {toml(table)}" for name, table in tables.items()]


def settings_of(*engines: ScriptedEngine | str, folder: Path = Path(), **sections: Any) -> Settings:
    """Read what `configuration` writes."""
    return parse_settings(configuration(*engines, **sections), folder=folder)


def tenant(name: str, key: str, **members: object) -> dict[str, object]:
    """Write a tenant with one key."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return {"id": name, "keys": [{"id": f"{name}-key", "hash": f"sha256:{digest}"}], **members}


# The running gateway ----------------------------------------------------------------------------------------


class Serving:
    """A running gateway, with short words for what tests ask.

    Attributes:
        gateway: the whole of it.
        log: what it has logged, complete only after the block.
        broken: equations that did not hold after some step.
        may_report_bugs: whether reports of surprises are part of the test; else one fails it.
    """

    def __init__(self, gateway: Gateway, log: io.StringIO) -> None:
        self.gateway: Final = gateway
        self.log: Final = log
        self.broken: list[str] = []
        self.may_report_bugs = False

    # -- clients

    @property
    def address(self) -> Address:
        """Where clients connect."""
        return parse_address(self.gateway.addresses[0])

    @property
    def admin_address(self) -> Address:
        """Where operators connect."""
        return parse_address(self.gateway.admin_addresses[0])

    async def connect(self, *, receive_buffer: int | None = None) -> RawClient:
        """Connect a client."""
        return await RawClient.connect(self.address, receive_buffer=receive_buffer)

    async def ask(self, request: bytes) -> Answer:
        """Send a request on a connection of its own and read the whole answer."""
        with trio.fail_after(LIMIT), await self.connect() as client:
            await client.send(request)
            return await client.read_to_end()

    async def get(self, path: str, **headers: str) -> Answer:
        """Ask for a path."""
        return await self.fetch("GET", path, headers=tuple(headers.items()))

    async def fetch(
        self, method: str, path: str, *, headers: Headers = (), body: bytes | None = None
    ) -> Answer:
        """Ask with any method."""
        with trio.fail_after(LIMIT), await self.connect() as client:
            await client.request(method, path, headers=headers, body=body)
            return await client.read_to_end()

    # -- state

    @property
    def records(self) -> list[Record]:
        """The settled exchanges, oldest first."""
        return list(self.gateway.books.recent)

    @property
    def depth(self) -> int:
        """Requests that have a position in a queue."""
        return self.gateway.admission.statistics().queued

    @property
    def held(self) -> int:
        """Leases of attempts that are under way."""
        return self.gateway.admission.statistics().held

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, within bounds."""
        with trio.fail_after(LIMIT):
            await until(holds)

    async def queued(self, depth: int) -> None:
        """Wait until so many requests have a position."""
        await self.until(lambda: self.depth == depth)

    async def settled(self, number: int = 1) -> Record:
        """Wait until the ``number``-th exchange is settled, and answer its record."""
        await self.until(lambda: len(self.records) >= number)
        return self.records[number - 1]

    async def returned(self) -> None:
        """Wait until every lease was given back."""
        await self.until(lambda: self._leases_out() == 0)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Lines of the log about an event; all of them only after the block."""
        lines = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [line for line in lines if line["event"] == event]

    def turned_away(self) -> dict[str, int]:
        """Requests that were not accepted, by code."""
        return dict(self.gateway.books.turned_away)

    # -- the account

    def equations(self) -> list[str]:
        """Name the equations that do not hold right now."""
        gateway, admission = self.gateway, self.gateway.admission.statistics()
        return conservation_errors(
            gateway.books,
            granted=admission.granted,
            held=admission.held,
            draining=admission.draining,
            returned=admission.returned,
            buffered=gateway.buffers.used,
            sum_of_exchanges=gateway.live.buffered + gateway.kept_bytes,
        )

    async def expect_nothing_left(self) -> None:
        """Wait until nothing runs, then look at everything that could be held."""
        gateway, books = self.gateway, self.gateway.books
        await self.until(lambda: gateway.server.open == 0 and len(gateway.live) == 0)
        await self.returned()
        admission = gateway.admission.statistics()
        assert not self.broken
        assert not self.equations()
        assert (books.reading, books.waiting, books.running) == (0, 0, 0)
        assert books.arrived == sum(books.turned_away.values()) + sum(books.outcomes.values())
        assert (admission.queued, admission.queued_bytes, admission.queued_by_tenant) == (0, 0, {})
        assert admission.granted == admission.returned
        assert admission.double_releases == 0
        await self.until(lambda: gateway.kept_answers == 0)
        assert gateway.buffers.used == 0
        assert gateway.server.room.used == 0
        assert len(gateway.watch) == 0
        assert not gateway.read_loop
        assert [(book.held, book.draining) for book in gateway.fleet.books.values()] == [
            (0, 0) for _ in gateway.fleet.books
        ]

    def _leases_out(self) -> int:
        admission = self.gateway.admission.statistics()
        return admission.granted - admission.returned


class _Auditor(trio.abc.Instrument):
    """Checks the equations after every step of every task."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._serving.broken:
            self._serving.broken = self._serving.equations()


@asynccontextmanager
async def serving(
    *engines: ScriptedEngine | str,
    file: Path | None = None,
    folder: Path = Path(),
    **sections: Any,
) -> AsyncIterator[Serving]:
    """Run a gateway for the length of the block; arguments are those of `configuration`.

    Args:
        file: where the configuration is written to, and read from again.

    After the block, unless it failed, nothing may be left of it.
    """
    before = open_descriptors()
    log = io.StringIO()
    writer = Log(log)
    text = configuration(*engines, **sections)
    if file is None:
        source = Source.of_text(text, folder=folder)
    else:
        file.write_text(text, encoding="utf-8")  # noqa: ASYNC240  (before anything runs)
        source = Source.read(file)
    gateway = Gateway(source.settings, writer, source, read_together=READ_TOGETHER)
    running = Serving(gateway, log)
    auditor = _Auditor(running)
    trio.lowlevel.add_instrument(auditor)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.run)
            yield running
            await running.expect_nothing_left()
            nursery.cancel_scope.cancel()
        for engine in engines:
            if isinstance(engine, ScriptedEngine):
                with trio.fail_after(LIMIT):
                    await engine.wait_disconnected()
        with trio.fail_after(LIMIT):
            await until(lambda: open_descriptors() == before)
    finally:
        trio.lowlevel.remove_instrument(auditor)
        with trio.move_on_after(LIMIT, shield=True):
            await trio.to_thread.run_sync(writer.close)
    assert running.may_report_bugs or not running.logged("bug")


# Small words ------------------------------------------------------------------------------------------------


def parse_address(shown: str) -> Address:
    """Turn an address that the gateway tells into one to connect to."""
    if shown.startswith("unix:"):
        return shown.removeprefix("unix:")
    host, _, port = shown.rpartition("/")[2].rpartition(":")
    return host.strip("[]"), int(port)


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6."""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def open_descriptors() -> int:
    """Count the descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def error_code(answer: Answer) -> object:
    """The code of an error answer."""
    return answer.error()["code"]


def leave(client: RawClient, how: Leaving) -> None:
    """Close a client's connection this way."""
    if how == "fin":
        client.leave_fin()
    else:
        client.leave_reset()
