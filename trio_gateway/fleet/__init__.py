"""Workers: who they are, what is known of their room, and who drains."""

from ._dialects import DIALECTS
from ._drain import DrainKeeper
from ._registry import Fleet, Route, WorkerBook

__all__ = ["DIALECTS", "DrainKeeper", "Fleet", "Route", "WorkerBook"]
