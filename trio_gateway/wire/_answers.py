"""What engines say: buffered answers, errors in all their shapes, usage. Sans-IO."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from ..contract import RERANK, SCORE, Operation, Style
from ..errors import EngineProtocolError
from ._json import join_members, raw_members

MAX_MESSAGE_BYTES: Final = 1024
MOST_FAULTS: Final = 8  # of one error that are passed on
OVERLOADED: Final = 529  # how Dynamo and Anthropic's API say what is a 503 elsewhere
FAILED_DEPENDENCY: Final = 424  # how TGI says that generating failed
_OUT_OF_MEMORY = re.compile(
    r"out of memory|outofmemory|cuda error: memory|hip out of memory|kv cache is full", re.IGNORECASE
)
_PAGE: Final = re.compile(r"\s*<(!doctype|html|head|body|\?xml)\b", re.IGNORECASE)
# TGI gives every error inside a stream the status 422; its words tell them apart.
_TGI_STATUSES: Final = (
    ("Model is overloaded", 429),
    ("Request failed during generation", 424),
    ("Incomplete generation", 500),
)


@dataclass(slots=True)  # frozen, its fields would be set by calls
class Usage:
    """Tokens as the engine counted them; None where it did not say."""

    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None


@dataclass(frozen=True, slots=True)
class EngineError:
    """An engine's own error, in whatever shape it came, made safe to pass on.

    Attributes:
        status: HTTP status, or the class that an in-band error claims.
        message: at most 1 KiB, printable; empty if the engine said nothing.
        gave_up: the engine dropped the request before any output, as it does when it stops.
        final: the worker says that no other would do better.
    """

    status: int
    message: str = ""
    type: str | None = None
    code: str | None = None
    param: str | None = None
    out_of_memory: bool = False
    gave_up: bool = False
    final: bool = False

    @property
    def lacked_memory(self) -> bool:
        """Whether it failed for want of memory; the same words about a request are the caller's matter."""
        return self.out_of_memory and (self.status >= 500 or self.status == FAILED_DEPENDENCY)


# Counts that no engine reaches are no counts; they would only break what adds them up.
MOST_TOKENS: Final = 2**31  # that a request can have; whatever is more would only spoil what adds them up
_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    message: Any = None
    text: Any = None

    @property
    def says_something(self) -> bool:
        """Whether it has output."""
        said = self.message if isinstance(self.message, dict) else {}
        return bool(self.text) or any(value for key, value in said.items() if key != "role")


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    object: Any = None


_answer = msgspec.json.Decoder(_Answer)
_usage = msgspec.json.Decoder(_Usage)
_any = msgspec.json.Decoder()


def _read_usage(raw: bytes | msgspec.Raw) -> Usage | None:
    try:
        found = _usage.decode(raw)
    except msgspec.MsgspecError:
        return None  # null, absent, or a form that nobody knows
    details = found.prompt_tokens_details
    return Usage(found.prompt_tokens, details.cached_tokens if details else None, found.completion_tokens)


def read_usage(data: bytes) -> Usage | None:
    """Read the usage of an event, a JSON object; None if there is none that can be read."""
    return _read_usage(raw_members(data).get("usage", b""))


def judge_answer(
    body: bytes, operation: Operation, choices: int, secrets: tuple[str, ...] = ()
) -> Usage | EngineError | None:
    """Judge a whole 200 body.

    Answers its usage, or the error that it holds.

    Args:
        secrets: texts that must not be passed on.

    Raises:
        EngineProtocolError: it is no JSON object, or lacks a finished choice.
    """
    try:
        if not body.isascii():
            body.decode()  # msgspec does not look into the strings that it skips
        if operation in (RERANK, SCORE) and body.lstrip().startswith(b"["):
            _any.decode(body)
            return None  # some engines answer lists
        answer = _answer.decode(body)
        failed = _is_error(answer.error, answer.object)
        if operation.style in (Style.RESPONSES, Style.MESSAGES) and not failed:
            return _judge_named(body, operation.style, secrets)
    except (ValueError, RecursionError):
        raise EngineProtocolError("the answer is not the JSON that was asked for") from None
    if failed:
        return read_error(body, None, secrets)
    if operation.choices:
        given_up = [c for c in answer.choices or () if c.finish_reason in NO_FINISH]
        if given_up:
            unsaid = all(c.finish_reason == ABORT and not c.says_something for c in given_up)
            return EngineError(503 if unsaid else 500, gave_up=unsaid)
        finished = {c.index for c in answer.choices or () if c.finish_reason}
        if not finished.issuperset(range(choices)):
            raise EngineProtocolError("the answer has a choice without a finish reason")
    return _read_usage(answer.usage)


def _judge_named(body: bytes, style: Style, secrets: tuple[str, ...]) -> Usage | EngineError:
    """Judge an answer of the Responses or Messages API."""
    value = _any.decode(body)
    if style is Style.MESSAGES:
        if value.get("type") == "error":
            return read_error(body, None, secrets)
        whole = value.get("stop_reason") is not None
    else:
        if value.get("status") in ("failed", "cancelled"):
            return EngineError(500)
        whole = value.get("status") in ("completed", "incomplete", None)
    if not whole:
        raise EngineProtocolError("the answer does not say that it is whole")
    return read_named_usage(value, "", Usage())


