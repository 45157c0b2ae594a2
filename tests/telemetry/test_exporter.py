"""The way to a collector: whole in protobuf, again where that may help, and never a wait for the loop."""

from __future__ import annotations

import dataclasses
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.ledger.making import make_record, make_request
from tests.telemetry.collector import Collector, attributes, collecting
from tests.telemetry.test_spans import ID, STEPS
from trio_gateway.ledger import Names
from trio_gateway.telemetry import Exporter, ExporterSettings, _exporter

PATIENCE = 20


class Lines:
    """Takes log lines from any thread."""

    def __init__(self) -> None:
        self.found: queue.Queue[tuple[str, str, dict[str, Any]]] = queue.Queue()

    def write(self, level: str, event: str, **fields: Any) -> None:
        self.found.put((level, event, fields))


@contextmanager
def exporting(url: str, lines: Lines | None = None, **changes: Any) -> Iterator[Exporter]:
    values: dict[str, Any] = {
        "endpoint": url,
        "headers": [("authorization", "Bearer secret")],
        "ratio": 1.0,
        "interval": 3600.0,
        "resource": {"service.name": "gateway"},
        "version": "1.2.3",
    }
    exporter = Exporter(
        ExporterSettings(**values | changes), lambda worker: None, Names(), lines or Lines(), pause=0.01
    )
    exporter.open()
    try:
        yield exporter
    finally:
        exporter.close()
        exporter.close()  # harmless


def end_one(exporter: Exporter, **changes: Any) -> None:
    record = dataclasses.replace(make_record(), exchange_id=ID, **changes)
    exporter.ended(make_request(exchange_id=ID), record, STEPS)


def wait_for(collector: Collector, exporter: Exporter, sent: int) -> None:
    end = time.monotonic() + PATIENCE
    while exporter.sent < sent and time.monotonic() < end:
        time.sleep(0.01)
    assert exporter.sent == sent


def test_what_is_sent_can_be_decoded() -> None:
    with collecting() as collector:
        with exporting(collector.url) as exporter:
            end_one(exporter)
            wait_for(collector, exporter, 1)
        whole, first, second = collector.spans
        assert collector.resource == {"service.name": "gateway"}
        assert collector.headers[0]["content-type"] == "application/x-protobuf"
        assert collector.headers[0]["authorization"] == "Bearer secret"
    assert whole.trace_id.hex() == ID
    assert whole.parent_span_id == b""
    assert first.parent_span_id == second.parent_span_id == whole.span_id
    assert (whole.kind, first.kind) == (whole.SPAN_KIND_SERVER, whole.SPAN_KIND_CLIENT)
    assert (first.status.code, first.status.message) == (first.status.STATUS_CODE_ERROR, "overloaded")
    assert second.status.code == second.status.STATUS_CODE_UNSET
    assert attributes(whole)["gen_ai.request.stream"] is True
    assert attributes(second)["trio_gateway.attempt"] == 2
    assert second.end_time_unix_nano - second.start_time_unix_nano == 1_000_000_000
    assert [event.name for event in second.events] == ["opened", "first_content"]


def test_metrics_arrive_as_sums_since_the_start() -> None:
    values = {"arrived_at": 1000.0, "first_content_at": 1001.0, "settled_at": 1003.0}
    with collecting() as collector:
        with exporting(collector.url) as exporter:
            end_one(exporter, **values, tokens_prompt=5, tokens_generated=11)
            end_one(exporter, **values, tokens_prompt=0, tokens_generated=0, outcome="upstream_failed")
        metrics = collector.metrics
    duration = metrics["gen_ai.server.request.duration"]
    assert duration.unit == "s"
    assert duration.histogram.aggregation_temporality == 2
    good, bad = duration.histogram.data_points
    assert attributes(good) == {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    assert attributes(bad)["error.type"] == "upstream_failed"
    assert (good.count, good.sum, sum(good.bucket_counts)) == (1, 3.0, 1)
    assert len(good.bucket_counts) == len(good.explicit_bounds) + 1
    (first,) = metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    assert first.sum == 1.0
    (each,) = metrics["gen_ai.server.time_per_output_token"].histogram.data_points
    assert each.sum == pytest.approx(0.2)
    usage = metrics["gen_ai.client.token.usage"].histogram.data_points
    assert {attributes(point)["gen_ai.token.type"]: point.sum for point in usage} == {
        "input": 5,
        "output": 11,
    }


def test_an_answer_without_content_or_tokens_has_a_duration_alone() -> None:
    nothing = {"first_content_at": None, "tokens_prompt": None, "tokens_generated": None}
    with collecting() as collector:
        with exporting(collector.url + "/") as exporter:
            end_one(exporter, **nothing)
        assert set(collector.metrics) == {"gen_ai.server.request.duration"}


def test_metrics_are_sent_again_and_again() -> None:
    with collecting() as collector, exporting(collector.url, interval=0.01, ratio=0.0) as exporter:
        end_one(exporter)
        end = time.monotonic() + PATIENCE
        while len(collector.got) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        assert {path for path, _ in collector.got} == {"/v1/metrics"}
        assert len(collector.got) >= 3


def test_a_collector_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exporter, "PAUSE", 0.01)
    lines = Lines()
    with collecting() as collector, exporting(collector.url, lines) as exporter:
        collector.statuses.extend((503, 429))
        end_one(exporter)
        wait_for(collector, exporter, 1)
        assert len(collector.spans) == 3
    told = [lines.found.get_nowait() for _ in range(lines.found.qsize())]
    assert told == [
        ("warning", "collector_away", {"reason": "it answered 503"}),
        ("info", "collector_back", {}),
    ]


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_a_collector_refuses_is_dropped_and_counted(status: int) -> None:
    with collecting() as collector, exporting(collector.url) as exporter:
        collector.statuses.append(status)
        end_one(exporter)
        end = time.monotonic() + PATIENCE
        while not exporter.dropped and time.monotonic() < end:
            time.sleep(0.01)
        assert exporter.figures() == {"sent": 0, "dropped": 1}


def test_a_collector_that_hangs_delays_nobody_and_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exporter, "MOST_WAITING", 10)
    with collecting() as collector:
        collector.let_go.clear()
        with exporting(collector.url) as exporter:
            end_one(exporter)
            assert collector.asked.wait(PATIENCE)
            for _ in range(25):
                end_one(exporter)
            assert exporter.dropped == 15
            collector.let_go.set()
            wait_for(collector, exporter, 11)


def test_closing_waits_for_no_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exporter, "CLOSE_LIMIT", 0.05)
    with collecting() as collector:
        collector.let_go.clear()
        with exporting(collector.url) as exporter:
            end_one(exporter)
            assert collector.asked.wait(PATIENCE)
        assert exporter.sent == 0  # it came back although the collector never answered


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://nowhere.invalid:4318", "https://127.0.0.1:9"])
def test_a_collector_that_is_not_there_is_told_once(url: str) -> None:
    lines = Lines()
    with exporting(url, lines) as exporter:
        end_one(exporter)
        level, event, fields = lines.found.get(timeout=PATIENCE)
    assert (level, event) == ("warning", "collector_away")
    assert fields["reason"]
    assert lines.found.empty()
    assert exporter.dropped == 1


def test_without_the_package_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trio_gateway.telemetry._otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", None)
    before = threading.active_count()
    with pytest.raises(OSError, match=r"install trio-gateway\[otel\]"), exporting("http://127.0.0.1:9"):
        pass
    assert threading.active_count() == before
