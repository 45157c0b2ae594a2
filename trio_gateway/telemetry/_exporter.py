"""Sends spans and metrics to a collector, by OTLP over HTTP, from a thread that nothing waits for.

The loop appends to a bounded queue and goes on; what a collector does not take in
time is dropped and counted. Encoding and sending are the thread's.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ..contract import InternalRequest
from ..ledger import Names, Record
from ._gen_ai import GenAiMetrics
from ._spans import Ended, Headers, Step, Value, attempt_headers, context_of, note_end, spans_of
from ._watchdog import LogPort

if TYPE_CHECKING:
    from ._otlp import Otlp

MOST_WAITING: Final = 4_096  # exchanges; further ones are dropped and counted
BATCH: Final = 256  # exchanges in one request
PAUSE: Final = 1.0  # seconds until what waits is sent
TIMEOUT: Final = 10.0  # seconds for one request
TRIES: Final = 5  # of one batch
LONGEST_PAUSE: Final = 30.0  # seconds between two of them
CLOSE_LIMIT: Final = 2.0  # seconds for what waits at the end
_AGAIN: Final = frozenset({429, 502, 503, 504})  # statuses after which OTLP has a client try again


@dataclass(frozen=True, slots=True)
class ExporterSettings:
    """Where to, and how much.

    Attributes:
        endpoint: base URL of the collector.
        headers: that it wants.
        ratio: share of exchanges without a caller's trace that are sampled.
        interval: seconds between two sendings of metrics.
        resource: attributes of this process; ``version`` of this program.
    """

    endpoint: str
    headers: Sequence[tuple[str, str]]
    ratio: float
    interval: float
    resource: Mapping[str, Value]
    version: str


class Exporter:
    """See the module's docstring.

    Args:
        address_of: knows host and port of a worker.
        models: names that have metrics of their own.
        log: told when the collector is away, and when it is back.
        wall: the wall clock.
        pause: seconds until what waits is sent.

    Attributes:
        sent, dropped: sampled exchanges.
    """

    def __init__(
        self,
        settings: ExporterSettings,
        address_of: Callable[[str], tuple[str, int] | None],
        models: Names,
        log: LogPort,
        *,
        wall: Callable[[], float] = time.time,
        pause: float = PAUSE,
    ) -> None:
        self._settings = settings
        self._address_of = address_of
        self._log = log
        self._wall = wall
        self._pause = pause
        self._metrics = GenAiMetrics(models)
        self._waiting: Final = deque[Ended]()
        self._stop = threading.Event()
        self._away = False
        self._thread: threading.Thread | None = None
        self.sent = 0
        self.dropped = 0

    def open(self) -> None:
        """Start the thread. The collector need not be there.

        Raises:
            OSError: the package that writes OTLP is not installed.
        """
        try:
            from ._otlp import Otlp
        except ModuleNotFoundError as error:
            raise OSError(
                f"telemetry.otlp_endpoint needs the package {error.name}: install trio-gateway[otel]"
            ) from None
        settings = self._settings
        otlp = Otlp(settings.resource, settings.version, self._wall())
        self._thread = threading.Thread(target=self._run, args=(otlp,), name="otlp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what waits, within `CLOSE_LIMIT`, and let the rest go. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT)
            self._thread = None

    # -- what the loop says

    def headers(self, request: InternalRequest, attempt_id: str) -> Headers:
        """Write the headers by which an engine continues the trace below an attempt."""
        return attempt_headers(request, attempt_id, self._settings.ratio)

    def ended(self, request: InternalRequest, record: Record, steps: Iterable[Step]) -> None:
        """Take an exchange that is settled; never waits."""
        self._metrics.see(request, record)
        context = context_of(request, self._settings.ratio)
        if not context.sampled:
            return
        if len(self._waiting) >= MOST_WAITING:
            self.dropped += 1
            return
        self._waiting.append(note_end(request, record, steps, context))

    def figures(self) -> dict[str, int]:
        """Answer the counts of this moment."""
        return {"sent": self.sent, "dropped": self.dropped}

    # -- the thread

    def _run(self, otlp: Otlp) -> None:
        due = time.monotonic() + self._settings.interval
        last = False
        while not last:
            last = self._stop.wait(self._pause)
            while self._waiting:
                self._send_batch(otlp)
            if last or time.monotonic() >= due:
                due = time.monotonic() + self._settings.interval
                if points := self._metrics.points():
                    self._send("/v1/metrics", otlp.metrics(points, self._wall()), tries=1)

    def _send_batch(self, otlp: Otlp) -> None:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        spans = [span for ended in batch for span in spans_of(ended, self._address_of)]
        if self._send("/v1/traces", otlp.traces(spans), TRIES):
            self.sent += len(batch)
        else:
            self.dropped += len(batch)

    def _send(self, path: str, body: bytes, tries: int) -> bool:
        """Send a message, again if that may help; answers whether it was taken."""
        pause = PAUSE
        for number in range(1, tries + 1):
            trouble, again = self._post(path, body)
            if trouble is None:
                self._be_well()
                return True
            self._be_ill(trouble)
            if not again or number == tries or self._stop.wait(pause * random.uniform(0.5, 1.0)):
                break
            pause = min(2 * pause, LONGEST_PAUSE)
        return False

    def _post(self, path: str, body: bytes) -> tuple[str | None, bool]:
        """Make one request; answers what went wrong, and whether it may go better another time."""
        url = urlsplit(self._settings.endpoint)
        assert url.hostname is not None
        limit = CLOSE_LIMIT if self._stop.is_set() else TIMEOUT
        connection: http.client.HTTPConnection
        if url.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(url.hostname, url.port, timeout=limit, context=context)
        else:
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=limit)
        headers = {"content-type": "application/x-protobuf", **dict(self._settings.headers)}
        try:
            with contextlib.closing(connection):
                connection.request("POST", url.path.rstrip("/") + path, body, headers)
                status = connection.getresponse().status
        except socket.gaierror:
            return "its name does not resolve", True
        except (OSError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__, True
        return (None, False) if status < 300 else (f"it answered {status}", status in _AGAIN)

    def _be_well(self) -> None:
        if self._away:
            self._away = False
            self._log.write("info", "collector_back")

    def _be_ill(self, trouble: str) -> None:
        if not self._away:
            self._away = True
            self._log.write("warning", "collector_away", reason=trouble)
