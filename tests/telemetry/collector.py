"""A collector of OTLP over HTTP, as small as one can be: it decodes what it gets, and can refuse or hang."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MESSAGES: dict[str, Any] = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
}


class Collector:
    """Keeps what it was sent.

    Attributes:
        statuses: of the next answers; 200 afterwards.
        let_go: cleared, requests are read and not answered.
        asked: set once there was a request.
    """

    def __init__(self) -> None:
        self.statuses = deque[int]()
        self.let_go = threading.Event()
        self.let_go.set()
        self.asked = threading.Event()
        self.got: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0

    @property
    def url(self) -> str:
        """Its base."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[Span]:
        """All spans, in the order of coming."""
        return [
            span
            for path, message in self.got
            if path == "/v1/traces"
            for whole in message.resource_spans
            for scope in whole.scope_spans
            for span in scope.spans
        ]

    @property
    def metrics(self) -> dict[str, Metric]:
        """Those of the last message."""
        messages = [message for path, message in self.got if path == "/v1/metrics"]
        (whole,) = messages[-1].resource_metrics
        return {metric.name: metric for scope in whole.scope_metrics for metric in scope.metrics}

    @property
    def resource(self) -> dict[str, Any]:
        """Attributes of the sender."""
        path, message = self.got[0]
        (whole,) = message.resource_spans if path == "/v1/traces" else message.resource_metrics
        return attributes(whole.resource)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Take a message; answers the status."""
        self.asked.set()
        self.let_go.wait(20)
        status = self.statuses.popleft() if self.statuses else 200
        if status == 200:
            self.headers.append(headers)
            message = MESSAGES[path]()
            message.ParseFromString(body)
            self.got.append((path, message))
        return status


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port of the loopback address."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.send_response(collector.take(self.path, headers, body))
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.let_go.set()
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(owner: Any) -> dict[str, Any]:
    """Attributes of a message as plain values."""

    def plain(each: KeyValue) -> Any:
        return getattr(each.value, str(each.value.WhichOneof("value")))

    return {each.key: plain(each) for each in owner.attributes}
