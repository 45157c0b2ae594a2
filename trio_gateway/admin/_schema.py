"""Shapes of JSON, in the words of JSON Schema as OpenAPI 3.1 has them, and a check of values against them.

Only what the shapes of this room use is known: types, unions, enumerations, bounds, objects and lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]

_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list, tuple),
}


def text(meaning: str = "", **more: Any) -> Schema:
    """Describe text."""
    return _described({"type": "string", **more}, meaning)


def word(*words: str, meaning: str = "") -> Schema:
    """Describe text that is one of a few words."""
    return _described({"type": "string", "enum": list(words)}, meaning)


def count(meaning: str = "", *, least: int = 0, most: int | None = None) -> Schema:
    """Describe a whole number."""
    bounds = {"minimum": least} | ({} if most is None else {"maximum": most})
    return _described({"type": "integer", **bounds}, meaning)


def number(meaning: str = "") -> Schema:
    """Describe a number."""
    return _described({"type": "number"}, meaning)


def switch(meaning: str = "") -> Schema:
    """Describe what is true or false."""
    return _described({"type": "boolean"}, meaning)


def anything(meaning: str = "") -> Schema:
    """Describe any value."""
    return _described({}, meaning)


def many(items: Schema, meaning: str = "") -> Schema:
    """Describe a list."""
    return _described({"type": "array", "items": items}, meaning)


def table(values: Schema, meaning: str = "") -> Schema:
    """Describe an object whose keys are data."""
    return _described({"type": "object", "additionalProperties": values}, meaning)


def shape(**members: Schema) -> Schema:
    """Describe an object that has just these members, all of them."""
    return {
        "type": "object",
        "properties": members,
        "required": list(members),
        "additionalProperties": False,
    }


def optional(of: Schema, **members: Schema) -> Schema:
    """Let the object of a shape have further members, or not."""
    return {**of, "properties": {**of["properties"], **members}}


def or_null(of: Schema) -> Schema:
    """Let null stand for what is not known, or not there."""
    if "type" in of and "enum" not in of:
        return {**of, "type": [of["type"], "null"]}
    return {"anyOf": [of, {"type": "null"}]}


def named(name: str) -> Schema:
    """Refer to a shape of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def complaints(
    value: object, schema: Schema, shapes: Mapping[str, Schema], path: str = ""
) -> Iterator[tuple[str, str]]:
    """Say where a value is not as its schema has it, as dotted paths and reasons.

    Args:
        shapes: those that `named` refers to.
        path: where the value stands.
    """
    if "$ref" in schema:
        yield from complaints(value, shapes[schema["$ref"].rpartition("/")[2]], shapes, path)
        return
    if "anyOf" in schema:
        found = [list(complaints(value, one, shapes, path)) for one in schema["anyOf"]]
        if all(found):
            yield from min(found, key=len)
        return
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield path, f"must be {' or '.join(_ARTICLES[kind] for kind in kinds)}"
    elif "enum" in schema and value not in schema["enum"]:
        yield path, f"must be one of {', '.join(schema['enum'])}"
    elif isinstance(value, dict):
        yield from _members(value, schema, shapes, path)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from complaints(item, schema.get("items", {}), shapes, f"{path}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _bounds(value, schema, path)
    elif isinstance(value, str) and not schema.get("minLength", 0) <= len(value):
        yield path, "must not be empty"


_ARTICLES: Final = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "object": "an object",
    "array": "a list",
}


def _described(schema: dict[str, Any], meaning: str) -> Schema:
    return {**schema, "description": meaning} if meaning else schema


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind])


def _bounds(value: float, schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    if "minimum" in schema and value < schema["minimum"]:
        yield path, f"must be {schema['minimum']} or more"
    if "maximum" in schema and value > schema["maximum"]:
        yield path, f"must be {schema['maximum']} or less"


def _members(
    value: dict[str, Any], schema: Schema, shapes: Mapping[str, Schema], path: str
) -> Iterator[tuple[str, str]]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    prefix = f"{path}." if path else ""
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{prefix}{name}", "must be given"
    for name, item in value.items():
        if name in known:
            yield from complaints(item, known[name], shapes, f"{prefix}{name}")
        elif others is False:
            yield f"{prefix}{name}", "is not known"
        elif isinstance(others, Mapping):
            yield from complaints(item, others, shapes, f"{prefix}{name}")
