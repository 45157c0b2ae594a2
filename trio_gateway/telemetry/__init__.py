"""What the process tells about itself: log lines and metrics."""

from ._log import Log
from ._memory import return_free_memory
from ._metrics import METRICS_TYPE, render_metrics

__all__ = ["METRICS_TYPE", "Log", "render_metrics", "return_free_memory"]
