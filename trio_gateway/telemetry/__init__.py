"""What the process tells about itself: log lines, metrics, traces, and where its loop hangs."""

from ._exporter import Exporter, ExporterSettings
from ._log import Log
from ._memory import CycleCollector, return_free_memory
from ._metrics import METRICS_TYPE, render_metrics
from ._watchdog import LoopWatch

__all__ = [
    "METRICS_TYPE",
    "CycleCollector",
    "Exporter",
    "ExporterSettings",
    "Log",
    "LoopWatch",
    "render_metrics",
    "return_free_memory",
]
