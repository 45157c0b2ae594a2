"""The part of the page on the admin API that is made from the code: routes, codes and shapes.

``python -m tests.docs.admin_reference`` puts it into the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tests.docs.pages import DOCS
from trio_gateway.admin import ACTS, ADMIN_CODES, PREFIX, READS, SHAPES, openapi_document

PAGE: Final = "reference/admin-api.md"
BEGIN: Final = "<!-- Made by `python -m tests.docs.admin_reference`; a test compares the two. -->\n"


def generated() -> str:
    """Write everything behind `BEGIN`."""
    return "\n".join([*_reading(), *_acting(), *_codes(), *_shapes()]) + "\n"


def whole(page: str) -> str:
    """Answer the page with its generated part made again."""
    head, begin, _ = page.partition(BEGIN)
    return head + begin + generated()


def _reading() -> Iterator[str]:
    of_reads = {PREFIX + read.path: read for read in READS}
    yield "\n## Routes for reading\n"
    yield "All of them answer GET and HEAD. Parameters of the query stand behind the route.\n"
    yield "| Route | Query | Answer | Meaning |"
    yield "| --- | --- | --- | --- |"
    for path, operations in openapi_document("").get("paths", {}).items():
        if (operation := operations.get("get")) is None:
            continue
        query = ", ".join(f"`{name}`" for name in of_reads[path].query) if path in of_reads else ""
        content = operation["responses"]["200"]["content"]
        ((kind, answer),) = content.items()
        named = answer["schema"].get("$ref", "").rpartition("/")[2]
        shown = f"[`{named}`](#{named.lower()})" if named else kind
        yield f"| `{path}` | {query} | {shown} | {operation['summary']} |"


def _acting() -> Iterator[str]:
    yield "\n## Routes for acting\n"
    yield "All of them take POST and answer [`Act`](#act).\n"
    yield "| Route | In the audit table | Body | Meaning |"
    yield "| --- | --- | --- | --- |"
    for act in ACTS:
        body = "`{}`" if act.shape == "Nothing" else f"[`{act.shape}`](#{act.shape.lower()})"
        yield f"| `{PREFIX}{act.path}` | {act.action} | {body} | {act.summary} |"


def _codes() -> Iterator[str]:
    yield "\n## Codes of refusals\n"
    yield "| HTTP | Code | Type | When |"
    yield "| --- | --- | --- | --- |"
    for code, info in ADMIN_CODES.items():
        yield f"| {info.status} | `{code}` | `{info.type}` | {info.meaning} |"


def _shapes() -> Iterator[str]:
    yield "\n## Shapes\n"
    yield "Members of inner objects stand behind a dot, of entries of a list behind `[]`, and of what stands"
    yield "under any name behind `*`."
    for name, schema in SHAPES.items():
        if name == "Nothing":
            continue
        yield f"\n### {name}\n"
        rows = list(_rows(schema, ""))
        if not rows:
            yield schema.get("description", "").capitalize() + "."
            continue
        yield "| Member | Type | Meaning |"
        yield "| --- | --- | --- |"
        for path, inner in rows:
            yield f"| `{path}` | {_kind(inner)} | {inner.get('description', '')} |"


def _rows(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every member, at any depth."""
    for one in schema.get("anyOf", ()):
        yield from _rows(one, path)
    for name, inner in schema.get("properties", {}).items():
        whole_path = f"{path}.{name}" if path else name
        yield whole_path, inner
        yield from _rows(inner, whole_path)
    if "items" in schema:
        yield from _rows(schema["items"], f"{path}[]")
    if isinstance(others := schema.get("additionalProperties"), Mapping) and others.get("properties"):
        yield from _rows(others, f"{path}.*")


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_of(kind, schema) for kind in kinds)


def _of(kind: str, schema: Mapping[str, Any]) -> str:
    if kind == "array":
        return f"list of {_kind(schema['items'])}" if not schema["items"].get("properties") else "list"
    if kind == "object" and isinstance(others := schema.get("additionalProperties"), Mapping):
        return f"object of {_kind(others)}" if not others.get("properties") else "object"
    if kind == "integer":
        least, most = schema.get("minimum"), schema.get("maximum")
        return kind if not least and most is None else f"{kind}, {json.dumps(least)} to {most or 'any'}"
    return kind


if __name__ == "__main__":
    file = DOCS / PAGE
    file.write_text(whole(file.read_text("utf-8")), "utf-8")
