"""Usage as text: a table for people, CSV and JSON for programs. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from ._rows import DIMENSIONS, KINDS, UsageRow

FORMATS: Final = ("table", "csv", "json")
COUNTS: Final = ("requests", "completed", "open", "estimated", *KINDS)


def usage_page(rows: Sequence[UsageRow], by: Sequence[str], style: str) -> str:
    """Write usage down, one row a group.

    Args:
        by: the dimensions that the rows are grouped by.
        style: one of `FORMATS`.
    """
    names = [*by, *COUNTS]
    cells = [[*row.group, *(counts_of(row)[name] for name in COUNTS)] for row in rows]
    match style:
        case "json":
            return json.dumps([dict(zip(names, line, strict=True)) for line in cells], indent=2)
        case "csv":
            out = io.StringIO()
            csv.writer(out, lineterminator="\n").writerows([names, *cells])
            return out.getvalue().rstrip("\n")
    return _table(names, len(by), cells)


def counts_of(row: UsageRow) -> dict[str, int]:
    """The numbers of a row, by the names of `COUNTS`."""
    own = {name: getattr(row, name) for name in ("requests", "completed", "open", "estimated")}
    return {**own, **row.tokens}


def _table(names: Sequence[str], words: int, cells: Sequence[Sequence[str | int | None]]) -> str:
    """Words to the left, numbers to the right with their thousands apart."""
    lines = [list(names)]
    lines += [[f"{cell:,}" if isinstance(cell, int) else cell or "-" for cell in row] for row in cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < words else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def parse_dimensions(text: str) -> tuple[str, ...]:
    """Read ``tenant,model``; empty for one sum over all.

    Raises:
        ValueError: one of them is not in `DIMENSIONS`, or named twice.
    """
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    for index, name in enumerate(names):
        if name not in DIMENSIONS:
            raise ValueError(f"{name!r} is none of {', '.join(DIMENSIONS)}")
        if name in names[:index]:
            raise ValueError(f"names {name} twice")
    return names


def parse_moment(text: str) -> float:
    """Read ``2026-11-01`` or ``2026-11-01T12:00+01:00`` as seconds since the epoch; without a zone it is UTC.

    Raises:
        ValueError: neither.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is no date such as 2026-11-01, and no time such as 2026-11-01T12:00"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
