"""Putting other settings in force: prepared where it may fail, then done in one step, which can not.

What runs goes on under what it began with. Between the first and the last change of a
step no other task runs, so nobody sees half of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import trio

from ..admin import AdminToken, refusal
from ..config import Settings, TenantMerger
from ..contract import Worker
from ..errors import spoken_tls
from ._changes import is_another
from ._house import House
from ._making import (
    NOTHING_STORED,
    Callers,
    admission_limits,
    attempt_limits,
    exchange_limits,
    generate_settings,
    make_callers,
    make_worker,
    routes_of,
    server_limits,
    socket_settings,
    upstream_limits,
)
from ._part import settings_of


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is to be put in force.

    Attributes:
        added, described: workers that are new or others, and workers that are described anew.
        removed: ids of workers that get nothing more.
        callers: all who may call; None: they stay.
        merger: puts the file's tenants beside those of the database.
    """

    before: Settings
    settings: Settings
    added: tuple[Worker, ...]
    described: tuple[Worker, ...]
    removed: tuple[str, ...]
    callers: Callers | None
    merger: TenantMerger


async def prepare(house: House, before: Settings, settings: Settings) -> Prepared:
    """Make what is needed, and touch nothing.

    Args:
        settings: all that is to be in force afterwards.

    Raises:
        Refused: ``not_possible``, files were replaced since they were judged.
    """
    old = {worker.id: worker for worker in before.workers if not worker.many}
    new = {worker.id: worker for worker in settings.workers if not worker.many}
    added = [worker for id_, worker in new.items() if id_ not in old or is_another(old[id_], worker)]
    described = [worker for id_, worker in new.items() if worker not in added and old[id_] != worker]
    merger = TenantMerger(settings.tenants)
    callers = None
    if _callers_differ(before, settings):
        stored = NOTHING_STORED if house.follower is None else house.follower.stored

        def make() -> Callers:
            return make_callers(settings, merger, stored, house.part)[0]

        callers = await trio.to_thread.run_sync(make)  # of many thousand keys it takes a while
    try:
        made = [
            [make_worker(worker, house.certificates) for worker in workers] for workers in (added, described)
        ]
    except (OSError, ValueError) as exc:
        raise refusal("not_possible", f"a worker's certificate can not be used: {spoken_tls(exc)}") from None
    return Prepared(
        before,
        settings,
        tuple(made[0]),
        tuple(made[1]),
        tuple(id_ for id_ in old if id_ not in new),
        callers,
        merger,
    )


def _callers_differ(before: Settings, settings: Settings) -> bool:
    if before.tenants != settings.tenants:
        return True
    # Who serves everybody without a key may fill the whole queue.
    return not settings.tenants and before.admission.max_queued != settings.admission.max_queued


def commit(house: House, prepared: Prepared) -> None:
    """Put it in force; never waits, and does not fail."""
    settings = prepared.settings
    _change_limits(house, settings_of(settings, house.part))
    if prepared.callers is not None:
        take_callers(house, prepared.callers)
    _change_workers(house, prepared)
    house.log.relevel(settings.log.level)
    house.access.admit(AdminToken(token.id, token.digest, token.role) for token in settings.admin.tokens)


def take_callers(house: House, callers: Callers) -> None:
    """Have others call from now on. What was accepted goes on."""
    house.keyring.become(callers.keyring)
    house.rates.relimit(callers.tenant_limits, callers.key_limits)
    house.admission.reshare(callers.shares)


def _change_limits(house: House, settings: Settings) -> None:
    house.admission.relimit(admission_limits(settings))
    house.buffers.resize(settings.delivery.total_buffer_bytes)
    house.server.limit(server_limits(settings))
    house.parts.budget.change(settings.retry.budget_ratio)
    house.fleet.pause_at_first(settings.retry.backoff)
    parts = house.parts
    house.engine = house.engine.limited(upstream_limits(settings))
    attempts = dataclasses.replace(parts.attempts, engine=house.engine, limits=attempt_limits(settings))
    house.parts = dataclasses.replace(parts, attempts=attempts, limits=exchange_limits(settings))
    house.generator.use(house.parts, generate_settings(settings))
    house.sockets.use(house.parts, socket_settings(settings))


def _change_workers(house: House, prepared: Prepared) -> None:
    fleet, settings = house.fleet, prepared.settings
    house.registrations.reserve(worker.id for worker in settings.workers if not worker.many)
    for name in prepared.removed:
        fleet.remove(name)
        house.log.write("info", "worker", worker=name, detail="removed from the configuration")
    for worker in prepared.described:
        fleet.describe(worker)
    for worker in prepared.added:
        house.fleet_watch.begin(fleet.add(worker))
        house.log.write("info", "worker", worker=worker.id, detail="added to the configuration")
    if prepared.added:
        fleet.arrange(worker.id for worker in settings.workers)
    if prepared.before.models != settings.models:
        fleet.reroute(routes_of(settings))
