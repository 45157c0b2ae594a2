"""The operators' dashboard: one page, and a policy that lets nothing else into it.

The page holds no data. It asks for a token where one is needed, and reads and acts by the
routes that everyone else uses. Its one script and its one style are named by their digests,
so that the policy allows no other: not one from elsewhere, and none that found its way into
the page. Nothing may be made into markup either ("trusted-types 'none'"), so that what
clients name their requests, models and tenants is text whatever it is.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

from ._app import Page

# What is for readers of the file only: the space before lines, and lines of the script that are comments.
_ASIDE: Final = re.compile(rb"(?<=\n)[ \t]*(?://[^\n]*\n|(?=[^ \t]))")
_PART: Final = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def dashboard_page(text: bytes) -> Page:
    """Make the page of its text, with the strictest policy that it can live with.

    Args:
        text: has no line in a text of the script that begins with a space or ``//``.
    """
    text = _ASIDE.sub(b"", text)
    named: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _PART.findall(text):
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        named[kind.decode()].append(f"'sha256-{digest}'")
    policy = (
        "default-src 'none'",
        f"script-src {' '.join(named['script'])}",
        f"style-src {' '.join(named['style'])}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return Page(text, "text/html; charset=utf-8", "; ".join(policy))


DASHBOARD_PAGES: Final[Mapping[str, Page]] = {
    "/": dashboard_page(files(__package__).joinpath("dashboard.html").read_bytes())
}
