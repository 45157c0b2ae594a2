"""The simulated engine's scheduler: continuous batching in steps. Pure: time and dice are arguments.

A step computes part of the prompts that are new, up to a budget of tokens, and
one token of every sequence whose prompt is computed. It takes the time that both
need together, and its tokens exist when it ends. A sequence is one choice of one
request and holds one slot; its tokens live in blocks of KV memory. Where blocks
run out, the youngest sequence gives its own back, waits, and computes all of its
tokens again (vLLM's preemption by recomputing).

Whoever drives it calls `SimulatedCore.advance` when `SimulatedCore.wake_at` has
come, and after `submit`, `cancel`, `resume`.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, final

from ._simulated_faults import FaultPlan
from ._simulated_generation import (
    HOLDING,
    Entry,
    Generation,
    Limits,
    Outcome,
    Output,
    Refusal,
    Sequence,
    Speed,
    State,
    StepEntry,
)
from ._simulated_memory import BlockTable, KVMemory, chain
from ._simulated_request import Ask, AskError

if TYPE_CHECKING:
    from random import Random

CATCH_UP: Final = 0.1  # seconds a step may begin in the past, so that late wake-ups do not slow the engine
RATE_WINDOW: Final = 2.0  # seconds that `tokens_per_second` looks back
LOG_LENGTH: Final = 10_000  # steps, and requests, that are remembered one by one


@final
class SimulatedCore:
    """A whole engine, without a clock, a socket or dice of its own.

    Attributes:
        memory: the KV blocks.
        ready_at: when its model is loaded.
        plan: faults of requests that do not name any; may be exchanged at any time.
        steps: the last steps, and ``entries`` the last requests that were released.
        high_water: the most sequences that ever held slots at a time.
        arrived, refused, preemptions, step_count: counts.
        outcomes: released generations by outcome.
        prompt_tokens, generated_tokens: of everything so far; a prompt counts when it is admitted.
        tally: finish reasons of choices, by number.

    Args:
        seed: of all texts.
        now: when it starts to load its model.
    """

    def __init__(
        self, limits: Limits | None = None, speed: Speed | None = None, *, seed: int = 0, now: float = 0.0
    ) -> None:
        self.limits: Final = limits or Limits()
        self.speed: Final = speed or Speed()
        self.memory: Final = KVMemory(self.limits.blocks, self.limits.block_tokens)
        self.plan = FaultPlan()
        self.steps: Final[deque[StepEntry]] = deque(maxlen=LOG_LENGTH)
        self.entries: Final[deque[Entry]] = deque(maxlen=LOG_LENGTH)
        self.high_water = 0
        self.arrived = 0
        self.refused = 0
        self.preemptions = 0
        self.step_count = 0
        self.outcomes: Final[Counter[str]] = Counter()
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.tally: Final[Counter[str]] = Counter()
        self._seed = seed
        self.ready_at = now + self.speed.load
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._generations: dict[int, Generation] = {}
        self._released: list[Generation] = []
        self._step_ends: float | None = None
        self._changed_at = now  # the last time that somebody came or left
        self._rates: deque[tuple[float, int]] = deque()

    # -- what it says of itself

    @property
    def running(self) -> int:
        """Sequences that hold a slot, those included that are leaving."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Requests that are not released, in the order of arrival."""
        return tuple(self._generations.values())

    @property
    def wake_at(self) -> float | None:
        """When `advance` has something to do next; None: not before somebody calls something."""
        if self._step_ends is not None:
            return self._step_ends
        return min((s.leaves_at for s in self._running if s.state is State.LEAVING), default=None)

    def ready(self, now: float) -> bool:
        """Whether the model is loaded."""
        return now >= self.ready_at

    def tokens_per_second(self, now: float) -> float:
        """Tokens generated over the last `RATE_WINDOW` seconds, by second."""
        while self._rates and self._rates[0][0] <= now - RATE_WINDOW:
            self._rates.popleft()
        return sum(tokens for _, tokens in self._rates) / RATE_WINDOW

    # -- what is asked of it

    def submit(self, ask: Ask, now: float, rng: Random) -> Generation:
        """Take a request; its sequences wait for slots from now on.

        Raises:
            Refusal: there is no room, or no model.
            AskError: no room would ever be enough.
        """
        self.arrived += 1
        faults = (*ask.faults, *self.plan.faults_of(self.arrived, now, rng))
        try:
            self._judge(ask, now, {fault.kind for fault in faults})
        except (Refusal, AskError):
            self.refused += 1
            raise
        generation = Generation(self.arrived, ask, faults, now)
        for choice in range(ask.choices):
            prompt = ask.prompts[choice // ask.n]
            speech = ask.speech(choice, self._seed, self.limits.context)
            names = chain(prompt, self.limits.block_tokens, ask.salt)
            generation.sequences.append(Sequence(generation, choice, prompt, names, speech))
        self._waiting += generation.sequences
        self._generations[generation.number] = generation
        self._changed_at = now
        return generation

    def _judge(self, ask: Ask, now: float, faults: set[str]) -> None:
        if not self.ready(now):
            raise Refusal("engine_unready")
        if "load_failure" in faults:
            raise Refusal("model_load_failed")
        longest = max(map(len, ask.prompts))
        if longest >= self.limits.context:
            raise AskError(
                f"This model's maximum context length is {self.limits.context} tokens. However, your request "
                f"has {longest} input tokens. Please reduce the length of the input messages.",
                "messages" if ask.chat else "prompt",
            )
        if self.limits.together and ask.choices > self.limits.slots:
            raise AskError(f"{ask.choices} choices need as many slots", "n")
        room = self.limits.max_queued
        taken = len(self._running) + len(self._waiting) + ask.choices
        if "refuse" in faults or (room is not None and taken > self.limits.slots + room):
            raise Refusal("capacity")

    def cancel(self, generation: Generation, now: float) -> None:
        """Let a generation end soon; what runs keeps its slot until the step under way is over.

        No effect on one that has ended, and none but that nothing holds it back any more on one that does not
        heed it.
        """
        if generation.ended is not None or generation.cancelled:
            return
        self._changed_at = now
        generation.cancelled = True
        generation.paused = False
        if not generation.heeds_cancel:
            return
        self._conclude(generation, "cancelled", now)
        for sequence in generation.sequences:
            if sequence.state is State.WAITING:
                self._waiting.remove(sequence)
                self._end(sequence, now)
            elif sequence.state in (State.PREFILLING, State.DECODING):
                sequence.move("leave")
                sequence.leaves_at = now + generation.keeps_for
        if self._step_ends is None:
            self._let_go(now)

    def pause(self, generation: Generation) -> None:
        """Give it no tokens from the next step on. Idempotent; no effect on one that was cancelled."""
        generation.paused = not generation.cancelled

    def resume(self, generation: Generation) -> None:
        """Give it tokens again. Idempotent."""
        generation.paused = False

    # -- steps

    def advance(self, now: float, rng: Random) -> list[Output]:
        """End the step under way if its time has come, and begin the next; answers what was generated."""
        outputs: list[Output] = []
        begin = now
        if self._step_ends is not None:
            if now < self._step_ends:
                return outputs
            # Nobody who came meanwhile may be served before he came.
            begin = max(self._step_ends, self._changed_at) if now - self._step_ends <= CATCH_UP else now
            self._finish_step(self._step_ends, outputs)
            self._step_ends = None
        self._let_go(now)
        self._admit(begin)
        self._begin_step(begin, rng)
        return outputs

    def take_released(self) -> list[Generation]:
        """Give out those that were released since the last call."""
        released, self._released = self._released, []
        return released

    def _admit(self, now: float) -> None:
        """Move waiting sequences into slots, first come, first served, while there are slots and blocks."""
        while self._waiting and len(self._running) < self.limits.slots:
            sequence = self._waiting[0]
            if self.limits.together and self._waits_for_others(sequence.generation):
                return
            table = self.memory.take(sequence.names, len(sequence.prompt) + sequence.generated + 1)
            if table is None:
                return
            del self._waiting[0]
            self._place(sequence, table, now)

    def _waits_for_others(self, generation: Generation) -> bool:
        """Whether there are too few slots for all of its sequences that have not begun."""
        new = sum(s.state is State.WAITING and not s.was_admitted for s in generation.sequences)
        return new > self.limits.slots - len(self._running)

    def _place(self, sequence: Sequence, table: BlockTable, now: float) -> None:
        generation = sequence.generation
        cached = table.cached * self.limits.block_tokens
        sequence.move("admit")
        sequence.table = table
        sequence.to_prefill = len(sequence.prompt) + sequence.generated - cached
        if not sequence.was_admitted:
            sequence.was_admitted = True
            self.prompt_tokens += len(sequence.prompt)
            if not sequence.choice % generation.ask.n:  # the choices of one prompt share its tokens
                generation.cached_tokens += cached
        if generation.admitted is None:
            generation.admitted = now
        bisect.insort(self._running, sequence, key=_order)
        self.high_water = max(self.high_water, len(self._running))

    def _begin_step(self, now: float, rng: Random) -> None:
        decoding = self._plan_decode()  # first: it may take blocks from those that prefill
        prefilled = self._plan_prefill()
        if not prefilled and not decoding:
            return
        seconds = self.speed.step(prefilled, decoding)
        if self.speed.jitter:
            seconds *= 1 + self.speed.jitter * (2 * rng.random() - 1)
        self._step_ends = now + seconds
        self.step_count += 1
        self.steps.append(StepEntry(now, self._step_ends, len(self._running), prefilled, decoding))

    def _plan_prefill(self) -> int:
        budget = self.limits.step_tokens
        for sequence in self._running:
            if sequence.state is State.PREFILLING and budget and not sequence.generation.paused:
                sequence.chunk = min(sequence.to_prefill, budget)
                budget -= sequence.chunk
        return self.limits.step_tokens - budget

    def _plan_decode(self) -> int:
        """Choose who gets a token; the oldest first, so that who makes room is the youngest."""
        decoding = 0
        for sequence in tuple(self._running):
            # It may have been preempted for an older one since the walk began.
            if sequence.state is not State.DECODING or sequence.generation.stuck:
                continue
            if self._has_room(sequence):
                decoding += 1
                sequence.decodes = True
        return decoding

    def _has_room(self, sequence: Sequence) -> bool:
        """Find a place for its next token; False if it had to give its own blocks back for want of one."""
        assert sequence.table is not None
        tokens = len(sequence.prompt) + sequence.generated + 1
        while len(sequence.table.blocks) * self.limits.block_tokens < tokens:
            if self.memory.grow(sequence.table):
                continue
            youngest = next(s for s in reversed(self._running) if _preemptible(s))
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.move("preempt")
        self._free(sequence)
        bisect.insort(self._waiting, sequence, key=_order)

    def _finish_step(self, now: float, outputs: list[Output]) -> None:
        before = self.generated_tokens
        for sequence in tuple(self._running):
            if sequence.state is State.PREFILLING and sequence.chunk:
                self._prefilled(sequence)
            chosen, sequence.decodes, sequence.chunk = sequence.decodes, False, 0
            if chosen and sequence.state is State.DECODING and self._pays(sequence):
                self._generate(sequence, now, outputs)
        if self.generated_tokens > before:
            self._rates.append((now, self.generated_tokens - before))
            self.tokens_per_second(now)  # forgets what is old

    def _prefilled(self, sequence: Sequence) -> None:
        sequence.to_prefill -= sequence.chunk
        if not sequence.to_prefill:
            assert sequence.table is not None
            self.memory.remember(sequence.table, sequence.names)
            sequence.move("prefilled")
            sequence.decodes = not sequence.generation.stuck  # the last of the prompt gives the first token

    def _pays(self, sequence: Sequence) -> bool:
        """Whether a token is due, which for a slow one is not so in every step."""
        pace = sequence.generation.pace
        sequence.credit += 1 / pace
        if sequence.credit < 1 - 1e-9:
            return False
        sequence.credit -= 1
        return True

    def _generate(self, sequence: Sequence, now: float, outputs: list[Output]) -> None:
        generation = sequence.generation
        if generation.strikes and generation.generated >= generation.strikes[0].tokens:
            fault = generation.strikes.pop(0)
            outputs.append(Output(generation, sequence.choice, None, fault))
            if fault.kind != "malformed":
                self._fail(generation, now)
                return
        if generation.stuck:  # another choice of it has just reached the place where it hangs
            return
        piece = sequence.speech.next()
        sequence.generated += 1
        generation.generated += 1
        self.generated_tokens += 1
        if generation.first_token is None:
            generation.first_token = now
        outputs.append(Output(generation, sequence.choice, piece))
        if piece.finish is not None:
            self.tally[piece.finish] += 1
            self._finish(sequence, now)

    # -- ends

    def _finish(self, sequence: Sequence, now: float) -> None:
        generation = sequence.generation
        if generation.left == 1:
            self._conclude(generation, "cancelled" if generation.cancelled else "finished", now)
        self._end(sequence, now)

    def _fail(self, generation: Generation, now: float) -> None:
        self._conclude(generation, "failed", now)
        for sequence in generation.sequences:
            if sequence.state is State.WAITING:
                self._waiting.remove(sequence)
            if sequence.state is not State.OVER:
                self._end(sequence, now)

    def _conclude(self, generation: Generation, outcome: Outcome, now: float) -> None:
        generation.outcome = outcome
        generation.ended = now

    def _let_go(self, now: float) -> None:
        for sequence in tuple(self._running):
            if sequence.state is State.LEAVING and sequence.leaves_at <= now:
                self._end(sequence, now)

    def _end(self, sequence: Sequence, now: float) -> None:
        """Take slot and blocks back; with a generation's last sequence, it is released."""
        if sequence.state in HOLDING:
            self._free(sequence)
        sequence.move("end")
        generation = sequence.generation
        generation.left -= 1
        if not generation.left:
            self._release(generation, now)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.table is not None
        self.memory.give_back(sequence.table)
        sequence.table = None
        sequence.chunk = 0
        sequence.decodes = False
        self._running.remove(sequence)

    def _release(self, generation: Generation, now: float) -> None:
        g = generation
        assert g.outcome is not None
        assert g.ended is not None
        g.released = now
        self._released.append(g)
        del self._generations[g.number]
        self.outcomes[g.outcome] += 1
        times = (g.arrived, g.admitted, g.first_token, g.ended, g.released)
        counts = (g.prompt_tokens, g.cached_tokens, g.generated)
        self.entries.append(Entry(g.number, g.outcome, *times, *counts))


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _preemptible(sequence: Sequence) -> bool:
    """Whether it may be made to give its blocks back; who is paused or hangs keeps them."""
    return sequence.state in (State.PREFILLING, State.DECODING) and not sequence.generation.stuck
