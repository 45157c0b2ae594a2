"""Small runs of what `python -m bench scale_on_paper` plays at full size; everything is seeded."""

from __future__ import annotations

import dataclasses
from typing import Final

import pytest

from bench.late_views import Crowds, History, LateGateway, crowds
from bench.scenarios.scale_on_paper import MOST_RETURNS, _busiest_second, _waits
from bench.shared_order import Flood, flooded
from bench.simulation import Setting
from bench.store_turns import GATHER, LOOK, Asking, turns
from bench.tenants import jain

SEED: Final = 3
BASE: Final = Setting(gateways=50, workers=150, agents=True, mean_service=10.0, seconds=4.0)
FLOOD: Final = Flood(replicas=6, slots=120, tenants=6, seconds=30.0)


def rejected(found: Crowds) -> float:
    return found.rejected / found.attempts


# Views that are late ----------------------------------------------------------------------------------------


def test_a_gateway_knows_each_worker_as_it_was_when_it_last_read_it_and_its_own_share_as_it_is() -> None:
    setting = dataclasses.replace(BASE, workers=2, period=1.0)
    workers = [History(number, setting) for number in range(2)]
    gateway = LateGateway(workers, setting, 0, [0.25, 0.75])
    gateway.begin()
    for moment, held in ((0.2, 1), (0.5, 2), (1.1, 3)):
        workers[0].running = held
        workers[0].note(moment)
    for now, known in ((0.24, 0), (0.3, 1), (1.2, 1), (1.25, 3)):
        first, second = gateway.candidates(now)
        assert (first.work, first.own, first.free) == (known, 0, setting.slots - known)
        assert second.work == 0
        read = {0.24: -0.75, 0.3: 0.25, 1.2: 0.25, 1.25: 1.25}[now]
        assert first.age - gateway.ahead == pytest.approx(now - read)
    gateway.view(0).own += 1
    gateway.changed(0, 1.3)
    (first, _) = gateway.candidates(1.3)
    assert (first.work, first.own) == (4, 1)  # credited at once
    workers[0].running = 4
    workers[0].note(1.3)
    (first, _) = gateway.candidates(2.3)
    assert (first.work, first.own) == (4, 1)  # and not twice, when it is read


def test_one_seed_tells_one_story() -> None:
    short = dataclasses.replace(BASE, gateways=5, workers=20)
    assert crowds(short, "ours", SEED) == crowds(short, "ours", SEED)
    assert crowds(short, "ours", SEED) != crowds(short, "ours", SEED + 1)


def test_fewer_replicas_choose_the_same_worker_than_the_least_loaded_one_draws() -> None:
    ours, least = (crowds(BASE, policy, SEED) for policy in ("ours", "least-loaded"))
    assert ours.attempts > 200
    assert ours.mean < least.mean
    assert ours.largest < least.largest
    assert rejected(ours) < rejected(least) / 2
    assert ours.wrongly == 0 < least.wrongly


def test_looking_at_some_of_many_workers_draws_smaller_crowds_than_looking_at_all() -> None:
    many = dataclasses.replace(BASE, gateways=10, workers=500, seconds=3.0)
    some, every = (crowds(many, policy, SEED) for policy in ("ours", "ours, of all"))
    assert some.mean < every.mean
    assert rejected(some) < rejected(every)


def test_the_older_the_news_the_more_is_rejected() -> None:
    new, old = (
        crowds(dataclasses.replace(BASE, workers=60, gateways=20, period=age, seconds=12.0), "ours", SEED)
        for age in (0.25, 4.0)
    )
    assert rejected(new) < rejected(old)


# Tenants at some replicas -----------------------------------------------------------------------------------


def index(flood: Flood) -> float:
    return jain(list(flooded(flood, SEED).service.values()))


def test_tenants_of_one_replica_each_share_by_weight_with_a_store_and_not_without() -> None:
    assert index(dataclasses.replace(FLOOD, store=True)) > 0.97
    assert index(FLOOD) < 0.85


def test_tenants_that_are_everywhere_share_by_weight_either_way() -> None:
    everywhere = dataclasses.replace(FLOOD, homes=FLOOD.replicas)
    assert index(everywhere) > 0.97
    assert index(dataclasses.replace(everywhere, store=True)) > 0.97


def test_slots_of_replicas_without_tenants_are_idle_only_if_they_were_divided() -> None:
    few = dataclasses.replace(FLOOD, tenants=2)
    assert flooded(few, SEED).busy == pytest.approx(2 / 6, abs=0.02)
    assert flooded(dataclasses.replace(few, store=True), SEED).busy > 0.95


def test_what_waits_longer_for_a_grant_leaves_slots_idle_longer() -> None:
    soon, late = (
        flooded(dataclasses.replace(FLOOD, store=True, look=look), SEED).busy for look in (0.02, 1.0)
    )
    assert soon > late


def test_the_fewer_slots_a_part_has_the_more_wait_for_one() -> None:
    assert _waits(1, 0.8) == pytest.approx(0.8)  # one server: the load itself
    assert _waits(2, 0.5) == pytest.approx(1 / 3)
    assert _waits(200, 0.8) < 0.01 < _waits(16, 0.8) < _waits(4, 0.8)


# The store --------------------------------------------------------------------------------------------------


def test_a_request_is_granted_in_one_trip_and_costs_about_two_turns() -> None:
    alone = turns(Asking(rate=2.0, seconds=60.0), SEED)
    assert alone.delay == pytest.approx(0.001, rel=0.05)
    busy = turns(Asking(rate=100.0, seconds=20.0), SEED)
    assert 1 < busy.per_second / 100 < 3


def test_a_replica_takes_no_more_turns_than_fit_one_after_the_other() -> None:
    slow = turns(Asking(rate=500.0, trip=0.05, seconds=10.0), SEED)
    assert slow.per_second <= 1 / 0.05 + 0.1
    waiting = turns(Asking(rate=0.01, waits=True, seconds=60.0), SEED)
    assert waiting.per_second == pytest.approx(1 / (LOOK + 0.001), rel=0.05)
    assert GATHER > LOOK  # else what is given back would be told later than others look for it


# Who comes back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 20])
def test_those_who_were_refused_by_many_replicas_do_not_come_back_together(replicas: int) -> None:
    assert _busiest_second(replicas, 40.0) <= MOST_RETURNS
