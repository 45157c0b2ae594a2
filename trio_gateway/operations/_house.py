"""The parts of a running gateway that operators look at and act on. All belong to the gateway."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..admin import Access
from ..admission import Admission
from ..cluster import Replica
from ..edge import Generator, HangupWatch, HttpServer, Sockets, UnplacedBytes
from ..exchange import LiveExchanges, Parts
from ..fleet import DrainKeeper, Fleet, FleetWatch, Registrations
from ..flow import BufferPool, Certificates
from ..ledger import Books, Ledger, conservation_errors
from ..lending import Borrower
from ..telemetry import Exporter, Log, LoopWatch
from ..tenancy import Follower, Keyring, RateBook
from ..units import WHOLE, Part
from ..upstream import ConnectionPool, HttpEngine
from ._making import Callers


@dataclass(slots=True)
class House:
    """See the module's docstring.

    Attributes:
        started: Trio clock, seconds.
        parts: of which new exchanges are made; another one after each change of limits.
        certificates: what is shown to workers, and believed of them.
        idle_times: how long engines took to let go of what was abandoned.
        follower: of tenants in the database, if there is one.
        leaks: what the last look of the self-audit found held for nobody.
        replica: of a cluster, if it is one.
        stopping: why the gateway takes no more work; None: it does.
        part: of all that is split among processes.
        borrower: of whom slots are borrowed that several processes share, and the way to the supervisor.
        capacity: how several processes count slots together: see `Place`; None: this is the only one.
    """

    boot_id: str
    started: float
    log: Log
    books: Books
    ledger: Ledger | None
    live: LiveExchanges
    admission: Admission
    fleet: Fleet
    drain: DrainKeeper
    fleet_watch: FleetWatch
    registrations: Registrations
    keyring: Keyring
    rates: RateBook
    follower: Follower[Callers] | None
    buffers: BufferPool
    connections: ConnectionPool
    engine: HttpEngine
    room: UnplacedBytes
    generator: Generator
    sockets: Sockets
    server: HttpServer
    access: Access
    parts: Parts
    idle_times: Counter[str]
    loop_watch: LoopWatch
    watch: HangupWatch
    certificates: Certificates
    exporter: Exporter | None = None
    replica: Replica | None = None
    leaks: int = 0
    stopping: str | None = None
    part: Part = WHOLE
    borrower: Borrower | None = None
    capacity: str | None = None

    @property
    def kept_answers(self) -> int:
        """Answers that can be resumed."""
        return len(self.sockets.kept) + len(self.generator.kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept for those who may resume."""
        return self.sockets.kept.bytes + self.generator.kept.bytes

    def equations(self) -> list[str]:
        """Name the equations of conservation that do not hold right now."""
        admission = self.admission.statistics()
        return conservation_errors(
            self.books,
            granted=admission.granted,
            held=admission.held,
            draining=admission.draining,
            returned=admission.returned,
            buffered=self.buffers.used,
            sum_of_exchanges=self.live.buffered + self.kept_bytes,
        )

    def not_ready(self) -> str | None:
        """Say why the gateway is not ready; None: it is."""
        if self.stopping is not None:
            return self.stopping
        if not (self.keyring.complete or self.keyring.tenants):
            return "the tenants have not been read yet"
        if (outage := self.admission.outage) is not None:
            return outage.message
        if not self.fleet.books:
            return "there is no worker"
        return None if self.fleet.ready() else "no worker is ready"
