"""Bytes to meaning and back. Sans-IO: no Trio, no clock, no socket."""

from ._answers import EngineError, Usage, judge_answer, read_error, rename_model
from ._head_parser import Header
from ._http1 import (
    CHUNKED,
    CONTINUE,
    LAST_CHUNK,
    UNTIL_CLOSE,
    BodyReader,
    HeadBuffer,
    RequestHead,
    ResponseHead,
    parse_request_head,
    parse_response_head,
    write_chunk,
    write_request_head,
    write_response_head,
)
from ._json import Json, may_hold_infinity, needs_thread, read_object, with_finite_numbers
from ._named_relay import NamedRelay
from ._ollama import OllamaRelay, ollama_answer
from ._relay import StreamRelay, StreamShape, failed_chunk
from ._requests import ReadBody, forbidden_field, internal_body, model_of, read_body, read_form_body
from ._sse import DONE, HEARTBEAT, write_event

__all__ = [
    "CHUNKED",
    "CONTINUE",
    "DONE",
    "HEARTBEAT",
    "LAST_CHUNK",
    "UNTIL_CLOSE",
    "BodyReader",
    "EngineError",
    "HeadBuffer",
    "Header",
    "Json",
    "NamedRelay",
    "OllamaRelay",
    "ReadBody",
    "RequestHead",
    "ResponseHead",
    "StreamRelay",
    "StreamShape",
    "Usage",
    "failed_chunk",
    "forbidden_field",
    "internal_body",
    "judge_answer",
    "may_hold_infinity",
    "model_of",
    "needs_thread",
    "ollama_answer",
    "parse_request_head",
    "parse_response_head",
    "read_body",
    "read_error",
    "read_form_body",
    "read_object",
    "rename_model",
    "with_finite_numbers",
    "write_chunk",
    "write_event",
    "write_request_head",
    "write_response_head",
]
