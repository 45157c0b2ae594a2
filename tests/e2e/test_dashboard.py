"""The dashboard in a real browser, before a real gateway with a thousand requests under way."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.admin.looking import Dashboard, complaints_of, unnamed, url_of
from tests.e2e.browser import Scheme, open_browser
from tests.e2e.process import GatewayProcess, process_serving
from tests.e2e.serving import parse_address, tenant
from trio_gateway.testing import (
    Address,
    RawClient,
    Repeat,
    ScriptedEngine,
    chat_chunk,
    chat_request,
    chat_stream,
    open_engine,
    until,
)

LIMIT: Final = 40.0  # seconds; a browser takes its time to start
PACES: Final = (1.3, 1.7, 2.3)  # seconds from token to token, of each worker
WORKERS: Final = len(PACES)
SLOTS: Final = 200
TENANTS: Final = ("acme", "globex", "initech", "umbrella")
REQUESTS: Final = 1000
WAITING: Final = REQUESTS - WORKERS * SLOTS
MOST_BYTES: Final = 60_000
SCHEMES: Final[tuple[Scheme, ...]] = ("light", "dark")
# The folder of the pictures of the documentation: whoever sets it makes them anew, after a while.
PICTURES: Final = os.environ.get("DASHBOARD_PICTURES")
A_WHILE: Final = 75.0 if PICTURES else 0.0  # seconds

pytestmark = pytest.mark.slow


def key_of(name: str) -> str:
    return f"tg_{name}_0123456789abcdef0123456789abcdef"


def admin_address(gateway: GatewayProcess) -> Address:
    (line,) = (line for line in gateway.lines if line["event"] == "listening")
    return parse_address(line["admin"][0])


@dataclass(frozen=True)
class Busy(Dashboard):
    """The page, and what stands behind it.

    Attributes:
        answers: of all clients, in the order in which they asked.
    """

    gateway: GatewayProcess
    engines: list[ScriptedEngine]
    clients: list[RawClient]

    @property
    def open_requests(self) -> int:
        """Requests that engines answer now."""
        return sum(engine.statistics().open_requests for engine in self.engines)

    async def picture(self, folder: Path, name: str) -> None:
        """Keep what is to be seen now."""
        shot = await self.browser.command("Page.captureScreenshot", format="png")
        data = base64.b64decode(shot["data"])
        await trio.Path(folder / f"{name}.png").write_bytes(data)
        assert len(data) < 300_000


@asynccontextmanager
async def busy(folder: Path) -> AsyncIterator[Busy]:
    """Run everything for the length of the block; every request is at a worker or waits for one."""
    beginning = chat_stream("one ", finish=None, done=False, end=False)
    word = chat_chunk({"content": "more "})
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(open_engine((*beginning, Repeat((word,), every=pace))))
            for pace in PACES
        ]
        gateway = await stack.enter_async_context(
            process_serving(
                *engines,
                folder=folder,
                worker={"slots": SLOTS},
                admission={"max_wait": 600},
                tenants=[
                    tenant(name, key_of(name), max_concurrency=500, max_queued=500, weight=1.0 + number)
                    for number, name in enumerate(TENANTS)
                ],
            )
        )
        clients = []
        for number in range(REQUESTS):
            client = stack.enter_context(await gateway.connect())
            await client.send(chat_request(key=key_of(TENANTS[number % len(TENANTS)])))
            clients.append(client)
        browser = await stack.enter_async_context(open_browser(folder, recording=True))
        page = Busy(browser, url_of(admin_address(gateway)), gateway, engines, clients)
        with trio.fail_after(30):
            await until(lambda: page.open_requests == WORKERS * SLOTS)
        yield page
        assert not [line for line in gateway.lines if line["event"] == "bug"]


def tile(name: str, text: str) -> str:
    """An expression that holds when a figure is this text."""
    return (
        "[...document.querySelectorAll('#tiles > div')]"
        f".find((one) => one.firstChild.textContent === '{name}').children[1].textContent === '{text}'"
    )


async def test_a_thousand_requests_are_seen_live_found_and_one_of_them_is_cancelled(tmp_path: Path) -> None:
    pictures = Path(PICTURES or tmp_path)
    with trio.fail_after(LIMIT + A_WHILE):
        async with busy(tmp_path) as page:
            browser = page.browser
            await browser.resize(1440, 900)
            await page.open()
            loaded = "performance.getEntriesByType('navigation')[0].transferSize"
            assert 1000 < await browser.run(f"return {loaded}") <= MOST_BYTES
            await browser.wait_until(tile("Running", str(WORKERS * SLOTS)))
            await browser.wait_until(tile("Waiting", str(WAITING)))
            await browser.wait_text("range", "^1\N{EN DASH}50 of 1,000$")
            assert await browser.run("return document.querySelectorAll('#body tr').length") == 50
            # Tokens flow, and so do their figures.
            tokens = "document.querySelectorAll('#tiles .big')[1].textContent"
            await browser.wait_until(f"parseFloat({tokens}) > 0")

            await trio.sleep(A_WHILE)

            # Who waits longest, and why?
            await page.click("#states button", "Waiting")
            await page.click("#order")
            await browser.wait_text("range", f"^1\N{EN DASH}50 of {WAITING}$")
            where = "document.querySelector('#body .where').textContent"
            await browser.wait_until(f"{where}.includes('no slot is free')")

            # One that runs is cancelled: its client is told, its engine stops, and a waiter takes its slot.
            await page.click("#states button", "Running")
            await browser.wait_text("range", f"^1\N{EN DASH}50 of {WORKERS * SLOTS}$")
            identity = await browser.run("return document.querySelector('#body tr').dataset.key")
            await page.click("#rows .link")
            await browser.wait_until("document.querySelector('#sheet-in .steps li')")
            assert "first content" in await browser.text("sheet-in")
            await page.picture(pictures, "request")
            await page.click("#sheet-in button", "Cancel it")
            assert await page.confirm() == "Done: cancel the request."
            await browser.wait_until(
                "document.querySelector('#sheet-in dd').textContent === 'operator cancelled'"
            )
            record = await page.gateway.logged("exchange", lambda line: line["exchange_id"] == identity)
            assert (record["outcome"], record["phase"]) == ("operator_cancelled", "after_content")
            await browser.wait_until(tile("Waiting", str(WAITING - 1)))
            await browser.wait_until(tile("Running", str(WORKERS * SLOTS)))
            assert sum(engine.statistics().requests for engine in page.engines) == WORKERS * SLOTS + 1
            await browser.run("document.getElementById('sheet').close()")
            await page.click("#states button", "All")
            await page.click("#order")

            # A worker and a tenant are taken out; it is to be seen at once.
            await page.click("#worker-list li:last-child button.act")
            assert await page.confirm() == "Done: drain the worker."
            await page.click("#tenant-list li:last-child button.act")
            assert await page.confirm() == "Done: freeze the tenant."
            for kind, chip in (("worker", "drained"), ("tenant", "frozen")):
                shown = f"document.querySelector('#{kind}-list .chip')?.textContent"
                await browser.wait_until(f"{shown} === arguments[0]", chip)
            await page.expect_quiet()

            # It looks right, on every screen and in every light.
            await browser.run(
                "document.activeElement.blur(); document.getElementById('news').textContent = ''"
            )
            # The pointer goes out of the rows.
            await browser.command("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
            for name, width, height, rows in (("phone", 390, 844, 10), ("desktop", 1440, 900, 50)):
                for scheme in SCHEMES:
                    await browser.resize(width, height, scheme)
                    shown = "document.querySelectorAll('#body tr').length"
                    await browser.wait_until(f"{shown} === arguments[0]", rows)
                    assert (name, scheme, await complaints_of(browser)) == (name, scheme, [])
                    await page.picture(pictures, f"dashboard-{name}-{scheme}")
            assert not await unnamed(browser)


async def test_the_gateway_comes_back_and_the_page_with_it(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT):
        async with open_browser(tmp_path) as browser:
            admin = {"bind": ["127.0.0.1:0"]}
            async with process_serving(folder=tmp_path, admin=admin, workers=[], models=[]) as gateway:
                address = admin_address(gateway)
                assert isinstance(address, tuple)
                page = Dashboard(browser, url_of(address))
                await browser.open(page.url)
                await browser.wait_text("state", "^live$|^not ready$")
                await browser.run("document.getElementById('state').textContent = ''")
            await browser.wait_text("state", "no live figures")
            admin["bind"] = ["{}:{}".format(*address)]
            async with process_serving(folder=tmp_path, admin=admin, workers=[], models=[]):
                await browser.wait_text("state", "^live$|^not ready$")
