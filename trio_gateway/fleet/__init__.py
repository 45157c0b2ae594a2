"""Workers: who they are, what is known of them and of their room, which one is next, and who drains."""

from ._book import DRAINED, EJECTED, UNTOUCHED, FleetSettings, Portion, WorkerBook, slots_for
from ._breaker import BreakerState, Transition
from ._dialects import DIALECTS
from ._drain import DrainKeeper
from ._kubernetes import KubernetesAccess, PodWorkers
from ._names import NamedWorkers
from ._registrations import Registrations, RegistrationSettings, Seen, Turned, make_secret
from ._registry import KEPT, Fleet, Route
from ._watch import FleetWatch, WatchSettings, Ways

__all__ = [
    "DIALECTS",
    "DRAINED",
    "EJECTED",
    "KEPT",
    "UNTOUCHED",
    "BreakerState",
    "DrainKeeper",
    "Fleet",
    "FleetSettings",
    "FleetWatch",
    "KubernetesAccess",
    "NamedWorkers",
    "PodWorkers",
    "Portion",
    "RegistrationSettings",
    "Registrations",
    "Route",
    "Seen",
    "Transition",
    "Turned",
    "WatchSettings",
    "Ways",
    "WorkerBook",
    "make_secret",
    "slots_for",
]
