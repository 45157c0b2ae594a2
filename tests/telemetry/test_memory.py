"""When circles of garbage are looked for; and giving memory back, a favour where the C library knows it."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections import deque
from collections.abc import Iterator

import pytest

from trio_gateway.telemetry import CycleCollector, return_free_memory
from trio_gateway.telemetry._memory import _WORTH_LOOKING, CALM, FEW, YOUNG_OF_FEW


def test_free_memory_goes_back_where_the_library_can() -> None:
    return_free_memory()


@pytest.mark.parametrize("missing", [OSError, AttributeError])
def test_another_library_is_no_error(monkeypatch: pytest.MonkeyPatch, missing: type[Exception]) -> None:
    def no_library(name: None) -> None:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    return_free_memory()


class Circle:
    """Known only by itself."""

    def __init__(self) -> None:
        self.itself = self


def old_circle() -> weakref.ref[Circle]:
    """Answer a circle of garbage that was young long ago."""
    circle = Circle()
    gc.collect(1)
    return weakref.ref(circle)


def look_at_the_young(times: int) -> None:
    for _ in range(times):
        gc.collect(0)


@pytest.fixture
def collector() -> Iterator[CycleCollector]:
    collector = CycleCollector()
    collector.start()
    yield collector
    collector.stop()
    gc.unfreeze()


def test_the_old_are_looked_at_while_few_exchanges_run(collector: CycleCollector) -> None:
    circle = old_circle()
    look_at_the_young(_WORTH_LOOKING // YOUNG_OF_FEW)
    assert not collector.sweep(running=CALM + 1)
    assert circle() is not None
    assert collector.sweep(running=CALM)
    assert circle() is None


def test_they_are_not_looked_at_where_nothing_happened(collector: CycleCollector) -> None:
    look_at_the_young(_WORTH_LOOKING // YOUNG_OF_FEW)
    assert collector.sweep(running=0)
    assert not collector.sweep(running=0)


def test_the_interpreter_does_not_look_at_them_by_itself(collector: CycleCollector) -> None:
    circle = old_circle()
    kept = [[] for _ in range(300_000)]  # type: ignore[var-annotated]
    assert circle() is not None
    assert len(kept) == 300_000


def test_where_many_run_the_young_are_looked_at_often_and_few_at_a_time(collector: CycleCollector) -> None:
    collector.sweep(running=FEW + 1)
    found: list[int] = []
    random_ = random.Random(1)

    def note(phase: str, told: dict[str, int]) -> None:
        if phase == "start":
            found.append(len(gc.get_objects(generation=told["generation"])))

    gc.callbacks.append(note)
    try:
        runs: deque[list[list[int]]] = deque(maxlen=1000)  # requests that run; as many come as go
        for _ in range(5000):
            runs.append([[] for _ in range(random_.randrange(200))])
    finally:
        gc.callbacks.remove(note)
    assert len(found) > 500
    assert max(found) < 10_000  # a tenth of what runs


def test_in_a_process_that_is_never_calm_they_are_looked_at_in_the_end(
    collector: CycleCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.telemetry._memory._OVERDUE", 30 * YOUNG_OF_FEW)
    circle = old_circle()
    look_at_the_young(31)
    assert collector.sweep(running=10_000)
    assert circle() is None


def test_what_took_long_to_look_at_and_stays_is_not_looked_at_again(
    collector: CycleCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.telemetry._memory._SHORT", 0.0)
    frozen = gc.get_freeze_count()
    kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    look_at_the_young(_WORTH_LOOKING // YOUNG_OF_FEW)
    assert collector.sweep(running=0)
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_afterwards_the_interpreter_does_as_before() -> None:
    before = gc.get_threshold()
    collector = CycleCollector()
    collector.start()
    assert gc.get_threshold() != before
    collector.stop()
    assert gc.get_threshold() == before
    gc.unfreeze()
