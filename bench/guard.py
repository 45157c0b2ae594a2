"""Has a token become dearer? What it costs in times a plain relay (`in_process.py`), against what it did.

``python -m bench.guard`` fails (status 1) if that is over 1.25 times what ``guard.json`` says, three times in
a row. ``--keep`` writes what it found there: after a change that pays, or one that is worth its price.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import trio

from .in_process import measure
from .setups import SETUPS

KEPT: Final = Path(__file__).with_name("guard.json")
LIMIT: Final = 1.25  # times what was kept
TRIES: Final = 3


def dearer(found: Mapping[str, float], kept: Mapping[str, float]) -> list[str]:
    """Say which setups have become dearer than they may."""
    return [
        f"a token in {name} costs {found[name]:.2f} times a plain relay; it was {kept[name]:.2f}"
        for name in SETUPS
        if found[name] > LIMIT * kept[name]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and compare, or keep; answer the exit status."""
    parser = argparse.ArgumentParser(prog="bench.guard", description="Has a token become dearer?")
    parser.add_argument("--keep", action="store_true", help=f"write what is found to {KEPT.name}")
    given = parser.parse_args(arguments)
    for _ in range(1 if given.keep else TRIES):
        found = trio.run(measure)
        print(", ".join(f"{name} {found[name]:.2f}" for name in SETUPS), end=" times a plain relay, ")
        print(f"which takes {found['relay']:.1f} us", flush=True)
        if given.keep:
            KEPT.write_text(json.dumps({name: round(found[name], 2) for name in SETUPS}) + "\n")
            return 0
        complaints = dearer(found, json.loads(KEPT.read_text()))
        if not complaints:
            return 0
    print("\n".join(complaints))
    print(f"over {LIMIT} times that fails. If it is worth it: python -m bench.guard --keep")
    return 1


if __name__ == "__main__":
    sys.exit(main())
