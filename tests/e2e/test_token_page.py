"""The page of the documentation, in a real browser before a real gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.docs.pages import DOCS
from tests.e2e.browser import Browser, open_browser, open_origin
from tests.e2e.cutting import Network, Plan, network_to
from tests.e2e.serving import Serving, serving, tenant
from trio_gateway.testing import (
    Repeat,
    Script,
    ScriptedEngine,
    Step,
    Wait,
    chat_chunk,
    chat_stream,
    open_engine,
)

PAGE: Final = DOCS / "examples" / "tokens.html"
KEY: Final = "tg_acme_0123456789abcdef0123456789abcdef"
WORDS: Final = [f"w{number} <b>&amp; \N{SNOWMAN} " for number in range(60)]
TEXT: Final = "".join(WORDS)
LIMIT: Final = 60.0  # seconds; a browser takes its time to start

pytestmark = pytest.mark.slow


def paced(*texts: str, every: float = 0.005) -> Script:
    """A whole answer whose tokens do not come all at once."""
    script: list[Step] = []
    for step in chat_stream(*texts):
        script += [step, Wait(every)]
    return tuple(script)


@dataclass(frozen=True)
class Shown:
    """The page, loaded, and what stands behind it."""

    browser: Browser
    engine: ScriptedEngine
    gateway: Serving
    network: Network

    async def ask(self, *, key: str = KEY, credit: int = 8) -> None:
        """Fill in the form and send it."""
        fields = {
            "url": self.network.url.replace("http", "ws"),
            "key": key,
            "model": "m1",
            "prompt": "x",
            "credit": str(credit),
        }
        for name, text in fields.items():
            await self.browser.fill(name, text)
        await self.browser.click("generate")

    async def counts(self) -> tuple[int, int, int]:
        """Pieces, tokens and losses that the page tells."""
        told = await self.browser.text("counts")
        pieces, tokens, losses = (int(part.split()[0]) for part in told.split(", "))
        return pieces, tokens, losses


@asynccontextmanager
async def showing(browser: Browser, *scripts: Script, allowed: str | None = None) -> AsyncIterator[Shown]:
    """Load the page in a browser; ``allowed``: the one origin that may open sockets, None: the page's."""
    async with open_origin() as origin, open_engine(*scripts) as engine:
        sections: dict[str, Any] = {
            "server": {"bind": ["127.0.0.1:0"], "cors_origins": [allowed or origin.url]},
            "tenants": [tenant("acme", KEY)],
            "delivery": {"resume_window": 1.0},
        }
        async with serving(engine, **sections) as gateway:
            assert isinstance(gateway.address, tuple)
            async with network_to(gateway.address) as network, origin.serving(PAGE.read_bytes()):
                await browser.open(origin.url)
                yield Shown(browser, engine, gateway, network)
                await browser.open("about:blank")


def cut_behind(*seqs: int) -> Plan:
    """Cut the first connection behind the first of these deltas, the second behind the second, and so on."""

    def plan(number: int, came: bytes) -> int | None:
        if number > len(seqs):
            return None
        found = came.find(b'"seq":%d,' % seqs[number - 1])
        return None if found < 0 else found + 7

    return plan


async def test_the_page_shows_the_whole_answer_though_its_connection_is_lost_again_and_again(
    tmp_path: Path,
) -> None:
    with trio.fail_after(LIMIT):
        async with open_browser(tmp_path) as browser, showing(browser, paced(*WORDS)) as page:
            page.network.plan = cut_behind(1, 20, 45)
            await page.ask()
            await page.browser.wait_text("status", "^(Done|Failed)")
            assert await page.browser.text("status") == "Done: stop."
            assert await page.browser.text("answer") == TEXT
            assert await page.counts() == (len(WORDS) + 2, len(WORDS), 3)
            assert page.network.connections == 4
            record = await page.gateway.settled()
            assert (record.outcome, record.tokens_acknowledged) == ("completed", len(WORDS))
            assert len(page.gateway.records) == 1


async def test_cancelling_ends_the_stream_and_what_was_shown_is_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    more = Repeat((chat_chunk({"content": "more "}),), every=0.005)
    endless = (*chat_stream("one ", finish=None, done=False, end=False), more)
    with trio.fail_after(LIMIT):
        async with open_browser(tmp_path) as browser, showing(browser, endless, paced(*WORDS)) as page:
            await page.ask()
            await page.browser.wait_text("counts", r"^[3-9]\d pieces")
            await page.browser.click("cancel")
            await page.browser.wait_text("status", "^Cancelled")
            _, tokens, _ = await page.counts()
            record = await page.gateway.settled()
            assert (record.outcome, record.tokens_acknowledged) == ("client_cancelled", tokens)
            assert (await page.browser.text("answer")).startswith("one more more ")
            await page.browser.click("generate")  # and it can be asked again
            await page.browser.wait_text("status", "^Done")
            assert await page.browser.text("answer") == TEXT


async def test_a_page_that_shows_nothing_takes_no_more_than_its_credit(tmp_path: Path) -> None:
    hold = "window.held = []; window.requestAnimationFrame = (paint) => window.held.push(paint);"
    let_go = """
        window.requestAnimationFrame = (paint) => setTimeout(paint, 5);
        for (const paint of window.held) paint();
    """
    with trio.fail_after(LIMIT):
        async with open_browser(tmp_path) as browser, showing(browser, chat_stream(*WORDS)) as page:
            await page.browser.run(hold)
            await page.ask(credit=5)
            await page.browser.wait_text("status", "^Answered")
            # The gateway has the whole answer, and what it may send of it has been sent.
            await page.gateway.until(lambda: page.engine.statistics().open_requests == 0)
            await page.gateway.until(lambda: b'"seq":5,' in page.network.last)
            await page.browser.run("return 'time has passed'")
            assert b'"seq":6,' not in page.network.last
            await page.browser.run(let_go)
            await page.browser.wait_text("status", "^Done")
            assert await page.browser.text("answer") == TEXT


REFUSED: Final = (
    ("tg_wrong", None, 1006),  # browsers do not tell pages why a handshake was refused
    ("wrong key", None, 4401),  # no name of a subprotocol: the first message has it
    (KEY, "https://other.example", 1006),
)


async def test_what_the_gateway_refuses_is_told(tmp_path: Path) -> None:
    # Attempts go on for half a minute: let it be short.
    hurry = "const now = performance.now.bind(performance); performance.now = () => now() * 100;"
    with trio.fail_after(LIMIT):
        async with open_browser(tmp_path) as browser:
            for key, allowed, code in REFUSED:
                async with showing(browser, allowed=allowed) as page:
                    await browser.run(hurry)
                    await page.ask(key=key)
                    found = await browser.wait_text("status", r"^Failed: .* \(closed_(\d+)\)")
                    assert int(found[1]) == code


def test_the_page_needs_no_other_host() -> None:
    text = PAGE.read_text("utf-8")
    assert "://" in text
    assert not [word for word in text.split() if "http://" in word or "https://" in word or "//cdn" in word]
