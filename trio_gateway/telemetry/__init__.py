"""What the process tells about itself: log lines and metrics."""

from ._log import Log
from ._memory import return_free_memory
from ._metrics import METRICS_TYPE, render_metrics
from ._watchdog import LoopWatch

__all__ = ["METRICS_TYPE", "Log", "LoopWatch", "render_metrics", "return_free_memory"]
