"""The public bodies, as the OpenAI API reference shapes them; nothing else reads them.

Only the fields that the gateway acts on are typed. All others pass to the
engine as the caller's bytes, so that a new sampling option needs no release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..contract import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    Dialect,
    Form,
    InternalRequest,
    Operation,
    RawJson,
)
from ..errors import Problem, Refused
from ._json import is_null, join_members, object_pieces, raw_members
from ._multipart import read_form, with_model
from ._ollama_request import ollama_chat_body
from ._scan import Json, JsonObject

MAX_CHOICES: Final = 128
_TRUE: Final = (b"true", b"1", b"on", b"yes", b"y", b"t")  # as readers of forms take it
_Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Fields(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, hide_input_in_errors=True)


class _StreamOptions(_Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Acted(_Fields):
    """What the gateway itself acts on; ``null`` equals absent for optional fields."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    max_output_tokens: _Tokens | None = None
    user: str | None = None
    prompt_cache_key: str | None = None

    def tokens(self, operation: Operation) -> int | None:
        """The most output tokens that were asked for, by a name that the operation knows."""
        if operation is RESPONSES:
            return self.max_output_tokens
        other = self.max_completion_tokens if operation is CHAT else None
        if self.max_tokens is None or other is None:
            return other if self.max_tokens is None else self.max_tokens
        return max(self.max_tokens, other)


@dataclass(slots=True)  # frozen, its fields would be set by calls
class ReadBody:
    """What a caller's body says to the gateway.

    Attributes:
        members: the top-level fields as bytes.
        choices: choices that the answer must finish.
        tokens: the most output tokens that the caller asked for; None: it named no bound.
        form: the body, where it is no JSON.
        session: ``prompt_cache_key``, by which the caller asks to meet the same cache again.
    """

    model: str
    stream: bool
    n: int
    choices: int
    wants_usage: bool
    wants_running_usage: bool
    members: dict[str, RawJson]
    tokens: int | None = None
    form: Form | None = None
    session: str | None = None


def model_of(body: JsonObject) -> str:
    """Name the model, which is judged before all other fields.

    Raises:
        Refused: it is missing or no string.
    """
    name = body.value.get("model")
    if name is None:
        raise _missing("model")
    if "model" in body.long:
        raise _wrong("model", "is too long")
    if not isinstance(name, str) or not name:
        raise _wrong("model", "must be a string that is not empty")
    return name


def read_body(operation: Operation, body: JsonObject) -> ReadBody:
    """Check the fields that the gateway acts on.

    Raises:
        Refused: ``missing_field`` or ``invalid_value``, with the field as ``param``.
    """
    value = body.value
    for name in body.long:
        if name in _Acted.model_fields:
            raise _wrong(name, "is too long")
    try:
        acted = _Acted.model_validate(value)
    except ValidationError as exc:
        raise _explain(exc) from None
    stream = acted.stream or False
    if stream and not operation.streams:
        raise _wrong("stream", f"is not possible for {operation.name}")
    prompts = _inputs(operation, value)
    options = acted.stream_options
    wants_usage = options is not None and options.include_usage is True
    return ReadBody(
        model=acted.model,
        stream=stream,
        n=acted.n or 1,
        choices=prompts * (acted.n or 1) if operation.choices else 0,
        wants_usage=wants_usage,
        wants_running_usage=wants_usage and options is not None and options.continuous_usage_stats is True,
        members=body.members,
        tokens=acted.tokens(operation),
        session=acted.prompt_cache_key or None,
    )


def read_form_body(body: bytes, content_type: bytes) -> ReadBody:
    """Check a form as far as the gateway acts on it.

    Raises:
        Refused: malformed, no model, or a stream, which no form can ask for.
    """
    form, model, fields = read_form(body, content_type)
    if fields.get("stream", b"").strip().lower() in _TRUE:
        raise _wrong("stream", "is not possible here")
    return ReadBody(model, False, 1, 0, False, False, {**fields}, None, form)


