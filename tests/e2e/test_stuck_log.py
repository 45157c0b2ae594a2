"""A log whose reader is stopped: requests are answered, lines wait, and the process can still end."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from tests.e2e.process import COMMAND, START_LIMIT
from tests.e2e.serving import configuration, parse_address
from trio_gateway.testing import Answer, RawClient, ScriptedEngine, chat_answer, chat_request, open_engine

PIPE: Final = 4096  # bytes; smallest that the kernel gives
REQUESTS: Final = 60  # whose lines fill that pipe, and the buffers before it, many times
LIMIT: Final = 20.0


class Piped:
    """A gateway whose log goes through a pipe to a reader of its own."""

    def __init__(self, gateway: trio.Process, reader: trio.Process) -> None:
        self.gateway = gateway
        self.reader = reader
        self.lines: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Take what the reader passes on, until both are gone."""
        assert self.reader.stdout is not None
        rest = b""
        async for data in self.reader.stdout:
            *whole, rest = (rest + data).split(b"\n")
            self.lines += map(json.loads, whole)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of that name."""
        return [line for line in self.lines if line["event"] == name]

    async def ask(self) -> Answer:
        """Make one request."""
        (line,) = self.events("listening")
        with await RawClient.connect(parse_address(line["public"][0])) as client:
            await client.send(chat_request(stream=False))
            return await client.read_to_end()


@asynccontextmanager
async def piped(engine: ScriptedEngine, folder: Path) -> AsyncIterator[Piped]:
    """Run both for the length of the block."""
    file = folder / "gateway.toml"
    quick = {"readiness_delay": 0, "grace": 1}
    file.write_text(configuration(engine, shutdown=quick), encoding="utf-8")
    source, sink = os.pipe()
    fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, PIPE)
    reader = await trio.lowlevel.open_process(["cat"], stdin=source, stdout=-1)
    gateway = await trio.lowlevel.open_process([*COMMAND, "serve", str(file)], stdout=sink)
    os.close(source)
    os.close(sink)
    both = Piped(gateway, reader)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.read)
            with trio.fail_after(START_LIMIT):
                while not both.events("listening"):  # noqa: ASYNC110 - another process tells
                    await trio.sleep(0.01)
            yield both
            gateway.kill()
            reader.send_signal(signal.SIGCONT)
    finally:
        for process in (gateway, reader):
            process.kill()
            with trio.move_on_after(5, shield=True):
                await process.wait()


async def test_a_stopped_reader_of_the_log_holds_up_no_request_and_misses_no_line(tmp_path: Path) -> None:
    async with open_engine(*[chat_answer()] * REQUESTS) as engine, piped(engine, tmp_path) as both:
        both.reader.send_signal(signal.SIGSTOP)
        with trio.fail_after(LIMIT):
            assert [(await both.ask()).status for _ in range(REQUESTS)] == [200] * REQUESTS
            assert len(both.events("exchange")) < REQUESTS
            both.reader.send_signal(signal.SIGCONT)
            both.gateway.send_signal(signal.SIGTERM)
            assert await both.gateway.wait() == 0
            while not both.events("stopped"):  # noqa: ASYNC110 - another process tells
                await trio.sleep(0.01)
        assert len(both.events("exchange")) == REQUESTS


async def test_a_process_whose_log_nobody_reads_ends_when_it_is_told_to(tmp_path: Path) -> None:
    async with open_engine(*[chat_answer()] * REQUESTS) as engine, piped(engine, tmp_path) as both:
        both.reader.send_signal(signal.SIGSTOP)
        with trio.fail_after(LIMIT):
            for _ in range(REQUESTS):
                await both.ask()
            both.gateway.send_signal(signal.SIGTERM)
            assert await both.gateway.wait() == 0
        assert both.events("stopped") == []
