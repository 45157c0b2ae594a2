"""Scripts for the answers that Ollama gives, by its own API and by its OpenAI layer.

The shapes and habits are those of its server (read at fb307609, 2026-08-21):
NDJSON with one record a token, tool calls whole, the counts on the last record,
0 left out; an error before any output is an HTTP status, a later one a record of
its own, which the OpenAI layer turns into an empty chunk and an end.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ._answers import Usage, chat_answer, chat_chunk
from ._engine import good_answer
from ._engine_connection import EngineRequest
from ._steps import Chunk, EndChunks, Event, Head, Headers, Json, Script, Step

NDJSON_HEADERS: Final[Headers] = (
    ("content-type", "application/x-ndjson"),
    ("transfer-encoding", "chunked"),
)
_TIME: Final = "2023-11-14T22:13:20.123456789Z"  # as Go writes times
_JSON: Final[Headers] = (("content-type", "application/json; charset=utf-8"),)
_FLOATS: Final = frozenset({"temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"})
_INTEGERS: Final = frozenset({"seed", "num_predict", "num_ctx", "top_k"})
_THINKS: Final = (True, False, "low", "medium", "high", "max")


def encode_record(record: Mapping[str, object]) -> bytes:
    """Write a record with its line end, as Go writes JSON: these five characters are always escaped."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode() + b"\n"


def ollama_record(
    content: str = "", *, model: str = "m1", done: str | None = None, usage: Usage = (0, 0), **message: object
) -> dict[str, object]:
    """One record of a chat.

    Args:
        done: the reason with which this record ends the answer; None: more follow.
        usage: tokens of the prompt and of the answer, where it ends.
        message: further members of the message, ``thinking`` and ``tool_calls``.
    """
    record: dict[str, object] = {
        "model": model,
        "created_at": _TIME,
        "message": {"role": "assistant", "content": content, **message},
        "done": done is not None,
    }
    if done is not None:
        record["done_reason"] = done
        record |= {"total_duration": 5_000_000, "load_duration": 1_000_000}
        counts = zip(("prompt_eval_count", "eval_count"), usage, strict=True)
        record |= {name: count for name, count in counts if count}
    return record


def ollama_error(message: str) -> dict[str, object]:
    """The record, or the body, that stands for a failure."""
    return {"error": message}


def ollama_stream(*records: Mapping[str, object], end: bool = True) -> Script:
    """A streamed answer of these records; ``end``: the HTTP message is ended, else held open."""
    steps: list[Step] = [Head(headers=NDJSON_HEADERS), *(Chunk(encode_record(one)) for one in records)]
    return (*steps, EndChunks()) if end else tuple(steps)