def forbidden_field(members: Mapping[str, RawJson], fields: frozenset[str]) -> str | None:
    """Answer the first field that steers the engine itself, unless it is null."""
    return next((key for key, raw in members.items() if key in fields and not is_null(raw)), None)


def internal_body(request: InternalRequest, dialect: Dialect, attempt_id: str, salt: str) -> list[RawJson]:
    """Write the body that the engine gets: the caller's fields, and our identity.

    Answers it in pieces, in order.

    Args:
        salt: keeps the prefix caches of tenants apart, where the engine can.

    Raises:
        Refused: this engine can not be asked for it.
    """
    if request.form is not None:
        return [*with_model(request.form, request.upstream_model)]
    members = dict(request.members)
    for key, raw in request.defaults.items():
        if is_null(members.get(key, b"null")):
            members[key] = raw
    field = _tokens_field(request.operation, dialect)
    if request.output_limit is not None and field is not None:
        members[field] = b"%d" % request.output_limit
    # The caller may have written an alias.
    if msgspec.json.decode(members["model"]) != request.upstream_model:
        members["model"] = msgspec.json.encode(request.upstream_model)
    if dialect.native(request.operation):
        return [ollama_chat_body(members, request.upstream_model)]
    if request.stream and request.operation.choices:
        members["stream_options"] = _ask_for_usage(members.get("stream_options"), dialect.running_usage)
    if dialect.request_id_field is not None:
        members[dialect.request_id_field] = msgspec.json.encode(attempt_id)
    if dialect.cache_salt:
        members["cache_salt"] = msgspec.json.encode(salt)
    return object_pieces(members)


def _ask_for_usage(asked: RawJson | None, running: bool) -> bytes:
    options = {} if asked is None or is_null(asked) else raw_members(asked)
    options["include_usage"] = b"true"
    if running:
        options["continuous_usage_stats"] = b"true"
    return join_members(options)


def _inputs(operation: Operation, value: dict[str, Json]) -> int:
    """Check that there is something to do, and answer for how many prompts."""
    given = value.get(operation.input)
    if given is None:
        if any(value.get(name) is not None for name in operation.instead):
            return 1
        raise _missing(operation.input)
    if operation in (COMPLETIONS, EMBEDDINGS):
        return _prompts(operation.input, given)
    if operation.input == "messages":
        _check_messages(given)
    elif operation is RESPONSES and not (isinstance(given, str) or (isinstance(given, list) and given)):
        raise _wrong("input", "must be a string or an array that is not empty")
    return 1


def _check_messages(given: Json) -> None:
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise _wrong("messages", "must be an array of messages that is not empty")


def _tokens_field(operation: Operation, dialect: Dialect) -> str | None:
    """Name the field by which an engine bounds its output; None: the operation gives none."""
    if operation is RESPONSES:
        return "max_output_tokens"
    if operation is CHAT and dialect.kind == "openai":
        return "max_completion_tokens"
    return "max_tokens" if operation in (CHAT, COMPLETIONS, MESSAGES) else None


def _prompts(field: str, given: Json) -> int:
    """Count prompts: a string or a list of token ids is one, a list of those is many."""
    if isinstance(given, str):
        return 1
    if isinstance(given, list) and given:
        if all(isinstance(item, int) and not isinstance(item, bool) for item in given):
            return 1
        if all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
            return len(given)
        if all(isinstance(item, dict) for item in given):
            return len(given)
    raise _wrong(field, "must be a string, an array of strings, or arrays of token ids")


def _explain(error: ValidationError) -> Refused:
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return _missing(param)
    return _wrong(param, first["msg"][:1].lower() + first["msg"][1:])


def _missing(param: str) -> Refused:
    return Refused(Problem.of("missing_field", f"'{param}' is missing", param=param))


def _wrong(param: str, why: str) -> Refused:
    return Refused(Problem.of("invalid_value", f"'{param}' {why}", param=param))
