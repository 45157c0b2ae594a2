"""The streams of all WebSockets: from a message to its exchange, which may outlive its socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import trio

from ..contract import ClientPort, Ending, InternalRequest, Operation, Outcome
from ..errors import ClientGone, Problem, Refused
from ..exchange import OWNER, Exchange, LiveExchanges, Parts
from ..ledger import Books, Tally
from ..tenancy import Caller
from ._generate import Asked, Generator, Task, new_id
from ._http_server import UnplacedBytes


class StreamPort(ClientPort, Protocol):
    """A client port that is told more of its exchange than one of HTTP needs."""

    request_id: str
    tally: Tally | None

    @property
    def door(self) -> str:
        """By which protocol it came, in a word for operators."""

    def queued(self, request: InternalRequest, position: int, eta: float | None) -> None:
        """It waits for a worker. ``eta``: seconds."""

    def placed(self, request: InternalRequest) -> None:
        """It has its first worker."""

    async def last_words(self) -> None:
        """Wait a while for what the client may still say of an answer that it has."""

    def settle(self, ending: Ending) -> None:
        """Its exchange has ended: say why, if nothing was said. Called once."""


class SocketStreams:
    """Starts exchanges for messages of sockets, and accounts for those that never became one.

    Args:
        spawn: runs a task in the gateway's own nursery.
        room: for bodies of requests that no worker has yet, and large messages that are not whole.
        refusing: the problem that new work is refused with; None: it is welcome.
    """

    def __init__(
        self,
        generator: Generator,
        parts: Parts,
        live: LiveExchanges,
        books: Books,
        room: UnplacedBytes,
        refusing: Callable[[], Problem | None],
        spawn: Callable[[Task], None],
    ) -> None:
        self._generator = generator
        self._parts = parts
        self._live = live
        self._books: Final = books
        self.room: Final = room
        self._refusing = refusing
        self._spawn = spawn

    def use(self, parts: Parts) -> None:
        """Make the streams that begin from now on out of other parts."""
        self._parts = parts

    def start(
        self,
        port: StreamPort,
        asked: Asked,
        body: bytes,
        operation: Operation,
        caller: Caller,
        kept: int = 0,
        turn: trio.Event | None = None,
        problem: Problem | None = None,
    ) -> StreamRun:
        """Begin a stream; ``port`` hears how it goes, a refusal included.

        Args:
            kept: bytes of the answer that the port keeps: as many fewer may wait in front of it.
            turn: what it waits for; only then ``port`` hears of it. Its deadline does not wait.
            problem: that it is refused with.
        """
        run = StreamRun(self, port, new_id(), kept, turn)
        port.request_id = run.exchange_id
        self._books.arrive()
        try:
            if (problem := problem or self._refusing()) is not None:
                raise Refused(problem)
            self.room.take(len(body))
            run.held = len(body)
        except Refused as refused:
            if turn is None:
                self.refuse(run, refused.problem)
                return run
            run.problem, body = refused.problem, b""
        run.body = body
        self._spawn(lambda: self._run(run, asked, operation, caller))
        return run

    def turn_away(self, problem: Problem) -> None:
        """Count a message that asked for a stream, and was told at once that it does not get one."""
        self._books.arrive()
        self._books.turn_away(problem.code)

    def end(self, run: StreamRun) -> None:
        """Its owner wants no more of it. Idempotent."""
        run.unwanted = True
        self._live.end(run.exchange_id, OWNER)

    def refuse(self, run: StreamRun, problem: Problem) -> None:
        """Tell that it does not become an exchange."""
        self._books.turn_away(problem.code)
        run.port.respond(problem, None)
        run.port.settle(Ending(Outcome.REFUSED, problem))

    def give_room(self, run: StreamRun) -> None:
        """Its body does not count as unplaced any more. Idempotent."""
        held, run.held = run.held, 0
        self.room.give(held)

    async def _run(self, run: StreamRun, asked: Asked, operation: Operation, caller: Caller) -> None:
        try:
            exchange = await self._understand(run, asked, run.take_body(), operation, caller)
            if exchange is not None:
                await self._carry_out(run, exchange)
        finally:
            self.give_room(run)

    async def _understand(
        self, run: StreamRun, asked: Asked, body: bytes, operation: Operation, caller: Caller
    ) -> Exchange | None:
        arrived = trio.current_time()
        try:
            await run.wait_for_turn()
            if (problem := run.problem or self._refusing()) is not None:
                raise Refused(problem)
            request = await self._generator.understand(
                asked, body, operation, caller, run.exchange_id, arrived, stream=True
            )
            if run.unwanted:
                raise Refused(OWNER.problem or Problem.of("request_cancelled", ""))
            return self._exchange(run, request)
        except Refused as refused:
            self.refuse(run, refused.problem)
            return None
        except ClientGone:
            problem = self._refusing()
            self._books.turn_away("client_gone" if problem is None else problem.code)
            run.port.settle(Ending(Outcome.CLIENT_GONE))
            return None
        except Exception:
            self.refuse(run, Problem.of("internal_error", "this is a fault of the gateway"))
            raise
        except BaseException:
            self._books.turn_away("internal_error")
            raise

    def _exchange(self, run: StreamRun, request: InternalRequest) -> Exchange:
        port = run.port

        def placed() -> None:
            self.give_room(run)
            port.placed(request)

        def queued(position: int, eta: float | None) -> None:
            port.queued(request, position, eta)

        exchange = Exchange(
            request,
            port,
            self._parts,
            placed,
            queued=queued,
            kept=run.kept,
            door=port.door,
            last_words=port.last_words,
        )
        port.tally = exchange.tally
        return exchange

    async def _carry_out(self, run: StreamRun, exchange: Exchange) -> None:
        with self._live.holding(exchange):
            ending = await exchange.run()
        run.port.settle(ending)


class StreamRun:
    """One stream on its way.

    Attributes:
        body: of its message, until it is taken.
        held: bytes of it that count as unplaced.
        unwanted: it was cancelled before its exchange began.
        problem: that it is refused with, when its turn comes.
    """

    def __init__(
        self,
        streams: SocketStreams,
        port: StreamPort,
        exchange_id: str,
        kept: int,
        turn: trio.Event | None = None,
    ) -> None:
        self.port: Final = port
        self.exchange_id: Final = exchange_id
        self.kept: Final = kept
        self.body = b""
        self.held = 0
        self.unwanted = False
        self.problem: Problem | None = None
        self._streams = streams
        self._turn = turn
        self._gone = False

    def end(self) -> None:
        """See SocketStreams.end."""
        self._streams.end(self)

    def take_body(self) -> bytes:
        """Answer the body and forget it: it is not needed for as long as the answer takes."""
        body, self.body = self.body, b""
        return body

    async def wait_for_turn(self) -> None:
        """Wait until those in front of it are over.

        Raises:
            ClientGone: its client did not wait.
        """
        if self._turn is not None:
            await self._turn.wait()
        if self._gone:
            raise ClientGone

    def take_turn(self) -> None:
        """Go on: nobody is in front of it. Idempotent."""
        if self._turn is not None:
            self._turn.set()

    def leave(self) -> None:
        """Its client has gone: if it still waits for its turn, it ends at once."""
        if self._turn is not None and not self._turn.is_set():
            self._gone = True
            self._turn.set()
