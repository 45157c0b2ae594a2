"""The guard over what a token costs: it names what became dearer, and what it measures is a real gateway."""

from __future__ import annotations

import json
import math

import pytest
import trio

from bench import guard, in_process
from bench.setups import SETUPS


def test_a_setup_that_costs_over_a_quarter_more_than_it_did_is_named() -> None:
    found, kept = {"pass-through": 1.2, "full": 2.6}, {"pass-through": 1.0, "full": 2.0}

    assert guard.dearer(found, kept) == ["a token in full costs 2.60 times a plain relay; it was 2.00"]


def test_a_quarter_more_and_anything_less_is_let_pass() -> None:
    assert guard.dearer({"pass-through": 1.25, "full": 0.5}, {"pass-through": 1.0, "full": 2.0}) == []


@pytest.fixture
def cost_of_each_turn(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What is measured from now on, in the place of measuring."""
    found = {"relay": 20.0}

    async def measure() -> dict[str, float]:
        await trio.lowlevel.checkpoint()
        return found

    monkeypatch.setattr(guard, "measure", measure)
    return found


def test_it_fails_on_what_was_kept_and_says_what_became_dearer(
    cost_of_each_turn: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads(guard.KEPT.read_text())
    cost_of_each_turn.update({name: kept[name] * 1.3 for name in SETUPS})

    assert guard.main([]) == 1

    said = capsys.readouterr().out
    assert said.count("times a plain relay, which takes") == guard.TRIES
    assert all(f"a token in {name} costs" in said for name in SETUPS)


def test_it_is_content_with_what_was_kept(cost_of_each_turn: dict[str, float]) -> None:
    cost_of_each_turn.update(json.loads(guard.KEPT.read_text()))

    assert guard.main([]) == 0


def test_both_setups_stand_between_engine_and_clients_and_cost_something() -> None:
    found = trio.run(in_process.measure, 1, 5)

    assert set(found) == {"relay", *SETUPS}
    assert all(math.isfinite(cost) for cost in found.values())
    assert found["full"] > 0
