"""A chat request of the OpenAI API, said in the words of Ollama's own ``/api/chat``. Sans-IO.

Values that both APIs share keep the caller's bytes: texts, numbers, tools,
schemas. What Ollama has no word for is left out, and so is what the caller did
not say: then the model's own defaults hold. What can not be asked of Ollama, or
would fail there as its own error, is refused here. (API: Ollama's docs/api.md
and the types of its server, read at fb307609, 2026-08-21.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from ..contract import RawJson
from ..errors import Problem, Refused
from ._json import is_null, join_members, raw_members, read_object

MAX_ARGUMENT_VALUES: Final = 200_000
# Its templates join consecutive messages of one role so; parts of one message are nothing else to it.
_BETWEEN_TEXTS: Final = b"\\n\\n"
_NUMBER = re.compile(rb"-?[0-9]")

# Our name and the one among its options. A value that is no number makes it answer 500, as if it had failed.
_NUMERIC_OPTIONS: Final = (
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("seed", "seed"),
    ("frequency_penalty", "frequency_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("max_tokens", "num_predict"),
    ("max_completion_tokens", "num_predict"),  # supersedes max_tokens
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("typical_p", "typical_p"),
    ("repeat_penalty", "repeat_penalty"),
    ("repeat_last_n", "repeat_last_n"),
)
# Fields that it knows by the same name. `keep_alive` steers the engine, as `options` can.
_SAME_FIELDS: Final = ("logprobs", "top_logprobs", "truncate", "shift", "keep_alive")
_THINK: Final = {
    "none": b"false",
    "minimal": b'"low"',
    "low": b'"low"',
    "medium": b'"medium"',
    "high": b'"high"',
    "xhigh": b'"max"',
    "max": b'"max"',
}

_Raw = msgspec.Raw


class _Function(msgspec.Struct):
    name: str
    arguments: _Raw = _Raw()


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: _Raw = _Raw()
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning: _Raw = _Raw()
    reasoning_content: _Raw = _Raw()


class _Url(msgspec.Struct):
    url: str


class _Audio(msgspec.Struct):
    data: str


class _Part(msgspec.Struct):
    type: str
    text: _Raw = _Raw()
    refusal: _Raw = _Raw()
    image_url: str | _Url | None = None
    input_audio: _Audio | None = None


class _Schema(msgspec.Struct):
    schema: _Raw = _Raw()


class _Format(msgspec.Struct):
    type: str
    json_schema: _Schema | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


def ollama_chat_body(members: Mapping[str, RawJson], upstream_model: str) -> bytes:
    """Write the body for ``POST /api/chat``.

    Args:
        members: the top-level fields of a chat request, each as valid JSON.
        upstream_model: the name that Ollama knows.

    Raises:
        Refused: ``invalid_value``, with the path of what Ollama can not do as ``param``.
    """
    given = {key: bytes(raw) for key, raw in members.items() if not is_null(raw)}
    if given.get("n", b"1") != b"1":
        raise _refuse("n", "must be 1: this model's engine gives one choice")
    body = {
        "model": msgspec.json.encode(upstream_model),
        "messages": _messages(given.get("messages", b"[]")),
        "stream": given.get("stream", b"false"),  # Ollama streams unless it is told not to
    }
    if "tools" in given and given.get("tool_choice") != b'"none"':
        body["tools"] = given["tools"]
    for key in _SAME_FIELDS:
        if key in given:
            body[key] = given[key]
    wanted = {"format": _format(given), "think": _think(given), "options": _options(given)}
    body |= {key: raw for key, raw in wanted.items() if raw is not None}
    return join_members(body)


def _refuse(param: str, why: str) -> Refused:
    return Refused(Problem.of("invalid_value", f"'{param}' {why}", param=param))


def _decode(raw: bytes, kind: Any, path: str) -> Any:
    """Read a value whose shape is known; its faults are the caller's, named by their path."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError) as exc:
        why, _, where = str(exc).partition(" - at `$")
        param = path + re.sub(r"\[(\d+|\.\.\.)\]", r".\1", where.rstrip("`"))
        raise _refuse(param, f"can not be used: {why[:1].lower()}{why[1:]}") from None


def _say(raw: bytes | _Raw) -> bytes | None:
    """The bytes of a value; None if it is absent or null."""
    text = bytes(raw)
    return None if text in (b"", b"null") else text


# Messages ---------------------------------------------------------------------------------------------------


def _messages(raw: bytes) -> bytes:
    names: dict[str, str] = {}  # of the tools that were called, by the id of the call
    written = []
    for at, message in enumerate(_decode(raw, list[_Message], "messages")):
        for call in message.tool_calls or ():
            if call.id is not None:
                names[call.id] = call.function.name
        written.append(join_members(dict(_message(message, f"messages.{at}", names))))
    return b"[" + b",".join(written) + b"]"


