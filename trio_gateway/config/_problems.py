"""What is wrong with a configuration: every problem, each with the place to look at.

* ``ConfigurationError`` - carries one or more `Problem`, all that were found
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Path = tuple[str | int, ...]
"""Where a value stands in the parsed document: ``("workers", 0, "url")``."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that must be changed before the gateway can start.

    Attributes:
        file: the file as it was named, an environment variable, or a ``--set`` argument.
        line: counted from 1; None where there are no lines.
        key: dotted name of the setting, elements of lists by their id; empty for the file as a whole.
        message: what is wrong and, where it can be told, what to write instead. Never a secret.
    """

    file: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (place, self.key, self.message) if part)


class ConfigurationError(Exception):
    """The configuration cannot be used; ``str()`` lists every problem, one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def dotted(path: Path) -> str:
    """Write a path as TOML writes keys: ``limits.connections``, ``models."a.b".upstream``, ``workers[0]``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + quoted_key(step)
    return text


def quoted_key(key: str) -> str:
    """Write one key as TOML wants it: bare where that is allowed, else in double quotes."""
    return key if _BARE_KEY.fullmatch(key) else quoted(key)


def quoted(text: str) -> str:
    """Write a TOML basic string: quotes, backslashes and everything that does not print are escaped."""
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Answer the known word that `word` was probably meant to be, in whatever case, or None."""
    words = {each.lower(): each for each in sorted(known)}
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    return words[close[0]] if close else None
