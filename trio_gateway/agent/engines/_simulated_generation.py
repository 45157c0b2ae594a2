"""What the simulated engine works with: its size and speed, requests and their sequences. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, final

from ._simulated_faults import Fault
from ._simulated_memory import BlockTable
from ._simulated_request import Ask
from ._simulated_text import Piece, Speech


class Refusal(Exception):
    """The request was not taken, and nothing of it was executed.

    Attributes:
        code: ``capacity``, ``engine_unready`` or ``model_load_failed``.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Limits:
    """How large the engine is.

    Attributes:
        slots: sequences that run at a time.
        step_tokens: tokens of new prompts that one step computes.
        block_tokens, blocks: size and number of the blocks of KV memory.
        context: tokens of one prompt with its answer; at most what the memory holds.
        max_queued: sequences that may wait for a slot; None: any number.
        together: all choices of a request start at once or not at all.
    """

    slots: int = 8
    step_tokens: int = 2048
    block_tokens: int = 16
    blocks: int = 4096
    context: int = 8192
    max_queued: int | None = None
    together: bool = False

    def __post_init__(self) -> None:
        if min(self.slots, self.step_tokens, self.block_tokens, self.blocks) < 1:
            raise ValueError("an engine needs at least one slot, block, and token of each")
        if not 2 <= self.context <= self.block_tokens * self.blocks:
            raise ValueError("context must be at least 2, and not more than the blocks hold")


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast the engine is.

    Attributes:
        prefill: tokens of prompts a second.
        decode: tokens a second of one sequence that runs alone.
        crowding: share by which each further sequence makes a decoding step longer.
        jitter: share by which a step may be longer or shorter than that, below 1.
        load: seconds until the model is there.
    """

    prefill: float = 8000.0
    decode: float = 50.0
    crowding: float = 0.01
    jitter: float = 0.0
    load: float = 0.0

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode) <= 0 or min(self.crowding, self.jitter, self.load) < 0:
            raise ValueError("speeds must be positive, and what slows them not negative")
        if self.jitter >= 1:
            raise ValueError("jitter must be below 1")

    def times(self, factor: float) -> Speed:
        """Answer the same engine, so many times as fast."""
        return replace(
            self, prefill=self.prefill * factor, decode=self.decode * factor, load=self.load / factor
        )

    def step(self, prefilled: int, decoding: int) -> float:
        """Say how long a step takes, in seconds, but for the jitter."""
        decode = (1 + self.crowding * (decoding - 1)) / self.decode if decoding else 0.0
        return prefilled / self.prefill + decode


class State(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    LEAVING = "leaving"  # cancelled, and its slot and blocks are still held
    OVER = "over"


# Every step a sequence can take; anything else is a bug.
TRANSITIONS: Final[dict[tuple[State, str], State]] = {
    (State.WAITING, "admit"): State.PREFILLING,
    (State.WAITING, "end"): State.OVER,
    (State.PREFILLING, "prefilled"): State.DECODING,
    (State.PREFILLING, "preempt"): State.WAITING,
    (State.PREFILLING, "leave"): State.LEAVING,
    (State.PREFILLING, "end"): State.OVER,
    (State.DECODING, "preempt"): State.WAITING,
    (State.DECODING, "leave"): State.LEAVING,
    (State.DECODING, "end"): State.OVER,
    (State.LEAVING, "end"): State.OVER,
}
HOLDING: Final = frozenset({State.PREFILLING, State.DECODING, State.LEAVING})

Outcome = Literal["finished", "cancelled", "failed"]


@final
class Generation:
    """One request inside the engine. `SimulatedCore.submit` makes it, and only the core changes it.

    Attributes:
        number: from 1, in the order of arrival.
        ask: what it wants.
        faults: what goes wrong with it.
        paused: it gets no tokens, and keeps its slots and memory.
        cancelled: somebody does not want it any more, whether the engine heeds that or not.
        prompt_tokens, cached_tokens: of all prompts, and those of them that were still in memory.
        generated: tokens of all choices.
        arrived, admitted, first_token, ended, released: times; None while they have not come. Between
            ``ended`` and ``released`` it holds slots for nobody.
        outcome: how it ended.
    """

    def __init__(self, number: int, ask: Ask, faults: tuple[Fault, ...], now: float) -> None:
        self.number: Final = number
        self.ask: Final = ask
        self.faults: Final = faults
        self.paused = False
        self.cancelled = False
        self.prompt_tokens = sum(map(len, ask.prompts)) if ask.prompts else 0
        self.cached_tokens = 0
        self.generated = 0
        self.arrived: Final = now
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None
        self.released: float | None = None
        self.outcome: Outcome | None = None
        self.sequences: list[Sequence] = []
        self.left = ask.choices  # sequences that are not over
        self.strikes = sorted((f for f in faults if f.kind in _STRIKING), key=_tokens_of)
        self.hangs_after = min((f.tokens for f in faults if f.kind == "hang"), default=None)
        self.pace = max((f.factor for f in faults if f.kind == "slow"), default=1.0)
        self.keeps_for = max((f.seconds for f in faults if f.kind == "late_release"), default=0.0)
        self.heeds_cancel = all(f.kind != "lost_cancel" for f in faults)

    @property
    def silent_at_first(self) -> bool:
        """Whether not even the head of its answer may be sent before its first output."""
        return any(f.after == "headers" and f.kind in _BEFORE_HEADERS for f in self.faults)

    @property
    def stuck(self) -> bool:
        """Whether it says nothing more."""
        return self.paused or (self.hangs_after is not None and self.generated >= self.hangs_after)

    @property
    def running(self) -> int:
        """Its sequences that hold a slot."""
        return sum(sequence.state in HOLDING for sequence in self.sequences)


_STRIKING: Final = ("die", "out_of_memory", "malformed")
_BEFORE_HEADERS: Final = ("die", "out_of_memory", "hang")


def _tokens_of(fault: Fault) -> int:
    return fault.tokens


@final
class Sequence:
    """One choice of a generation, inside the core."""

    def __init__(
        self, generation: Generation, choice: int, prompt: list[int], names: list[int], speech: Speech
    ) -> None:
        self.generation: Final = generation
        self.choice: Final = choice
        self.prompt: Final = prompt
        self.names: Final = names
        self.speech: Final = speech
        self.order: Final = (generation.number, choice)
        self.state = State.WAITING
        self.table: BlockTable | None = None
        self.to_prefill = 0
        self.chunk = 0  # tokens of its prompt that the step under way computes
        self.decodes = False  # the step under way gives it a token
        self.credit = 0.0  # share of a token that a slow one has gathered
        self.generated = 0
        self.leaves_at = 0.0
        self.was_admitted = False

    def move(self, event: str) -> None:
        """Take one step of `TRANSITIONS`."""
        self.state = TRANSITIONS[self.state, event]


class Output(NamedTuple):
    """What a step gave one choice: a token, or a fault that strikes the whole generation."""

    generation: Generation
    choice: int
    piece: Piece | None
    fault: Fault | None = None


class Entry(NamedTuple):
    """One request in the log, when it was released; times are those of `Generation`."""

    number: int
    outcome: str
    arrived: float
    admitted: float | None
    first_token: float | None
    ended: float
    released: float
    prompt_tokens: int
    cached_tokens: int
    generated: int


class StepEntry(NamedTuple):
    """One step in the log.

    Attributes:
        begins, ends: times.
        running: sequences that hold a slot.
        prefilled, decoded: tokens of prompts, and sequences that were to get one.
    """

    begins: float
    ends: float
    running: int
    prefilled: int
    decoded: int
