"""From what an operator says to an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from .._engine import AgentEngine
from ._llamacpp import LlamaCppEngine
from ._openai import OpenAIEngine
from ._simulated_engine import SimulatedEngine
from ._simulated_generation import Limits, Speed

ENGINES: Final = ("simulated", "openai", "llamacpp")
DEFAULT_SLOTS: Final = 4  # of llama.cpp


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What engines are made from; each takes what it knows.

    Attributes:
        models: names to serve; for ``openai`` none means those that the server lists.
        slots: requests at a time.
        upstream: base URL of an OpenAI-compatible server; ``upstream_kind`` is its dialect.
        api_key: credential at that server.
        model_file, context: a GGUF file, and tokens of context of each slot, for ``llamacpp``.
        simulate: ``name=value`` for `Limits`, `Speed` and ``seed``.
    """

    models: tuple[str, ...] = ()
    slots: int | None = None
    upstream: str | None = None
    upstream_kind: str = "openai"
    api_key: str | None = field(default=None, repr=False)
    model_file: Path | None = None
    context: int = 2048
    simulate: tuple[str, ...] = ()


def make_engine(kind: str, options: EngineOptions) -> AgentEngine:
    """Make an engine of one of `ENGINES`.

    Raises:
        ValueError: something is missing or impossible; the text says what.
    """
    if kind == "simulated":
        return _simulated(options)
    if kind == "openai":
        if options.upstream is None:
            raise ValueError("the engine openai needs the base URL of its server: --upstream")
        return OpenAIEngine(
            options.upstream,
            options.upstream_kind,
            models=options.models,
            slots=options.slots,
            api_key=options.api_key,
        )
    if kind == "llamacpp":
        if options.model_file is None or len(options.models) != 1:
            raise ValueError("the engine llamacpp needs one --model-file and one --model, its name")
        return LlamaCppEngine(
            options.model_file,
            name=options.models[0],
            slots=options.slots or DEFAULT_SLOTS,
            context=options.context,
        )
    raise ValueError(f"no engine {kind}: there are {', '.join(ENGINES)}")


def _simulated(options: EngineOptions) -> AgentEngine:
    settings = dict(_setting(text) for text in options.simulate)
    seed = int(settings.pop("seed", 0))
    limits: Any = {
        each.name: int(settings.pop(each.name)) for each in fields(Limits) if each.name in settings
    }
    speed = {each.name: settings.pop(each.name) for each in fields(Speed) if each.name in settings}
    if settings:
        raise ValueError(f"nothing to simulate is called {next(iter(settings))}")
    size = Limits(**limits)
    if options.slots is not None:
        size = replace(size, slots=options.slots)
    return SimulatedEngine(options.models or ("simulated",), limits=size, speed=Speed(**speed), seed=seed)


def _setting(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"write name=number, not {text}" if equals else f"{text} has no value") from None


def read_secret(file: Path) -> str:
    """Read a secret from a file, without the line end behind it.

    Raises:
        ValueError: it is empty, or no single line of printable ASCII.
        OSError: it can not be read.
    """
    text = file.read_text(encoding="utf-8").strip()
    if not text.isascii() or not text.isprintable() or not text or " " in text:
        raise ValueError(f"{file} must hold one secret on one line")
    return text


def names(values: Iterable[str] | None) -> tuple[str, ...]:
    """Names from an option that may be given again, each once, in order."""
    return tuple(dict.fromkeys(values or ()))
