"""What a request will probably cost, before it was served. Pure.

Prompt tokens follow from the bytes of its body by a ratio that is learnt for each
model; output tokens from what it asks for and how long the model's answers lately were.
"""

from __future__ import annotations

from typing import Final

from ..contract import InternalRequest, Style

OUTPUT_WEIGHT: Final = 2.0  # what a generated token costs, in prompt tokens
_FIRST_RATIO: Final = 4.0  # bytes a token, until something was learnt
_FIRST_OUTPUT: Final = 256.0  # tokens
_STEP: Final = 0.05  # weight of the newest observation
_LEAST_RATIO, _MOST_RATIO = 0.5, 64.0


class _Model:
    """What was learnt of one model."""

    __slots__ = ("output", "ratio")

    def __init__(self) -> None:
        self.ratio = _FIRST_RATIO
        self.output = _FIRST_OUTPUT


_UNKNOWN: Final = _Model()  # never changed: whoever learns makes one of its own


class Estimates:
    """Running estimates, by model. Memory is bounded by the models."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def expected(self, request: InternalRequest) -> float:
        """Cost of a request that was not served yet, in prompt tokens."""
        return self.cost(request, None, None)

    def cost(self, request: InternalRequest, prompt: int | None, generated: int | None) -> float:
        """Cost by what is known; what is None is estimated."""
        if prompt is not None and generated is not None:
            return prompt + OUTPUT_WEIGHT * generated
        probable_prompt, probable_output = self.tokens(request)
        prompt_tokens = probable_prompt if prompt is None else float(prompt)
        return prompt_tokens + OUTPUT_WEIGHT * (probable_output if generated is None else float(generated))

    def tokens(self, request: InternalRequest) -> tuple[float, float]:
        """Tokens of the prompt and of the answer that a request will probably have."""
        model = self._models.get(request.model) or _UNKNOWN
        prompt = 0.0 if request.operation.multipart else request.size / model.ratio  # a recording is no text
        asked = request.output_limit or request.tokens
        each = model.output if asked is None else min(float(asked), model.output * 2)
        return prompt, each * _answers(request)

    def tokens_of(self, model: str, size: int) -> float:
        """Tokens that so many bytes of a body probably are."""
        return size / (self._models.get(model) or _UNKNOWN).ratio

    def observe(self, request: InternalRequest, prompt: int | None, generated: int) -> None:
        """Learn from a request that was served."""
        model = self._models.setdefault(request.model, _Model())
        if prompt:
            ratio = min(max(request.size / prompt, _LEAST_RATIO), _MOST_RATIO)
            model.ratio += _STEP * (ratio - model.ratio)
        if answers := _answers(request):
            model.output += _STEP * (generated / answers - model.output)


def _answers(request: InternalRequest) -> int:
    """How many texts are generated: one where the operation generates and knows no choices."""
    return 0 if request.operation.style is Style.PLAIN else request.choices or 1
