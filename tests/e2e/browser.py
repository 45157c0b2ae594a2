"""A real browser without a window, driven by the WebDriver protocol."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal

import httpx2
import pytest
import trio

DRIVER: Final = "chromedriver"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
ELEMENT: Final = "element-6066-11e4-a52e-4f735466cecf"  # W3C WebDriver, section 12.2: the key of an element
Scheme = Literal["light", "dark"]
START_LIMIT: Final = 60.0  # seconds
# As root there is no sandbox to be had. Nothing but this machine is looked for or talked to.
ARGUMENTS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def find_browser() -> str:
    """Answer the browser's command, or skip the test: it, or its driver, is not installed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or shutil.which(DRIVER) is None:
        pytest.skip("needs a browser: Debian's chromium and chromium-driver")
    return browser


class Browser:
    """One window."""

    def __init__(self, http: httpx2.AsyncClient, session: str) -> None:
        self._http = http
        self._session = session

    async def open(self, url: str) -> None:
        """Load a page."""
        await self._ask("POST", "url", url=url)

    async def fill(self, name: str, text: str) -> None:
        """Type into the field with this id, in place of what it has."""
        element = await self._find(name)
        await self._ask("POST", f"element/{element}/clear")
        await self._ask("POST", f"element/{element}/value", text=text)

    async def click(self, name: str) -> None:
        """Click on the element with this id."""
        await self._ask("POST", f"element/{await self._find(name)}/click")

    async def text(self, name: str) -> str:
        """Answer the text of the element with this id, as it is in the page."""
        return str(await self.run("return document.getElementById(arguments[0]).textContent", name))

    async def run(self, script: str, *arguments: object) -> Any:
        """Run a script in the page and answer what it returns."""
        return await self._ask("POST", "execute/sync", script=script, args=list(arguments))

    async def press(self, *keys: str) -> None:
        """Press and let go of keys, one after the other.

        Special ones are code points (W3C WebDriver, section 17.4.2).
        """
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        await self._ask("POST", "actions", actions=[{"type": "key", "id": "keyboard", "actions": steps}])

    async def resize(self, width: int, height: int, scheme: Scheme = "light") -> None:
        """Let the page have another size, and the one who looks another taste; narrow ones are phones."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.command("Emulation.setDeviceMetricsOverride", **size)
        taste = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.command("Emulation.setEmulatedMedia", features=taste)

    async def command(self, name: str, **parameters: object) -> Any:
        """Send a command of the Chrome DevTools Protocol."""
        return await self._ask("POST", "goog/cdp/execute", cmd=name, params=parameters)

    async def logged(self, kind: Literal["browser", "performance"]) -> list[dict[str, Any]]:
        """Answer what was noted since the last time: errors of pages, or what went over the network.

        The browser must have been opened to record.
        """
        noted: list[dict[str, Any]] = await self._ask("POST", "se/log", type=kind)
        return noted

    async def wait_until(self, condition: str, *arguments: object) -> Any:
        """Wait until an expression holds, looking each time the page is painted; answer what it is then."""
        script = f"""
            const done = arguments[arguments.length - 1];
            const holds = () => ({condition});
            const look = () => {{
              const value = holds();
              if (value) done(value);
              else requestAnimationFrame(look);
            }};
            look();
        """
        return await self._ask("POST", "execute/async", script=script, args=list(arguments))

    async def wait_text(self, name: str, pattern: str) -> re.Match[str]:
        """Wait until the text of an element fits, as the page itself sees it change."""
        script = """
            const [name, pattern, done] = arguments;
            const element = document.getElementById(name);
            const watch = new MutationObserver(look);
            function look() {
              if (!new RegExp(pattern).test(element.textContent)) return;
              watch.disconnect();
              done(element.textContent);
            }
            watch.observe(element, { childList: true, characterData: true, subtree: true });
            look();
        """
        text = await self._ask("POST", "execute/async", script=script, args=[name, pattern])
        found = re.search(pattern, text)
        assert found is not None
        return found

    async def _find(self, name: str) -> str:
        found = await self._ask("POST", "element", using="css selector", value=f"#{name}")
        return str(found[ELEMENT])

    async def _ask(self, method: str, path: str, **body: object) -> Any:
        answer = await self._http.request(method, f"/session/{self._session}/{path}", json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value


@asynccontextmanager
async def open_browser(folder: Path, *, recording: bool = False) -> AsyncIterator[Browser]:
    """Run a browser for the length of the block; ``folder`` is its home.

    Args:
        recording: note what `Browser.logged` answers.
    """
    binary = find_browser()
    # The browser makes a socket there, whose path may have 107 bytes: too few for the folder of a test.
    short = tempfile.TemporaryDirectory(prefix="b-", ignore_cleanup_errors=True)
    process = await trio.lowlevel.open_process(
        [DRIVER, "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder), "TMPDIR": short.name},
        start_new_session=True,
    )
    try:
        with trio.fail_after(START_LIMIT):
            port = await _read_port(process)
        # No connection is kept, so that tests can count descriptors.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=None, trust_env=False
        ) as http:
            wanted: dict[str, Any] = {
                "goog:chromeOptions": {"binary": binary, "args": ARGUMENTS},
                "timeouts": {"script": 60_000},
            }
            if recording:
                wanted["goog:loggingPrefs"] = {"browser": "ALL", "performance": "ALL"}
            with trio.fail_after(START_LIMIT):
                answer = await http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
            assert answer.status_code == 200, answer.text
            session = answer.json()["value"]["sessionId"]
            try:
                yield Browser(http, session)
            finally:
                with trio.move_on_after(10, shield=True):
                    await http.delete(f"/session/{session}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with trio.move_on_after(5, shield=True):
            await process.wait()
        assert process.stdout is not None
        await process.stdout.aclose()
        short.cleanup()


async def _read_port(process: trio.Process) -> int:
    said = b""
    assert process.stdout is not None
    while (found := re.search(rb"on port (\d+)\.", said)) is None:
        data = await process.stdout.receive_some()
        assert data, said
        said += data
    return int(found[1])


class Origin:
    """Where a page comes from. Its port listens already, so that its name is known before it is served."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self._listener = listener

    @property
    def url(self) -> str:
        """Scheme, host and port."""
        return "http://{}:{}".format(*self._listener.socket.getsockname())

    @asynccontextmanager
    async def serving(self, page: bytes) -> AsyncIterator[None]:
        """Serve a page at every path for the length of the block; then close what browsers hold open."""

        async def answer(stream: trio.SocketStream) -> None:
            async with stream:
                head = b""
                while b"\r\n\r\n" not in head:
                    data = await stream.receive_some()
                    if not data:
                        return
                    head += data
                kind = b"content-type: text/html; charset=utf-8\r\nconnection: close\r\n"
                size = b"content-length: %d\r\n\r\n" % len(page)
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(b"HTTP/1.1 200 OK\r\n" + kind + size + page)

        async def accept() -> None:
            async with trio.open_nursery() as connections:
                while True:
                    connections.start_soon(answer, await self._listener.accept())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)  # noqa: ASYNC113 - it listens already
            yield
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_origin() -> AsyncIterator[Origin]:
    """Listen for the length of the block."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        yield Origin(listener)
