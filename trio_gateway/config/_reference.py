"""The reference page of all settings, made from the settings themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trio_gateway.config._document import TABLE_LISTS
from trio_gateway.config._fields import LONGEST, Section, as_text
from trio_gateway.config._problems import quoted
from trio_gateway.config._sections import (
    AdminTokenSettings,
    MutualTlsSettings,
    TierSettings,
    TiersSettings,
    TlsSettings,
)
from trio_gateway.config._settings import Settings
from trio_gateway.config._tables import CANCEL_GRACE, DEFAULT_SLOTS, KeySettings
from trio_gateway.units import format_size

_INTRODUCTION = """\
# Settings

<!-- Made by `python -m trio_gateway.config > docs/reference/settings.md`; a test compares the two. -->

One TOML file, read when the gateway starts, and again whenever it is told to: see
[Read the file again](../how-to/steer.md#read-the-file-again).
How to write it, and how to find out what is wrong with it, is told in
[Configure the gateway](../how-to/configure.md).

- Sizes are whole bytes or a string with a unit: `65536`, `"64 KiB"`; the units are B, KiB, MiB and GiB.
- Durations are seconds or a string with a unit: `0.5`, `"500 ms"`; the units are ms, s, m and h. None may be
  longer than a day.
- *Applies* says when a changed value counts: *now*, for *new requests*, or after a *restart*.
- `TRIO_GATEWAY__SECTION__KEY` in the environment overrides the file, and `--set section.key=value` overrides
  both. Their values are TOML; what is no TOML value is taken as a string.
"""


def reference_page() -> str:
    """Write ``docs/reference/settings.md``."""
    return "\n".join([_INTRODUCTION, *_sections()]) + "\n"


def _sections() -> Iterator[str]:
    for name, known in Settings.model_fields.items():
        owner = (get_args(known.annotation) or (known.annotation,))[0]
        heading = f"[[{name}]]" if name in TABLE_LISTS else f"[{name}]"
        yield from _table(f"`{heading}`", owner)
        if owner.model_fields.keys() >= {"keys"}:
            yield from _table("`keys` of a tenant", KeySettings)
        if name == "admission":
            yield from _table("`tiers.interactive`, `tiers.standard`, `tiers.batch`", TierSettings)
        if owner.model_fields.keys() >= {"tokens"}:
            yield from _table("`tokens` of operators", AdminTokenSettings)
        if name == "server":
            yield from _table("`tls` of the server", TlsSettings)
        if name == "internal":
            yield from _table("`tls` of the internal listener", MutualTlsSettings)


def _table(heading: str, owner: type[Section]) -> Iterator[str]:
    first_line = (owner.__doc__ or "").partition("\n")[0]
    yield f"## {heading}\n\n{first_line}\n"
    yield "| Key | Unit | Default | Bounds | Applies | Meaning |"
    yield "|---|---|---|---|---|---|"
    for key, known in owner.model_fields.items():
        extra: Any = known.json_schema_extra
        if extra:
            cells = (f"`{key}`", extra["unit"], _default(key, known), _bounds(known), extra["applies"])
            yield f"| {' | '.join(cells)} | {known.description} |"
    yield ""


def _default(key: str, known: FieldInfo) -> str:
    if key == "cancel_grace":
        return ", ".join(f"{kind} {grace:g}" for kind, grace in CANCEL_GRACE.items())
    if key == "slots":
        return f"what the engine tells, else {DEFAULT_SLOTS}"
    if key == "tiers" and isinstance(known.default, TiersSettings):
        return "below"
    if key == "upstream":
        return "the `id`"
    if key == "workers" and known.default is None:
        return "every worker that reports it"
    if known.default_factory is dict:
        return "`{}`"
    if known.default is PydanticUndefined:
        return "must be given"
    return "none" if known.default is None else f"`{_literal(known.default, known)}`"


def _literal(value: Any, known: FieldInfo) -> str:
    extra: Any = known.json_schema_extra
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return quoted(format_size(int(value))) if extra["unit"] == "bytes" else f"{value:.15g}"
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(item, known) for item in value)}]"
    return quoted(as_text(value))


def _bounds(known: FieldInfo) -> str:
    words = _words(known.annotation)
    if words:
        return ", ".join(f"`{word}`" for word in words)
    return ", ".join(filter(None, (_bound(limit, known) for limit in known.metadata)))


def _bound(limit: object, known: FieldInfo) -> str:
    match limit:
        case Ge(ge=value):
            return f"at least {_number(value, known)}"
        case Gt(gt=value):
            return f"more than {_number(value, known)}"
        case Le(le=value) if value != LONGEST:
            return f"at most {_number(value, known)}"
        case Lt(lt=value):
            return f"less than {_number(value, known)}"
        case MinLen():
            return "not empty"
    return ""


def _number(value: Any, known: FieldInfo) -> str:
    return format_size(value) if known_unit(known) == "bytes" else f"{value:,.15g}"


def known_unit(known: FieldInfo) -> str:
    """Answer the unit that a field was described with."""
    extra: Any = known.json_schema_extra
    return str(extra["unit"])


def _words(annotation: Any) -> tuple[str, ...]:
    """Answer the words that a setting, or each entry of a list, may be."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    inner = get_args(annotation)
    return _words(inner[0]) if get_origin(annotation) is tuple and inner else ()
