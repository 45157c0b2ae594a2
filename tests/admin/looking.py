"""The dashboard in a browser, and what a careful eye would see of it, as a script.

The eye complains of what overlaps, runs out of its place, or is hard to read or to hit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.e2e.browser import Browser
from trio_gateway.testing import Address

ENTER: Final = "\ue007"

_LOOK: Final = Path(__file__).with_suffix(".js").read_text("utf-8")


async def complaints_of(browser: Browser, selector: str | None = None) -> list[str]:
    """Answer what is wrong to see of an element and all within it; None: of the page."""
    await browser.run("scrollTo(0, 0)")
    found: list[str] = await browser.run(_LOOK, selector)
    return found


_CONTROLS: Final = {
    "button",
    "textbox",
    "searchbox",
    "combobox",
    "link",
    "dialog",
    "table",
    "region",
    "navigation",
}


async def unnamed(browser: Browser) -> list[str]:
    """Answer the roles of whatever a screen reader would have no name for."""
    tree = await browser.command("Accessibility.getFullAXTree")
    return [
        role
        for node in tree["nodes"]
        if not node.get("ignored")
        and (role := value_of(node, "role")) in _CONTROLS
        and not value_of(node, "name").strip()
    ]


def value_of(node: dict[str, Any], member: str) -> str:
    """Answer what the tree says of a node."""
    return str(node.get(member, {}).get("value", ""))


def url_of(address: Address) -> str:
    """Where the page of a listener is."""
    assert isinstance(address, tuple)
    return "http://{}:{}/".format(*address)


@dataclass(frozen=True)
class Dashboard:
    """The page in a browser that records."""

    browser: Browser
    url: str

    async def open(self, secret: str | None = None) -> None:
        """Load the page, show a token if one is asked for, and wait until figures come."""
        await self.browser.open(self.url)
        if secret is not None:
            await self.browser.wait_until("document.getElementById('token').open")
            await self.browser.fill("token-in", secret)
            await self.browser.press(ENTER)
        await self.browser.wait_text("state", "^live$")
        await self.browser.wait_until(
            "document.querySelector('#body tr') && document.querySelector('#tenant-list li')"
        )

    async def click(self, selector: str, text: str | None = None) -> None:
        """Click on the first visible element that fits, with this text if one is given."""
        script = """
            const [selector, text] = arguments;
            const found = [...document.querySelectorAll(selector)]
              .find((each) => each.checkVisibility() && (text === null || each.textContent === text));
            if (!found) throw new Error(`no ${selector} ${text}`);
            found.focus();
            found.click();
        """
        await self.browser.run(script, selector, text)

    async def confirm(self, value: str | None = None) -> str:
        """Say yes to what is asked, and answer what is told then."""
        await self.browser.wait_until("document.getElementById('confirm').open")
        if value is not None:
            field = "document.querySelector('#confirm-in input, #confirm-in select')"
            await self.browser.run(f"{field}.value = arguments[0]", value)
        await self.browser.run("document.getElementById('news').textContent = ''")
        await self.browser.click("confirm-yes")
        await self.browser.wait_until("!document.getElementById('confirm').open")
        return (await self.browser.wait_text("news", ".")).string

    async def expect_quiet(self) -> None:
        """Fail if the page had an error or warning, or if anything was asked of another host."""
        noted = await self.browser.logged("browser")
        assert not [entry for entry in noted if entry["level"] in ("SEVERE", "WARNING")]
        messages = [
            json.loads(entry["message"])["message"] for entry in await self.browser.logged("performance")
        ]
        asked = [_asked_for(message) for message in messages if message["method"] in _ASKING]
        assert asked
        ours = (self.url, "data:", "blob:", "chrome:", "about:")
        assert not [url for url in asked if not url.startswith(ours)]


_ASKING: Final = {"Network.requestWillBeSent", "Network.webSocketCreated", "Network.webTransportCreated"}


def _asked_for(message: dict[str, Any]) -> str:
    parameters = message["params"]
    return str(parameters.get("request", parameters)["url"])
