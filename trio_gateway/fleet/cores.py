"""The pure cores by which workers are judged and chosen, for who simulates a fleet.

A running gateway uses `Fleet`; these are its parts, without a clock or a socket.
"""

from ._breaker import TRANSITIONS, Breaker, BreakerState
from ._choice import LOOKED_AT, MANY, Candidate, choose, drawn, filtered, prefix_keys, session_keys
from ._outage import Outage
from ._probe_state import ProbeState
from ._progress import Progress
from ._snapshot import Snapshot, Source

__all__ = [
    "LOOKED_AT",
    "MANY",
    "TRANSITIONS",
    "Breaker",
    "BreakerState",
    "Candidate",
    "Outage",
    "ProbeState",
    "Progress",
    "Snapshot",
    "Source",
    "choose",
    "drawn",
    "filtered",
    "prefix_keys",
    "session_keys",
]
