"""Fields of a request that a model's configuration fills in where the caller leaves them out.

Any field will do whose value JSON can express, since what an engine calls its options is not ours to know.
Refused is only what the gateway acts on or writes itself: a default for it would be one thing here and
another at the engine.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from trio_gateway.config._problems import Path
from trio_gateway.contract import OPERATIONS

# As in the bodies of callers. The body itself is the first level.
MAX_DEPTH: Final = 100

_BOUNDED: Final = "is bounded by max_output_tokens of the model: write that, beside defaults"
_ACTED_ON: Final = "cannot have a default: the gateway acts on what the caller says"
_WRITTEN: Final = "cannot have a default: the gateway writes it for each request anew"
_INPUT: Final = "cannot have a default: it is what the caller asks about"

# A default for one name of the bound would stand beside the caller's own, under another name.
_REFUSED: Final[Mapping[str, str]] = {
    **{name: _INPUT for operation in OPERATIONS for name in (operation.input, *operation.instead)},
    **dict.fromkeys(("model", "stream", "stream_options", "n", "user", "prompt_cache_key"), _ACTED_ON),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _BOUNDED),
    **dict.fromkeys(("rid", "request_id", "cache_salt"), _WRITTEN),
}


def check_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Answer the fields as they are.

    Raises:
        ValidationError: some of them are the gateway's own, or no JSON; each error has its place.
    """
    problems = list(_problems(fields))
    if problems:
        details = [
            InitErrorDetails(type="value_error", loc=path, input=None, ctx={"error": ValueError(message)})
            for path, message in problems
        ]
        raise ValidationError.from_exception_data("defaults", details)
    return fields


def defaults_as_json(fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Write each field's value as compact JSON in UTF-8. The fields must have passed `check_defaults`."""
    return {
        name: json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        for name, value in fields.items()
    }


def _problems(fields: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    for name, value in fields.items():
        if name in _REFUSED:
            yield (name,), _REFUSED[name]
        else:
            yield from _unfit(name, value)


def _unfit(name: str, value: object) -> Iterator[tuple[Path, str]]:
    """Find what JSON cannot say; without recursion, since TOML nests as deep as somebody likes."""
    todo: list[tuple[Path, object]] = [((name,), value)]
    for path, item in todo:
        message = _why_unfit(path[-1]) or _why_unfit(item)
        if message:
            yield path, message
        elif len(path) >= MAX_DEPTH and isinstance(item, dict | list):
            yield (name,), f"is nested over {MAX_DEPTH} levels, which no request may be"
            return
        elif isinstance(item, dict):
            todo.extend(((*path, key), inner) for key, inner in item.items())
        elif isinstance(item, list):
            todo.extend(((*path, index), inner) for index, inner in enumerate(item))


def _why_unfit(value: object) -> str | None:
    match value:
        case str():
            # Only a variable of the environment can bring these.
            return None if _is_unicode(value) else "has a byte that is not valid UTF-8"
        case bool() | dict() | list():
            return None
        case int():
            # What TOML promises; a hexadecimal one can be so large that Python refuses to write it.
            return None if -(2**63) <= value < 2**63 else "must fit into 64 bits"
        case float():
            return None if math.isfinite(value) else "must be a finite number: JSON has no other"
        case datetime.date() | datetime.time():
            return "is a date or a time, which JSON does not have: write it as a string, in quotes"
    return "is no value that TOML has"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
