"""All tests of exchanges run twice: with streams that one task reads, and with streams read by their own."""

from __future__ import annotations

import pytest

from tests.exchange import rig


@pytest.fixture(params=["together", "alone"], autouse=True)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who reads streams."""
    monkeypatch.setattr(rig, "READ_TOGETHER", request.param == "together")
    return str(request.param)
