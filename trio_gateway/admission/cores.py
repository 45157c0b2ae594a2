"""The pure core that has the order of those who wait, for who simulates it or measures another.

A running gateway uses `Admission`; this is its part without a clock.
"""

from ._scheduler import Group, Scheduler, Waiter

__all__ = ["Group", "Scheduler", "Waiter"]
