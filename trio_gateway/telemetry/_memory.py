"""Memory: when circles of garbage are looked for, and what the allocator keeps after a burst."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from typing import Final

CALM: Final = 64  # exchanges up to which looking at everything takes a few milliseconds
YOUNG: Final = (
    4000,
    2,
)  # new objects until they are looked at, and how often that is until all young ones are
_NEVER: Final = 2**31 - 1
_WORTH_LOOKING: Final = 20  # looks at the young since all were looked at
_OVERDUE: Final = 100_000  # of them: some hundred million objects were made
_SHORT: Final = 0.002  # seconds


class CycleCollector:
    """Looks for circles among old objects when that holds nobody up.

    Python looks at all objects whenever a quarter of them is new: with a thousand exchanges
    that holds the loop for 0.1 s (measured), and finds nothing, since an exchange falls
    apart when it ends. So the old are looked at while few exchanges run; in a process that
    never has few, after a very long time. The young are looked at as ever, in small heaps.

    What survived a look that took long is not looked at again: it is the configuration.
    """

    def __init__(self) -> None:
        self._before: Final = gc.get_threshold()

    def start(self) -> None:
        """Take over from the interpreter. What there is by now stays, and is never looked at."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*YOUNG, _NEVER)

    def stop(self) -> None:
        """Leave it to the interpreter again."""
        gc.set_threshold(*self._before)

    def sweep(self, running: int) -> bool:
        """Look at all objects if it is time; answers whether it did. About once a second.

        Args:
            running: exchanges.
        """
        looks = gc.get_count()[2]
        if looks < (_WORTH_LOOKING if running <= CALM else _OVERDUE):
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
