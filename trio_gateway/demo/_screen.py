"""What the demo shows: colours and a spinner at a terminal, plain lines anywhere else."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text


class Screen:
    """Writes to standard output, and errors to standard error."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # models say more than ASCII, whatever the locale
        self._out = Console(highlight=False)
        self._err = Console(stderr=True, highlight=False)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that something is under way for the length of the block."""
        if self._out.is_terminal:
            with self._out.status(what):
                yield
        else:
            self._out.print(f"{what} ...", soft_wrap=True)
            yield

    def done(self, what: str) -> None:
        """Show that a step has succeeded."""
        self._out.print(Text.assemble(("✓ ", "green"), what), soft_wrap=True)

    def heading(self, text: str) -> None:
        """Begin a part."""
        self._out.print()
        self._out.print(Text(text, "bold"), soft_wrap=True)

    def line(self, text: str = "") -> None:
        """Write one line as it is."""
        self._out.print(Text(text), soft_wrap=True)

    def token(self, text: str) -> None:
        """Write a piece of the answer, at once and without a line end."""
        self._out.print(Text(text), end="", soft_wrap=True)
        self._out.file.flush()

    def json(self, value: dict[str, Any]) -> None:
        """Write an object, one member a line."""
        self._out.print_json(json.dumps(value), highlight=self._out.is_terminal)

    def error(self, message: str, details: str = "") -> None:
        """Tell what went wrong."""
        self._err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
        if details:
            self._err.print(Text(details, "dim"), soft_wrap=True)
