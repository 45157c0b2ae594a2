"""The command that plays a recorded exchange once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ._common import complain

LONGEST_FILE: Final = 16 * 1024 * 1024  # bytes; a recording has some tens of KiB
DIFFERENT: Final = 1  # exit status

_ENDING: Final = (
    "outcome",
    "phase",
    "code",
    "status",
    "attempts",
    "events_delivered",
    "tokens_generated",
    "tokens_delivered",
)


def replay_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `trio-gateway admin flight` saved.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play a recorded exchange against a scripted engine and client, and compare how it ends."""
    from ..testing import Recorded, UnreadableFlight, replay_at_once

    try:
        with file.open("rb") as stream:
            recorded = Recorded(json.loads(stream.read(LONGEST_FILE)))
    except (OSError, ValueError) as error:
        complain(f"{file}: {error}" if isinstance(error, UnreadableFlight | json.JSONDecodeError) else error)
    except RecursionError:
        complain(f"{file}: nested too deeply")
    try:
        replayed = replay_at_once(recorded)
    except Exception as error:  # its form is right, but what it tells never happened
        complain(f"{file}: it can not be played: either it contradicts itself, or this is a bug: {error!r}")
    before = {name: recorded.ending[name] for name in _ENDING}
    now = {name: getattr(replayed.record, name) for name in _ENDING}
    if as_json:
        both = {"recorded": before, "replayed": now, "differences": sorted(replayed.differences)}
        typer.echo(json.dumps({"same": replayed.same, **both}, indent=1))
    else:
        _print(before, now, replayed.differences, replayed.ended)
    if not replayed.same:
        raise typer.Exit(DIFFERENT)


def _print(
    before: dict[str, Any], now: dict[str, Any], differences: dict[str, Any], ended: tuple[float, float]
) -> None:
    rows = [("", "recorded", "replayed"), *((name, before[name], now[name]) for name in before)]
    rows.append(("ended after", f"{ended[0]:.3f} s", f"{ended[1]:.3f} s"))
    for name, *values in rows:
        mark = "  differs" if name in differences else ""
        shown = "".join(f"{'-' if value is None else value!s:<22}" for value in values)
        typer.echo(f"{name:<18}{shown}{mark}".rstrip())
    typer.echo("the ending differs" if differences else "the ending is the same")