def read_named_usage(value: dict[str, Any], holder: str, before: Usage) -> Usage:
    """Read the usage of a Responses or Messages answer or event; what it leaves open stays as ``before``.

    Args:
        holder: the member that may hold the usage instead of the event itself.
    """
    held = value.get(holder)
    usage = value.get("usage") or (held.get("usage") if isinstance(held, dict) else None)
    if not isinstance(usage, dict):
        return before
    details = usage.get("input_tokens_details")
    cached = usage.get("cache_read_input_tokens")
    if isinstance(details, dict):
        cached = details.get("cached_tokens")

    def count(found: object, old: int | None) -> int | None:
        return found if type(found) is int and 0 <= found <= MOST_TOKENS else old

    prompt = count(usage.get("input_tokens"), None)
    if prompt is not None:
        # Anthropic counts what came from a cache, or went into one, apart from the rest of the prompt.
        apart = ("cache_read_input_tokens", "cache_creation_input_tokens")
        prompt += sum(count(usage.get(name), 0) or 0 for name in apart)
    return Usage(
        before.prompt if prompt is None else prompt,
        count(cached, before.cached),
        count(usage.get("output_tokens"), before.generated),
    )


# Finish reasons that say that the engine stopped, not that the answer is whole.
ABORT: Final = "abort"
NO_FINISH: Final = frozenset({ABORT, "error"})


def _is_error(error: msgspec.Raw, kind: object) -> bool:
    return kind == "error" or (bytes(error) != b"" and bool(_any.decode(error)))


def read_error(body: bytes, status: int | None, secrets: tuple[str, ...] = ()) -> EngineError:
    """Read an error body or event: nested, flat, a list, a string, or no JSON at all.

    Args:
        status: of the HTTP answer; None for an error in a 200, which names its own.
        secrets: texts that must not be passed on.
    """
    try:
        value = _any.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        value = body.decode("utf-8", "replace")
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = value[0]  # how Google's do it
    outer: dict[str, Any] = value if isinstance(value, dict) else {"message": value}
    error = outer.get("error")
    if isinstance(error, str) and error:
        error = {**outer, "message": error}
    elif not isinstance(error, dict) or not error:
        error = outer
    text = body[: 64 * 1024].decode("utf-8", "replace")
    message = _message(error, secrets)
    claimed = _claimed_status(error, outer, message) if status is None else status
    return EngineError(
        status=503 if claimed == OVERLOADED else claimed,
        message=message,
        type=_label(error.get("type"), secrets),
        code=_label(error.get("code"), secrets),
        param=_label(error.get("param"), secrets),
        out_of_memory=_OUT_OF_MEMORY.search(text) is not None,
    )


def _claimed_status(error: dict[str, Any], outer: dict[str, Any], message: str) -> int:
    for holder in (error, outer):
        for key in ("code", "status", "http_status_code"):
            value = holder.get(key)
            if isinstance(value, str) and re.fullmatch("[45][0-9][0-9]", value):
                value = int(value)
            if type(value) is int and 400 <= value < 600:
                return _by_words(message) if key == "http_status_code" and value == 422 else value
    return 500


def _by_words(message: str) -> int:
    return next((status for words, status in _TGI_STATUSES if message.startswith(words)), 422)


def _message(error: dict[str, Any], secrets: tuple[str, ...]) -> str:
    for key in ("message", "detail", "error", "msg", "errors"):
        text = _text(error.get(key))
        if text:
            for secret in secrets:
                text = text.replace(secret, "***")
            return _printable(text[:MAX_MESSAGE_BYTES])
    return ""


def _text(value: object) -> str:
    """Answer what a member says; a list does of each fault. A page is a proxy's and says nothing."""
    if isinstance(value, list):
        return "; ".join([text for text in map(_of_fault, value[:MOST_FAULTS]) if text])
    return value if isinstance(value, str) and not _PAGE.match(value) else ""


def _of_fault(fault: object) -> str:
    """Say one fault of a list, and where it is: FastAPI and Pydantic name the place in ``loc``."""
    if not isinstance(fault, dict):
        return fault if isinstance(fault, str) else ""
    said = next((fault[key] for key in ("msg", "message", "detail") if isinstance(fault.get(key), str)), "")
    place = fault.get("loc")
    if not said or not isinstance(place, list):
        return said
    return f"{'.'.join([str(step) for step in place if isinstance(step, (str, int))])}: {said}"


def _printable(text: str) -> str:
    """Keep what can be printed, within `MAX_MESSAGE_BYTES` of UTF-8; runs of all else become one blank."""
    words = "".join(char if char.isprintable() else "\n" for char in text)
    return re.sub("\n+", " ", words).encode()[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")


def _label(value: object, secrets: tuple[str, ...]) -> str | None:
    """Pass a short word on; one that holds a secret is dropped."""
    if not isinstance(value, str) or not 0 < len(value) <= 64 or not value.isprintable():
        return None
    return None if any(secret in value for secret in secrets) else value


def rename_model(data: bytes, upstream: str, public: str) -> bytes:
    """Put the public name at ``model``; every other byte of a value stays as it was.

    Raises:
        EngineProtocolError: ``data`` is no JSON object.
    """
    try:
        members = raw_members(data)
        if "model" not in members or _any.decode(members["model"]) != upstream:
            return data
    except (ValueError, RecursionError):
        raise EngineProtocolError("the answer is not valid JSON") from None
    members["model"] = msgspec.json.encode(public)
    return join_members(members)


def drop_usage(data: bytes) -> bytes:
    """Take ``usage`` out of an event."""
    members = raw_members(data)
    members.pop("usage", None)
    return join_members(members)
