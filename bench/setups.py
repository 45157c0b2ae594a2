"""The gateway's two setups that are always measured side by side.

*pass-through*: nothing configured that costs: one anonymous tenant, the model's public name is the engine's,
and the engine is asked for usage once, as any gateway that counts has to.

*full*: all that a company would switch on: keys of four tenants with weights and limits of concurrency and
of rates (too high to be reached), a SQLite database behind its journal, a public name for the engine's own,
and an engine that sends usage in every event, as vLLM does when asked, which the client has not asked for and
does not get.

Both have metrics and the fair queue, which can not be switched off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from trio_gateway.tenancy import new_key

from . import peers

UPSTREAM: Final = "bench/bench-model-instruct"  # what the engine calls the model in the full setup
TENANTS: Final = 4
KEYS_EACH: Final = 2
ENOUGH: Final = 100_000_000  # a minute: no request is refused
TENANT: Final = """
[[tenants]]
id = "tenant-{number}"
weight = {number}
max_concurrency = {room}
max_queued = {room}
requests_per_minute = {enough}
tokens_per_minute = {enough}
keys = [
{keys}
]
"""
KEY: Final = (
    '  {{id = "{id}", hash = "{hash}", requests_per_minute = {enough}, tokens_per_minute = {enough}}},'
)
DATABASE: Final = """
[database]
url = "sqlite:///{folder}/records.db"
journal = "{folder}/journal"
"""
SETUPS: Final = ("pass-through", "full")


def tenants_with_keys(room: int) -> tuple[str, list[str]]:
    """Answer the configuration of tenants that may have so many requests at a time, and their keys."""
    keys: list[str] = []
    tenants = []
    for number in range(1, TENANTS + 1):
        rows = []
        for _ in range(KEYS_EACH):
            id_, key, stored = new_key()
            keys.append(key)
            rows.append(KEY.format(id=id_, hash=stored, enough=ENOUGH))
        tenants.append(TENANT.format(number=number, room=room, enough=ENOUGH, keys="\n".join(rows)))
    return "".join(tenants), keys


@contextmanager
def pass_through(engine_port: int, *, slots: int = 1024, workers: int = 1) -> Iterator[peers.Gateway]:
    """Run the gateway with nothing that costs; `workers` have so many slots each, all at the one engine."""
    with peers.gateway(engine_port, slots=slots, workers=workers) as gateway:
        yield replace(gateway, name="pass-through")


@contextmanager
def full(engine_port: int, *, slots: int = 1024, workers: int = 1) -> Iterator[peers.Gateway]:
    """Run the gateway with all that a company would switch on."""
    tenants, keys = tenants_with_keys(max(slots * workers, 16_384))
    load: Mapping[str, str] = {"keys": ",".join(keys), "upstream": UPSTREAM}
    with tempfile.TemporaryDirectory(prefix="bench-full-") as folder:
        extra = tenants + DATABASE.format(folder=folder)
        started = peers.gateway(
            engine_port, kind="vllm", slots=slots, workers=workers, upstream=UPSTREAM, extra=extra
        )
        with started as gateway:
            yield replace(gateway, name="full", load=load)


STARTS: Final = {"pass-through": pass_through, "full": full}
