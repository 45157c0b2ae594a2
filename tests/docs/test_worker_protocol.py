"""The page of the worker protocol has every field, record, code and log line of the code, and no others."""

from __future__ import annotations

import ast
import re
from typing import Any

import msgspec
import pytest

from tests.docs.pages import column, modules, page, section, table, words
from trio_gateway.contract import OPERATIONS
from trio_gateway.wire import (
    FAILURES,
    REJECTIONS,
    Accepted,
    Delta,
    End,
    Failed,
    Finish,
    Generate,
    NamedEvent,
    Ping,
    Registered,
    Registration,
    ReleasedRequest,
    Result,
    ToolCall,
    UsageCounts,
    WorkerReport,
)

PAGE = "reference/worker-protocol.md"
NO_EVENTS = {"info", "warning", "ready", "starting"}  # levels and states
RECORDS = (Accepted, Delta, ToolCall, UsageCounts, Finish, NamedEvent, Result, End, Failed, Ping)


@pytest.mark.parametrize(
    ("heading", "number", "message"),
    [
        ("Registration", 1, Registration),
        ("Registration", 2, Registered),
        ("Heartbeats", 1, WorkerReport),
        ("Requests", 1, Generate),
        ("Cancelling", 1, ReleasedRequest),
    ],
)
def test_every_field_of_a_message_is_described(
    heading: str, number: int, message: type[msgspec.Struct]
) -> None:
    described = [words(row["Field"])[0] for row in table(PAGE, heading, number)]
    assert sorted(described) == sorted(message.__struct_fields__)


def test_every_record_and_its_fields_are_described() -> None:
    described = {words(row["Record"])[0]: words(row["Fields"]) for row in table(PAGE, "Answers", 1)}
    written: dict[Any, list[str]] = {
        record.__struct_config__.tag: list(record.__struct_fields__) for record in RECORDS
    }
    assert {name: sorted(fields) for name, fields in described.items()} == {
        name: sorted(fields) for name, fields in written.items()
    }
    grammar = re.search(r"^    accepted .*$", section(PAGE, "Answers"), re.MULTILINE)
    assert grammar is not None
    assert set(re.findall(r"\w+", grammar[0])) == set(written)


def test_every_rejection_has_its_status() -> None:
    described = {words(row["Word"])[0]: int(row["Status"]) for row in table(PAGE, "Requests", 2)}
    assert described == REJECTIONS


def test_every_code_of_a_failure_is_described() -> None:
    described = [word for row in table(PAGE, "Answers", 2) for word in words(row["Code"])]
    assert sorted(described) == sorted(FAILURES)


def test_operations_that_are_named_exist() -> None:
    row = next(row for row in table(PAGE, "Requests", 1) if "`operation`" in row["Field"])
    assert set(words(row["Meaning"])) <= {operation.name for operation in OPERATIONS}


def test_every_event_that_an_agent_logs_is_described() -> None:
    said = set()
    for tree in modules("agent/_agent.py", "agent/_register.py").values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                constants = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                if node.func.attr == "_say" and len(constants) > 1:
                    said.add(constants[1])
                elif node.func.attr == "_tell":
                    said.add(constants[0])
            elif isinstance(node, ast.IfExp) and isinstance(node.body, ast.Constant):
                said |= {each.value for each in (node.body, node.orelse) if isinstance(each, ast.Constant)}
    events = {each for each in said if isinstance(each, str)} - NO_EVENTS
    assert set(column(PAGE, "Log lines", "Event")) == events


def test_routes_are_those_of_the_code() -> None:
    told = set(re.findall(r"/internal/v1/\w+", page(PAGE)))
    (server,) = modules("agent/_server.py").values()
    (register,) = modules("agent/_register.py").values()
    written = {
        route
        for tree in (server, register)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for route in re.findall(r"/internal/v1/\w+", node.value)
    }
    assert told == written
