"""Traces of real exchanges: a collector gets a span for each, a child for each attempt, and engines go on."""

from __future__ import annotations

from typing import Any

import trio
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.serving import leave, serving
from tests.telemetry.collector import attributes, collecting
from trio_gateway.testing import (
    CloseFin,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    error_answer,
    open_engine,
)

CALLER = "00-11111111111111111111111111111111-2222222222222222-01"


async def tick() -> None:
    """Take steps: what the collector's threads close is only looked for after one."""
    while True:  # noqa: ASYNC110 - nothing of this run tells when they do
        await trio.sleep(0.01)


def by_exchange(spans: list[Span]) -> dict[str, list[Span]]:
    """The children of each exchange, under its id; the exchange's own span comes first."""
    owners = {span.span_id: span for span in spans if span.kind == Span.SPAN_KIND_SERVER}
    found = {owner: [span] for owner, span in owners.items()}
    for span in spans:
        if span.kind == Span.SPAN_KIND_CLIENT:
            found[span.parent_span_id].append(span)
    return {attributes(group[0])["trio_gateway.exchange_id"]: group for group in found.values()}


async def test_each_exchange_leaves_its_spans_however_it_ends(nursery: trio.Nursery) -> None:
    nursery.start_soon(tick)
    go = trio.Event()
    scripts = (
        chat_stream("a", "b", usage=(3, 2)),
        error_answer(503),
        chat_answer(),
        (*chat_stream("a", finish=None, done=False, end=False), CloseFin()),
        (WaitFor(go),),
    )
    with collecting() as collector:
        telemetry = {"otlp_endpoint": collector.url, "service_name": "gw"}
        async with (
            open_engine(*scripts) as engine,
            serving(engine, retry={"backoff": 0.01}, telemetry=telemetry) as gateway,
        ):
            await gateway.ask(chat_request(temperature=0.5, max_tokens=9))
            await gateway.ask(chat_request(stream=False))
            await gateway.ask(chat_request())
            with await gateway.connect() as leaver:
                await leaver.send(chat_request())
                await engine.request(5)
                leave(leaver, "reset")
            await gateway.settled(4)
            go.set()
            records = gateway.records
            sent = [request.header("traceparent") for request in engine.requests]
        groups = by_exchange(collector.spans)
        assert collector.resource["service.name"] == "gw"
        assert collector.metrics["gen_ai.server.request.duration"].histogram.data_points
    assert list(groups) == [record.exchange_id for record in records]
    good, retried, cut, gone = groups.values()
    assert [len(group) for group in (good, retried, cut, gone)] == [2, 3, 2, 2]
    _expect(good[0], "chat m1", "completed", error="")
    assert attributes(good[0])["gen_ai.usage.output_tokens"] == 2
    assert attributes(good[0])["gen_ai.request.temperature"] == 0.5
    assert attributes(good[0])["gen_ai.request.max_tokens"] == 9
    assert attributes(good[1])["server.address"] == "127.0.0.1"
    _expect(retried[0], "chat m1", "completed", error="")
    assert [span.status.message for span in retried[1:]] == ["overloaded", ""]
    _expect(cut[0], "chat m1", "upstream_failed", error="engine_failed")
    assert cut[1].status.message
    _expect(gone[0], "chat m1", "client_gone", error="")
    assert attributes(gone[1])["error.type"] == "client_gone"
    # Each engine was told of the very attempt, in the order of asking.
    attempts = [span for group in groups.values() for span in group[1:]]
    assert sent == [f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" for span in attempts]
    for owner, *children in groups.values():
        assert owner.parent_span_id == b""
        assert all(owner.trace_id == child.trace_id for child in children)
        assert all(owner.start_time_unix_nano <= child.start_time_unix_nano for child in children)
        assert all(child.end_time_unix_nano <= owner.end_time_unix_nano for child in children)


def _expect(span: Span, name: str, outcome: str, error: str) -> None:
    found: dict[str, Any] = attributes(span)
    assert (span.name, found["trio_gateway.outcome"], span.status.message) == (name, outcome, error)


async def test_a_callers_trace_goes_on_through_the_gateway_to_the_engine(nursery: trio.Nursery) -> None:
    nursery.start_soon(tick)
    headers = (("traceparent", CALLER), ("tracestate", "vendor=1"))
    with collecting() as collector:
        telemetry = {"otlp_endpoint": collector.url, "sample_ratio": 0}
        async with (
            open_engine(chat_stream("a"), chat_stream("b")) as engine,
            serving(engine, telemetry=telemetry) as gateway,
        ):
            await gateway.ask(chat_request(headers=headers))
            await gateway.ask(chat_request())
            await gateway.settled(2)
            first, second = engine.requests
        whole, attempt = collector.spans  # of the second, nobody wants to know
    assert whole.trace_id.hex() == "1" * 32
    assert whole.parent_span_id.hex() == "2" * 16
    assert whole.trace_state == "vendor=1"
    assert first.header("traceparent") == f"00-{'1' * 32}-{attempt.span_id.hex()}-01"
    assert first.header("tracestate") == "vendor=1"
    assert (second.header("traceparent") or "").endswith("-00")


async def test_without_a_collector_a_callers_trace_is_passed_on_as_it_came() -> None:
    async with open_engine(chat_stream("a")) as engine, serving(engine) as gateway:
        await gateway.ask(chat_request(headers=(("traceparent", CALLER),)))
        assert engine.requests[0].header("traceparent") == CALLER
