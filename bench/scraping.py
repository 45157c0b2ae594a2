"""A gateway in this process with much to tell, and what telling it does to the loop."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import time
from contextlib import ExitStack
from typing import Final

import trio

from trio_gateway.config import parse_settings
from trio_gateway.contract import Ending, Outcome
from trio_gateway.exchange import Exchange
from trio_gateway.flow import in_steps
from trio_gateway.gateway import SWITCH_INTERVAL, Gateway
from trio_gateway.ledger import Tally
from trio_gateway.telemetry import Log, render_metrics
from trio_gateway.testing import make_request

from .replay import Sink, make_gateway

TENANTS: Final = 100
MODELS: Final = 5
WORKERS: Final = 20
EXCHANGES: Final = 1_000
NAP: Final = 0.0005


def _settings() -> str:
    workers = (
        f'[[workers]]\nid = "w{n}"\nurl = "http://127.0.0.1:{9000 + n}"\nkind = "vllm"\nslots = 64'
        for n in range(WORKERS)
    )
    models = (f'[[models]]\nid = "m{n}"' for n in range(MODELS))
    return "\n".join((*workers, *models))


async def scrape(times: int) -> tuple[float, float, float, int]:
    """Scrape again and again; answers ms of CPU for a snapshot, for a page, the longest pause, and bytes.

    The pause is CPU time between two wake-ups of a task that sleeps for half a millisecond, as in
    `large_bodies`: the snapshot is in it, and the longest piece of the page.
    """
    gateway = Gateway(parse_settings(_settings()), Log(None))
    _fill(gateway)
    parts = make_gateway(metrics=True).parts
    gc.collect()
    gc.freeze()  # as the gateway does when it has started
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, before)
        for _ in range(EXCHANGES):
            stack.enter_context(gateway.live.holding(Exchange(make_request(), Sink(), parts, lambda: None)))
        snapshots, pages, longest = [], [], 0.0

        async def watch() -> None:
            nonlocal longest
            while True:
                spent = time.process_time()
                await trio.sleep(NAP)
                longest = max(longest, time.process_time() - spent - NAP)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            for _ in range(times):
                began = time.thread_time()
                figures = gateway.statistics()
                snapshots.append(time.thread_time() - began)
                began = time.process_time()
                page = b"".join(await in_steps(render_metrics(figures), 1))
                pages.append(time.process_time() - began)
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        return max(snapshots) * 1e3, min(pages) * 1e3, longest * 1e3, len(page)


def _fill(gateway: Gateway) -> None:
    """Have every tenant used every model, with every ending."""
    now = trio.current_time()
    for tenant, model, outcome in itertools.product(range(TENANTS), range(MODELS), Outcome):
        tally = Tally()
        tally.placed, tally.attempts = now, 1
        tally.commit(now)
        request = make_request(f"m{model}", tenant=f"t{tenant}")
        record = tally.record(request, Ending(outcome), "boot", now, time.time())
        gateway.books.arrive()
        gateway.books.accept(waiting=False)
        gateway.books.settle(dataclasses.replace(record, stream=True), waiting=False)
