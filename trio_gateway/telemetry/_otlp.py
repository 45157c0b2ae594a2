"""Spans and histograms as OTLP messages in protobuf, by the classes that OpenTelemetry generates.

Imported only where telemetry is exported, since the package is an extra.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from ._gen_ai import TEXTS, UNITS, Point
from ._spans import Span, Value

SCOPE: Final = "trio_gateway"


class Otlp:
    """Writes requests of one process.

    Args:
        resource: attributes of this process.
        version: of this program.
        started: when it began to count, by the wall clock.
    """

    def __init__(self, resource: Mapping[str, Value], version: str, started: float) -> None:
        self._resource = Resource(attributes=_attributes(resource))
        self._scope = InstrumentationScope(name=SCOPE, version=version)
        self._started = _nanoseconds(started)

    def traces(self, spans: Iterable[Span]) -> bytes:
        """Write an ``ExportTraceServiceRequest``."""
        scope = ScopeSpans(scope=self._scope, spans=[_span(span) for span in spans])
        whole = ResourceSpans(resource=self._resource, scope_spans=[scope])
        return bytes(ExportTraceServiceRequest(resource_spans=[whole]).SerializeToString())

    def metrics(self, points: Iterable[Point], now: float) -> bytes:
        """Write an ``ExportMetricsServiceRequest`` of sums since the start."""
        by_name: dict[str, list[HistogramDataPoint]] = {}
        for point in points:
            by_name.setdefault(point.name, []).append(self._point(point, _nanoseconds(now)))
        metrics = [
            Metric(
                name=name,
                description=TEXTS[name],
                unit=UNITS[name],
                histogram=Histogram(
                    data_points=rows,
                    aggregation_temporality=AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE,
                ),
            )
            for name, rows in by_name.items()
        ]
        whole = ResourceMetrics(
            resource=self._resource, scope_metrics=[ScopeMetrics(scope=self._scope, metrics=metrics)]
        )
        return bytes(ExportMetricsServiceRequest(resource_metrics=[whole]).SerializeToString())

    def _point(self, point: Point, now: int) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=_attributes(dict(point.attributes)),
            start_time_unix_nano=self._started,
            time_unix_nano=now,
            count=sum(point.counts),
            sum=point.total,
            bucket_counts=point.counts,
            explicit_bounds=point.bounds,
        )


def _span(span: Span) -> ProtoSpan:
    return ProtoSpan(
        trace_id=bytes.fromhex(span.context.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_id or ""),
        trace_state=(span.context.state or b"").decode("latin-1"),
        flags=1,
        name=span.name,
        kind=ProtoSpan.SPAN_KIND_CLIENT if span.client else ProtoSpan.SPAN_KIND_SERVER,
        start_time_unix_nano=_nanoseconds(span.began),
        end_time_unix_nano=_nanoseconds(max(span.ended, span.began)),
        attributes=_attributes(span.attributes),
        events=[ProtoSpan.Event(time_unix_nano=_nanoseconds(at), name=name) for at, name in span.events],
        status=None if span.error is None else Status(code=Status.STATUS_CODE_ERROR, message=span.error),
    )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1_000_000) * 1_000


def _attributes(values: Mapping[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any(value)) for key, value in values.items()]


def _any(value: Value) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
    return AnyValue(string_value=value)
