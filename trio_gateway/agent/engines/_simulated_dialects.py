"""How engines of each kind speak HTTP, for the simulated one to speak like them. Pure.

What a kind does was read from its source (vLLM 0.33, SGLang 0.5.23, llama.cpp of
October 2026, TGI of January 2026); a new kind is a new row of `MANNERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

encode: Final = msgspec.json.Encoder().encode
DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that an engine complains of.

    Attributes:
        message: for people; may name the ``{model}``.
    """

    status: int
    message: str
    type: str = ""
    param: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Manner:
    """How one kind of engine behaves.

    Attributes:
        error: writes the body of an error answer.
        event_error: writes the object of an error event.
        troubles: what it says of each of its own troubles.
        early_head: a stream's head is sent before there is anything to say.
        busy_in_band: a stream that finds no room is told so in an event, on a 200.
        done_after_error: ``[DONE]`` follows an error event.
        first_content: JSON of the content of a choice's first event.
        finish_apart: a finish reason has an event of its own.
        finish_last: those events come behind the last token of all choices.
        reasoning_field: where thinking stands.
        id_header, id_field: where a caller may give his request an id.
        id_prefix: in front of that id in a chat's answer; completions leave out its ``chat``.
        running_usage: knows ``continuous_usage_stats``.
        knows_models: a model that it does not serve is an error.
        looks_every: seconds between two looks whether the caller is still there, for a stream and for a
            buffered answer; 0: it is told at once.
        together: all choices of a request start at once.
        max_queued: how many sequences wait, unless it is told otherwise; None: any number.
        answers_while_loading: it listens before its model is there.
        responses: it knows OpenAI's Responses.
        metrics: it has a metrics page; ``metrics_asked``: only when it is started with one.
    """

    error: Callable[[Trouble], dict[str, Any]]
    event_error: Callable[[Trouble], dict[str, Any]]
    troubles: dict[str, Trouble]
    early_head: bool = False
    busy_in_band: bool = False
    done_after_error: bool = True
    first_content: bytes = b'""'
    finish_apart: bool = True
    finish_last: bool = False
    reasoning_field: str = "reasoning_content"
    id_header: bytes | None = None
    id_field: str | None = None
    id_prefix: str = "chatcmpl-"
    running_usage: bool = False
    knows_models: bool = True
    looks_every: tuple[float, float] = (0.0, 0.0)
    together: bool = False
    max_queued: int | None = None
    answers_while_loading: bool = False
    responses: bool = True
    metrics: bool = True
    metrics_asked: bool = False
    headers: tuple[tuple[str, str], ...] = ()


# -- shapes of errors


def _nested(trouble: Trouble) -> dict[str, Any]:
    return {"error": _flat(trouble)}


def _flat(trouble: Trouble) -> dict[str, Any]:
    known = {"message": trouble.message, "type": trouble.type, "param": trouble.param}
    return {**known, "code": trouble.status}


def _flat_object(trouble: Trouble) -> dict[str, Any]:
    # An HTTP error of SGLang has its status as its type.
    kind = trouble.type if trouble.status == 400 else str(trouble.status)
    return {"object": "error", **_flat(trouble), "type": kind}


def _event_object(trouble: Trouble) -> dict[str, Any]:
    return {"object": "error", **_flat(trouble)}


def _llama(trouble: Trouble) -> dict[str, Any]:
    return {"code": trouble.status, "message": trouble.message, "type": trouble.type}


def _llama_body(trouble: Trouble) -> dict[str, Any]:
    return {"error": _llama(trouble)}


def _tgi(trouble: Trouble) -> dict[str, Any]:
    return {"error": trouble.message, "error_type": trouble.type}


def _tgi_event(trouble: Trouble) -> dict[str, Any]:
    return {"message": trouble.message, "http_status_code": 422}  # whatever it is


def _openai(trouble: Trouble) -> dict[str, Any]:
    words = {"message": trouble.message, "type": trouble.type, "param": trouble.param}
    return {**words, "code": trouble.code}


def _openai_body(trouble: Trouble) -> dict[str, Any]:
    return {"error": _openai(trouble)}


# -- what they say

_CUDA: Final = "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 79.10 GiB."

