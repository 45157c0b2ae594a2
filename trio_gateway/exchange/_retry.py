"""What a failed attempt means: who may try again, what it says of the worker, what the caller is told.

The table of contracts section 5, as far as one attempt can tell. Pure.
"""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import enum
import re
from dataclasses import dataclass
from typing import Final

from ..contract import Worker
from ..errors import CODES, Problem, UpstreamFailed, UpstreamFault
from ..wire import READER_STALLED, EngineError

LONGEST_RETRY_AFTER: Final = 3600.0  # seconds


class Way(enum.Enum):
    """Where an exchange may go after a failed attempt, before commit."""

    NOWHERE = enum.auto()  # the answer stays as it is
    ANYWHERE = enum.auto()  # not executed: back to the queue, costs no budget
    ELSEWHERE = enum.auto()  # not executed: another worker only
    ONCE = enum.auto()  # perhaps executed: one retry per exchange, paid from the budget


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt.

    Attributes:
        problem: what the caller is told if this is the last word.
        reason: for metrics, of a bounded set.
        fault: counts against the worker.
        rejected: the worker did not take it or gave it up unexecuted; with ``retry_after`` as it said.
        signal: what that, or the failure, tells of the worker, in the words of the worker protocol;
            empty: nothing more.
    """

    way: Way
    problem: Problem
    reason: str
    fault: bool = False
    rejected: bool = False
    retry_after: float | None = None
    signal: str = ""

    @property
    def executed(self) -> bool:
        """Whether the engine may have worked on the request before it failed."""
        if self.way is Way.NOWHERE:
            return self.reason not in _JUDGED
        return self.way is Way.ONCE and self.signal != "model_load_failed"


_JUDGED: Final = frozenset({"invalid", "credentials", "deadline", "out_of_memory"})  # before any work


def of_transport(failure: UpstreamFailed) -> Failure:
    """Judge an attempt that got no readable answer."""
    if failure.fault is UpstreamFault.UNREACHABLE:
        problem = Problem.of("engine_failed", "the worker could not be reached")
        return Failure(Way.ELSEWHERE, problem, "unreachable", fault=True)
    if failure.fault is UpstreamFault.TOO_LARGE:
        problem = Problem.of(
            "engine_protocol_error", "the engine's answer is larger than the gateway accepts"
        )
        return Failure(Way.NOWHERE, problem, "too_large")
    if failure.fault is UpstreamFault.MALFORMED:
        problem = Problem.of("engine_protocol_error", "the engine's answer could not be read")
        return Failure(Way.ONCE, problem, "malformed", fault=True)
    return Failure(Way.ONCE, Problem.of("engine_failed", "the engine's answer was cut"), "broken", fault=True)


CUT: Final = Failure(
    Way.ONCE, Problem.of("engine_failed", "the engine's answer ended before it was whole"), "cut", fault=True
)
FIRST_TOKEN: Final = Failure(
    Way.ONCE,
    Problem.of("first_token_timeout", "the engine gave no output in time"),
    "first_token",
    fault=True,
)
NO_PROGRESS: Final = Failure(
    Way.ONCE, Problem.of("engine_failed", "the engine stopped giving output"), "no_progress", fault=True
)
ABORTED: Final = Failure(
    Way.ANYWHERE,
    Problem.of("engine_overloaded", "the engine gave the request up"),
    "aborted",
    rejected=True,
    signal="draining",
)
WRONG_TYPE: Final = Failure(
    Way.ONCE,
    Problem.of("engine_protocol_error", "the engine answered with another content type than asked for"),
    "content_type",
    fault=True,
)


def not_possible(problem: Problem) -> Failure:
    """Judge a request that this kind of engine can not be asked for; one of another kind perhaps can."""
    return Failure(Way.ELSEWHERE, problem, "not_possible")


def of_error(error: EngineError, retry_after: float | None = None) -> Failure:
    """Judge an engine's own error, be it an HTTP status or in a 200.

    Args:
        retry_after: seconds, as the engine asked.
    """
    status = error.status
    if error.gave_up:
        return ABORTED
    if error.code == READER_STALLED:
        return Failure(Way.NOWHERE, Problem.of("engine_failed", "the answer was not read in time"), "unread")
    if error.lacked_memory:
        return Failure(
            Way.NOWHERE,
            Problem.of(
                "engine_out_of_memory", "the engine is out of memory: shorten the prompt or lower max_tokens"
            ),
            "out_of_memory",
        )
    if status in (429, 503):
        problem = Problem.of("engine_overloaded", "the engine has no room")
        if status == 429:
            problem = problem.but(
                status=429, type="rate_limit_error", message=error.message or problem.message
            )
        signal = "engine_unready" if error.message.startswith(_LOADING) else "capacity"
        return Failure(Way.ANYWHERE, problem, "overloaded", False, True, retry_after, signal)
    if status in (401, 403) or 300 <= status < 400:
        return Failure(
            Way.NOWHERE,
            Problem.of("engine_credentials", "the gateway could not use the worker"),
            "credentials",
        )
    if status == 404:
        lacking = error.code == "model_not_found" or "model" in _own_words(error)
        return Failure(
            Way.ELSEWHERE, _passed_on(error), "not_found", signal="model_not_loaded" if lacking else ""
        )
    if (400 <= status < 500 and status not in _FAILURES_BELOW_500) or status == 501:
        return Failure(Way.NOWHERE, _passed_on(error), "invalid")
    code = error.code if error.code == "engine_protocol_error" else "engine_failed"
    way = Way.NOWHERE if error.final else Way.ONCE
    signal = error.code if error.code == "model_load_failed" else ""
    return Failure(way, Problem.of(code, "the engine failed"), "error", fault=True, signal=signal)


def of_rejection(reason: str, error: EngineError, retry_after: float | None = None) -> Failure:
    """Judge a typed rejection of an agent: nothing was executed.

    Args:
        reason: as the agent says it.
        retry_after: seconds, as it asked.
    """
    if reason == "deadline":
        problem = Problem.of("deadline_exceeded", "too little time was left to begin")
        return Failure(Way.NOWHERE, problem, "deadline")
    return dataclasses.replace(of_error(error), signal=reason, retry_after=retry_after)


_QUOTED: Final = re.compile(r"['\"`]")
_LOADING: Final = "Loading model"  # how llama.cpp says that it does
_FAILURES_BELOW_500: Final = frozenset({424})  # how TGI says that generating failed
_OWN_CODES: Final = {404: "model_not_found", 408: "request_timeout", 413: "request_too_large"}


def _own_words(error: EngineError) -> str:
    """Answer how a message begins. What stands in quotes may be the caller's: the name of a model, say."""
    return _QUOTED.split(error.message, 1)[0].lower()


