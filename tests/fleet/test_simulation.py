"""Small seeded simulations of gateways with stale views; `python -m bench routing` runs the large ones."""

from __future__ import annotations

import dataclasses
from typing import Final

import pytest

from bench.simulation import POLICIES, Setting, simulate

SEED: Final = 1
BASE: Final = Setting(gateways=8, agents=False, mean_service=10.0, seconds=60.0)
BUSY: Final = dataclasses.replace(BASE, agents=True, gateways=16)
SHARED: Final = dataclasses.replace(BASE, agents=True, slots=16, prefixes=1000, gateways=4)


def test_one_seed_tells_one_story() -> None:
    short = dataclasses.replace(BUSY, seconds=20.0)
    once, again = (simulate(short, "ours", SEED) for _ in range(2))
    assert once == again
    assert once != simulate(short, "ours", SEED + 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_or_fails(policy: str) -> None:
    crowded = dataclasses.replace(BASE, gateways=2, workers=4, load=1.1)
    queued, rejected = (
        simulate(dataclasses.replace(crowded, agents=agents), policy, SEED) for agents in (False, True)
    )
    assert rejected.rejected > 0
    assert rejected.served + rejected.failed == queued.served


def test_alone_a_gateway_takes_the_least_loaded_worker() -> None:
    alone = dataclasses.replace(BASE, gateways=1)
    ours, least = (simulate(alone, policy, SEED).peak_to_mean for policy in ("ours", "least-loaded"))
    assert ours <= 1.05 * least


def test_among_many_gateways_it_does_not_follow_the_herd() -> None:
    peaks = {policy: simulate(BASE, policy, SEED).peak_to_mean for policy in POLICIES}
    assert peaks["ours"] <= 1.3
    assert all(peaks["ours"] < peaks[policy] for policy in POLICIES if policy != "ours")


def test_every_rejection_is_absorbed_elsewhere_while_a_slot_is_free() -> None:
    result = simulate(BUSY, "ours", SEED)
    assert result.rejected > 0
    assert result.absorbed > 0
    assert result.wrongly == 0
    assert simulate(BUSY, "least-loaded", SEED).rejected > 1.5 * result.rejected


def test_prefixes_are_met_again_without_flooding_their_workers() -> None:
    ours, dice = (simulate(SHARED, policy, SEED) for policy in ("ours", "random"))
    assert ours.hits >= 2 * dice.hits > 0
    assert ours.peak_to_mean < 1.3