_VLLM_SAYS: Final = {
    "invalid": Trouble(400, "", "BadRequestError"),
    "no_route": Trouble(404, "Not Found", "NotFoundError"),
    "capacity": Trouble(503, "The server has too many queued requests.", "Service Unavailable"),
    "model_not_loaded": Trouble(404, "The model `{model}` does not exist.", "NotFoundError", "model"),
    "model_load_failed": Trouble(500, "Failed to load the model.", "InternalServerError"),
    "engine_unready": Trouble(503, "Loading", "ServiceUnavailableError"),
    "out_of_memory": Trouble(500, _CUDA, "InternalServerError"),
}
_SGLANG_SAYS: Final = {
    "invalid": Trouble(400, "", "BadRequest"),
    "no_route": Trouble(404, "Not Found", "NotFound"),
    "capacity": Trouble(503, "The request queue is full.", "SERVICE_UNAVAILABLE"),
    "model_not_loaded": Trouble(404, "The model {model} is not served.", "NotFound", "model"),
    "model_load_failed": Trouble(500, "Failed to load the model.", "InternalServerError"),
    "engine_unready": Trouble(503, "Service Unavailable", "SERVICE_UNAVAILABLE"),
    "out_of_memory": Trouble(500, f"Out of memory. {_CUDA}", "INTERNAL_SERVER_ERROR"),
}
_LLAMACPP_SAYS: Final = {
    "invalid": Trouble(400, "", "invalid_request_error"),
    "no_route": Trouble(404, "File Not Found", "not_found_error"),
    "capacity": Trouble(503, "no slot available", "unavailable_error"),
    "model_not_loaded": Trouble(400, "model not found", "invalid_request_error"),
    "model_load_failed": Trouble(500, "failed to load model", "server_error"),
    "engine_unready": Trouble(503, "Loading model", "unavailable_error"),
    "out_of_memory": Trouble(500, "KV cache is full", "server_error"),
}
_TGI_SAYS: Final = {
    "invalid": Trouble(422, "", "validation"),
    "no_route": Trouble(404, "Not Found", "not_found"),
    "capacity": Trouble(429, "Model is overloaded", "overloaded"),
    "model_not_loaded": Trouble(404, "model not found", "validation"),
    "model_load_failed": Trouble(500, "Incomplete generation", "incomplete_generation"),
    "engine_unready": Trouble(503, "unhealthy", "healthcheck"),
    "out_of_memory": Trouble(424, f"Request failed during generation: Server error: {_CUDA}", "generation"),
}
_OPENAI_SAYS: Final = {
    "invalid": Trouble(400, "", "invalid_request_error"),
    "no_route": Trouble(404, "Unknown request URL", "invalid_request_error", code="unknown_url"),
    "capacity": Trouble(429, "Rate limit reached for requests", "requests", code="rate_limit_exceeded"),
    "model_not_loaded": Trouble(
        404, "The model `{model}` does not exist", "invalid_request_error", "model", "model_not_found"
    ),
    "model_load_failed": Trouble(500, "The server had an error", "server_error"),
    "engine_unready": Trouble(503, "The server is starting", "server_error"),
    "out_of_memory": Trouble(500, "The server ran out of memory", "server_error"),
}

MANNERS: Final[dict[str, Manner]] = {
    "vllm": Manner(
        _nested,
        _flat,
        _VLLM_SAYS,
        early_head=True,
        finish_apart=False,
        reasoning_field="reasoning",
        id_header=b"x-request-id",
        id_field="request_id",
        running_usage=True,
    ),
    "sglang": Manner(
        _flat_object,
        _event_object,
        _SGLANG_SAYS,
        busy_in_band=True,
        finish_last=True,
        id_field="rid",
        id_prefix="",
        running_usage=True,
        knows_models=False,
        looks_every=(0.0, 4.0),
        answers_while_loading=True,
        metrics_asked=True,
    ),
    "llamacpp": Manner(
        _llama_body,
        _llama,
        _LLAMACPP_SAYS,
        done_after_error=False,
        first_content=b"null",
        knows_models=False,
        looks_every=(1.0, 1.0),
        together=True,
        answers_while_loading=True,
        metrics_asked=True,
        headers=(("x-accel-buffering", "no"),),
    ),
    "tgi": Manner(
        _tgi,
        _tgi_event,
        _TGI_SAYS,
        early_head=True,
        busy_in_band=True,
        finish_apart=False,
        knows_models=False,
        max_queued=0,
        responses=False,
    ),
    "openai": Manner(_openai_body, _openai, _OPENAI_SAYS, early_head=True, metrics=False),
}


def event(data: bytes) -> bytes:
    """Write one event of a stream."""
    return b"data: " + data + b"\n\n"
