"""How faults are asked for and planned."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from trio_gateway.agent.engines._simulated_faults import Fault, FaultPlan, PlannedFault, Wishes, read_wishes

REFUSE = Fault("refuse")


@pytest.mark.parametrize(
    ("value", "wishes"),
    [
        (None, Wishes()),
        ("", Wishes()),
        ("hang", Wishes((Fault("hang"),))),
        ("die after=3; slow factor=2.5 ;", Wishes((Fault("die", after=3), Fault("slow", factor=2.5)))),
        ("die after=content", Wishes((Fault("die", after="content"),))),
        ("tokens=40 reasoning=8", Wishes(tokens=40, reasoning=8)),
        ("tokens=4;late_release seconds=2", Wishes((Fault("late_release", seconds=2),), tokens=4)),
        ({"tokens": 3}, Wishes(tokens=3)),
        ({"faults": [{"kind": "die", "after": "headers"}]}, Wishes((Fault("die"),))),
    ],
)
def test_wishes_are_read_from_words_and_objects(value: Any, wishes: Wishes) -> None:
    assert read_wishes(value) == wishes


@pytest.mark.parametrize(
    "value",
    [
        "explode",
        "slow factor=0.5",
        "die after=-1",
        "die after=soon",
        "hang until=3",
        "tokens=0",
        "slow factor=x",
        7,
        {"fault": []},
        {"tokens": 2.5},
    ],
)
def test_what_is_no_wish_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_wishes(value)


@pytest.mark.parametrize(("after", "tokens"), [("headers", 0), ("content", 0), (5, 5)])
def test_a_fault_strikes_after_so_many_tokens(after: Any, tokens: int) -> None:
    assert Fault("die", after=after).tokens == tokens


def chosen(plan: FaultPlan, count: int, *, now: float = 0.0, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [number for number in range(1, count + 1) if plan.faults_of(number, now, rng)]


def test_a_plan_without_faults_gives_none() -> None:
    assert chosen(FaultPlan(), 5) == []


def test_a_fault_can_be_for_one_request_or_for_so_many() -> None:
    assert chosen(FaultPlan([PlannedFault(REFUSE, request=3)]), 5) == [3]
    assert chosen(FaultPlan([PlannedFault(REFUSE, times=2)]), 5) == [1, 2]
    assert chosen(FaultPlan([PlannedFault(REFUSE, times=0)]), 5) == []
    assert chosen(FaultPlan([PlannedFault(REFUSE)]), 3) == [1, 2, 3]


@pytest.mark.parametrize(("now", "struck"), [(10.9, False), (11.0, True), (12.9, True), (13.0, False)])
def test_a_fault_can_be_for_a_time_from_the_making_of_the_plan(now: float, struck: bool) -> None:
    plan = FaultPlan([PlannedFault(REFUSE, start=1, end=3)], now=10.0)
    assert bool(plan.faults_of(1, now, Random(0))) is struck


def test_a_fault_can_be_left_to_the_dice_which_do_not_use_it_up() -> None:
    often = chosen(FaultPlan([PlannedFault(REFUSE, probability=0.25)]), 1000)
    assert 200 < len(often) < 300
    assert len(chosen(FaultPlan([PlannedFault(REFUSE, probability=0.25, times=3)]), 1000)) == 3
    assert chosen(FaultPlan([PlannedFault(REFUSE, probability=0)]), 100) == []


def test_one_request_can_get_several_faults() -> None:
    plan = FaultPlan([PlannedFault(REFUSE), PlannedFault(Fault("hang"), request=1)])
    assert [fault.kind for fault in plan.faults_of(1, 0.0, Random(0))] == ["refuse", "hang"]


def test_a_plan_is_read_strictly() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"fault":{"kind":"hang"},"requests":3}', type=PlannedFault)
