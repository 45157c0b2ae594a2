"""How the simulated engine misbehaves: per request, or by a plan. Pure.

A request names its faults in its body, as an object or in words that also fit
OpenAI's ``metadata``, whose values are texts:

    "simulate": {"faults": [{"kind": "die", "after": 3}]}
    "metadata": {"simulate": "die after=3; late_release seconds=2"}
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final, Literal, final

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from random import Random

Kind = Literal[
    "refuse",  # there is no room for it
    "hang",  # it keeps its slot and says nothing more
    "slow",  # it gets a token only every ``factor`` steps
    "die",  # the connection is cut
    "out_of_memory",
    "load_failure",  # its model could not be loaded
    "malformed",  # a line that is no line of the protocol
    "lost_cancel",  # it goes on to its end, whoever left
    "late_release",  # it keeps its slot for ``seconds`` after it was cancelled
]
_Positive = Annotated[float, Meta(gt=0, le=1e6)]
_Tokens = Annotated[int, Meta(ge=0)]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to go wrong.

    Attributes:
        kind: which.
        after: when, for ``hang``, ``die``, ``out_of_memory`` and ``malformed``: before the ``headers`` of the
            answer, behind them and before the ``content``, or after so many tokens of the request.
        factor: of ``slow``, at least 1.
        seconds: of ``late_release``.
    """

    kind: Kind
    after: Literal["headers", "content"] | _Tokens = "headers"
    factor: Annotated[float, Meta(ge=1, le=1e6)] = 4.0
    seconds: _Positive = 5.0

    @property
    def tokens(self) -> int:
        """Tokens of the request after which it strikes."""
        return self.after if isinstance(self.after, int) else 0


class PlannedFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of requests that do not ask for it: of all of them, unless an attribute says of which.

    Attributes:
        fault: what they get.
        request: the number of the one that gets it, from 1 in the order of arrival.
        start, end: seconds from the making of the plan between which it has to arrive.
        probability: with which it gets it.
        times: of how many requests at most.
    """

    fault: Fault
    request: Annotated[int, Meta(ge=1)] | None = None
    start: float = 0.0
    end: float = float("inf")
    probability: Annotated[float, Meta(ge=0, le=1)] = 1.0
    times: Annotated[int, Meta(ge=0)] | None = None


@final
class FaultPlan:
    """Faults by number, time or chance.

    Args:
        planned: every one that fits a request is given to it.
        now: the time from which ``start`` and ``end`` count.
    """

    def __init__(self, planned: Iterable[PlannedFault] = (), now: float = 0.0) -> None:
        self._planned = tuple(planned)
        self._left = [planned.times for planned in self._planned]
        self._made = now

    def faults_of(self, number: int, now: float, rng: Random) -> list[Fault]:
        """Choose what the request with this number gets, and count it."""
        found = []
        for at, planned in enumerate(self._planned):
            if self._fits(planned, number, now - self._made) and self._left[at] != 0:
                if planned.probability < 1 and rng.random() >= planned.probability:
                    continue
                left = self._left[at]
                self._left[at] = None if left is None else left - 1
                found.append(planned.fault)
        return found

    def _fits(self, planned: PlannedFault, number: int, age: float) -> bool:
        return planned.request in (None, number) and planned.start <= age < planned.end


class Wishes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request wants of the simulation.

    Attributes:
        faults: in any number.
        tokens: that a choice is long, instead of a length by its seed.
        reasoning: tokens of thinking in front of the answer.
    """

    faults: tuple[Fault, ...] = ()
    tokens: Annotated[int, Meta(ge=1)] | None = None
    reasoning: _Tokens = 0


_NUMBER: Final = re.compile(r"[0-9]+")
_REAL: Final = re.compile(r"[0-9]+\.[0-9]+")


def read_wishes(value: object) -> Wishes:
    """Read a ``simulate`` member: an object of `Wishes`, or words.

    In words, faults are divided by semicolons, and each is a kind with its settings: ``slow factor=3``. A
    part without a kind sets what `Wishes` has: ``tokens=40 reasoning=8``.

    Raises:
        ValueError: it is neither; the message says why.
    """
    if value is None:
        return Wishes()
    return msgspec.convert(_from_words(value) if isinstance(value, str) else value, Wishes)


def _from_words(text: str) -> dict[str, object]:
    wishes: dict[str, object] = {}
    faults: list[dict[str, object]] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        first, *rest = part.split()
        if "=" in first:
            wishes |= map(_setting, (first, *rest))
        else:
            faults.append({"kind": first, **dict(map(_setting, rest))})
    return {**wishes, "faults": faults} if faults else wishes


def _setting(word: str) -> tuple[str, object]:
    name, _, value = word.partition("=")
    if _NUMBER.fullmatch(value):
        return name, int(value)
    return name, float(value) if _REAL.fullmatch(value) else value
