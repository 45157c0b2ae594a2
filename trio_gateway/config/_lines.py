"""Where each key of a TOML document stands. Sans-IO: text in, line numbers out.

`tomllib` answers values without their places, and an error message without a line sends people searching.
This scanner walks a document that `tomllib` has already accepted, so it judges nothing: it follows the
grammar just closely enough to know which key, table or list element begins on which line. Its paths are
those of the parsed document, so ``[[workers]]`` counts as ``("workers", 0)``, ``("workers", 1)``, ...
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from typing import Final

from trio_gateway.config._problems import Path

_BLANK: Final = re.compile(r"(?:[ \t\n\r]|#[^\n]*)*")
_SPACE: Final = re.compile(r"[ \t]*")
# The multi-line forms come first, since they begin like the others. Up to two quotes may stand directly
# before the closing three (https://toml.io/en/v1.0.0#string).
_STRING: Final = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}'
    r"|'''(?:[^']|'(?!''))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR: Final = re.compile(r"[^,\]}\n#]+")  # numbers, booleans, dates: all that has no quotes


def find_lines(text: str) -> dict[Path, int]:
    """Map the path of every key, table and list element to the line, from 1, on which it is first named.

    Args:
        text: a document that `tomllib.loads` accepts.

    Raises:
        ValueError: `text` is no such document.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


def read_key(text: str) -> tuple[tuple[str, ...], str]:
    """Read one dotted key from the start of `text`.

    Returns:
        The key's parts, and what follows it.

    Raises:
        ValueError: `text` does not begin with a key.
    """
    scanner = _Scanner(text)
    return scanner.key(), text[scanner.at :]


class _Scanner:
    """A position in a document, and the lines that were found up to it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._sizes: dict[Path, int] = {}  # tables that each [[array]] has so far

    def document(self) -> None:
        """Walk the whole text: headers, and pairs below the header that was last seen."""
        table: Path = ()
        while self._skip_blank() < len(self.text):
            if self._peek("["):
                table = self._header()
            else:
                self._pair(table)

    def key(self) -> tuple[str, ...]:
        """Take a key, dotted or not, with the blanks after it."""
        parts = [self._key_part()]
        while self._take_if("."):
            parts.append(self._key_part())
        return tuple(parts)

    def _header(self) -> Path:
        line = self._line()
        opening, closing = ("[[", "]]") if self._peek("[[") else ("[", "]")
        self._take(opening)
        path = self._resolve(self.key(), line, appends=opening == "[[")
        self._take(closing)
        return path

    def _resolve(self, key: tuple[str, ...], line: int, *, appends: bool) -> Path:
        """Turn a header's key into a path: a step through an array of tables means its last table."""
        path: Path = ()
        for index, part in enumerate(key):
            path = (*path, part)
            self._note(path, line)
            if appends and index == len(key) - 1:
                self._sizes[path] = self._sizes.get(path, 0) + 1
            if path in self._sizes:
                path = (*path, self._sizes[path] - 1)
                self._note(path, line)
        return path

    def _pair(self, table: Path) -> None:
        line = self._line()
        path = table
        for part in self.key():
            path = (*path, part)
            self._note(path, line)
        self._take("=")
        self._value(path)

    def _value(self, path: Path) -> None:
        self._skip(_SPACE)
        if self._take_if("["):
            self._elements(path)
        elif self._take_if("{"):
            self._inline_table(path)
        elif self._skip(_STRING) is None and self._skip(_SCALAR) is None:
            raise ValueError(f"no value in line {self._line()}")

    def _elements(self, path: Path) -> None:
        index = 0
        while not self._closes("]"):
            self._note((*path, index), self._line())
            self._value((*path, index))
            self._skip_blank()
            self._take_if(",")
            index += 1

    def _inline_table(self, path: Path) -> None:
        while not self._closes("}"):
            self._pair(path)
            self._skip_blank()
            self._take_if(",")

    def _key_part(self) -> str:
        self._skip(_SPACE)
        start = self.at
        if self._skip(_BARE_KEY) is not None:
            part: str = self.text[start : self.at]
        elif self._skip(_STRING) is not None:
            part = tomllib.loads("_ = " + self.text[start : self.at])["_"]
        else:
            raise ValueError(f"no key in line {self._line()}")
        self._skip(_SPACE)
        return part

    # Small steps --------------------------------------------------------------------------------

    def _note(self, path: Path, line: int) -> None:
        self.lines.setdefault(path, line)

    def _line(self) -> int:
        return bisect_right(self._starts, self.at)

    def _peek(self, token: str) -> bool:
        return self.text.startswith(token, self.at)

    def _take_if(self, token: str) -> bool:
        found = self._peek(token)
        if found:
            self.at += len(token)
        return found

    def _take(self, token: str) -> None:
        if not self._take_if(token):
            raise ValueError(f"no {token!r} in line {self._line()}")

    def _closes(self, token: str) -> bool:
        """Whether an array or inline table ends here, after blanks and comments."""
        self._skip_blank()
        return self._take_if(token)

    def _skip_blank(self) -> int:
        self._skip(_BLANK)
        return self.at

    def _skip(self, pattern: re.Pattern[str]) -> int | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return self.at
