"""One answer, as its consumer sees it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

import trio

from ._messages import Delivery, Delta
from ._state import StreamState


class Carrier(Protocol):
    """What a stream needs of its client."""

    async def begin(self, stream: TokenStream) -> None:
        """Wait for room among the streams, and have it sent.

        Raises:
            TokensError: nothing can be sent any more.
        """

    def wake(self, stream: TokenStream) -> None:
        """Send what it has to say."""


class TokenStream:
    """An answer that comes in deltas; made by ``Tokens.generate``.

    Entering the block sends the request, and waits until the gateway has accepted or queued it. Leaving the
    block cancels what has not ended. In between, iterate: each delta comes once, in order; coming for the
    next one says that the last was consumed, and lets more come. It has one consumer.

    Raises, on entering or while iterating:
        StreamFailed: the gateway refused or ended it; deltas that came before are handed out first.
        SocketLost, SocketRejected: it can not go on: it was not resumable, or could not be resumed in time.
    """

    def __init__(self, state: StreamState, carrier: Carrier) -> None:
        self.state = state
        self.moved = trio.lowlevel.ParkingLot()
        self._carrier = carrier

    # -- what is known

    @property
    def request_id(self) -> str:
        """The gateway's name for it: ``GET /v1/requests/{id}`` tells of it."""
        return self.state.request_id

    @property
    def model(self) -> str:
        """The model that answers; empty while it waits in a queue."""
        return self.state.model

    @property
    def position(self) -> int | None:
        """Its place in the queue; None: it does not wait there."""
        return None if self.state.queued is None else self.state.queued.position

    @property
    def finish_reasons(self) -> list[str | None]:
        """How each choice finished; empty before the end."""
        return [] if self.state.done is None else self.state.done.finish_reasons

    @property
    def usage(self) -> dict[str, Any] | None:
        """Tokens as OpenAI's API counts them; None before the end, or where the engine did not count."""
        return None if self.state.done is None else self.state.done.usage

    @property
    def delivery(self) -> Delivery | None:
        """Tokens generated, delivered and acknowledged when the gateway said so; None before the end."""
        return None if self.state.done is None else self.state.done.delivery

    @property
    def receipt(self) -> Any:
        """The gateway's receipt, if it gives any; None before the end."""
        return None if self.state.done is None else self.state.done.receipt

    # -- the block

    async def __aenter__(self) -> Self:
        """Send the request, and wait for the gateway's first word about it."""
        try:
            await self._carrier.begin(self)
            while not self.state.named:
                await self.moved.park()
            if self.state.error is not None and not self.state.waiting:
                raise self.state.error
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel what has not ended; does not wait for it."""
        self._leave()

    def _leave(self) -> None:
        self.state.leave()
        self._carrier.wake(self)

    # -- iterating

    def __aiter__(self) -> Self:
        """Answer itself."""
        return self

    async def __anext__(self) -> Delta:
        """Answer the next delta."""
        await trio.lowlevel.checkpoint_if_cancelled()
        state = self.state
        while True:
            now = trio.current_time()
            delta = state.take(now)
            if state.has_to_say(now):
                self._carrier.wake(self)
            if delta is not None:
                return delta
            if state.error is not None:
                raise state.error
            if state.over:
                raise StopAsyncIteration
            with trio.move_on_at(state.ack_by):
                await self.moved.park()

    async def text(self) -> str:
        """Consume the rest, and answer the text in it.

        Raises:
            TokensError: as iterating does.
        """
        return "".join([delta.text async for delta in self])
