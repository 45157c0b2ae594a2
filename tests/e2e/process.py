"""A gateway as its own process, as it is run in earnest."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from tests.e2e.serving import configuration, parse_address
from trio_gateway.testing import Address, RawClient, ScriptedEngine

COMMAND: Final = (sys.executable, "-m", "trio_gateway")
START_LIMIT: Final = 20.0  # seconds; imports take one


class GatewayProcess:
    """A running process and what it has logged.

    Attributes:
        lines: of its log, as they came.
    """

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._news = trio.Event()

    @property
    def address(self) -> Address:
        """Where clients connect."""
        (line,) = (line for line in self.lines if line["event"] == "listening")
        return parse_address(line["public"][0])

    async def connect(self, *, receive_buffer: int | None = None) -> RawClient:
        """Connect a client."""
        return await RawClient.connect(self.address, receive_buffer=receive_buffer)

    async def status_of(self, path: str) -> int:
        """Ask for a path."""
        with await self.connect() as client:
            await client.request("GET", path)
            return (await client.read_to_end()).status

    def send(self, what: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(what)

    async def logged(self, event: str, holds: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
        """Wait for a line about an event."""
        while True:
            for line in self.lines:
                if line["event"] == event and holds(line):
                    return line
            await self._news.wait()

    async def read_log(self) -> None:
        """Read the log to its end."""
        assert self.process.stdout is not None
        rest = b""
        async with self.process.stdout as stream:
            async for data in stream:
                *whole, rest = (rest + data).split(b"\n")
                self.lines += map(json.loads, whole)
                self._news.set()
                self._news = trio.Event()

    async def exit_code(self) -> int:
        """Wait until it ends."""
        return await self.process.wait()


@asynccontextmanager
async def process_serving(
    *engines: ScriptedEngine | str, folder: Path, **sections: Any
) -> AsyncIterator[GatewayProcess]:
    """Run ``trio-gateway serve`` for the length of the block, which the process may end itself."""
    file = folder / "gateway.toml"
    file.write_text(configuration(*engines, **sections), encoding="utf-8")
    process = await trio.lowlevel.open_process(
        [*COMMAND, "serve", "--config", str(file)], stdout=subprocess.PIPE
    )
    running = GatewayProcess(process)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.read_log)
            with trio.fail_after(START_LIMIT):
                await running.logged("listening")
            yield running
            process.kill()  # without effect if it ended itself
    finally:
        process.kill()
        with trio.move_on_after(5, shield=True):
            await process.wait()
