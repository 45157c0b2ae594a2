"""The address of a database, whose password nobody is shown."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

_SQLITE: Final = "sqlite:///"
_POSTGRESQL: Final = "postgresql+psycopg://"
# user:password@ of RFC 3986; the last @ before the path ends it, since some people do not escape theirs.
_PASSWORD: Final = re.compile(r"(?<=://)([^:@/?]*):[^/?]*@")
_QUERY_PASSWORD: Final = re.compile(r"(?<=[?&])(password=)[^&]*")


@dataclass(frozen=True, slots=True)
class DatabaseUrl:
    """A URL as SQLAlchemy reads it. ``str()`` and ``repr()`` hide the password.

    Attributes:
        value: the whole of it.
    """

    value: str = field(repr=False)

    def within(self, folder: Path) -> DatabaseUrl:
        """Let a relative path of a file count from a folder."""
        if not self.value.startswith(_SQLITE):
            return self
        path, mark, query = self.value.removeprefix(_SQLITE).partition("?")
        return DatabaseUrl(f"{_SQLITE}{folder / path}{mark}{query}")

    def __str__(self) -> str:
        hidden = _PASSWORD.sub(r"\1:***@", self.value)
        return _QUERY_PASSWORD.sub(r"\1***", hidden)


def parse_database_url(text: str) -> DatabaseUrl:
    """Read ``sqlite:///file`` or ``postgresql+psycopg://user@host/name``.

    Raises:
        ValueError: neither, or what it needs is not installed. The message does not repeat the URL.
    """
    if text.startswith(_SQLITE):
        path = text.removeprefix(_SQLITE).partition("?")[0]
        if path in ("", ":memory:") or path.endswith("/"):
            raise ValueError("must name a file: records in memory are lost with the process")
        return DatabaseUrl(text)
    if not text.startswith(_POSTGRESQL):
        raise ValueError(f'must begin with "{_SQLITE}" or "{_POSTGRESQL}"')
    rest = text.removeprefix(_POSTGRESQL)
    port = re.fullmatch(r"(?:[^/?]*@)?(?:\[[^]]*\]|[^:/?@]*)(?::([^/?@]*))?(?:[/?].*)?", rest)
    if port is None or (port[1] is not None and not port[1].isdecimal()):
        raise ValueError("has no host or a port that is no number")
    if any(not character.isprintable() or character == " " for character in unquote(rest)):
        raise ValueError("has a blank or another character that must be percent-encoded")
    if importlib.util.find_spec("psycopg") is None:
        raise ValueError("needs the package psycopg: install trio-gateway[postgres]")
    return DatabaseUrl(text)
