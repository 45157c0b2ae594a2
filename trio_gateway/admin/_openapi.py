"""The OpenAPI document of the operators' door, put together from the routes and shapes."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from ._port import ADMIN_CODES
from ._routes import ACTS, LIVEZ, METRICS, PREFIX, READS, WHO, Act, Read
from ._schema import Schema, named, text
from ._shapes import SHAPES

JSON: Final = "application/json"
FEED_TYPE: Final = "text/event-stream"


@cache
def document(version: str) -> dict[str, Any]:
    """Answer the document.

    Args:
        version: of the gateway.
    """
    paths: dict[str, dict[str, Any]] = {}
    for read in READS:
        paths.setdefault(PREFIX + read.path, {})["get"] = _read(read)
    for act in ACTS:
        paths.setdefault(PREFIX + act.path, {})["post"] = _act(act)
    paths |= _others()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "trio-gateway for operators",
            "version": version,
            "description": "See every request, steer without a restart. Viewers read; operators also act.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(SHAPES),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _read(read: Read) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in read.query.items()
    ]
    statuses = ["401", "403", "429", *(["404"] if "{id}" in read.path else [])]
    if parameters:
        statuses.append("400")
    return {
        "operationId": read.name,
        "summary": read.summary,
        "parameters": [*_id_of(read.path), *parameters],
        "responses": {"200": _answer(JSON, named(read.shape)), **_errors(*statuses)},
    }


def _act(act: Act) -> dict[str, Any]:
    statuses = ["400", "401", "403", "404", "408", "409", "413", "415", "429"]
    return {
        "operationId": act.action,
        "summary": act.summary,
        "parameters": _id_of(act.path),
        "requestBody": {"required": True, "content": {JSON: {"schema": named(act.shape)}}},
        "responses": {"200": _answer(JSON, named("Act")), **_errors(*statuses)},
    }


def _others() -> dict[str, dict[str, Any]]:
    """Describe the routes whose answers have another form."""
    feed = {
        "operationId": "feed",
        "summary": "Server-sent events: snapshot, at once and every second, and ending",
        "responses": {"200": _answer(FEED_TYPE, text()), **_errors("401", "403", "429", "503")},
    }
    itself = {
        "operationId": "openapi",
        "summary": "This document",
        "responses": {"200": _answer(JSON, {"type": "object"}), **_errors("401", "403", "429")},
    }
    metrics = {
        "operationId": "metrics",
        "summary": "Metrics for Prometheus",
        "responses": {"200": _answer("text/plain", text()), **_errors("401", "403", "429")},
    }
    who = {
        "operationId": "who",
        "summary": "Who asks; null where a token is needed and none is sent, which is no error here",
        "security": [],
        "responses": {"200": _answer(JSON, named("Who")), **_errors("401", "403", "429")},
    }
    livez = {
        "operationId": "livez",
        "summary": "Whether the process lives; needs no token",
        "security": [],
        "responses": {"200": _answer(JSON, {"type": "object"})},
    }
    return {
        f"{PREFIX}/feed": {"get": feed},
        f"{PREFIX}/openapi.json": {"get": itself},
        METRICS: {"get": metrics},
        WHO: {"get": who},
        LIVEZ: {"get": livez},
    }


def _id_of(path: str) -> list[dict[str, Any]]:
    if "{id}" not in path:
        return []
    return [{"name": "id", "in": "path", "required": True, "schema": text()}]


def _answer(kind: str, schema: Schema, meaning: str = "The answer") -> dict[str, Any]:
    return {"description": meaning, "content": {kind: {"schema": schema}}}


def _errors(*statuses: str) -> dict[str, Any]:
    found = {
        status: ", ".join(code for code, info in ADMIN_CODES.items() if str(info.status) == status)
        for status in statuses
    }
    return {status: _answer(JSON, named("Error"), codes) for status, codes in found.items()}
