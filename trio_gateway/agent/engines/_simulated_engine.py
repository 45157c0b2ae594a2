"""The simulated engine on Trio's clock, behind the agent's port. On a clock that jumps it takes no time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from random import Random
from typing import Any, Final, Protocol, final

import msgspec
import trio

from ... import __version__
from ...contract import CHAT, COMPLETIONS, RESPONSES
from ...wire import EngineRecord
from .._engine import EngineStatus, EngineStream, Rejected, Released, Work
from ._simulated_answer import RecordMaker, failed_by_caller
from ._simulated_core import SimulatedCore
from ._simulated_faults import Fault, FaultPlan, PlannedFault
from ._simulated_generation import Generation, Limits, Output, Refusal, Speed
from ._simulated_request import Ask, AskError, read_ask
from ._simulated_responses import read_response_ask


class Sink(Protocol):
    """Who gets what is generated for one request, synchronously, between two steps."""

    def output(self, output: Output) -> None:
        """Take one token or fault. May cancel or pause the generation."""

    def let_go(self) -> None:
        """The generation was released: it holds nothing any more."""


@final
class SimulatedEngine:
    """An engine without a model, as fast and as faulty as wanted. See `SimulatedCore` for what it does.

    `run` makes it live; it belongs to the task that runs it.

    Args:
        models: names that it serves, all with the same voice.
        failed_models: names that it was to load and could not.
        limits, speed: its size, and how fast it is.
        seed: of everything it says, and of its dice.
        plan: faults of requests that name none.

    Attributes:
        core: the scheduler, with its counters and its log. To be looked at only.
    """

    kind: Final = "simulated"
    version: Final = __version__
    can_pause: Final = True

    def __init__(
        self,
        models: Iterable[str] = ("simulated",),
        *,
        failed_models: Iterable[str] = (),
        limits: Limits | None = None,
        speed: Speed | None = None,
        seed: int = 0,
        plan: Iterable[PlannedFault] = (),
    ) -> None:
        self.models: Final = tuple(models)
        self.failed_models: Final = tuple(failed_models)
        self._limits = limits or Limits()
        self._speed = speed or Speed()
        self._seed = seed
        self._plan = tuple(plan)
        self._rng = Random(seed)
        self._core: SimulatedCore | None = None
        self._sinks: dict[Generation, Sink] = {}
        self._news = trio.Event()

    @property
    def core(self) -> SimulatedCore:
        """See the class."""
        assert self._core is not None, "run was not started"
        return self._core

    @property
    def ready(self) -> bool:
        """Whether its model is loaded."""
        return self.core.ready(trio.current_time())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See AgentEngine. What is open when it is cancelled fails, and is released."""
        now = trio.current_time()
        self._core = SimulatedCore(self._limits, self._speed, seed=self._seed, now=now)
        self._core.plan = FaultPlan(self._plan, now)
        task_status.started()
        try:
            while True:
                self._go_on()
                wake_at = self._core.wake_at
                with trio.move_on_at(math.inf if wake_at is None else wake_at):
                    await self._news.wait()
        finally:
            self._end()

    def _go_on(self) -> None:
        """Do what is due, and hand out what came of it."""
        self._news = trio.Event()
        core = self.core
        # One look at the clock: what is due at one moment happens at one moment.
        now = trio.current_time()
        for output in core.advance(now, self._rng):
            self._sinks[output.generation].output(output)
        for generation in core.take_released():
            self._sinks.pop(generation).let_go()

    def _end(self) -> None:
        died = Fault("die")
        for generation, sink in tuple(self._sinks.items()):
            sink.output(Output(generation, 0, None, died))
            sink.let_go()
        self._sinks.clear()

    def plan_faults(self, planned: Iterable[PlannedFault]) -> None:
        """Give requests that come from now on these faults, and none that were planned before."""
        self.core.plan = FaultPlan(planned, trio.current_time())

    # -- requests

    def submit(self, ask: Ask, sink: Sink) -> Generation:
        """Begin a request; ``sink`` gets its outputs, and then `Sink.let_go` once.

        Raises:
            Refusal: nothing was begun.
            AskError: it can never be served.
        """
        if ask.model in self.failed_models:
            raise Refusal("model_load_failed")
        if ask.model not in self.models:
            raise Refusal("model_not_loaded")
        generation = self.core.submit(ask, trio.current_time(), self._rng)
        self._sinks[generation] = sink
        self._news.set()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Let a generation end soon. Idempotent."""
        self.core.cancel(generation, trio.current_time())
        self._news.set()

    def pause(self, generation: Generation) -> None:
        """Give a generation no tokens for now. Idempotent."""
        self.core.pause(generation)

    def resume(self, generation: Generation) -> None:
        """Give a generation tokens again. Idempotent."""
        self.core.resume(generation)
        self._news.set()

    # -- the agent's port

    def status(self) -> EngineStatus:
        """See AgentEngine."""
        core, now = self.core, trio.current_time()
        running = sum(generation.running > 0 for generation in core.generations)
        return EngineStatus(
            ready=core.ready(now),
            models=self.models if core.ready(now) else (),
            slots=core.limits.slots,
            running=running,
            queued=len(core.generations) - running,
            kv_usage_ratio=core.memory.usage,
            tokens_per_second=core.tokens_per_second(now),
            failed_models=self.failed_models,
        )

    async def open(self, work: Work) -> EngineStream:
        """See AgentEngine."""
        await trio.lowlevel.checkpoint()
        try:
            ask = _ask_of(work)
            kind = "resp_" if ask.response else "chatcmpl-"
            stream = SimulatedStream(self, ask, f"{kind}{work.request_id}-{work.attempt:02d}")
            stream.begin()
        except Refusal as refusal:
            raise Rejected(refusal.code) from None
        except AskError as error:
            return _FailedStream(failed_by_caller(error))
        return stream


def _ask_of(work: Work) -> Ask:
    if work.operation not in (CHAT.name, COMPLETIONS.name, RESPONSES.name):
        raise AskError(f"{work.operation} is not simulated")
    try:
        body: Any = msgspec.json.decode(work.body)
    except (ValueError, RecursionError):
        raise AskError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise AskError("the body is no object")
    body = {**body, "model": work.model, "stream": work.stream}
    if work.operation == RESPONSES.name:
        return read_response_ask(body)
    return read_ask(body, chat=work.operation == CHAT.name)


@final
class SimulatedStream:
    """One request inside a `SimulatedEngine`; see EngineStream."""

    def __init__(self, engine: SimulatedEngine, ask: Ask, answer_id: str) -> None:
        self._engine = engine
        self._ask = ask
        self._maker = RecordMaker(ask, answer_id)
        self._records: deque[EngineRecord] = deque()
        self._over = False
        self._reader = trio.lowlevel.ParkingLot()
        self._released = trio.Event()
        self._generation: Generation | None = None

    def begin(self) -> None:
        """Submit it; raises as `SimulatedEngine.submit`."""
        self._generation = self._engine.submit(self._ask, self)

    @property
    def generation(self) -> Generation:
        """What the engine knows of it."""
        assert self._generation is not None
        return self._generation

    @property
    def generated(self) -> int:
        """See EngineStream."""
        return self.generation.generated

    async def receive(self) -> EngineRecord | None:
        """See EngineStream."""
        await trio.lowlevel.checkpoint()
        while not self._records:
            if self._over:
                return None
            await self._reader.park()
        return self._records.popleft()

    def pause(self) -> None:
        """See EngineStream."""
        self._engine.pause(self.generation)

    def resume(self) -> None:
        """See EngineStream."""
        self._engine.resume(self.generation)

    def cancel(self) -> None:
        """See EngineStream."""
        self._stop()
        self._records.clear()
        self._engine.cancel(self.generation)

    async def wait_released(self) -> Released:
        """See EngineStream."""
        await self._released.wait()
        return Released(self.generated, True)

    # -- as a sink

    def output(self, output: Output) -> None:
        """See Sink."""
        if self._over:
            return
        self._records.extend(self._maker.records(output, int(time.time())))
        if self._maker.over:
            self._stop()
            self._engine.cancel(self.generation)  # of effect only where a malformed line ended it
        else:
            self._reader.unpark()

    def let_go(self) -> None:
        """See Sink."""
        self._stop()
        self._released.set()

    def _stop(self) -> None:
        self._over = True
        self._reader.unpark_all()


@final
class _FailedStream:
    """A request that failed at its caller before the engine saw it."""

    generated: Final = 0

    def __init__(self, record: EngineRecord) -> None:
        self._record: EngineRecord | None = record

    async def receive(self) -> EngineRecord | None:
        await trio.lowlevel.checkpoint()
        record, self._record = self._record, None
        return record

    def pause(self) -> None:
        """Nothing is generated."""

    def resume(self) -> None:
        """Nothing is generated."""

    def cancel(self) -> None:
        self._record = None

    async def wait_released(self) -> Released:
        await trio.lowlevel.checkpoint()
        return Released(0, True)
