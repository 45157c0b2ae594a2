"""The second admission: the worker knows the truth about itself, and says no before any engine work. Pure."""

from __future__ import annotations

from ..wire import WorkerState
from ._engine import EngineStatus


def why_not(
    engine: EngineStatus, state: WorkerState, *, slots: int, held: int, model: str, remaining: float
) -> str | None:
    """Answer the typed rejection for a request, or None: it may have a slot.

    Args:
        slots, held: places in the engine, and those that are taken.
        remaining: seconds until the deadline.
    """
    if state == "stopping":
        return "shutting_down"
    if state == "draining":
        return "draining"
    if model in engine.failed_models:
        return "model_load_failed"
    if not engine.ready:
        return "engine_unready"
    if model not in engine.models:
        return "model_not_loaded"
    if held >= slots:
        return "capacity"
    if remaining <= 0:
        return "deadline"
    return None
