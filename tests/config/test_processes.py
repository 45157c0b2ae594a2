"""Several processes: how many, and what can not be said of them."""

from __future__ import annotations

import os

import pytest

from tests.config.reading import HASH, WORKER, complaints
from trio_gateway.config import parse_settings

TWO = "[server]\nprocesses = 2\n"
SPLIT = TWO + 'capacity = "split"\n'
TENANT = f'[[tenants]]\nid = "a"\nkeys = [{{id = "k", hash = "{HASH}", tokens_per_minute = 1}}]\n'


def test_one_process_is_usual_and_auto_is_one_for_each_processor() -> None:
    assert parse_settings("").processes == 1
    assert parse_settings(TWO).processes == 2
    auto = parse_settings('[server]\nprocesses = "auto"')
    assert auto.processes == min(len(os.sched_getaffinity(0)), 64)


@pytest.mark.parametrize("count", ["0", "-1", "65", '"3"', '"Auto"', "1.5", "true", "[2]"])
def test_another_number_of_processes_is_none(count: str) -> None:
    assert complaints(f"[server]\nprocesses = {count}") == [
        't.toml:2: server.processes: must be a number from 1 to 64, or "auto"'
    ]


def test_a_worker_that_can_not_be_split_is_named() -> None:
    worker = WORKER.replace('kind = "vllm"', 'kind = "vllm"\nslots = 1')
    parse_settings(TWO + worker)
    (complaint,) = complaints(SPLIT + worker)
    assert "workers.gpu-0.slots: must be at least server.processes (2)" in complaint


def test_a_rate_that_can_not_be_split_is_named() -> None:
    parse_settings(TENANT)
    (complaint,) = complaints(TWO + TENANT)
    assert "keys.k.tokens_per_minute: must be at least server.processes (2): each has its" in complaint
    tenant = TENANT.replace(", tokens_per_minute = 1", "") + "requests_per_minute = 1\n"
    (complaint,) = complaints(TWO + tenant)
    assert "tenants.a.requests_per_minute: must be at least server.processes (2)" in complaint


def test_processes_that_are_replicas_of_a_cluster_split_nothing_that_its_store_counts() -> None:
    cluster = '[cluster]\nurl = "redis://127.0.0.1:1"\n'
    parse_settings(cluster + TWO + TENANT)
    (complaint,) = complaints(cluster + SPLIT)
    assert 'server.capacity: must be "shared" with cluster.url' in complaint
