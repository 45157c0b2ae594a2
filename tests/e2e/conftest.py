"""Streams are read by one task for all, or each by its exchange's own; what is about streams runs with both.

``READ_ALONE=1`` in the environment runs all the others the second way.
"""

from __future__ import annotations

from typing import Final

import pytest

from tests.e2e import serving

BOTH: Final = {"test_streams", "test_slow_readers", "test_engine_failures"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of some modules twice."""
    if metafunc.module.__name__.rpartition(".")[2] in BOTH:
        metafunc.parametrize("reading", ["together", "alone"], indirect=True)


@pytest.fixture(autouse=True)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads streams."""
    if hasattr(request, "param"):
        monkeypatch.setattr(serving, "READ_TOGETHER", request.param == "together")
