"""One target's corpus again and again: ``python -m fuzz.endurance NAME CORPUS SECONDS``.

Prints a `Growth` as JSON; exit status 1 if memory grew with the number of inputs.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .target import load

WARM_UP: Final = 2  # rounds until caches and pools are as large as they get
BLOCKS_KEPT: Final = 500  # what the interpreter keeps for itself, whatever is run
KIB_KEPT: Final = 16 * 1024  # of fragments and pools


@dataclass(frozen=True)
class Growth:
    """How memory grew.

    Attributes:
        inputs: that were run between the two looks.
        blocks: of Python's allocator; an object that is kept is at least one.
        rss_kib: of the process, which also sees what C code keeps.
    """

    inputs: int
    blocks: int
    rss_kib: int

    @property
    def leaks(self) -> bool:
        """Whether it grew with the inputs: a twentieth of a block for each is more than chance."""
        return self.blocks > BLOCKS_KEPT + self.inputs / 20 or self.rss_kib > KIB_KEPT


def measure(check: Callable[[bytes], None], inputs: Sequence[bytes], seconds: float) -> Growth:
    """Run all inputs in rounds for that long, at least two rounds after the warm-up."""
    for _ in range(WARM_UP):
        _run(check, inputs)
    blocks, rss, ran = _blocks(), _rss_kib(), 0
    until = time.monotonic() + seconds
    while ran < 2 * len(inputs) or time.monotonic() < until:
        _run(check, inputs)
        ran += len(inputs)
    return Growth(ran, _blocks() - blocks, _rss_kib() - rss)


def _run(check: Callable[[bytes], None], inputs: Sequence[bytes]) -> None:
    for data in inputs:
        check(data)


def _blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def _rss_kib() -> int:
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise OSError("the kernel tells no VmRSS")


def main() -> int:
    """See the module; answers the exit status."""
    name, corpus, seconds = sys.argv[1:]
    target = load(name)
    inputs = [*target.seeds, *(path.read_bytes() for path in sorted(Path(corpus).iterdir()))]
    growth = measure(target.check, inputs, float(seconds))
    print(json.dumps(dataclasses.asdict(growth)))
    return int(growth.leaks)


if __name__ == "__main__":
    sys.exit(main())
