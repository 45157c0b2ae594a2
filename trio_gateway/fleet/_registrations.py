"""Workers that register themselves: who may, under which name, and until when each is believed.

A worker is known by its id and incarnation. A higher incarnation is a new process: it
gets a book of its own, and what the old one still owes is over. A lower one is told to go.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from ..contract import TlsPort, Worker
from ..wire import Registered, Registration, WorkerReport, status_of
from ._book import WorkerBook
from ._dialects import DIALECTS
from ._drain import DrainKeeper
from ._registry import Fleet
from ._snapshot import Snapshot, Source

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
SECRET_BYTES: Final = 24
MOST_REMEMBERED: Final = 10_000  # workers that are gone


class Turned(Exception):
    """A registration or heartbeat that is not taken; ``status`` is the HTTP status, the text says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class RegistrationSettings:
    """How workers register.

    Attributes:
        heartbeat_interval: seconds between heartbeats; ``ttl``: without one, until a worker is forgotten.
        allowed_networks: where workers may be.
        tls: what they are called with; all must be at https then, and none if there is none.
    """

    heartbeat_interval: float
    ttl: float
    allowed_networks: tuple[Network, ...]
    tls: TlsPort | None = None


@dataclass(slots=True)
class _Entry:
    incarnation: int
    url: str
    secret: str
    book: WorkerBook


def _make_secret(asked: Registration) -> str:
    return secrets.token_hex(SECRET_BYTES)


def _tell_nobody(worker: str, detail: str) -> None:
    """Nobody listens."""


