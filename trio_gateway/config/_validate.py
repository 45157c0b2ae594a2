"""One value after the other: unknown keys, keys of later versions, types and bounds.

Each section and each table of a list is judged alone, so that one mistake hides no other. What the parts say
about each other is `trio_gateway.config._checks`' business.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trio_gateway.config._document import TABLE_LISTS, Document
from trio_gateway.config._fields import Section
from trio_gateway.config._problems import Path, Problem, dotted, nearest, quoted
from trio_gateway.config._settings import Settings

# pydantic's words for what TOML calls otherwise. Every other message says "Input should be ...".
_MESSAGES: Final = {
    "missing": "must be given",
    "tuple_type": "must be a list",
    "string_type": "must be a string, in quotes",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "dataclass_exact_type": "must be a string, in quotes",
    "too_short": "must not be empty",
}

# Fields that the loader fills in, by section; for a secret, the key that names its file.
_LOADED: Final[dict[str, dict[str, str | None]]] = {
    "workers": {"api_key": "api_key_file", "ca_pem": None},
    "internal": {"join_token": "join_token_file"},
    "telemetry": {"otlp_headers": "otlp_headers_file"},
}

# Digits or characters of a wrong value that are worth repeating.
_SHORT: Final = 40


@dataclass
class Report:
    """Collects problems, and knows from the document where each belongs."""

    document: Document
    problems: list[Problem] = field(default_factory=list)

    def add(self, path: Path, message: str) -> None:
        """Note a problem."""
        origin = self.document.origin_of(path)
        self.problems.append(Problem(origin.file, origin.line, dotted(self._by_id(path)), message))

    def _by_id(self, path: Path) -> Path:
        """Name list entries by their ids where they have one: ``workers.gpu-0.url``."""
        named: Path = ()
        node: Any = self.document.tree
        for step in path:
            node = _child(node, step)
            id_ = _child(node, "id") if isinstance(step, int) else None
            named = (*named, id_ if isinstance(id_, str) and id_ else step)
        return named


@dataclass
class Draft:
    """What passed alone; the mistakes of the rest are in the report.

    Attributes:
        sections: by name, with defaults for what is missing.
        broken: settings of sections that did not pass; `sections` has their defaults instead.
        entries: tables of lists that passed as a whole, by name and position in the file.
    """

    sections: dict[str, Section] = field(default_factory=dict)
    broken: set[Path] = field(default_factory=set)
    entries: dict[str, dict[int, Section]] = field(default_factory=dict)

    def value(self, section: str, key: str) -> Any:
        """Answer an effective setting, or None if what was written did not pass."""
        if (section, key) in self.broken:
            return None
        return getattr(self.sections.get(section), key, None)


def validate(document: Document, report: Report) -> Draft:
    """Judge every value of the document by itself, and report all that is wrong."""
    tree = document.tree
    for name in tree:
        if name not in Settings.model_fields:
            report.add((name,), _unknown((), name))
    draft = Draft()
    for name in TABLE_LISTS:
        draft.entries[name] = _validate_list(name, tree.get(name, []), report)
    for name in Settings.model_fields:
        if name not in TABLE_LISTS:
            _validate_section(name, tree.get(name, {}), report, draft)
    return draft


def known_keys(path: Path) -> list[str]:
    """Name the keys that may stand in a table."""
    owner: type[Section] | None = Settings
    for step in path:
        if isinstance(step, str):
            owner = _table_class(owner, step)
    return _keys_of(owner) if path else list(Settings.model_fields)


def _keys_of(owner: type[Section] | None) -> list[str]:
    """Name the keys of a table: its fields that have a unit or are tables. The loader fills in the others."""
    if owner is None:
        return []
    fields = owner.model_fields.items()
    return [name for name, field in fields if field.json_schema_extra or _table_class(owner, name)]


def _table_class(owner: type[Section] | None, key: str) -> type[Section] | None:
    """Find the class of a nested table or of the tables in a nested list."""
    known = owner.model_fields.get(key) if owner else None
    if known is None:
        return None
    inner = (typing.get_args(known.annotation) or (known.annotation,))[0]
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def _validate_section(name: str, value: object, report: Report, draft: Draft) -> None:
    if not isinstance(value, dict):
        report.add((name,), f"must be one table: write [{name}], with single brackets")
        return
    owner = _table_class(Settings, name)
    assert owner is not None, name
    value = _without_loaded((name,), value, report)
    try:
        draft.sections[name] = owner.model_validate(value)
    except ValidationError as error:
        _report_all((name,), error, report)
        broken = {detail["loc"][0] for detail in error.errors()}
        draft.broken |= {(name, key) for key in broken}
        draft.sections[name] = owner.model_validate({key: value[key] for key in value if key not in broken})


def _validate_list(name: str, value: object, report: Report) -> dict[int, Section]:
    if not isinstance(value, list):
        report.add((name,), f"must be a list of tables: write [[{name}]], with double brackets")
        return {}
    entries = (
        (index, _validate_table(name, (name, index), entry, report)) for index, entry in enumerate(value)
    )
    return {index: entry for index, entry in entries if entry is not None}


def _validate_table(name: str, path: Path, value: object, report: Report) -> Section | None:
    owner = _table_class(Settings, name)
    assert owner is not None, name
    try:
        if isinstance(value, dict):
            value = _without_loaded(path, value, report)
        return owner.model_validate(value)
    except ValidationError as error:
        _report_all(path, error, report)
    return None


def _without_loaded(path: Path, table: dict[str, Any], report: Report) -> dict[str, Any]:
    """Drop what only the loader may fill in, above all a secret that somebody wrote beside its file."""
    loaded = _LOADED.get(str(path[0]), {})
    for key, holder in loaded.items():
        if key in table:
            hint = f"must not stand here: name a file that holds it with {holder}"
            report.add((*path, key), hint if holder else _unknown(path, key))
    return {key: inner for key, inner in table.items() if key not in loaded}


def _report_all(path: Path, error: ValidationError, report: Report) -> None:
    for detail in error.errors(include_url=False):
        where = (*path, *detail["loc"])
        if detail["type"] == "default_factory_not_called":
            continue  # a consequence of another field's error
        report.add(where, message_of(where, detail))


def message_of(where: Path, detail: ErrorDetails) -> str:
    """Say in our words what is wrong with a value.

    Args:
        where: it stands, or would, in a file.
        detail: pydantic's words for it.
    """
    kind, given = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return _unknown(where[:-1], str(where[-1]))
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    message = detail["msg"].replace("Input should", "must").replace("'", '"')
    if kind == "literal_error":
        return message + _but_not(given) + _did_you_mean(given, detail["ctx"]["expected"])
    return message + _but_not(given)


def _but_not(given: object) -> str:
    """Repeat what was given, if it is a number or a short word."""
    match given:
        case str() if len(given) <= _SHORT:
            return f", not {quoted(given)}"
        case int() if abs(given) < 10**_SHORT:
            return f", not {given}"
        case float():
            return f", not {given:g}"
    return ""


def _did_you_mean(given: object, expected: str) -> str:
    close = nearest(given, expected.split("'")[1::2]) if isinstance(given, str) else None
    return f'; did you mean "{close}"?' if close else ""


def _unknown(table: Path, key: str) -> str:
    known = known_keys(table)
    if close := nearest(key, known):
        return f'unknown key; did you mean "{close}"?'
    elsewhere = [name for name in Settings.model_fields if key in known_keys((name,))]
    if elsewhere:
        return f"unknown key here; it belongs to {' or '.join(f'[{name}]' for name in elsewhere)}"
    return f"unknown key; known here: {', '.join(known)}"


def _child(node: Any, step: str | int) -> Any:
    try:
        return node[step]
    except (KeyError, IndexError, TypeError):
        return None
