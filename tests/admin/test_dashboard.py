"""The dashboard in a real browser, before a process that is played."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.admin.door import OPERATOR, TOKENS, VIEWER, Door, door
from tests.admin.looking import ENTER, Dashboard, complaints_of, unnamed, url_of
from tests.e2e.browser import Scheme, open_browser
from trio_gateway.admin import DASHBOARD_PAGES, dashboard_page, refusal
from trio_gateway.admin._feed import Feed, FeedAnswer
from trio_gateway.testing import request_row, until

LIMIT: Final = 90.0  # seconds; a browser takes its time to start
SCHEMES: Final[tuple[Scheme, ...]] = ("light", "dark")
MOST_BYTES: Final = 60_000
PAGE: Final = DASHBOARD_PAGES["/"]
BACKSPACE: Final = "\ue003"
ESCAPE: Final = "\ue00c"
TAB: Final = "\ue004"
NASTY: Final = "<img src=x onerror=\"document.title='taken'\">&amp;\u202e\u2028`${alert(1)}`"

# Without a browser ------------------------------------------------------------------------------------------


async def test_the_page_comes_without_a_token_in_one_small_answer_that_nothing_may_be_added_to() -> None:
    async with door(pages=DASHBOARD_PAGES) as opened:
        answer = await opened.ask("GET", "/")
        assert (answer.status, answer.header("content-type")) == (200, "text/html; charset=utf-8")
        assert answer.header("content-security-policy") == PAGE.policy
        assert len(answer.body) + 2_000 < MOST_BYTES  # its head is far smaller than that
        head = await opened.ask("HEAD", "/")
        assert (head.status, head.body) == (200, b"")


def test_the_policy_names_the_one_script_and_the_one_style_and_allows_nothing_else() -> None:
    policy = dict(part.split(" ", 1) for part in PAGE.policy.split("; "))
    for kind in ("script", "style"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>".encode(), PAGE.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert "unsafe" not in PAGE.policy


def test_the_page_names_no_other_host_and_has_no_handler_or_style_in_its_markup() -> None:
    markup = re.sub(rb"<(script|style)>.*?</\1>", b"", PAGE.body, flags=re.DOTALL)
    assert not re.findall(rb"\son\w+=|\sstyle=|\ssrc=", markup)
    elsewhere = set(re.findall(rb"https?://[^\"'\s]+", PAGE.body))
    assert elsewhere == {b"http://www.w3.org/2000/svg"}  # a name, not a place


def test_what_is_for_readers_of_the_file_is_left_out_and_what_is_said_is_not() -> None:
    style = b"<style>\n  a { b: c }\n</style>\n"
    script = b"<script>\n// why\nf('// x');\n    // more\n  g(1); // end\n</script>\n"
    page = dashboard_page(style + script).body
    assert page == b"<style>\na { b: c }\n</style>\n<script>\nf('// x');\ng(1); // end\n</script>\n"


# With one ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown(Dashboard):
    """The page, and the process that is played."""

    door: Door

    @property
    def acts(self) -> list[tuple[str, str | None, dict[str, Any]]]:
        """What reached the process."""
        return [(action, target, arguments) for _, action, target, arguments in self.door.port.acts]


@asynccontextmanager
async def showing(folder: Path, *, tokens: bool = False) -> AsyncIterator[Shown]:
    """Open a browser and a door for the length of the block.

    No error may come up in the page, and nothing may be asked of another host.
    """
    async with (
        door(pages=DASHBOARD_PAGES, tokens=TOKENS if tokens else ()) as opened,
        open_browser(folder, recording=True) as browser,
    ):
        shown = Shown(browser, url_of(opened.address), opened)
        yield shown
        await shown.expect_quiet()
        assert not opened.bugs


@pytest.mark.slow
async def test_nothing_overlaps_or_runs_over_and_everything_has_contrast_and_a_name(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT):
        async with showing(tmp_path) as page:
            page.door.port.rows = [awkward(number) for number in range(120)]
            for width, height in ((390, 844), (820, 1100), (1440, 900)):
                for scheme in SCHEMES:
                    await page.browser.resize(width, height, scheme)
                    await page.open()
                    where = (width, scheme)
                    assert (where, await complaints_of(page.browser)) == (where, [])
                    for name, opener in SHEETS.items():
                        await page.click(*opener)
                        await page.browser.wait_until(
                            "document.querySelector('#sheet-in dd, #sheet-in tbody td')?.checkVisibility()"
                        )
                        assert (where, name, await complaints_of(page.browser, "#sheet")) == (where, name, [])
                        assert not await unnamed(page.browser)
                        await page.browser.press(ESCAPE)
                    await page.click("#level")
                    assert (where, await complaints_of(page.browser, "#confirm")) == (where, [])
                    await page.browser.press(ESCAPE)
                    assert not await unnamed(page.browser)


SHEETS: Final = {
    "worker": ("#worker-list .link",),
    "tenant": ("#tenant-list .link",),
    "request": ("#rows .link",),
    "limits": ("#limits",),
}


def awkward(number: int) -> dict[str, Any]:
    """Make a row with long words."""
    row = {
        **request_row(number),
        "id": f"{number:08x}" * 4,
        "model": "organisation/some-model-with-a-long-name-70B-Instruct",
    }
    if number % 7 == 1:
        row |= {
            "stalled_for": 4000.0,
            "lag": 4000.0,
            "buffered_bytes": 262_144,
            "age": 90_000.0,
            "attempt": 3,
        }
    if number % 3 == 0:
        row |= {
            "tenant": "an-organisation-with-a-name-that-nobody-can-say",
            "position": 1000 + number,
            "eta": 4000.0,
            "why": "tenant_at_concurrency",
        }
    return row


@pytest.mark.slow
async def test_a_viewer_sees_everything_and_is_offered_nothing_to_do(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT):
        async with showing(tmp_path, tokens=True) as page:
            await page.open(VIEWER)
            assert await page.browser.text("who") == "eyes (viewer)"
            visible = "filter((each) => each.checkVisibility()).length"
            offered = f"return [...document.querySelectorAll('.act')].{visible}"
            assert await page.browser.run(offered) == 0
            await page.click("#worker-list .link")
            await page.browser.wait_until("document.querySelector('#sheet-in dd')")
            assert await page.browser.run(offered) == 0
            await page.browser.press(ESCAPE)
            await page.click("#limits")
            await page.browser.wait_until("document.querySelector('#sheet-in tbody td')?.textContent")
            assert await page.browser.run("return document.querySelectorAll('#sheet-in .link').length") == 0
            await page.open()  # the tab knows the token as long as it is open
            assert await page.browser.run("return document.getElementById('token').open") is False
    assert not page.acts


@pytest.mark.slow
async def test_every_action_is_asked_back_and_reaches_the_process_once(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT):
        async with showing(tmp_path, tokens=True) as page:
            await page.open(OPERATOR)
            first = page.door.port.rows[0]["id"]
            for opener, button, value, done in ACTIONS:
                await page.click(*opener)
                if button is not None:
                    await page.browser.wait_until(
                        "document.querySelector('#sheet-in dd, #sheet-in tbody td')"
                    )
                    selector = "#sheet-in .link" if button == "1024" else "#sheet-in button"
                    named = "some((one) => one.textContent === arguments[1])"
                    shown = f"[...document.querySelectorAll(arguments[0])].{named}"
                    await page.browser.wait_until(shown, selector, button)
                    await page.click(selector, button)
                assert page.acts == []
                assert (await page.confirm(value)).startswith("Done: ")
                action, target, arguments = done
                assert page.acts == [
                    (action, target or (first if action == "requests.cancel" else None), arguments)
                ]
                page.door.port.acts.clear()
                await page.browser.run("document.getElementById('sheet').close()")


WORKER: Final = ("#worker-list .link",)
TENANT: Final = ("#tenant-list .link",)
# What is clicked, what then in the sheet that comes up, what is filled in, and what is done.
ACTIONS: Final[
    tuple[tuple[tuple[str, ...], str | None, str | None, tuple[str, str | None, dict[str, Any]]], ...]
] = (
    (("#rows button", "Cancel"), None, None, ("requests.cancel", None, {})),
    (("#rows .link",), "Cancel it", None, ("requests.cancel", None, {})),
    (("#worker-list button", "Drain"), None, None, ("workers.drain", "w1", {})),
    (WORKER, "Eject", None, ("workers.eject", "w1", {})),
    (WORKER, "Reset breakers", None, ("breakers.reset", "w1", {})),
    (WORKER, "open", None, ("breakers.force", "w1", {"model": "m1", "state": "open"})),
    (WORKER, "reset", None, ("breakers.reset", "w1", {"model": "m1"})),
    (("#tenant-list button", "Freeze"), None, None, ("tenants.freeze", "acme", {})),
    (TENANT, "Thaw", None, ("tenants.thaw", "acme", {})),
    (TENANT, "Cancel all its requests", None, ("tenants.cancel", "acme", {})),
    (("#limits",), "1024", "200", ("limits.set", None, {"set": {"admission.max_queued": 200}})),
    (("#limits",), "1024", "4 MiB", ("limits.set", None, {"set": {"admission.max_queued": "4 MiB"}})),
    (("#reload",), None, None, ("reload", None, {})),
    (("#level",), None, "debug", ("log_level.set", None, {"level": "debug"})),
)


@pytest.mark.slow
async def test_what_clients_call_themselves_is_text_whatever_it_is(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT):
        async with showing(tmp_path) as page:
            names = {
                "tenant": NASTY,
                "model": NASTY,
                "worker": NASTY,
                "client_request_id": NASTY,
                "key_id": NASTY,
            }
            page.door.port.rows = [{**request_row(1), **names}]
            await page.open()
            cell = "return document.querySelector('#rows td.model').firstChild.textContent"
            assert await page.browser.run(cell) == NASTY
            await page.click("#rows .link")
            await page.browser.wait_until("document.querySelector('#sheet-in dd')")
            assert NASTY in await page.browser.text("sheet-in")
            assert await page.browser.run("return document.querySelectorAll('img').length") == 0
            assert await page.browser.run("return document.title") != "taken"


@pytest.mark.slow
async def test_who_can_not_follow_the_feed_sees_figures_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(feed: Feed) -> FeedAnswer:
        raise refusal("feed_limit_reached", "16 feeds are open", retry_after=1.0)

    monkeypatch.setattr(Feed, "answer", full)
    running = "document.getElementById('tiles').textContent.includes('Running3')"
    with trio.fail_after(LIMIT):
        async with door(pages=DASHBOARD_PAGES, tokens=()) as opened, open_browser(tmp_path) as browser:
            await browser.open(url_of(opened.address))
            await browser.wait_text("state", "^too many feeds$")
            await browser.wait_until(running)
            seen = opened.port.snapshots
            await until(lambda: opened.port.snapshots >= seen + 2)


@pytest.mark.slow
async def test_rows_are_found_paged_and_turned_around_by_keyboard(tmp_path: Path) -> None:
    first = "document.querySelector('#body tr')?.dataset.key"
    with trio.fail_after(LIMIT):
        async with showing(tmp_path) as page:
            page.door.port.rows = [request_row(number) for number in range(120)]
            await page.browser.resize(1440, 900)
            await page.open()
            await page.browser.press("/", *"nant-3")
            await page.browser.wait_text("range", "^1\N{EN DASH}24 of 24$")
            assert await page.browser.run(f"return {first}") == f"{3:032x}"
            await page.browser.press(*BACKSPACE * 6)
            await page.browser.wait_text("range", "^1\N{EN DASH}50 of 120$")
            await page.click("#next")
            await page.browser.wait_text("range", "^51\N{EN DASH}100 of 120$")
            await page.click("#next")
            await page.browser.wait_text("range", "^101\N{EN DASH}120 of 120$")
            await page.browser.wait_until(f"{first} === arguments[0]", f"{100:032x}")
            await page.click("#states button", "Waiting")
            await page.browser.wait_text("range", "^1\N{EN DASH}40 of 40$")
            await page.click("#order")
            await page.browser.wait_until(f"{first} === arguments[0]", f"{117:032x}")
            await page.click("#states button", "All")
            await page.browser.wait_text("range", "^1\N{EN DASH}50 of 120$")
            await page.click("#next")
            await page.click("#next")
            await page.browser.wait_until(
                f"{first} === arguments[0]", f"{59:032x}"
            )  # those that ended are last
            assert await page.browser.run("return document.querySelectorAll('#body tr').length") == 20
            await page.click("#worker-list .link")
            await page.click("#sheet-in button", "Show its requests")
            at_w1 = "every((one) => one.textContent.startsWith('w1'))"
            await page.browser.wait_until(f"[...document.querySelectorAll('#body .where')].{at_w1}")


@pytest.mark.slow
async def test_nothing_is_done_by_escape_and_the_focus_is_where_it_was(tmp_path: Path) -> None:
    focused = "return document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"
    with trio.fail_after(LIMIT):
        async with showing(tmp_path) as page:
            await page.open()
            await page.browser.press(TAB)
            assert (
                await page.browser.run("return document.activeElement.textContent") == "Skip to the requests"
            )
            await page.browser.press(ENTER)
            assert await page.browser.run(focused) == "requests"
            label = f"Cancel request {page.door.port.rows[0]['id']}"
            for _ in range(20):
                if await page.browser.run(focused) == label:
                    break
                await page.browser.press(TAB)
            ring = "return parseFloat(getComputedStyle(document.activeElement).outlineWidth)"
            assert await page.browser.run(ring) >= 2
            await page.browser.press(ENTER)
            await page.browser.wait_until("document.getElementById('confirm').open")
            assert await page.browser.run(focused) == "confirm-no"
            await page.browser.press(ESCAPE)
            assert await page.browser.run("return document.getElementById('confirm').open") is False
            assert await page.browser.run(focused) == label
            assert page.acts == []


@pytest.mark.slow
async def test_rows_stand_still_while_somebody_is_among_them(tmp_path: Path) -> None:
    order = "return [...document.querySelectorAll('#body tr')].map((row) => row.dataset.key)"
    with trio.fail_after(LIMIT):
        async with showing(tmp_path) as page:
            await page.open()
            before = await page.browser.run(order)
            await page.browser.run("document.querySelector('#rows .link').focus()")
            port = page.door.port
            port.rows = [request_row(99), *port.rows[1:]]
            await page.browser.wait_until("document.querySelector('#body tr').classList.contains('gone')")
            assert await page.browser.run(order) == before
            await page.browser.run("document.activeElement.blur()")
            await page.browser.wait_until(
                "document.querySelector('#body tr').dataset.key === arguments[0]", f"{99:032x}"
            )


@pytest.mark.slow
async def test_a_refusal_is_told_where_it_was_asked_and_a_bad_token_is_asked_for_again(
    tmp_path: Path,
) -> None:
    with trio.fail_after(LIMIT):
        async with (
            door(pages=DASHBOARD_PAGES) as opened,
            open_browser(tmp_path) as browser,
        ):
            page = Shown(browser, url_of(opened.address), opened)
            await browser.open(page.url)
            await browser.wait_until("document.getElementById('token').open")
            await browser.fill("token-in", "tg_wrong")
            await browser.press(ENTER)
            await browser.wait_text("token-wrong", "not known")
            await browser.fill("token-in", OPERATOR)
            await browser.press(ENTER)
            await browser.wait_text("state", "^live$")
            await browser.wait_until("document.querySelector('#tenant-list li')")
            opened.port.raises = RuntimeError("a fault")
            await page.click("#reload")
            await browser.wait_until("document.getElementById('confirm').open")
            await browser.click("confirm-yes")
            await browser.wait_text("confirm-wrong", "fault of the gateway")
            assert await browser.run("return document.getElementById('confirm').open")


PLANTED: Final = {
    "overlaps": "document.getElementById('requests-h').style.marginBottom = '-2rem'",
    "boxes of": "document.getElementById('filters').style.marginBottom = '-3rem'",
    "the page is": "document.getElementById('tiles').style.width = '2000px'",
    "leaves the window": "document.getElementById('search').style.marginLeft = '-9rem'",
    "has a contrast": "document.getElementById('range').style.color = 'silver'",
    "is 18 by 18": "Object.assign(document.getElementById('order').style, "
    "{ width: '18px', height: '18px', minHeight: 0, padding: 0, overflow: 'hidden' })",
}


@pytest.mark.slow
async def test_the_eye_sees_what_is_planted(tmp_path: Path) -> None:
    with trio.fail_after(LIMIT):
        async with showing(tmp_path) as page:
            await page.browser.resize(390, 844)
            for complaint, plant in PLANTED.items():
                await page.open()
                await page.browser.run(plant)
                found = await complaints_of(page.browser)
                assert (complaint, [each for each in found if complaint in each]) != (complaint, [])
            await page.browser.run("document.getElementById('order').textContent = ''")
            assert await unnamed(page.browser) == ["button"]
