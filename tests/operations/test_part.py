"""What one of several processes has of limits that can only be split by number."""

from __future__ import annotations

from tests.config.reading import HASH
from trio_gateway.config import parse_settings
from trio_gateway.operations import settings_of
from trio_gateway.units import MiB, Part

TEXT = f"""
[limits]
connections = 5
[admission]
max_queued = 5
max_queued_bytes = "40 MiB"
[[tenants]]
id = "a"
max_queued = 3
max_concurrency = 1
requests_per_minute = 5
keys = [{{id = "k", hash = "{HASH}", tokens_per_minute = 7}}]
"""


def test_one_process_has_all_limits_as_they_are() -> None:
    settings = parse_settings(TEXT)
    assert settings_of(settings, Part()) is settings


def test_the_parts_of_counts_are_the_whole() -> None:
    settings = parse_settings(TEXT)
    parts = [settings_of(settings, Part(number, 2)) for number in range(2)]
    assert sum(part.limits.connections for part in parts) == 5
    assert sum(part.admission.max_queued for part in parts) == 5
    tenants = [part.tenants[0] for part in parts]
    assert sum(tenant.max_queued for tenant in tenants) == 3
    assert sum(tenant.requests_per_minute or 0 for tenant in tenants) == 5
    assert sum(tenant.keys[0].tokens_per_minute or 0 for tenant in tenants) == 7
    assert {tenant.max_concurrency for tenant in tenants} == {1}  # that is lent
    assert {tenant.keys[0].requests_per_minute for tenant in tenants} == {None}


def test_memory_is_split_but_one_request_fits_into_every_part() -> None:
    part = settings_of(parse_settings(TEXT), Part(3, 16))
    assert part.limits.unplaced_bytes == part.limits.body_bytes == 20 * MiB
    assert part.admission.max_queued_bytes == 20 * MiB
    assert part.delivery.total_buffer_bytes == part.limits.answer_bytes == 64 * MiB
    assert part.limits.connections == 1
    assert part.admission.max_queued in (0, 1)
