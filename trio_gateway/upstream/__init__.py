"""Towards engines: one HTTP/1.1 connection per attempt, and what is sent and read on it."""

from ._control import ask, follow, get, order, resolve
from ._engine import HttpEngine, UpstreamLimits
from ._pool import ConnectionPool

__all__ = ["ConnectionPool", "HttpEngine", "UpstreamLimits", "ask", "follow", "get", "order", "resolve"]
