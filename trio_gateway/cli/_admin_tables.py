"""What the operators' door answers, as tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import typer

NOTHING: Final = "-"

# Columns by name of what is read: paths into a row, with dots; the last part is the heading.
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "requests": (
        "id",
        "tenant",
        "model",
        "tier",
        "state",
        "phase",
        "outcome",
        "position",
        "eta",
        "why",
        "age",
        "worker",
        "attempt",
        "lag",
        "buffered_bytes",
        "tokens.generated",
    ),
    "tenants": (
        "id",
        "frozen",
        "weight",
        "running",
        "queued",
        "max_concurrency",
        "max_queued",
        "counter",
        "requests_per_minute.remaining",
        "tokens_per_minute.remaining",
    ),
    "pools": ("pool", "models", "slots", "held", "draining", "pace", "tiers", "oldest_wait"),
    "workers": (
        "id",
        "kind",
        "slots",
        "held",
        "draining",
        "free",
        "ready",
        "alive",
        "breakers",
        "operator",
        "snapshot_age",
        "models",
    ),
    "endings": ("id", "outcome", "phase", "code", "tenant", "model", "worker", "ended_ago", "duration"),
    "audit": ("at", "actor", "action", "target", "outcome", "before", "after"),
    "timeline": ("at", "what", "detail"),
    "leaks": ("kind", "holder", "worker", "age", "detail"),
    "limits": ("name", "value", "source", "applies"),
}


def print_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print a line for each row, below one of headings; columns are as wide as what is longest in them.

    Rows of several processes say of which they are.
    """
    rows = list(rows)
    if any("process" in row for row in rows):
        columns = (*columns, "process")
    headings = tuple(column.replace(".", " ") for column in columns)
    cells = [headings, *(tuple(shown(_at(row, column)) for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(padded).rstrip())


def print_members(value: Mapping[str, Any]) -> None:
    """Print an object as two columns, its inner ones under names with dots."""
    print_rows([{"name": name, "value": inner} for name, inner in flat(value)], ("name", "value"))


def print_tree(groups: Iterable[Mapping[str, Any]]) -> None:
    """Print tasks below their exchange, each with what it does."""
    for group in groups:
        typer.echo(f"exchange {shown(group['exchange'])}" if group["exchange"] else "no exchange")
        for task in group["tasks"]:
            _print_task(task, "  ")


def flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Answer the members of an object and of those inside it, by names with dots."""
    found: list[tuple[str, Any]] = []
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            found += flat(inner, f"{prefix}{name}.")
        else:
            found.append((prefix + name, inner))
    return found


def shown(value: Any) -> str:
    """Write one value for people. What a client chose can not move the cursor: JSON escapes it."""
    if value is None or (isinstance(value, str | list | dict) and not value):
        return NOTHING
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3f}".rstrip("0").rstrip(".")
        case dict():
            return " ".join(f"{name}={shown(inner)}" for name, inner in value.items())
        case list():
            return ", ".join(map(shown, value))
        case str():
            return value if value.isprintable() else json.dumps(value)
    return str(value)


def _print_task(task: Mapping[str, Any], indent: str) -> None:
    typer.echo(f"{indent}{shown(task['name'])}: {shown(task['doing'])}")
    for child in task["children"]:
        _print_task(child, indent + "  ")


def _at(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
