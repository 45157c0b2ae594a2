"""The answer of an agent: its grammar, written on one side and read on the other. Sans-IO.

The grammar is one table, `STEPS`, with what no table can say beside it in
`Grammar`. The agent writes through `RecordWriter`, which can not leave the
grammar; the gateway reads in `_worker_relay`, which refuses whatever leaves it.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Final, cast

import msgspec

from ..contract import COMPLETIONS, Operation
from ..units import MiB
from ._answers import EngineError, read_error
from ._json import may_hold_infinity, with_finite_numbers
from ._worker_messages import (
    Accepted,
    Delta,
    End,
    Failed,
    Finish,
    NamedEvent,
    Ping,
    Record,
    Rejection,
    Result,
    ToolCall,
    UsageCounts,
    read_message,
    write_message,
)

MAX_CHOICES: Final = 2**20  # of one request; record numbers have the same bound
READER_STALLED: Final = "reader_stalled"  # code of an answer that nobody took for too long
MAX_LINE: Final = 1 * MiB  # bytes of a record, `Result` excepted

_encode = msgspec.json.Encoder().encode
_record = cast("msgspec.json.Decoder[Record]", msgspec.json.Decoder(Record))


class _Tagged(msgspec.Struct):
    t: str


_tag = msgspec.json.Decoder(_Tagged)


class OutOfGrammar(ValueError):
    """A record that can not stand where it stands; the text says why, and holds nothing of its content."""


# The grammar ----------------------------------------------------------------------------------------


class AnswerForm(enum.Enum):
    """Which records an answer is made of."""

    CHOICES = enum.auto()  # a stream of deltas
    EVENTS = enum.auto()  # a stream of named events
    BUFFERED = enum.auto()  # one result

    @classmethod
    def of(cls, operation: Operation, stream: bool) -> AnswerForm:
        """Answer the form that an operation has when asked for as a stream or not."""
        if not stream:
            return cls.BUFFERED
        return cls.CHOICES if operation.choices else cls.EVENTS


class _Asked(msgspec.Struct):
    n: int | None = None
    prompt: msgspec.Raw = msgspec.Raw()


_asked = msgspec.json.Decoder(_Asked)
_list = msgspec.json.Decoder(list[msgspec.Raw])


def choices_asked(operation: Operation, body: bytes) -> int:
    """Count the choices that a body asks for: prompts x n; 0 for operations without.

    Raises:
        ValueError: the body can not be read so far.
    """
    if not operation.choices:
        return 0
    try:
        asked = _asked.decode(body)
        prompt = bytes(asked.prompt)
        listed = _list.decode(prompt) if operation is COMPLETIONS and prompt.startswith(b"[") else []
    except (msgspec.MsgspecError, RecursionError):
        raise ValueError("the body can not be read") from None
    # A list of token ids is one prompt; of strings, or of such lists, each is one.
    token_ids = bool(listed) and not bytes(listed[0]).startswith((b'"', b"[", b"{"))
    choices = (1 if token_ids else len(listed) or 1) * (1 if asked.n is None else asked.n)
    if not 0 < choices <= MAX_CHOICES:
        raise ValueError("the body asks for an impossible number of choices")
    return choices


class Stage(enum.Enum):
    """How far an answer has come."""

    NEW = enum.auto()
    OPEN = enum.auto()
    ANSWERED = enum.auto()  # the result was said
    OVER = enum.auto()


# From a stage, by a record, to the next; what is not here is outside of the grammar.
STEPS: Final[dict[Stage, dict[type, Stage]]] = {
    Stage.NEW: {Accepted: Stage.OPEN},
    Stage.OPEN: {
        Delta: Stage.OPEN,
        ToolCall: Stage.OPEN,
        UsageCounts: Stage.OPEN,
        Finish: Stage.OPEN,
        NamedEvent: Stage.OPEN,
        Ping: Stage.OPEN,
        Result: Stage.ANSWERED,
        End: Stage.OVER,
        Failed: Stage.OVER,
    },
    Stage.ANSWERED: {End: Stage.OVER},
    Stage.OVER: {},
}
# Records that only one form has.
_ONLY: Final[dict[type, frozenset[AnswerForm]]] = {
    Delta: frozenset({AnswerForm.CHOICES, AnswerForm.BUFFERED}),
    ToolCall: frozenset({AnswerForm.CHOICES, AnswerForm.BUFFERED}),
    Finish: frozenset({AnswerForm.CHOICES, AnswerForm.BUFFERED}),
    NamedEvent: frozenset({AnswerForm.EVENTS}),
    Result: frozenset({AnswerForm.BUFFERED}),
}


class Grammar:
    """Where an answer is in the grammar.

    Args:
        choices: choices that must finish before the end of a stream of choices.

    Attributes:
        stage: how far it is.
        counted: tokens that deltas and tool calls stand for.
    """

    def __init__(self, form: AnswerForm, choices: int) -> None:
        self._form = form
        self._choices = choices
        self._finished: set[int] = set()
        self.counted = 0
        self._told = 0  # tokens that pings told of
        self.stage = Stage.NEW

    @property
    def generated(self) -> int:
        """Tokens generated so far, as far as the records tell: pings may be ahead of deltas."""
        return max(self.counted, self._told)

    @property
    def all_finished(self) -> bool:
        """Whether every choice has its finish."""
        return len(self._finished) >= self._choices

    def step(self, record: Record) -> None:
        """Take one record.

        Raises:
            OutOfGrammar: it can not stand here; nothing has changed.
        """
        kind = type(record)
        after = STEPS[self.stage].get(kind)
        if after is None:
            raise OutOfGrammar(f"a record {_name(record)} can not stand {_PLACES[self.stage]}")
        if kind in _ONLY and self._form not in _ONLY[kind]:
            raise OutOfGrammar(f"a record {_name(record)} in an answer of another form")
        if isinstance(record, Delta | ToolCall | Finish):
            self._check_choice(record)
        elif kind is End:
            self._check_end()
        elif isinstance(record, Ping):
            self._told = max(self._told, record.generated)
        self.stage = after

    def _check_choice(self, record: Delta | ToolCall | Finish) -> None:
        if record.i >= self._choices:
            raise OutOfGrammar("a choice that nobody asked for")
        if record.i in self._finished:
            raise OutOfGrammar("a record of a choice that has its finish")
        if isinstance(record, Finish):
            self._finished.add(record.i)
        else:
            self.counted += record.n

    def _check_end(self) -> None:
        if self._form is AnswerForm.CHOICES and not self.all_finished:
            raise OutOfGrammar("the end before every choice has its finish")
        if self._form is AnswerForm.BUFFERED and self.stage is not Stage.ANSWERED:
            raise OutOfGrammar("the end before the result")


_PLACES: Final = {
    Stage.NEW: "at the beginning",
    Stage.OPEN: "in the middle",
    Stage.ANSWERED: "behind the result",
    Stage.OVER: "behind the end",
}


def _name(record: Record) -> str:
    return str(type(record).__struct_config__.tag)


class RecordWriter:
    """Writes one answer, on the agent's side.

    Args:
        choices: that the answer has.
    """

    def __init__(self, form: AnswerForm, choices: int) -> None:
        self._grammar = Grammar(form, choices)

    @property
    def over(self) -> bool:
        """Whether the answer has its end."""
        return self._grammar.stage is Stage.OVER

    @property
    def open(self) -> bool:
        """Whether deltas and pings can stand now."""
        return self._grammar.stage is Stage.OPEN

    @property
    def generated(self) -> int:
        """Tokens that the records so far stand for."""
        return self._grammar.generated

    def write(self, record: Record) -> bytes:
        """Write one line.

        Raises:
            OutOfGrammar: it can not stand here, or is over `MAX_LINE`; nothing was written.
        """
        line = write_message(record)
        if len(line) > MAX_LINE and not isinstance(record, Result):
            raise OutOfGrammar(f"a record is over {MAX_LINE} bytes")
        if b"\n" in line:  # only embedded JSON can hold one, where a blank says the same
            line = line.replace(b"\n", b" ")
        self._grammar.step(record)
        return line + b"\n"


def read_record(line: bytes) -> Record | None:
    """Read one line; None: a kind of record that is not known here.

    Raises:
        ValueError: it is no record; the text holds nothing of its content.
    """
    if may_hold_infinity(line):
        line = with_finite_numbers(line)
    try:
        if not line.isascii():
            line.decode()  # what is embedded is not looked into
        return _record.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        pass
    try:
        kind = _tag.decode(line).t
    except (msgspec.MsgspecError, RecursionError):
        raise ValueError("a record can not be read") from None
    if kind in _TAGS:
        raise ValueError(f"a record {kind} can not be read")
    return None


_TAGS: Final = frozenset(
    str(kind.__struct_config__.tag)
    for kind in (Accepted, Delta, ToolCall, UsageCounts, Finish, NamedEvent, Result, End, Failed, Ping)
)


# What failures mean ---------------------------------------------------------------------------------

# Codes of error records and rejections, as the gateway would have read them from an engine itself.
_MEANINGS: Final[dict[str, EngineError]] = {
    "capacity": EngineError(429),
    "overloaded": EngineError(503),
    "draining": EngineError(503, gave_up=True),
    "shutting_down": EngineError(503, gave_up=True),
    "aborted": EngineError(503, gave_up=True),
    "engine_unready": EngineError(503),
    "deadline": EngineError(503),
    "model_not_loaded": EngineError(404, "the model is not loaded at this worker", code="model_not_found"),
    "model_load_failed": EngineError(500, code="model_load_failed"),
    "out_of_memory": EngineError(500, out_of_memory=True),
    "engine_out_of_memory": EngineError(500, out_of_memory=True),
    "engine_credentials": EngineError(401),
    "engine_protocol_error": EngineError(502, code="engine_protocol_error"),
    "engine_failed": EngineError(500),
    "reader_stalled": EngineError(500, code=READER_STALLED, final=True),
}
FAILURES: Final = frozenset(_MEANINGS)


def failure_of(record: Failed, secrets: tuple[str, ...] = ()) -> EngineError:
    """Say an error record in the words of an engine's own error.

    A code that is not in `FAILURES` is an engine's word for what its caller did
    wrong, if the record has a status below 500; else the engine failed.
    """
    error = _MEANINGS.get(record.code)
    if error is None and record.status and record.status < 500:
        told = {"message": record.message, "type": record.type, "param": record.param, "code": record.code}
        words = {key: value for key, value in told.items() if isinstance(value, str)}
        return read_error(_encode({"error": words}), record.status, secrets)
    error = error or EngineError(record.status or 500)
    # What was not executed may be tried elsewhere whatever is said of it.
    executed = error.status >= 500 and error.status != 503
    return replace(error, final=True) if executed and record.retry == "never" else error


def rejection_of(body: bytes) -> tuple[Rejection, EngineError] | None:
    """Read the body of an answer that is not 200; None: it is no typed rejection.

    A code that is not known is a worker without room.
    """
    try:
        rejection = read_message(body, Rejection)
    except ValueError:
        return None
    return rejection, _MEANINGS.get(rejection.rejected, _MEANINGS["overloaded"])
