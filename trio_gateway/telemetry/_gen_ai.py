"""The metrics of OpenTelemetry's conventions for generative AI, as histograms. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from ..contract import InternalRequest
from ..ledger import Histogram, Names, Record
from ._spans import error_type, operation_name

# The bounds that the conventions recommend.
DURATIONS: Final = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKENS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS: Final = tuple(float(4**power) for power in range(14))

DURATION: Final = "gen_ai.server.request.duration"
FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"  # noqa: S105 - a name
OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"  # noqa: S105 - a name
USAGE: Final = "gen_ai.client.token.usage"

UNITS: Final = {DURATION: "s", FIRST_TOKEN: "s", OUTPUT_TOKEN: "s", USAGE: "{token}"}
TEXTS: Final = {
    DURATION: "From a request's arrival until its exchange was over.",
    FIRST_TOKEN: "From a request's arrival until the first content of its whole answer.",
    OUTPUT_TOKEN: "Time of each output token after the first, of whole answers.",
    USAGE: "Tokens of prompt and answer.",
}
_BOUNDS: Final = {DURATION: DURATIONS, FIRST_TOKEN: FIRST_TOKENS, OUTPUT_TOKEN: PER_TOKEN, USAGE: TOKENS}

Attributes = tuple[tuple[str, str], ...]


class Point(NamedTuple):
    """One histogram of one moment; the last of ``counts`` is above all bounds."""

    name: str
    attributes: Attributes
    bounds: tuple[float, ...]
    counts: list[int]
    total: float


class GenAiMetrics:
    """Counts what has ended, in a few additions an exchange.

    Args:
        models: names that have figures of their own.
    """

    def __init__(self, models: Names) -> None:
        self._models = models
        self._found: dict[tuple[str, Attributes], Histogram] = {}

    def see(self, request: InternalRequest, record: Record) -> None:
        """Count an exchange."""
        model, operation = self._models.of(record.model), operation_name(request)
        whose: Attributes = (("gen_ai.operation.name", operation), ("gen_ai.request.model", model))
        error = error_type(record)
        lasted = max(record.settled_at - record.arrived_at, 0.0)
        self._of(DURATION, whose if error is None else (*whose, ("error.type", error))).see(lasted)
        for kind, tokens in (("input", record.tokens_prompt), ("output", record.tokens_generated)):
            if tokens:
                self._of(USAGE, (*whose, ("gen_ai.token.type", kind))).see(tokens)
        if error is None and record.first_content_at is not None:
            first = max(record.first_content_at - record.arrived_at, 0.0)
            self._of(FIRST_TOKEN, whose).see(first)
            if record.stream and (record.tokens_generated or 0) > 1:
                each = max(lasted - first, 0.0) / ((record.tokens_generated or 0) - 1)
                self._of(OUTPUT_TOKEN, whose).see(each)

    def points(self) -> list[Point]:
        """Copy all of this moment."""
        points = []
        for (name, attributes), histogram in tuple(self._found.items()):
            figures = histogram.figures({})
            points.append(Point(name, attributes, figures["bounds"], figures["counts"], figures["seconds"]))
        return points

    def _of(self, name: str, attributes: Attributes) -> Histogram:
        found = self._found.get((name, attributes))
        if found is None:
            found = self._found[name, attributes] = Histogram(_BOUNDS[name])
        return found
