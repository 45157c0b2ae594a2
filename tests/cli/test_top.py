"""The command top in a real terminal, against a real door on a real socket."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
import trio

from tests.admin.door import OPERATOR, TOKENS, VIEWER, Door, door
from tests.e2e.process import COMMAND
from trio_gateway.testing import request_row, until

LIMIT: Final = 60.0  # seconds
WINDOW: Final = (80, 24)


class Terminal:
    """One that a program runs in.

    Attributes:
        frame: what it shows, line by line, without styles.
        said: everything that was written to it.
    """

    def __init__(self, keyboard: int) -> None:
        self._keyboard = keyboard
        self.said = b""

    @property
    def frame(self) -> list[str]:
        """What is shown now, if a whole frame was written."""
        found = re.findall(rb"\x1b\[H(.*?)\x1b\[J", self.said, re.DOTALL)
        text = re.sub(rb"\x1b\[[\d;]*[mK]", b"", found[-1] if found else b"").decode()
        return [line.rstrip() for line in text.split("\r\n")]

    def resize(self, width: int, height: int) -> None:
        """Have another size; the program is told by the kernel."""
        fcntl.ioctl(self._keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._keyboard, keys.encode())

    async def read(self) -> None:
        """Take what the program writes, until it ends."""
        while True:
            await trio.lowlevel.wait_readable(self._keyboard)
            try:
                self.said += os.read(self._keyboard, 1 << 16)
            except OSError:  # it ended
                return

    async def shows(self, text: str) -> None:
        """Wait until something is shown."""
        await until(lambda: any(text in line for line in self.frame))


@asynccontextmanager
async def terminal(
    opened: Door, secret: str | None = None, **environment: str
) -> AsyncIterator[tuple[Terminal, trio.Process]]:
    """Run top for the length of the block, and expect that it ended well and left the terminal as it was."""
    assert isinstance(opened.address, tuple)
    host, port = opened.address
    keyboard, display = pty.openpty()
    try:
        shown = Terminal(keyboard)
        shown.resize(*WINDOW)
        before = termios.tcgetattr(display)
        process = await trio.lowlevel.open_process(
            [*COMMAND, "top", "--url", f"http://{host}:{port}"],
            stdin=display,
            stdout=display,
            stderr=display,
            env={**os.environ, **environment, **({"TRIO_GATEWAY_ADMIN_TOKEN": secret} if secret else {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(shown.read)
                yield shown, process
                assert await process.wait() == 0
                nursery.cancel_scope.cancel()
            assert shown.said.rstrip().endswith(b"\x1b[?25h\x1b[?1049l")
            assert termios.tcgetattr(display) == before
        finally:
            process.kill()
            with trio.move_on_after(5, shield=True):
                await process.wait()
    finally:
        os.close(keyboard)
        os.close(display)


@pytest.mark.slow
async def test_it_shows_the_gateway_live_cancels_and_takes_another_size() -> None:
    with trio.fail_after(LIMIT):
        async with door(tokens=TOKENS) as opened:
            opened.port.rows = [request_row(number) for number in range(300)]
            async with terminal(opened, OPERATOR) as (shown, _):
                await shown.shows("requests 300")
                assert len(shown.frame) == 24
                assert max(map(len, shown.frame)) <= 80
                assert shown.frame[0].startswith("trio-gateway  live")
                await shown.shows("0000012a")  # the oldest that has not ended is on top
                shown.resize(120, 40)
                await until(lambda: len(shown.frame) == 40)
                shown.resize(40, 10)
                await until(lambda: len(shown.frame) == 10)
                assert max(map(len, shown.frame)) <= 40
                shown.resize(*WINDOW)
                shown.press("/tenant-3\r")
                await shown.shows("requests 60")
                shown.press("f")
                await shown.shows("waiting, oldest first")
                await shown.shows("requests 20")
                shown.press("c")
                await shown.shows("[y/N] Cancel request")
                assert opened.port.acts == []
                shown.press("y")
                await shown.shows("Done.")
                ((_, action, target, _),) = opened.port.acts
                assert (action, target) == ("requests.cancel", request_row(288)["id"])
                shown.press("\r")
                await shown.shows("placed")
                shown.press("q\t")
                await shown.shows("BREAKERS")
                shown.press("\t")
                await shown.shows("COUNTER")
                assert b"\x1b[32m" in shown.said
                shown.press("q")


@pytest.mark.slow
async def test_a_refusal_is_told_a_lost_gateway_too_and_ctrl_c_ends_it_without_colours() -> None:
    with trio.fail_after(LIMIT):
        async with door(tokens=TOKENS) as opened, terminal(opened, VIEWER, NO_COLOR="1") as (shown, _):
            await shown.shows("requests 7")
            shown.press("\t")
            await shown.shows("BREAKERS")
            shown.press("dy")
            await shown.shows("may read, but not act (403 role_not_allowed)")
            assert not re.search(rb"\x1b\[3\dm", shown.said)
            assert opened.port.acts == []
            shown.press("\x03")


@pytest.mark.slow
async def test_whoever_is_told_to_end_leaves_the_terminal_as_it_was() -> None:
    with trio.fail_after(LIMIT):
        async with door() as opened, terminal(opened, VIEWER) as (shown, process):
            await shown.shows("requests 7")
            process.send_signal(signal.SIGTERM)


@pytest.mark.slow
async def test_a_gateway_that_goes_is_told_and_one_that_was_stopped_goes_on_drawing() -> None:
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            gone = trio.Event()
            shown_to: list[tuple[Terminal, trio.Process]] = []

            async def look() -> None:
                async with terminal(opened) as seen:
                    shown_to.append(seen)
                    await gone.wait()
                    await seen[0].shows("trio-gateway  no answer from ")
                    seen[0].press("q")

            async with door(tokens=()) as opened:
                nursery.start_soon(look)
                await until(lambda: bool(shown_to))
                shown, process = shown_to[0]
                await shown.shows("requests 7")
                process.send_signal(signal.SIGSTOP)
                written = len(shown.said)
                process.send_signal(signal.SIGCONT)
                await until(lambda: b"\x1b[?1049h" in shown.said[written:])
            gone.set()


async def run(opened: Door, *arguments: str, environment: Mapping[str, str] = {}) -> tuple[int, str, str]:
    assert isinstance(opened.address, tuple)
    host, port = opened.address
    ran = await trio.run_process(
        [*COMMAND, "top", "--url", f"http://{host}:{port}", *arguments],
        env={**os.environ, "COLUMNS": "100", **environment},
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    return ran.returncode, ran.stdout.decode(), ran.stderr.decode()


@pytest.mark.slow
async def test_once_prints_plain_text_for_scripts() -> None:
    with trio.fail_after(LIMIT):
        async with door(tokens=TOKENS) as opened:
            opened.port.rows = [request_row(number) for number in range(60)]
            code, out, err = await run(opened, "--once", "--token", VIEWER)
            assert (code, err) == (0, "")
            lines = out.splitlines()
            assert lines[0].startswith("trio-gateway  live")
            assert len(lines) == 4 + 1 + 60
            assert "\x1b" not in out
            refused: Any = await run(opened, "--once")
            assert refused[0] == 1
            assert "401 invalid_admin_token" in refused[2]
            code, out, err = await run(opened, "--token", VIEWER)
            assert (code, out) == (2, "")
            assert "--once" in err
