"""Scripts for the answers that OpenAI-compatible engines give.

Each function returns a script for `ScriptedEngine`. The shapes are those of
vLLM: a role-only chunk first, one chunk a token, the finish reason on a chunk of
its own, then usage with an empty ``choices``, then ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from ._steps import EndChunks, Event, Head, Headers, Json, Script, Step

CREATED: Final = 1_700_000_000  # one fixed second, so that answers compare equal
DONE: Final = Event("[DONE]")

Usage: TypeAlias = tuple[int, int]
"""Tokens of the prompt and of the completion."""


def usage_object(usage: Usage) -> dict[str, object]:
    """Write a usage pair as the API does."""
    prompt, completion = usage
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def chat_chunk(
    delta: Mapping[str, object],
    *,
    index: int = 0,
    finish: str | None = None,
    model: str = "m1",
    answer_id: str = "chatcmpl-1",
) -> Event:
    """One chunk of a chat stream with one choice."""
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return _chunk("chat.completion.chunk", answer_id, model, [choice])


def chat_stream(
    *texts: str,
    choices: int = 1,
    usage: Usage | None = None,
    finish: str | None = "stop",
    done: bool = True,
    end: bool = True,
    model: str = "m1",
    answer_id: str = "chatcmpl-1",
) -> Script:
    """A streamed chat answer.

    Args:
        texts: one token each; every choice says all of them.
        choices: how many choices the answer has, their tokens interleaved.
        usage: sent in a chunk of its own before ``[DONE]``; None sends none.
        finish: the finish reason of every choice; None leaves it out.
        done: whether ``[DONE]`` is sent.
        end: whether the HTTP message is ended; else it is held open.
        model: the name the engine writes into each chunk.
        answer_id: the ``id`` of each chunk.
    """
    each = range(choices)
    deltas: list[Mapping[str, object]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": text} for text in texts]
    steps: list[Step] = [Head()]
    steps += [chat_chunk(delta, index=i, model=model, answer_id=answer_id) for delta in deltas for i in each]
    if finish is not None:
        steps += [chat_chunk({}, index=i, finish=finish, model=model, answer_id=answer_id) for i in each]
    if usage is not None:
        steps.append(_chunk("chat.completion.chunk", answer_id, model, [], usage))
    return _ended(steps, done=done, end=end)


def chat_answer(
    text: str = "ok",
    *,
    choices: int = 1,
    usage: Usage | None = (3, 1),
    finish: str = "stop",
    model: str = "m1",
    answer_id: str = "chatcmpl-1",
) -> Script:
    """A buffered chat answer."""
    message = {"role": "assistant", "content": text}
    listed: list[dict[str, object]] = [
        {"index": i, "message": message, "finish_reason": finish} for i in range(choices)
    ]
    return (Json(_object("chat.completion", answer_id, model, listed, usage)),)


def completion_stream(
    *texts: str,
    usage: Usage | None = None,
    finish: str | None = "stop",
    done: bool = True,
    end: bool = True,
    model: str = "m1",
    answer_id: str = "cmpl-1",
) -> Script:
    """A streamed answer of ``/v1/completions``; arguments as of `chat_stream`."""

    def chunk(text: str, reason: str | None) -> Event:
        choice = {"index": 0, "text": text, "finish_reason": reason}
        return _chunk("text_completion", answer_id, model, [choice])

    steps: list[Step] = [Head(), *(chunk(text, None) for text in texts)]
    if finish is not None:
        steps.append(chunk("", finish))
    if usage is not None:
        steps.append(_chunk("text_completion", answer_id, model, [], usage))
    return _ended(steps, done=done, end=end)


def completion_answer(
    text: str = "ok",
    *,
    usage: Usage | None = (3, 1),
    finish: str = "stop",
    model: str = "m1",
    answer_id: str = "cmpl-1",
) -> Script:
    """A buffered answer of ``/v1/completions``."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return (Json(_object("text_completion", answer_id, model, [choice], usage)),)


def embedding_answer(*vectors: Sequence[float], prompt_tokens: int = 3, model: str = "m1") -> Script:
    """An answer of ``/v1/embeddings`` with one entry for each vector."""
    data = [
        {"object": "embedding", "index": i, "embedding": list(vector)} for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return (Json({"object": "list", "data": data, "model": model, "usage": usage}),)


def error_body(message: str, *, type_: str = "server_error", code: object = None) -> dict[str, object]:
    """The error object that engines share with OpenAI's API."""
    return {"error": {"message": message, "type": type_, "param": None, "code": code}}


def error_answer(
    status: int,
    message: str = "engine says no",
    *,
    type_: str = "server_error",
    code: object = None,
    headers: Headers = (),
) -> Script:
    """A refusal with its own HTTP status."""
    return (Json(error_body(message, type_=type_, code=code), status, headers),)


def error_event(message: str = "engine broke", *, type_: str = "server_error", code: object = 500) -> Event:
    """An error inside a stream whose status was 200."""
    return Event(error_body(message, type_=type_, code=code))


def _object(
    kind: str,
    answer_id: str,
    model: str,
    choices: Sequence[Mapping[str, object]],
    usage: Usage | None,
) -> dict[str, object]:
    body: dict[str, object] = {
        "id": answer_id,
        "object": kind,
        "created": CREATED,
        "model": model,
        "choices": list(choices),
    }
    if usage is not None:
        body["usage"] = usage_object(usage)
    return body


def _chunk(
    kind: str,
    answer_id: str,
    model: str,
    choices: Sequence[Mapping[str, object]],
    usage: Usage | None = None,
) -> Event:
    return Event(_object(kind, answer_id, model, choices, usage))


def _ended(steps: list[Step], *, done: bool, end: bool) -> Script:
    if done:
        steps.append(DONE)
    if end:
        steps.append(EndChunks())
    return tuple(steps)
