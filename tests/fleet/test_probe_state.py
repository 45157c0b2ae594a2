"""Probes with hysteresis, and streams that prove a worker alive."""

from __future__ import annotations

import pytest

from trio_gateway.fleet._probe_state import ProbeState


def after(*results: bool, failures: int = 3, successes: int = 1) -> ProbeState:
    state = ProbeState(5.0, failures, successes)
    for result in results:
        state.result(result)
    return state


def test_a_worker_counts_as_alive_until_probes_say_otherwise() -> None:
    assert after().alive(0.0)


@pytest.mark.parametrize(
    ("results", "alive"),
    [
        ((False, False), True),
        ((False, False, False), False),
        ((False, False, True, False, False), True),
        ((False, False, False, True), True),
        ((False, False, False, True, False, False), True),
        ((False,) * 9, False),
    ],
)
def test_three_failures_in_a_row_remove_it_and_one_success_brings_it_back(
    results: tuple[bool, ...], alive: bool
) -> None:
    assert after(*results).alive(0.0) is alive


def test_as_many_successes_in_a_row_are_needed_as_are_asked_for() -> None:
    down = (False,)
    assert not after(*down, True, False, True, failures=1, successes=2).alive(0.0)
    assert after(*down, True, True, failures=1, successes=2).alive(0.0)


def test_a_worker_whose_streams_deliver_is_alive_whatever_its_probes_say() -> None:
    state = after(False, False, False)
    state.event(100.0)
    state.event(99.0)
    assert state.alive(115.0)
    assert not state.alive(115.1)


def test_nothing_changes_by_time_while_it_answers() -> None:
    state = after(False, False)
    state.event(100.0)
