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
from collections.abc import Iterator
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
ROOM: Final = 1024  # requests of a tenant at a time
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
def start(name: str, engine_port: int, *, extra: str = "", **limits: int) -> Iterator[peers.Gateway]:
    """Run the gateway in one of the setups, under that name; the rest is as for `peers.gateway`."""
    room = max(limits.get("slots", 0) * limits.get("workers", 1), limits.get("connections", 0), ROOM)
    with tempfile.TemporaryDirectory(prefix="bench-setup-") as folder:
        kind, upstream, setup, keys = _parts(name, room, folder)
        load = {"keys": ",".join(keys), "upstream": upstream} if keys else {}
        started = peers.gateway(engine_port, kind=kind, upstream=upstream, extra=setup + extra, **limits)
        with started as gateway:
            yield replace(gateway, name=name, load=load)


def configuration(
    name: str, engine_port: int, port: int, admin_port: int, folder: str
) -> tuple[str, list[str]]:
    """Answer the configuration of a setup with one worker, and the keys that open it."""
    kind, upstream, extra, keys = _parts(name, ROOM, folder)
    text = peers.configuration(
        engine_port, port, admin_port, kind=kind, upstream=upstream, slots=ROOM, extra=extra
    )
    return text, keys


def _parts(name: str, room: int, folder: str) -> tuple[str, str, str, list[str]]:
    """Answer the engine's dialect, its name of the model, more TOML, and keys."""
    if name == "pass-through":
        return "openai", peers.MODEL, "", []
    tenants, keys = tenants_with_keys(room)
    return "vllm", UPSTREAM, tenants + DATABASE.format(folder=folder), keys
