"""Scripts for the answers that agents give, in records of the worker protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ..wire import REJECTIONS
from ._answers import Usage
from ._ollama import NDJSON_HEADERS
from ._steps import Chunk, EndChunks, Head, Json, Script, Step

AGENT_HEAD: Final = Head(200, NDJSON_HEADERS)


def agent_record(t: str, **fields: object) -> Chunk:
    """One record as a chunk of its own; `t` is its kind."""
    return Chunk(json.dumps({"t": t, **fields}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


ACCEPTED: Final = agent_record("accepted", slot=0)


def agent_stream(
    *texts: str,
    choices: int = 1,
    finish: str | None = "stop",
    usage: Usage | None = None,
    last: Step | None = agent_record("end"),  # noqa: B008  (immutable)
    end: bool = True,
) -> Script:
    """A stream of one delta for each text and choice.

    Args:
        finish: the reason of every choice; None leaves them open.
        usage: tokens of the prompt and of the answer.
        last: the last record; None leaves it out.
        end: end the HTTP message, else hold it open.
    """
    steps: list[Step] = [AGENT_HEAD, ACCEPTED]
    steps += [agent_record("delta", i=i, text=text, n=1) for text in texts for i in range(choices)]
    if finish is not None:
        steps += [agent_record("finish", i=i, reason=finish) for i in range(choices)]
    if usage is not None:
        steps.append(agent_record("usage", prompt_tokens=usage[0], completion_tokens=usage[1]))
    if last is not None:
        steps.append(last)
    return (*steps, EndChunks()) if end else tuple(steps)


def agent_result(body: object, status: int = 200, *, content_type: str | None = None) -> Script:
    """A buffered answer: the engine's status and body; with `content_type` a text."""
    kind = {} if content_type is None else {"content_type": content_type}
    result = agent_record("result", status=status, body=body, **kind)
    return (AGENT_HEAD, ACCEPTED, result, agent_record("end"), EndChunks())


def agent_failure(code: str, *texts: str, retry: str = "elsewhere", **fields: object) -> Script:
    """A stream that fails after these texts; `fields` are further ones of the error record."""
    failed = agent_record("error", code=code, message=fields.pop("message", ""), retry=retry, **fields)
    return agent_stream(*texts, finish=None, last=failed)


def agent_rejection(
    reason: str, worker: Mapping[str, Any] | None = None, *, retry_after: str | None = None
) -> Script:
    """A typed rejection before any work, with what the worker tells of itself."""
    headers = () if retry_after is None else (("retry-after", retry_after),)
    told = {} if worker is None else {"worker": dict(worker)}
    return (Json({"rejected": reason, **told}, REJECTIONS.get(reason, 503), headers),)


def agent_report(seq: int = 1, **changes: object) -> dict[str, Any]:
    """What an agent tells of an idle worker, but for `changes`."""
    return {
        "incarnation": 1,
        "seq": seq,
        "state": "ready",
        "models": ["m1"],
        "slots": 4,
        "running": 0,
        "queued": 0,
        **changes,
    }