def _passed_on(error: EngineError) -> Problem:
    """Put the engine's words for what the caller did wrong into our shape."""
    status = 400 if error.status == 501 else error.status
    own = _OWN_CODES.get(status, "invalid_value")
    if status == 404 and "response" in (words := _own_words(error)) and "model" not in words:
        own = "previous_response_not_found"
    if (
        status == 400
        and "context" in error.message
        and ("length" in error.message or "exceed" in error.message)
    ):
        own = "context_length_exceeded"
    return Problem(
        code=error.code if error.code and not error.code.isdigit() else own,
        message=error.message or f"the engine refused the request with status {error.status}",
        status=status,
        type=error.type if error.type and not error.type.isdigit() else CODES[own].type,
        param=error.param,
        final=True,
    )


def read_retry_after(value: bytes | None, wall: float) -> float | None:
    """Read a Retry-After header: seconds or an HTTP date.

    What is neither, or further away than an hour, counts as absent: no engine knows
    that, and one slip of a number must not take a worker away for a year.

    Args:
        wall: seconds since the epoch.
    """
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    if text.isascii() and text.isdigit():
        seconds = float(text)
    else:
        try:
            when = email.utils.parsedate_to_datetime(text)
            # RFC 9110 5.6.7: in GMT, also in the obsolete form that names no zone.
            moment = when if when.tzinfo is not None else when.replace(tzinfo=datetime.UTC)
            seconds = max(moment.timestamp() - wall, 0.0)
        except (ValueError, OverflowError):
            return None
    return seconds if seconds <= LONGEST_RETRY_AFTER else None


def secrets_of(worker: Worker) -> tuple[str, ...]:
    """Texts of a worker that no caller may see, longer ones in front of their parts."""
    address = worker.socket_path or f"{worker.host}:{worker.port}"
    # A plain word may be a word of the message as well; a dotted name or an address is not.
    host = worker.host if "." in worker.host or ":" in worker.host else ""
    texts = (worker.api_key, worker.url, address, worker.authority, host, worker.address)
    return tuple([text for text in texts if text])


class RetryBudget:
    """A bucket that keeps retries from multiplying a failing load.

    It holds at most ``size``; every request fills in ``ratio``, time fills in
    ``per_second``. A retry costs 1.
    """

    def __init__(self, ratio: float, size: float = 10.0, per_second: float = 3.0) -> None:
        self._ratio = ratio
        self._size = size
        self._per_second = per_second
        self._level = size
        self._at = 0.0

    def change(self, ratio: float) -> None:
        """Let each request fill in another share from now on."""
        self._ratio = ratio

    def deposit(self) -> None:
        """Count a request."""
        self._level = min(self._level + self._ratio, self._size)

    def spend(self, now: float) -> bool:
        """Pay for one retry if there is enough."""
        self._level = min(self._level + (now - self._at) * self._per_second, self._size)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def give_back(self) -> None:
        """Take back what was paid for a retry that is not made."""
        self._level = min(self._level + 1, self._size)
