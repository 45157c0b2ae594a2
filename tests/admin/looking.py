"""What a careful eye would see of a page, as a script.

It complains of what overlaps, runs out of its place, or is hard to read or to hit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.e2e.browser import Browser

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
