"""The ports of an exchange: client, admission, lease, fleet, engine.

Sync methods cannot wait; ``async`` methods are checkpoints. Each port has a
real implementation in one room and a fake in `trio_gateway.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import Problem
from ._request import InternalRequest
from ._worker import Rejection, Worker, WorkerStatus

if TYPE_CHECKING:
    import trio


@dataclass(slots=True)  # frozen, its fields would be set by calls
class AnswerHead:
    """Head of an answer to a client. ``length`` None: streamed as server-sent events, whatever the type."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    length: int | None = None
    content_type: str = "application/json"


class ClientPort(Protocol):
    """The reading end of one exchange, seen from the exchange.

    An answer is begun once, then pieces are pushed, then it is finished. At most
    one piece is pending: `push` frames it, hands the socket what it takes at
    once, and keeps the rest, which `flush` waits for.
    """

    @property
    def begun(self) -> bool:
        """Whether a head was queued for the client."""

    @property
    def pending(self) -> int:
        """Bytes that were pushed and not yet accepted by the socket."""

    @property
    def ended(self) -> bool:
        """Whether the last piece was pushed: nothing can be added."""

    @property
    def finished(self) -> bool:
        """Whether the message has its proper end, and the socket accepted all of it."""

    def taken(self) -> int:
        """A figure that grows whenever the socket accepts bytes or the peer's kernel acknowledges some."""

    def delivered(self) -> tuple[int, int]:
        """Whole events of the engine, and bytes, that the peer's kernel has acknowledged (where it can tell).

        An event that others were joined to counts as all of them.
        """

    def begin(self, head: AnswerHead) -> None:
        """Queue the head in front of the first piece."""

    def push(
        self, piece: bytes, *, last: bool = False, joined: Sequence[tuple[int, int]] = (), events: int = 0
    ) -> None:
        """Frame one piece (whole events, or a part of one) and write what the socket takes now.

        Only while nothing is pending. ``last`` ends the message properly in the
        same write. Raises ClientGone.

        Args:
            joined: offsets in the piece behind events to which further events of the engine were joined,
                in order, each with how many.
            events: how many events of the engine the piece is, if it is nothing else and none were joined;
                0: not known.
        """

    async def flush(self) -> None:
        """Wait until nothing is pending. Raises ClientGone."""

    def withdraw(self) -> None:
        """Take back what was pushed and has not begun to leave: it will not be part of the answer."""

    def respond(self, problem: Problem, extra: dict[str, object] | None) -> None:
        """Queue a whole error answer, before anything else was begun. Raises ClientGone."""

    def error_event(self, problem: Problem, extra: dict[str, object], sequence: int) -> bytes:
        """Express a failure as the last event of a stream, in which it would have the number ``sequence``."""

    def cut(self) -> None:
        """Close without a proper end, so that nobody mistakes the answer for a whole one. Idempotent."""

    def on_leaving(self, told: Callable[[], None] | None) -> None:
        """Have ``told`` called once, when the client may have left, which `wait_gone` then finds out.

        Most never do, and a task that waits for it would cost each of them. None: nobody is to be told.
        """

    async def wait_gone(self) -> None:
        """Return when the client has left; keeps asking after a half-close."""


class LeasePort(Protocol):
    """The right to a worker's slots, from placement until the engine let go."""

    @property
    def worker(self) -> Worker:
        """The worker whose slots are held."""

    @property
    def engine_asked(self) -> bool:
        """Whether a request was on its way to the engine: it may have worked on it."""

    def engine_started(self, attempt_id: str) -> None:
        """From now on the engine may be working on an attempt: leaving means draining."""

    def engine_done(self) -> None:
        """The engine's message was read to its end: leaving means returning."""

    def __enter__(self) -> LeasePort:
        """Take over ownership; the ``with`` block gives back."""

    def __exit__(self, *exc: object) -> None:
        """Return the slot, or hand it to the drain keeper. Never waits."""


class TicketPort(Protocol):
    """A place in a queue, or the placement that made it unnecessary."""

    @property
    def waiting(self) -> bool:
        """Whether it holds a position."""

    @property
    def place(self) -> int | None:
        """Position from 1 among those that wait for the same model; None when placed."""

    @property
    def eta(self) -> float | None:
        """Seconds until it will probably be placed; None when placed, or as long as nothing can be."""

    @property
    def why(self) -> str | None:
        """Why it waits, in one word of a bounded set; None when placed."""

    async def wait(self) -> LeasePort:
        """Wait for the placement; the caller owns the lease.

        Raises:
            Refused: ``max_wait`` passed, or no worker can be tried in time.
        """

    def back(self, *, without: Worker | None, last: Problem) -> bool:
        """Go back to the front with the place and clock it had.

        Args:
            without: a worker not to be tried again by this exchange.
            last: what the caller is told if no worker can be tried in time.

        Answers False, and takes no position, if no worker is left to try.
        """

    def served(self, prompt: int | None, generated: int | None) -> None:
        """Tell what was really used, so that the tenant is charged that; None: nobody knows."""

    def leave(self) -> None:
        """Give the position or an unclaimed placement back. Idempotent."""


