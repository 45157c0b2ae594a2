"""Requests for the simulated engine, in short."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from trio_gateway.agent.engines._simulated_core import SimulatedCore
from trio_gateway.agent.engines._simulated_faults import Fault
from trio_gateway.agent.engines._simulated_generation import Generation, Output
from trio_gateway.agent.engines._simulated_request import Ask, read_ask

LONG: Final = 10_000  # steps; a story that takes more does not end


def ask(prompt: int = 8, tokens: int | None = 4, *faults: Fault, kind: int = 0, **others: Any) -> Ask:
    """A completion of ``tokens`` tokens for a prompt of ``prompt`` tokens, equal for an equal ``kind``."""
    prompts = ([kind * 1_000_000 + at for at in range(prompt)],)
    return Ask(model="m", chat=False, stream=True, prompts=prompts, length=tokens, faults=faults, **others)


def chat(text: str = "hi", **members: Any) -> Ask:
    """A chat body, read."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **members}
    return read_ask(body, chat=True)


class Story:
    """A core with a clock of its own that goes from one step to the next."""

    def __init__(self, core: SimulatedCore, seed: int = 0) -> None:
        self.core = core
        self.rng = Random(seed)
        self.now = 0.0
        self.outputs: list[Output] = []

    def submit(self, wanted: Ask) -> Generation:
        """Give the core a request, and let it begin."""
        generation = self.core.submit(wanted, self.now, self.rng)
        self.advance()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Cancel, and let the core go on."""
        self.core.cancel(generation, self.now)
        self.advance()

    def resume(self, generation: Generation) -> None:
        """Resume, and let the core go on."""
        self.core.resume(generation)
        self.advance()

    def advance(self) -> None:
        """Let the core do what is due now."""
        self.outputs += self.core.advance(self.now, self.rng)

    def step(self) -> bool:
        """Go to the core's next moment; False if there is none."""
        wake_at = self.core.wake_at
        if wake_at is None:
            return False
        self.now = max(self.now, wake_at)
        self.advance()
        return True

    def play(self) -> None:
        """Go on until nothing is left to do."""
        assert any(not self.step() for _ in range(LONG))

    def text(self, generation: Generation, choice: int = 0) -> str:
        """What one choice has said."""
        mine = (o for o in self.outputs if o.generation is generation and o.choice == choice)
        return "".join(output.piece.text for output in mine if output.piece)

    def tokens(self, generation: Generation) -> int:
        """How many tokens came out."""
        return sum(o.generation is generation and o.piece is not None for o in self.outputs)