class Registrations:
    """The registered workers of one gateway.

    Args:
        resolve: answers the addresses of a host name.
        begin: told of the book of each worker that is new.
        tell: told worker and detail of what operators may want to know.
        make_secret: makes the secret of a worker, which nobody else can know.
    """

    def __init__(
        self,
        fleet: Fleet,
        drain: DrainKeeper,
        settings: RegistrationSettings,
        now: Callable[[], float],
        resolve: Callable[[str], Awaitable[Sequence[str]]],
        begin: Callable[[WorkerBook], None],
        tell: Callable[[str, str], None] = _tell_nobody,
        make_secret: Callable[[Registration], str] = _make_secret,
    ) -> None:
        self._fleet = fleet
        self._drain = drain
        self._settings = settings
        self._now = now
        self._resolve = resolve
        self._begin = begin
        self._tell = tell
        self._make_secret = make_secret
        self._entries: dict[str, _Entry] = {}
        self._gone: OrderedDict[str, int] = OrderedDict()  # the last incarnation of those that were forgotten
        self._static = frozenset(fleet.books)

    def reserve(self, configured: Iterable[str]) -> None:
        """Take no worker under these names; one that is there is forgotten, but for its book."""
        self._static = frozenset(configured)
        for worker_id in self._static & self._entries.keys():
            self._remember(worker_id, self._entries[worker_id])

    async def register(self, asked: Registration) -> Registered:
        """Take a worker in, or the same process again.

        Raises:
            Turned: 403 its address is not allowed, 409 an old incarnation or a configured worker's name.
        """
        self._expect_new(asked)
        host, port = self._address(asked.url)
        address = await self._allowed(host)
        self._expect_new(asked)  # another may have come in the meantime
        entry = self._entries.get(asked.worker_id)
        if entry is None or (entry.incarnation, entry.url) != (asked.incarnation, asked.url):
            entry = self._enter(asked, host, port, address)
        self._fleet.report_models(entry.book, asked.models)
        entry.book.expires_at = self._now() + self._settings.ttl
        return Registered(entry.secret, self._settings.heartbeat_interval, self._settings.ttl)

    def _address(self, url: str) -> tuple[str, int]:
        """Answer host and port of a worker that is called as all are, in clear text or by TLS."""
        host, port = _address(url)
        if url.lower().startswith("https:") is not (self._settings.tls is not None):
            wanted = "http" if self._settings.tls is None else "https"
            raise Turned(403, f"the worker's url must be {wanted}: that is how this gateway calls workers")
        return host, port

    def _expect_new(self, asked: Registration) -> None:
        if asked.worker_id in self._static:
            raise Turned(409, "a worker of this name is configured")
        if asked.incarnation < self._last_incarnation(asked.worker_id):
            raise Turned(409, "a younger incarnation of this worker is known")

    def _last_incarnation(self, worker_id: str) -> int:
        entry = self._entries.get(worker_id)
        return self._gone.get(worker_id, 0) if entry is None else entry.incarnation

    async def _allowed(self, host: str) -> str:
        """Answer the address to call. A name's is kept: what it names later was not looked at."""
        for address in await self._resolve(host):
            found = _plain(ipaddress.ip_address(address.partition("%")[0]))
            if any(found in network for network in self._settings.allowed_networks):
                return address
        raise Turned(403, "the worker's address is in none of internal.allowed_networks")

    def _enter(self, asked: Registration, host: str, port: int, address: str) -> _Entry:
        secret = self._make_secret(asked)
        shown = f"[{host}]" if ":" in host else host
        dialect = DIALECTS["agent"]
        worker = Worker(
            id=asked.worker_id,
            url=asked.url,
            dialect=dialect,
            host=host,
            address=address,
            port=port,
            authority=f"{shown}:{port}",
            prefix="",
            slots=asked.slots,
            cancel_grace=dialect.cancel_grace,
            api_key=secret,
            labels=frozenset(asked.labels),
            slots_unknown=True,
            tls=self._settings.tls,
        )
        old = self._entries.get(asked.worker_id)
        if old is not None:
            self._end(old, process_gone=asked.incarnation > old.incarnation)
        # Until it hears this answer it does not know its secret: its first heartbeat shows that it does.
        unheard = Snapshot(source=Source.HEARTBEAT, taken_at=self._now(), state="starting")
        book = self._fleet.add(worker, asked.models, unheard)
        book.expires_at = self._now() + self._settings.ttl
        entry = self._entries[asked.worker_id] = _Entry(asked.incarnation, asked.url, secret, book)
        self._begin(book)
        return entry

    def _end(self, entry: _Entry, *, process_gone: bool) -> None:
        self._fleet.remove(entry.book.worker.id)
        if process_gone:
            self._drain.released_all(entry.book.worker)

    def report(self, worker_id: str, shown: str, report: WorkerReport) -> None:
        """Take a heartbeat.

        Raises:
            Turned: 404 the worker is not known, 401 another's secret, 409 an old incarnation.
        """
        entry = self._known(worker_id, shown)
        if report.incarnation < entry.incarnation:
            raise Turned(409, "a younger incarnation of this worker is known")
        entry.book.expires_at = self._now() + self._settings.ttl
        status = status_of(report)
        worker, known = entry.book.worker, entry.book.snapshot
        whole = status.requests is not None or not (status.running or status.queued)
        # What was told before the last news may not list what began since.
        if whole and (status.incarnation, status.seq) >= (known.incarnation, known.seq):
            self._drain.listed(worker, status.requests or ())
        self._fleet.reported(worker, status)
        after = entry.book.snapshot.state
        if after != known.state and "starting" not in (after, known.state):
            self._tell(worker_id, f"it says that it is {after}")

    def remove(self, worker_id: str, shown: str, incarnation: int | None) -> None:
        """Place nothing more at a worker; what streams there may finish.

        Raises:
            Turned: as `report`.
        """
        entry = self._known(worker_id, shown)
        if incarnation is not None and incarnation < entry.incarnation:
            raise Turned(409, "a younger incarnation of this worker is known")
        self._remember(worker_id, entry)
        self._end(entry, process_gone=False)
        self._tell(worker_id, "signed off")

    def recognise(self, worker_id: str, shown: str) -> None:
        """Look whether a worker is who it says.

        Raises:
            Turned: 404 it is not known, 401 another's secret.
        """
        self._known(worker_id, shown)

    def _known(self, worker_id: str, shown: str) -> _Entry:
        entry = self._entries.get(worker_id)
        if entry is None:
            raise Turned(404, "the worker is not known here")
        if not hmac.compare_digest(entry.secret.encode(), shown.encode()):
            raise Turned(401, "this is not the worker's secret")
        return entry

    def forget(self, books: Iterable[WorkerBook]) -> None:
        """Forget workers whose time was up."""
        for book in books:
            entry = self._entries.get(book.worker.id)
            if entry is not None and entry.book is book:
                self._remember(book.worker.id, entry)

    def _remember(self, worker_id: str, entry: _Entry) -> None:
        """Forget a worker but for its incarnation, so that an old process does not come back."""
        del self._entries[worker_id]
        self._gone.pop(worker_id, None)
        self._gone[worker_id] = entry.incarnation
        if len(self._gone) > MOST_REMEMBERED:
            self._gone.popitem(last=False)


def _plain(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IPv4 address that is written as one of IPv6 is still the same."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise Turned(400, "the url has no host and port")
    return host, port
