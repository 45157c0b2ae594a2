"""Giving memory back is a favour: where the C library knows no such thing nothing happens."""

from __future__ import annotations

import ctypes

import pytest

from trio_gateway.telemetry import return_free_memory


def test_free_memory_goes_back_where_the_library_can() -> None:
    return_free_memory()


@pytest.mark.parametrize("missing", [OSError, AttributeError])
def test_another_library_is_no_error(monkeypatch: pytest.MonkeyPatch, missing: type[Exception]) -> None:
    def no_library(name: None) -> None:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    return_free_memory()
