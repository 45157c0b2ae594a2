"""The pure cores of the order of those who wait, and of when who is refused comes back, to simulate them.

A running gateway uses `Admission`; these are its parts without a clock.
"""

from ._drain_rate import DrainRate
from ._returns import Returns
from ._scheduler import Group, Scheduler, Waiter

__all__ = ["DrainRate", "Group", "Returns", "Scheduler", "Waiter"]
