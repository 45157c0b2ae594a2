"""Workers that register themselves: who may, under which name, and until when each is believed.

A worker is known by its id and incarnation. A higher incarnation is a new process: it
gets a book of its own, and what the old one still owes is over. A lower one is told to go.

Gateways that share tell each other what workers said to one of them: see `Registrations.news` and `told`.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import msgspec
import trio

from ..contract import TlsPort, Worker
from ..wire import Registered, Registration, WorkerNews, WorkerReport, status_of
from ._book import WorkerBook
from ._dialects import DIALECTS
from ._drain import DrainKeeper
from ._registry import Fleet
from ._snapshot import Snapshot, Source

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
SECRET_BYTES: Final = 24
MOST_REMEMBERED: Final = 10_000  # workers that are gone
TOLD_IN_A_TTL: Final = 3  # times that others are told of a worker of which nothing changes
RESOLVE_LIMIT: Final = 5.0  # seconds, for the name of a worker that others told of


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


@dataclass(frozen=True, slots=True)
class Seen:
    """What a worker said here.

    Attributes:
        left: seconds for which it is to be believed.
        period: another one when it was heard of again for long enough to say it again.
    """

    news: WorkerNews
    left: float = field(compare=False)
    period: int


@dataclass(slots=True)
class _Entry:
    asked: Registration
    secret: str
    book: WorkerBook
    heard_at: float = -math.inf  # when it said anything here
    told_at: float = -math.inf  # when another gateway told of it
    news: WorkerNews | None = None  # what it said
    period: int = 0

    @property
    def incarnation(self) -> int:
        return self.asked.incarnation

    @property
    def url(self) -> str:
        return self.asked.url


def make_secret(asked: Registration) -> str:
    """Make a secret that nobody else can know."""
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
        make_secret: Callable[[Registration], str] = make_secret,
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
        self._signed_off: dict[str, tuple[WorkerNews, float]] = {}  # and until when others are told
        self._strangers: dict[str, tuple[WorkerNews, float]] = {}  # that others told of, and until when
        self._shunned: OrderedDict[str, Registration] = OrderedDict()  # those of them that may not be here
        self._stranger_came = trio.Event()

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
        entry = self._entries[asked.worker_id] = _Entry(asked, secret, book)
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
        self._note(entry, report)
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
        if entry.news is not None:
            gone = msgspec.structs.replace(entry.news, gone=True)
            self._signed_off[worker_id] = gone, self._now() + self._settings.ttl
        self._sign_off(worker_id, entry)

    def _sign_off(self, worker_id: str, entry: _Entry) -> None:
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

    # -- what gateways tell each other

    def _note(self, entry: _Entry, report: WorkerReport) -> None:
        """Remember what others are to be told; not each report is news."""
        entry.heard_at = self._now()
        period, before = int(entry.heard_at * TOLD_IN_A_TTL / self._settings.ttl), entry.news
        if before is None or (period, report.state, report.models, report.slots) != (
            entry.period,
            before.state,
            before.registration.models,
            before.registration.slots,
        ):
            asked = msgspec.structs.replace(entry.asked, models=report.models, slots=report.slots)
            entry.news, entry.period = WorkerNews(asked, report.state, report.seq), period

    def news(self) -> list[Seen]:
        """What workers said here, while others may believe it."""
        now, ttl = self._now(), self._settings.ttl
        self._signed_off = {name: each for name, each in self._signed_off.items() if each[1] > now}
        return [
            *(
                Seen(entry.news, entry.heard_at + ttl - now, entry.period)
                for entry in self._entries.values()
                if entry.news is not None and entry.heard_at + ttl > now
            ),
            *(Seen(news, until - now, 0) for news, until in self._signed_off.values()),
        ]

    def told(self, news: WorkerNews, left: float) -> None:
        """Take what a worker said to another gateway, which is to be believed for ``left`` seconds."""
        asked, now = news.registration, self._now()
        name, entry = asked.worker_id, self._entries.get(asked.worker_id)
        if name in self._static or asked.incarnation < self._last_incarnation(name):
            return
        self._strangers.pop(name, None)
        if news.gone:
            if entry is not None:
                self._sign_off(name, entry)
        elif entry is not None and (entry.incarnation, entry.url) == (asked.incarnation, asked.url):
            self._believe(entry, news, left)
        elif self._shunned.get(name) != asked:
            self._strangers[name] = news, now + left
            self._stranger_came.set()

    def _believe(self, entry: _Entry, news: WorkerNews, left: float) -> None:
        """Take over a state, where nothing newer was said here."""
        book, now, asked = entry.book, self._now(), news.registration
        entry.told_at = now
        book.expires_at = max(book.expires_at or now, now + left)
        unheard = now > entry.heard_at + 2 * self._settings.heartbeat_interval
        if news.seq < book.snapshot.seq or not (unheard or news.state != book.snapshot.state):
            return
        reading = Snapshot(
            incarnation=asked.incarnation,
            seq=news.seq,
            source=Source.TOLD,
            taken_at=now,
            slots=asked.slots,
            state=news.state,
        )
        self._fleet.read(book, reading)
        self._fleet.report_models(book, asked.models)

    def go_on_believing(self) -> None:
        """Let no worker expire that others told of, since they can not be heard at the moment."""
        until = self._now() + self._settings.ttl
        for entry in self._entries.values():
            if entry.told_at > entry.heard_at:
                entry.book.expires_at = until

    async def meet(self) -> None:
        """Take in the workers that others told of, for ever."""
        while True:
            await self._stranger_came.wait()
            self._stranger_came = trio.Event()
            while self._strangers:
                news, until = self._strangers.pop(next(iter(self._strangers)))
                try:
                    await self._take_in(news, until)
                except Turned as turned:
                    self._shun(news.registration, str(turned))

    async def _take_in(self, news: WorkerNews, until: float) -> None:
        asked = news.registration
        host, port = self._address(asked.url)
        with trio.move_on_after(RESOLVE_LIMIT) as limit:
            address = await self._allowed(host)
        if limit.cancelled_caught:
            return  # others will tell of it again
        self._expect_new(asked)  # it, or another, may have come in the meantime
        entry = self._entries.get(asked.worker_id)
        if entry is None or (entry.incarnation, entry.url) != (asked.incarnation, asked.url):
            entry = self._enter(asked, host, port, address)
            entry.book.expires_at = until
        self._believe(entry, news, until - self._now())

    def _shun(self, asked: Registration, why: str) -> None:
        """Tell once why a worker is not taken in."""
        self._shunned.pop(asked.worker_id, None)
        self._shunned[asked.worker_id] = asked
        if len(self._shunned) > MOST_REMEMBERED:
            self._shunned.popitem(last=False)
        self._tell(asked.worker_id, f"another gateway told of it, and it is not taken: {why}")

    # -- forgetting

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
