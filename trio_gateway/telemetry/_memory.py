"""Memory: when circles of garbage are looked for, and what the allocator keeps after a burst."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from typing import Final

CALM: Final = 16  # exchanges up to which looking at everything takes a few milliseconds
FEW: Final = 64  # exchanges up to which looking at all that they made does
YOUNG: Final = 200  # objects more than at the last look, after which those that came since are looked at
YOUNG_OF_FEW: Final = 4000  # while few exchanges run: hardly ever
_NEVER: Final = 2**31 - 1
_WORTH_LOOKING: Final = 200_000  # objects more, in all looks at the young since all were looked at
_OVERDUE: Final = 500_000_000
_SHORT: Final = 0.002  # seconds


class CycleCollector:
    """Looks for circles among old objects when that holds nobody up.

    Python looks at all objects whenever a quarter of them is new: with a thousand exchanges
    that holds the loop for 0.1 s (measured), and finds nothing, since an exchange falls
    apart when it ends. So the old are looked at while few exchanges run; in a process that
    never has few, after a very long time.

    Where many exchanges run, the young are looked at often, a request's worth of them, and then are old.
    What counts for the interpreter is how many objects were made less those that went, which stands still
    while requests come and go; the young meanwhile become all that runs. With 1,000 requests at a time, looks
    after 1,000 objects, and at all young ones after five such, took up to 35 ms and 0.17 ms of each request;
    these take up to 1.4 ms, and 0.04 ms of each. While few run, all that they made is looked at within a few
    milliseconds, so that is done seldom, which saves 0.02 ms of each.

    What survived a look that took long is not looked at again: it is the configuration.
    """

    def __init__(self) -> None:
        self._before: Final = gc.get_threshold()
        self._young = YOUNG_OF_FEW

    def start(self) -> None:
        """Take over from the interpreter. What there is by now stays, and is never looked at."""
        gc.collect()
        gc.freeze()
        self._look_after(YOUNG_OF_FEW)

    def _look_after(self, objects: int) -> None:
        self._young = objects
        gc.set_threshold(objects, _NEVER, _NEVER)

    def stop(self) -> None:
        """Leave it to the interpreter again."""
        gc.set_threshold(*self._before)

    def sweep(self, running: int) -> bool:
        """Look at all objects if it is time; answers whether it did. About once a second.

        Args:
            running: exchanges.
        """
        made = gc.get_count()[1] * self._young
        self._look_after(YOUNG_OF_FEW if running <= FEW else YOUNG)
        if made < (_WORTH_LOOKING if running <= CALM else _OVERDUE):
            return False
        began = time.thread_time()
        gc.collect()
        if running <= CALM and time.thread_time() - began > _SHORT:
            gc.freeze()
        return True


def return_free_memory() -> None:
    """Give free pages of the C heap back; glibc only, elsewhere nothing happens.

    Small blocks that outlive a burst pin the heap, so glibc by itself keeps most of
    what 200 stalled clients had cost (measured: 62 of 103 MB). Takes about 0.1 ms a
    megabyte, in which other allocations wait: for rare moments, from a thread.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