def _message(message: _Message, path: str, names: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    # A developer's word is the system's by its newer name, which few of its templates know.
    role = "system" if message.role == "developer" else message.role
    yield "role", msgspec.json.encode(role)
    text, media = _content(message, f"{path}.content")
    yield "content", text
    if media:
        yield "images", msgspec.json.encode(media)
    thinking = _say(message.reasoning) or _say(message.reasoning_content)
    if thinking is not None and thinking.startswith(b'"'):
        yield "thinking", thinking
    if message.tool_calls:
        calls = (_call(call, f"{path}.tool_calls.{at}") for at, call in enumerate(message.tool_calls))
        yield "tool_calls", b"[" + b",".join(calls) + b"]"
    if message.tool_call_id is not None:
        yield "tool_call_id", msgspec.json.encode(message.tool_call_id)
    if role == "tool":
        name = message.name or names.get(message.tool_call_id or "")
        if name:
            yield "tool_name", msgspec.json.encode(name)


def _content(message: _Message, path: str) -> tuple[bytes, list[str]]:
    """The text of a message, as JSON, and what is to be seen and heard beside it, in base64."""
    raw = _say(message.content)
    if raw is None and (message.role == "assistant" or message.tool_calls):
        return b'""', []
    if raw is not None and raw.startswith(b'"'):
        return raw, []
    if raw is None or not raw.startswith(b"["):
        raise _refuse(path, "must be a string or an array of parts")
    texts: list[bytes] = []
    media: list[str] = []
    for at, part in enumerate(_decode(raw, list[_Part], path)):
        _take_part(part, f"{path}.{at}", texts, media)
    return b'"' + _BETWEEN_TEXTS.join(texts) + b'"', media


def _take_part(part: _Part, path: str, texts: list[bytes], media: list[str]) -> None:
    if part.type in ("text", "refusal"):
        text = bytes(part.text if part.type == "text" else part.refusal)
        if not text.startswith(b'"'):
            raise _refuse(f"{path}.{part.type}", "must be a string")
        texts.append(text[1:-1])
    elif part.type == "image_url" and part.image_url is not None:
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        media.append(_data_of(url, f"{path}.image_url"))
    elif part.type == "input_audio" and part.input_audio is not None:
        media.append(part.input_audio.data)
    else:
        raise _refuse(f"{path}.type", "names a kind of part that this model's engine does not know")


def _data_of(url: str, path: str) -> str:
    """The base64 of a data URL, by RFC 2397. Ollama fetches nothing."""
    head, comma, data = url.partition(",")
    head = head[:256].lower()
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise _refuse(path, "must be a data: URL in base64: this model's engine fetches no images")
    return data


def _call(call: _Call, path: str) -> bytes:
    """A tool call, whose arguments are an object there and text that holds one here."""
    raw = _say(call.function.arguments) or b"{}"
    if raw.startswith(b'"'):
        raw = _arguments(msgspec.json.decode(raw, type=str), f"{path}.function.arguments")
    elif not raw.startswith(b"{"):
        raise _refuse(f"{path}.function.arguments", "must be a string that holds a JSON object")
    function = {"name": msgspec.json.encode(call.function.name), "arguments": raw}
    identity = {} if call.id is None else {"id": msgspec.json.encode(call.id)}
    return join_members({**identity, "function": join_members(function)})


def _arguments(text: str, path: str) -> bytes:
    """Read what becomes part of the body as strictly as the body itself was read."""
    raw = text.strip().encode()
    if not raw:
        return b"{}"  # how calls of tools without parameters are often written
    try:
        read_object(raw, MAX_ARGUMENT_VALUES)
    except Refused:
        raise _refuse(path, "must be a string that holds a JSON object") from None
    return raw


# Everything else --------------------------------------------------------------------------------------------


def _format(given: dict[str, bytes]) -> bytes | None:
    raw = given.get("response_format")
    if raw is None:
        return None
    form: _Format = _decode(raw, _Format, "response_format")
    if form.type == "text":
        return None
    if form.type not in ("json_object", "json_schema"):
        raise _refuse("response_format.type", "names a form that this model's engine does not know")
    schema = _say(form.json_schema.schema) if form.type == "json_schema" and form.json_schema else None
    if schema is None:
        return b'"json"'
    if not schema.startswith(b"{"):
        raise _refuse("response_format.json_schema.schema", "must be an object")
    return schema


def _think(given: dict[str, bytes]) -> bytes | None:
    """Whether, or how hard, to think: its own word first, then the two that its OpenAI layer knows."""
    if "think" in given:
        return given["think"]
    path, effort = "reasoning_effort", given.get("reasoning_effort")
    if "reasoning" in given:
        path = "reasoning.effort"
        value: _Reasoning = _decode(given["reasoning"], _Reasoning, "reasoning")
        effort = None if value.effort is None else msgspec.json.encode(value.effort)
    if effort is None:
        return None
    think = _THINK.get(_decode(effort, str, path))
    if think is None:
        raise _refuse(path, f"must be one of {', '.join(_THINK)}")
    return think


def _options(given: dict[str, bytes]) -> bytes | None:
    options: dict[str, bytes] = {}
    if "options" in given:
        try:
            options = raw_members(given["options"])
        except ValueError:
            raise _refuse("options", "must be an object") from None
    for key, name in _NUMERIC_OPTIONS:
        if key in given:
            if not _NUMBER.match(given[key].strip()):
                raise _refuse(key, "must be a number")
            options[name] = given[key]
    if "stop" in given:
        options["stop"] = _stop(given["stop"])
    return join_members(options) if options else None


def _stop(raw: bytes) -> bytes:
    """One text or many; Ollama takes an array only."""
    if raw.lstrip().startswith(b"["):
        _decode(raw, list[str], "stop")
        return raw
    _decode(raw, str, "stop")
    return b"[" + raw + b"]"