class AdmissionPort(Protocol):
    """Bounded acceptance of work."""

    def enter(self, request: InternalRequest) -> TicketPort:
        """Place the request or give it a position.

        Raises:
            Refused: there is no room; nothing was taken.
        """

    def with_retry_after(self, problem: Problem, model: str) -> Problem:
        """Add when to come back to a 429 or 503 that is final for this exchange."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a process would borrow at once, if it could.

    Attributes:
        things: any of them will do, the best first.
        units: of one of them, all at once; at least 1.
        count: how often that would be of use; at least 1.
    """

    things: tuple[str, ...]
    units: int = 1
    count: int = 1


class LenderPort(Protocol):
    """Lends things of which several processes together may use so many units, and no more.

    What is lent stays lent until it is given back. None of this waits: what was said since is sent by
    `speak`, and answers come as calls of whoever borrows.
    """

    def describe(self, thing: str, units: int, grace: float) -> None:
        """Say how many units of a thing there are, for all processes together.

        Args:
            grace: seconds for which units stay in use after a process died that had them.
        """

    def want(self, wants: Mapping[str, Want]) -> None:
        """Say all that is wanted now, by names that tell wants apart; nothing else is wanted any more."""

    def give_back(self, thing: str, units: int) -> None:
        """Give back units that were lent."""

    def recalled(self, thing: str) -> bool:
        """Whether another process waits for a thing: what comes free of it is to be given back."""

    def ask(self) -> int:
        """Ask to be told when all that was said until now has been judged; answers a growing number."""

    def speak(self) -> None:
        """Send what was said."""


@dataclass(slots=True)  # frozen, its fields would be set by calls
class RateStanding:
    """How much of a minute's amount is left.

    Attributes:
        kind: ``requests`` or ``tokens``.
        reset: seconds until all of ``limit`` is there again, if nothing more is used.
    """

    kind: str
    limit: int
    remaining: int
    reset: float


class ChargePort(Protocol):
    """What one request reserved of its tenant's and its key's rates; ended once, in one of both ways."""

    def refund(self) -> None:
        """Give everything back: the request was refused."""

    def settle(self, prompt: int | None, generated: int) -> None:
        """Take the tokens that were really used instead of those reserved; ``prompt`` None: as estimated."""


class RatesPort(Protocol):
    """Requests and tokens a minute."""

    def charge(self, request: InternalRequest) -> ChargePort:
        """Reserve what the request will probably use.

        Raises:
            Refused: ``rate_limit_exceeded``; nothing was reserved.
        """

    def standings(self, tenant: str, key_id: str | None) -> tuple[RateStanding, ...]:
        """Answer what is left of each kind of which there is a limit: the tenant's or the key's, if less."""


class FleetPort(Protocol):
    """What is learnt from attempts about workers."""

    def attempted(self, worker: Worker) -> None:
        """Count an attempt that is about to be made."""

    def output(self, worker: Worker, request: InternalRequest) -> None:
        """The worker gave output: whatever held it back is over."""

    def rejected(self, worker: Worker, request: InternalRequest, rejection: Rejection) -> None:
        """The worker did not take the request."""

    def reported(self, worker: Worker, status: WorkerStatus) -> None:
        """The worker said how it is."""

    def fault(self, worker: Worker, request: InternalRequest) -> None:
        """The worker failed in a way that counts against it."""


class EngineAnswer(Protocol):
    """One HTTP answer of an engine while it is read. Leaving ``with`` closes or reuses its connection."""

    @property
    def status(self) -> int:
        """HTTP status."""

    def header(self, name: bytes) -> bytes | None:
        """Value of an answer header, by lower-case name."""

    @property
    def ended(self) -> bool:
        """Whether the message was read to its proper end."""

    async def receive(self) -> bytes:
        """Answer some decoded bytes of the body, or ``b""`` at its proper end.

        Raises:
            UpstreamFailed: the connection broke or the framing is wrong.
        """

    async def pour(
        self,
        take: Callable[[bytes, float], bool],
        take_lines: Callable[[list[bytes], float], bool] | None = None,
    ) -> bool:
        """Hand what `receive` would answer to ``take``, with the time, for as long as that answers True.

        Whoever calls waits all the while; ``take`` may be called by another task, and can not wait.

        Args:
            take_lines: for streams of events. May be called in its place with several whole events, each
                of which was one line: these lines, without line ends and the blank lines behind them.

        Answers False if the body came to its proper end, True if ``take`` wants no more.

        Raises:
            UpstreamFailed: as `receive`. What ``take`` raises is raised here, too.
        """

    def __enter__(self) -> EngineAnswer:
        """Take over ownership of the connection."""

    def __exit__(self, *exc: object) -> None:
        """Keep the connection for reuse after a clean end, else close it. Never waits."""


class EnginePort(Protocol):
    """Opens attempts at workers."""

    async def open(
        self, request: InternalRequest, lease: LeasePort, attempt_id: str, nursery: trio.Nursery
    ) -> EngineAnswer:
        """Send the request to the lease's worker and read the head of the answer.

        ``nursery`` may go on sending the body while the answer is read.

        Raises:
            UpstreamFailed: no answer.
            Refused: this kind of engine can not be asked for it; nothing was sent.
        """
