"""The command ``top``: the gateway live in a terminal. The shell around `_top_screen`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import trio
import typer

from ._admin_client import AdminClient, AdminFailed
from ._admin_where import DEFAULT_URL, Token, TokenFile, Url, asking, token_of
from ._common import complain
from ._top_screen import Act, Piece, Screen, keys_of

INTERVAL: Final = 2.0  # seconds between two lists
PATIENCE: Final = 1.0  # seconds until the feed is tried again
PLAIN_WIDTH: Final = 120  # cells of a line where no terminal says how many there are
_SETTING: Final = b"\x1b[?1049h\x1b[?25l"  # the other screen, no cursor
_UNSETTING: Final = b"\x1b[0m\x1b[?25h\x1b[?1049l"
_STYLES: Final = {"bold": "1", "dim": "2", "good": "32", "warn": "33", "bad": "31", "turned": "7"}
_COLOURS: Final = ("good", "warn", "bad")


def top(
    url: Url = DEFAULT_URL,
    token: Token = None,
    token_file: TokenFile = None,
    once: bool = typer.Option(False, "--once", help="Print it once, as plain text, and end."),
) -> None:
    """Show a running gateway live in the terminal, and steer it by keys."""
    with asking(url, token_of(token, token_file)) as client:
        if once:
            _print_once(client)
        elif not (sys.stdin.isatty() and sys.stdout.isatty()):
            complain("top needs a terminal; --once prints to anything")
        else:
            _watch(client)


def _print_once(client: AdminClient) -> None:
    screen = Screen(sort="newest")
    snapshots = (value for name, value in client.events("/feed") if name == "snapshot")
    if (snapshot := next(snapshots, None)) is None:
        raise AdminFailed("the feed ended before it told anything")
    screen.snapshot = snapshot
    screen.take_requests(client.read("/requests", **screen.query()))
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
    for line in screen.plain_lines(width):
        typer.echo(line)


def _watch(client: AdminClient) -> None:
    # What a first question is refused for is told before the screen changes.
    client.read("/version")
    keyboard, display = sys.stdin.fileno(), sys.stdout.fileno()
    with _terminal(keyboard, display):
        try:
            trio.run(Watching(client, keyboard, display).run)
        except* KeyboardInterrupt:
            pass  # before signals were listened to; as good as q


class Watching:
    """Everything that goes on while somebody looks.

    Args:
        keyboard: descriptor to read keys from.
        display: descriptor of the terminal.
    """

    def __init__(self, client: AdminClient, keyboard: int, display: int) -> None:
        self.screen = Screen()
        self._client = client
        self._keyboard = keyboard
        self._display = display
        self._colours = not os.environ.get("NO_COLOR")
        self._asked = trio.Event()  # somebody wants to see something else

    async def run(self) -> None:
        """Show it until somebody presses q."""
        self._draw()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow)
            nursery.start_soon(self._ask_again_and_again)
            nursery.start_soon(self._hear_signals, nursery.cancel_scope)
            await self._read_keys()
            nursery.cancel_scope.cancel()

    # Threads that wait for the gateway are left behind at the end: a question is over within its limit.

    async def _follow(self) -> None:
        while True:
            try:
                await trio.to_thread.run_sync(self._read_feed, abandon_on_cancel=True)
                self.screen.trouble = "the feed has ended"
            except AdminFailed as failed:
                self.screen.trouble = str(failed)
            self._draw()
            await trio.sleep(PATIENCE)

    def _read_feed(self) -> None:
        for name, value in self._client.events("/feed"):
            if name == "snapshot":
                trio.from_thread.run_sync(self._hear, value)

    def _hear(self, snapshot: dict[str, Any]) -> None:
        self.screen.snapshot, self.screen.trouble = snapshot, ""
        self.screen.rows["workers"] = snapshot["workers"]
        self._draw()

    async def _ask_again_and_again(self) -> None:
        while True:
            self._asked = trio.Event()
            try:
                await self._ask()
            except AdminFailed as failed:
                self.screen.news = str(failed)
            self._draw()
            with trio.move_on_after(INTERVAL):
                await self._asked.wait()

    async def _ask(self) -> None:
        screen = self.screen
        if screen.closely:
            closely = screen.closely
            told = await self._read(f"/requests/{closely}")
            if closely == screen.closely:
                screen.timeline = told
        elif screen.tab == "tenants":
            screen.rows["tenants"] = (await self._read("/tenants"))["tenants"]
        elif screen.tab == "requests":
            query = screen.query()
            answer = await self._read("/requests", **query)
            if query == screen.query():
                screen.take_requests(answer)

    async def _read(self, path: str, **query: Any) -> Any:
        return await trio.to_thread.run_sync(lambda: self._client.read(path, **query), abandon_on_cancel=True)

    async def _read_keys(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._keyboard)
            data = os.read(self._keyboard, 1024)
            for key in keys_of(data) if data else ["quit"]:
                wish = "quit" if key == "quit" else self.screen.press(key)
                if wish == "quit":
                    return
                if isinstance(wish, Act):
                    await self._act(wish)
                if wish is not None:
                    self._asked.set()
            self._draw()

    async def _act(self, act: Act) -> None:
        try:
            result = await trio.to_thread.run_sync(
                lambda: self._client.act(act.path, {}), abandon_on_cancel=True
            )
            self.screen.news = "Done." if result["done"] else "There was nothing to do."
        except AdminFailed as failed:
            self.screen.news = str(failed)

    async def _hear_signals(self, shown: trio.CancelScope) -> None:
        """Draw anew when the terminal has another size, or after the process was stopped and goes on.

        At SIGTERM and SIGINT all ends as by q, so that the terminal is left as it was. An exception out of
        Ctrl-C would be lost where it met a finalizer.
        """
        ends = (signal.SIGTERM, signal.SIGINT)
        with trio.open_signal_receiver(signal.SIGWINCH, signal.SIGCONT, *ends) as signals:
            async for which in signals:
                if which in ends:
                    shown.cancel()
                if which == signal.SIGCONT:
                    tty.setcbreak(self._keyboard)
                    os.write(self._display, _SETTING)
                self._draw()

    def _draw(self) -> None:
        width, height = os.get_terminal_size(self._display)
        text = written(self.screen.lines(width, height), self._colours)
        os.write(self._display, text.encode(errors="replace"))


def written(lines: Sequence[Sequence[Piece]], colours: bool) -> str:
    """Write lines so that they replace what a terminal shows, without flicker."""
    drawn = []
    for line in lines:
        pieces = [
            f"\x1b[{_STYLES[style]}m{text}\x1b[0m"
            if style in _STYLES and (colours or style not in _COLOURS)
            else text
            for text, style in line
        ]
        drawn.append("".join(pieces) + "\x1b[K")
    return "\x1b[H" + "\r\n".join(drawn) + "\x1b[J"


@contextmanager
def _terminal(keyboard: int, display: int) -> Iterator[None]:
    """Have keys at once and unechoed, and a screen of its own, for the length of the block."""
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        os.write(display, _SETTING)
        yield
    finally:
        os.write(display, _UNSETTING)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