@dataclass(frozen=True, slots=True)
class ScriptedOllama:
    """How an Ollama answers; give it to `ScriptedEngine` as a script.

    ``/api/chat`` and ``/v1/chat/completions`` say the same, all else is answered as by `good_answer`.
    What the request must look like is judged as its server does.

    Attributes:
        texts: one token each.
        thinking: one token each, in front of them.
        calls: tool calls, each ``{"function": {"name": .., "arguments": {..}}}``, behind them.
        reason: why it ends.
        usage: tokens of the prompt and of the answer.
        failure: said in place of the end.
        models: what it has.
    """

    texts: Sequence[str] = ("ok",)
    thinking: Sequence[str] = ()
    calls: Sequence[Mapping[str, object]] = ()
    reason: str = "stop"
    usage: Usage = (3, 1)
    failure: str | None = None
    models: Sequence[str] = ("m1",)

    def __call__(self, request: EngineRequest) -> Script:
        """Answer the script for a request."""
        if request.target.endswith("/api/chat"):
            return self._chat(request.json())
        if request.target.endswith("/v1/chat/completions"):
            return self._openai_chat(request.json())
        return good_answer(request)

    # -- its own API

    def _chat(self, body: Mapping[str, object]) -> Script:
        wrong = wrong_field(body)
        if wrong is not None:
            return _refused(400, f"json: cannot unmarshal into Go struct field ChatRequest.{wrong}")
        model = body.get("model")
        if model not in self.models:
            return _refused(404, f"model '{model}' not found")
        option = wrong_option(body.get("options"))
        if option is not None:  # a caller's fault that it reports as its own
            return _refused(500, f'option "{option}" must be of another type')
        if not body.get("messages"):
            word = "unload" if body.get("keep_alive") == 0 else "load"
            return (Json(ollama_record(model=str(model), done=word), headers=_JSON),)
        records = self._records(str(model))
        if body.get("stream", True):
            return self._streamed(records, str(model))
        return self._whole(records, str(model))

    def _records(self, model: str) -> list[dict[str, object]]:
        records = [ollama_record(model=model, thinking=token) for token in self.thinking]
        records += [ollama_record(token, model=model) for token in self.texts]
        return records + [ollama_record(model=model, tool_calls=[call]) for call in self.calls]

    def _streamed(self, records: list[dict[str, object]], model: str) -> Script:
        if self.failure is None:
            return ollama_stream(*records, ollama_record(model=model, done=self.reason, usage=self.usage))
        if not records:
            return _refused(500, self.failure)
        return ollama_stream(*records, ollama_error(self.failure))

    def _whole(self, records: list[dict[str, object]], model: str) -> Script:
        if self.failure is not None:
            return _refused(500, self.failure)
        message: dict[str, object] = {}
        if self.thinking:
            message["thinking"] = "".join(self.thinking)
        if self.calls:
            message["tool_calls"] = list(self.calls)
        text = "".join(self.texts)
        return (Json(ollama_record(text, model=model, done=self.reason, usage=self.usage, **message)),)

    # -- its OpenAI layer

    def _openai_chat(self, body: Mapping[str, object]) -> Script:
        if not body.get("stream"):
            if self.failure is not None:
                return (Json({"error": {"message": self.failure, "type": "api_error"}}, 500),)
            return chat_answer("".join(self.texts), usage=self.usage, finish=self.reason)
        steps: list[Step] = [Head()]
        steps += [chat_chunk({"role": "assistant", "content": text}) for text in self.texts]
        if self.failure is not None:  # read as a record with nothing in it
            return (*steps, chat_chunk({"content": ""}), EndChunks())
        return (*steps, chat_chunk({}, finish=self.reason), Event("[DONE]"), EndChunks())


def _refused(status: int, message: str) -> Script:
    return (Json(ollama_error(message), status, _JSON),)


def wrong_field(body: Mapping[str, object]) -> str | None:
    """Name the first field that its server could not read, by the types it gives them."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "model": str,
        "messages": list,
        "stream": bool,
        "tools": list,
        "options": dict,
        "logprobs": bool,
        "top_logprobs": int,
        "truncate": bool,
        "shift": bool,
    }
    for name, kind in kinds.items():
        if body.get(name) is not None and not isinstance(body[name], kind):
            return name
    if body.get("think") is not None and body["think"] not in _THINKS:
        return "think"
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        wrong = _wrong_member(message)
        if wrong is not None:
            return f"messages.{wrong}"
    return None


def _wrong_member(message: object) -> str | None:
    if not isinstance(message, dict):
        return "Message"
    for name in ("role", "content", "thinking", "tool_name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str):
            return name
    if not all(map(_is_base64, message.get("images") or ())):
        return "images"
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments"), dict):
            return "tool_calls"
    return None


def _is_base64(text: object) -> bool:
    try:
        base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def wrong_option(options: object) -> str | None:
    """Name the first option whose value has another type than its server's."""
    for name, value in options.items() if isinstance(options, dict) else ():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if (name in _FLOATS | _INTEGERS and not number) or (name == "stop" and not texts):
            return str(name)
    return None
