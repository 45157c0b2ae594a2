"""The port between the agent and an engine.

The agent admits, counts slots and bytes, and speaks to gateways; an engine
generates. An engine gives the records of an answer between ``accepted`` and
``end``, in the order of the grammar: per choice deltas and tool calls, then its
`Finish`; usage anywhere; `Result` alone for a buffered answer; `Failed` as the
last record instead of anything that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..wire import REJECTIONS, EngineRecord

if TYPE_CHECKING:
    import trio


class Rejected(Exception):
    """The request was not taken, and nothing of it was executed. ``code`` is a key of `wire.REJECTIONS`."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        assert code in REJECTIONS
        self.code = code


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt, as the gateway sent it.

    Attributes:
        request_id, attempt: together unique; ``attempt`` is the attempt's number from 1.
        operation: name of one of `trio_gateway.contract.OPERATIONS`.
        model: name that the engine knows.
        remaining: seconds until the deadline, when the request was admitted.
        priority: the tier, such as ``standard``.
        stream: deltas are wanted; else one `Result`.
        body: the request's JSON, as the gateway embedded it.
        content_type: of ``body`` where it is no JSON (a multipart form).
        choices: that the answer has (prompts x n); 0 for operations without.
    """

    request_id: str
    attempt: int
    operation: str
    model: str
    remaining: float
    priority: str
    stream: bool
    body: bytes
    content_type: str | None = None
    choices: int = 1


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine says of itself, at one moment.

    Attributes:
        ready: it can take work now; False while it starts, loads, or is broken.
        models: names that are loaded.
        slots: requests that it can run at a time; None: it does not know (the operator says).
        running, queued: requests inside of it, those that were cancelled and not let go included.
        kv_usage_ratio: 0 to 1; None where nothing tells.
        tokens_per_second: generated, over the last seconds; None where nothing tells.
        failed_models: names whose loading failed.
    """

    ready: bool
    models: tuple[str, ...]
    slots: int | None
    running: int
    queued: int
    kv_usage_ratio: float | None = None
    tokens_per_second: float | None = None
    failed_models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Released:
    """What the engine let go of: tokens it had generated, and whether its KV memory is free again."""

    generated: int
    kv_released: bool


class EngineStream(Protocol):
    """One request inside an engine. Owned by the task that opened it.

    However it goes, the owner awaits `wait_released` in the end: only then the slot is free.
    """

    @property
    def generated(self) -> int:
        """Tokens generated so far, delivered or not."""

    async def receive(self) -> EngineRecord | None:
        """Wait for the next record; None after the last one (after a `Failed`, too).

        What is read was not buffered without bound: an engine that `can_pause` goes on
        generating while nobody reads, until it is paused.
        """

    def pause(self) -> None:
        """Stop generating soon, and keep what there is. No effect on an engine that can not pause."""

    def resume(self) -> None:
        """Go on after `pause`. Idempotent, as `pause` is."""

    def cancel(self) -> None:
        """Stop for good: `receive` answers None soon. Idempotent, also after the end. Never waits."""

    async def wait_released(self) -> Released:
        """Wait until the engine does nothing for this request any more and its memory is free.

        Comes after the last record, or some time after `cancel`; may be awaited more than once.
        """


class AgentEngine(Protocol):
    """An engine that an agent guards.

    Attributes:
        kind: such as ``simulated``, ``openai``, ``llamacpp``.
        version: of the engine, for people; "" where nothing tells.
        can_pause: `EngineStream.pause` has an effect.
    """

    @property
    def kind(self) -> str:
        """See the class."""

    @property
    def version(self) -> str:
        """See the class."""

    @property
    def can_pause(self) -> bool:
        """See the class."""

    async def run(self, *, task_status: trio.TaskStatus[None] = ...) -> None:
        """Run the engine until cancelled; reports started when `status` and `open` may be called.

        Being ready is another matter: a model may load for minutes after that.
        """

    def status(self) -> EngineStatus:
        """Say how it is, at once and cheaply."""

    async def open(self, work: Work) -> EngineStream:
        """Give the engine one request, and answer when it has taken it.

        The caller owns the stream. If the caller is cancelled in here, the engine keeps nothing.

        Raises:
            Rejected: nothing was executed.
        """
