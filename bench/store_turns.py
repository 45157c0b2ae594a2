"""How often replicas ask a store that has the slots of all: turns a second, and seconds until one is granted.

A replica has one turn under way at a time. It takes one at once when somebody comes, and
again when something was granted (to say that it was heard); what is given back waits for
company for a moment; while somebody waits, it looks again and again; and it says that it
is alive. Nothing is asked for a token.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from typing import Final

GATHER: Final = 0.05  # seconds for which what is given back waits for company
LOOK: Final = 0.02  # seconds between two turns while somebody waits
HEARTBEAT: Final = 1.0  # seconds, at most, between two turns


@dataclass(frozen=True)
class Asking:
    """One replica's day.

    Attributes:
        rate: requests a second; as many end.
        trip: seconds that a turn takes, there and back.
        waits: somebody waits all the time.
    """

    rate: float
    trip: float = 0.001
    waits: bool = False
    seconds: float = 60.0


@dataclass(frozen=True)
class Turns:
    """What came of it: turns a second, and seconds from a request's arrival to its grant, on average."""

    per_second: float
    delay: float


def turns(asking: Asking, seed: int) -> Turns:
    """Play one replica's day."""
    dice = random.Random(f"turns {seed}")
    coming: list[tuple[float, bool]] = []
    for arrives in (True, False):
        now = dice.expovariate(asking.rate)
        while now < asking.seconds:
            heapq.heappush(coming, (now, arrives))
            now += dice.expovariate(asking.rate)
    count, now, waited, arrived = 0, 0.0, 0.0, 0
    again = False  # something was granted, which has to be acknowledged
    while now < asking.seconds:
        due = now if again else now + (LOOK if asking.waits else HEARTBEAT)
        if coming:
            came, arrives = coming[0]
            due = min(due, max(came if arrives else came + GATHER, now))
            if not arrives:  # an arrival may still come before it is told
                later = (at for at, is_one in coming if is_one)
                due = min(due, max(min(later, default=math.inf), now))
        count += 1
        answered = due + asking.trip
        again = False
        while coming and coming[0][0] <= due:
            came, arrives = heapq.heappop(coming)
            if arrives:
                again = True
                arrived += 1
                waited += answered - came
        now = answered
    return Turns(count / asking.seconds, waited / max(arrived, 1))
