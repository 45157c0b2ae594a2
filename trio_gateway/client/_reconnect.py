"""When it makes sense to open another socket, and how long to wait before. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

# Closes that say nothing about this client: the other side went away, or its machine did. After all others,
# another socket would end the same way: a rule was broken (1002 to 1009, 4400), the key is no good (4401,
# 4403), nobody authenticated (4408), or there were too many streams (4429).
_PASSING: Final = frozenset({1000, 1001, 1005, 1006, 1011, 1012, 1013, 1014, 1015})
_PASSING_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})

FIRST_PAUSE: Final = 0.1  # seconds
LONGEST_PAUSE: Final = 2.0


def may_come_back(close_code: int | None) -> bool:
    """Whether another socket may do better after this close; None: there was none to be closed."""
    return close_code is None or close_code in _PASSING


def may_ask_again(status: int) -> bool:
    """Whether another handshake may do better after this answer."""
    return status in _PASSING_STATUS


class Pauses:
    """The waits between attempts to get a socket, within a window.

    The first attempt after a loss is made at once; then they wait, twice as long each time.

    Args:
        window: seconds after a loss in which attempts are made.
        rng: for the jitter, which keeps many clients of one gateway apart.
    """

    def __init__(self, window: float, rng: random.Random) -> None:
        self._window = window
        self._rng = rng
        self._began: float | None = None
        self._attempts = 0

    def reset(self) -> None:
        """Something has moved: the next loss is a new one."""
        self._began = None
        self._attempts = 0

    def next(self, now: float, asked: float | None) -> float | None:
        """Answer the seconds until the next attempt; None: the window is over.

        Args:
            asked: seconds that the gateway has asked to wait.
        """
        if self._began is None:
            self._began = now
        pause = 0.0
        if self._attempts:
            pause = min(FIRST_PAUSE * 2 ** min(self._attempts - 1, 10), LONGEST_PAUSE)
            pause *= self._rng.uniform(0.5, 1.0)
        self._attempts += 1
        pause = max(pause, asked or 0.0)
        return None if now + pause > self._began + self._window else pause
