"""The grammar of an agent's answer: one table, the same for whoever writes and whoever reads."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.worker_answers import ACCEPTED, END, RECORDS, lines
from trio_gateway.contract import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, OPERATIONS, RESPONSES, Operation
from trio_gateway.wire._answers import EngineError
from trio_gateway.wire._relay import StreamShape
from trio_gateway.wire._worker_messages import (
    REJECTIONS,
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
    UsageCounts,
    WorkerReport,
    write_message,
)
from trio_gateway.wire._worker_relay import AgentAnswer, AgentRelay
from trio_gateway.wire._worker_stream import (
    MAX_LINE,
    STEPS,
    AnswerForm,
    Grammar,
    OutOfGrammar,
    RecordWriter,
    Stage,
    choices_asked,
    read_record,
    rejection_of,
)

RAW = msgspec.Raw(b"{}")
SAMPLES: list[Record] = [
    Accepted(0), Delta(0, "a"), Delta(1, "a"), Finish(0, "stop"), Finish(1, "stop"), UsageCounts(1, 2),
    NamedEvent("{}"), Result(200, RAW), End(), Failed("engine_failed"), Ping(3),
]  # fmt: skip


def test_the_table_knows_every_stage_and_leads_to_known_ones() -> None:
    assert set(STEPS) == set(Stage)
    assert {after for steps in STEPS.values() for after in steps.values()} | {Stage.NEW} == set(Stage)
    assert STEPS[Stage.OVER] == {}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_answer_has_one_form(operation: Operation) -> None:
    assert AnswerForm.of(operation, stream=False) is AnswerForm.BUFFERED
    if operation.streams:
        form = AnswerForm.CHOICES if operation in (CHAT, COMPLETIONS) else AnswerForm.EVENTS
        assert AnswerForm.of(operation, stream=True) is form


@settings(max_examples=150)
@given(st.lists(st.sampled_from(SAMPLES), max_size=8), st.sampled_from(AnswerForm), st.integers(0, 2))
def test_what_a_writer_writes_a_reader_takes_and_nothing_else(
    records: list[Record], form: AnswerForm, choices: int
) -> None:
    writer = RecordWriter(form, choices)
    written = b""
    for record in records:
        before = writer.over, writer.open, writer.generated
        try:
            written += writer.write(record)
        except OutOfGrammar:
            assert (writer.over, writer.open, writer.generated) == before
    if form is AnswerForm.BUFFERED:
        answer = AgentAnswer(choices, 100)
        answer.feed(written)
        assert answer.fault is None or b'"error"' in written
        assert answer.generated == writer.generated
    else:
        operation = CHAT if form is AnswerForm.CHOICES else RESPONSES
        relay = AgentRelay(StreamShape(choices, False, False, "m", "m", 10_000), operation, "id", 1)
        relay.feed(written)
        failed = b'"error"' in written
        cut = form is AnswerForm.EVENTS and b'"end"' in written
        assert relay.fault is None or failed or cut
        assert relay.over is writer.over
        assert relay.generated == writer.generated


def test_a_writer_refuses_a_record_that_is_too_long() -> None:
    writer = RecordWriter(AnswerForm.CHOICES, 1)
    writer.write(Accepted(0))
    with pytest.raises(OutOfGrammar, match="is over"):
        writer.write(Delta(0, "x" * MAX_LINE))
    assert writer.generated == 0
    buffered = RecordWriter(AnswerForm.BUFFERED, 1)
    buffered.write(Accepted(0))
    assert len(buffered.write(Result(200, msgspec.Raw(b'"' + b"x" * MAX_LINE + b'"')))) > MAX_LINE


def test_a_record_is_one_line_whatever_is_embedded() -> None:
    writer = RecordWriter(AnswerForm.BUFFERED, 1)
    writer.write(Accepted(0))
    written = writer.write(Result(200, msgspec.Raw(b'{\n"a":\n1}\n')))
    assert written.count(b"\n") == 1
    assert json.loads(written)["body"] == {"a": 1}


@given(st.lists(RECORDS, max_size=5))
def test_a_record_that_is_read_can_be_written_again(written: list[bytes]) -> None:
    grammar = Grammar(AnswerForm.CHOICES, 2)
    for data in [ACCEPTED, *written]:
        record = read_record(data)
        assert record is not None
        assert read_record(write_message(record)) == record
        try:
            grammar.step(record)
        except OutOfGrammar:
            return


def test_lines_of_the_sample_end_where_the_grammar_says() -> None:
    grammar = Grammar(AnswerForm.CHOICES, 0)
    for data in lines(ACCEPTED, END).splitlines():
        record = read_record(data)
        assert record is not None
        grammar.step(record)
    assert grammar.stage is Stage.OVER


# Choices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "body", "choices"),
    [
        (CHAT, b'{"messages":[]}', 1),
        (CHAT, b'{"n":3,"prompt":["a","b"]}', 3),
        (CHAT, b'{"n":null}', 1),
        (COMPLETIONS, b'{"prompt":"a","n":2}', 2),
        (COMPLETIONS, b'{"prompt":["a","b"],"n":2}', 4),
        (COMPLETIONS, b'{"prompt":[1,2,3]}', 1),
        (COMPLETIONS, b'{"prompt":[[1,2],[3]]}', 2),
        (COMPLETIONS, b'{"prompt":[{"prompt_embeds":"x"},{}]}', 2),
        (COMPLETIONS, b'{"prompt":[]}', 1),
        (RESPONSES, b"not json", 0),
        (MESSAGES, b"", 0),
        (EMBEDDINGS, b'{"n":4}', 0),
    ],
)
def test_choices_are_prompts_times_n(operation: Operation, body: bytes, choices: int) -> None:
    assert choices_asked(operation, body) == choices


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"n":"x"}', b'{"n":0}', b'{"n":-1}', b'{"n":99999999}', b'{"a":' * 2000]
)
def test_choices_that_can_not_be_counted_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="the body"):
        choices_asked(CHAT, body)


# Rejections -------------------------------------------------------------------------------------------------

REPORT = WorkerReport(1, 2, "ready", ["m"], 8, 8, 0)


@pytest.mark.parametrize("code", REJECTIONS)
def test_a_typed_rejection_says_why_and_how_the_worker_is(code: str) -> None:
    found = rejection_of(write_message(Rejection(code, REPORT)))
    assert found is not None
    rejection, error = found
    assert rejection == Rejection(code, REPORT)
    not_executed = error.status in (404, 429, 503)
    assert not_executed or code == "model_load_failed"
    assert error.gave_up is (code in ("draining", "shutting_down"))


def test_a_rejection_for_an_unknown_reason_is_a_worker_without_room() -> None:
    found = rejection_of(b'{"rejected":"on_holiday"}')
    assert found == (Rejection("on_holiday"), EngineError(503))


@pytest.mark.parametrize("body", [b"", b"{}", b'{"error":{"message":"m"}}', b'{"rejected":7}', b"\xff"])
def test_what_is_no_rejection_is_none(body: bytes) -> None:
    assert rejection_of(body) is None
