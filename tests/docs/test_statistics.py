"""The pages of statistics and metrics name every key and every metric."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.pages import column, table, words
from tests.e2e.serving import Serving, leave, serving, tenant
from trio_gateway.testing import (
    Answer,
    RawClient,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    error_answer,
    http_request,
    open_engine,
)

# Objects whose keys are codes, outcomes, tenants, models or names of counters: described as a whole.
OPEN: Final = {
    "turned_away",
    "outcomes",
    "queue.tenants",
    "delivery_lag.buckets",
    "times",
    "loop",
    "counts",
    "workers[].breakers",
    "idle_after_cancel",
}
RECORDS: Final = "recent"


def keys_of(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key, with dots between levels, and ``[]`` for the entries of a list."""
    for key, inner in value.items():
        path = prefix + key
        if path == RECORDS:
            yield f"{path}[]"
        elif isinstance(inner, dict) and path not in OPEN:
            yield from keys_of(inner, f"{path}.")
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield from keys_of(inner[0], f"{path}[].")
        else:
            yield path


async def see_everything(gateway: Serving, engine_goes_on: trio.Event) -> bytes:
    """Cause each kind of count once, and scrape while somebody waits."""
    await gateway.ask(http_request("POST", "/nowhere"))  # turned away
    assert (await gateway.ask(chat_request(key="k"))).status == 200  # rejected once, then completed
    assert (await gateway.ask(chat_request(key="k"))).status == 400  # refused by the engine
    with await gateway.connect() as leaver, await gateway.connect() as waiter:
        await leaver.send(chat_request(key="k"))
        await gateway.until(lambda: gateway.held == 1)
        await waiter.send(chat_request(key="k"))
        await gateway.queued(1)
        leave(leaver, "reset")
        await gateway.settled(3)
        # The slot of the one that left is still draining.
        page = (await ask_admin(gateway, "/metrics")).body
        engine_goes_on.set()
        await waiter.read_to_end()
    return page


async def ask_admin(gateway: Serving, path: str) -> Answer:
    with trio.fail_after(10), await RawClient.connect(gateway.admin_address) as client:
        await client.send(http_request("GET", path, headers=(("connection", "close"),)))
        return await client.read_to_end()


async def test_every_metric_is_described_with_its_type_and_labels(tmp_path: Path) -> None:
    go = trio.Event()
    scripts = (
        error_answer(503),
        chat_stream("a", usage=(3, 1)),
        error_answer(400),
        (WaitFor(go),),
        chat_stream("b"),
    )
    async with (
        open_engine(*scripts) as engine,
        serving(
            engine,
            worker={"slots": 1, "cancel_grace": 1},
            tenants=[tenant("t1", "k")],
            retry={"backoff": 0.01},
            database={"url": f"sqlite:///{tmp_path}/records.db", "journal": str(tmp_path / "journal")},
            telemetry={"otlp_endpoint": "http://127.0.0.1:9"},
        ) as gateway,
    ):
        page = (await see_everything(gateway, go)).decode()
    # Whoever has not reached the store of its cluster serves nobody, and tells of that.
    async with (
        open_engine() as engine,
        serving(engine, cluster={"url": "redis://127.0.0.1:9"}) as gateway,
    ):
        whole = (await ask_admin(gateway, "/metrics")).body.decode().splitlines(keepends=True)
        page += "".join(line for line in whole if "trio_gateway_cluster_" in line)
    exported: dict[str, tuple[str, set[str]]] = {}
    for family in text_string_to_metric_families(page):
        if not family.name.startswith("trio_gateway_"):
            continue  # those of the process, which are everybody's
        suffix = "_total" if family.type == "counter" else ""
        labels = {label for sample in family.samples for label in sample.labels}
        exported[family.name + suffix] = (family.type, labels)
    described = {
        row["Metric"].strip("`"): (row["Type"], set(words(row["Labels"])))
        for row in table("reference/metrics.md", "Metrics")
    }
    assert described == exported


async def test_every_key_of_the_statistics_is_described() -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        await gateway.ask(chat_request())
        shown = list(keys_of(gateway.gateway.statistics()))
    assert column("reference/statistics.md", "Keys", "Key") == shown


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/admin/v1/statistics"])
async def test_the_admin_listener_answers_each_route(path: str) -> None:
    async with open_engine(chat_answer()) as engine, serving(engine) as gateway:
        assert (await ask_admin(gateway, path)).status == 200


async def test_the_code_that_an_engine_made_up_is_in_the_record_and_no_label() -> None:
    refusal = error_answer(400, code="made-up-7f3a")
    async with open_engine(refusal) as engine, serving(engine) as gateway:
        await gateway.ask(chat_request())
        assert (await gateway.settled()).code == "made-up-7f3a"
        page = (await ask_admin(gateway, "/metrics")).body.decode()
    assert 'trio_gateway_failures_total{phase="before_headers",code="other"} 1' in page
    assert "made-up" not in page
