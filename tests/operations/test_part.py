"""What each of several processes has of limits: together all of them; of what a cluster counts, the whole."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.serving import settings_of as parse
from tests.e2e.serving import tenant
from trio_gateway.operations import settings_of
from trio_gateway.units import Part

TENANT: dict[str, Any] = tenant("a", "k", requests_per_minute=7, tokens_per_minute=100, max_queued=2)
PARTS = tuple(Part(number, 3) for number in range(3))


def test_what_is_split_by_number_is_whole_in_all_together() -> None:
    parts = [settings_of(parse(tenants=[TENANT], admission={"max_queued": 10}), part) for part in PARTS]
    assert sum(part.admission.max_queued for part in parts) == 10
    for name in ("requests_per_minute", "tokens_per_minute", "max_queued"):
        assert sum(getattr(part.tenants[0], name) for part in parts) == TENANT[name]


@pytest.mark.parametrize("most", [1, 2, 10])
def test_rates_that_a_cluster_counts_are_whole_in_each_and_each_has_a_place_to_wait(most: int) -> None:
    cluster = {"url": "redis://127.0.0.1:1"}
    settings = parse(tenants=[TENANT], admission={"max_queued": most}, cluster=cluster)
    for part in (settings_of(settings, part) for part in PARTS):
        assert part.tenants[0].requests_per_minute == 7
        assert part.tenants[0].tokens_per_minute == 100
        assert part.tenants[0].keys == settings.tenants[0].keys
        assert part.tenants[0].max_queued == 1
        assert 1 <= part.admission.max_queued <= max(-(-most // 3), 1)
