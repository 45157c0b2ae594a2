"""Everything the gateway can answer, and every way an engine can fail, has a test that names it.

Three tables are promises to callers: the error codes, the outcomes, and the
reasons why an attempt failed. A name that no test mentions is a promise that
nobody keeps.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from trio_gateway.contract import Outcome, Phase
from trio_gateway.errors import CODES, UpstreamFault

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = ROOT / "trio_gateway"
# Tests of pages compare tables with tables; they show nothing of what the gateway does.
NO_WITNESS: Final = {"docs", "config", "conformance"}


def strings_of(path: Path) -> set[str]:
    """Every string that stands in a Python file, docstrings aside."""
    tree = ast.parse(path.read_text("utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    }


def members_of(path: Path, enum: str) -> set[str]:
    """Names of an enum's members that a file mentions, as ``Outcome.REFUSED``."""
    tree = ast.parse(path.read_text("utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == enum
    }


def witnesses() -> Iterator[Path]:
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.resolve() != Path(__file__).resolve() and not NO_WITNESS & set(path.parts):
            yield path


WITNESSES: Final = tuple(witnesses())
SAID_IN_TESTS: Final = frozenset().union(*map(strings_of, WITNESSES))


def reasons() -> list[str]:
    """The reasons for which an attempt can fail, read off the table of failures."""
    tree = ast.parse((PACKAGE / "exchange" / "_retry.py").read_text("utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Failure"
    ]
    found = {
        arg.value
        for call in calls
        for arg in (*call.args, *(word.value for word in call.keywords if word.arg == "reason"))
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    }
    assert len(calls) > 10, "the table is not where it was"
    return sorted(found)


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_code_is_named_by_a_test(code: str) -> None:
    assert code in SAID_IN_TESTS


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_named_by_a_test(outcome: Outcome) -> None:
    named = any(outcome.name in members_of(path, "Outcome") for path in WITNESSES)
    assert named or outcome.value in SAID_IN_TESTS


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_is_named_by_a_test(phase: Phase) -> None:
    assert phase.value in SAID_IN_TESTS or any(phase.name in members_of(path, "Phase") for path in WITNESSES)


@pytest.mark.parametrize("reason", reasons())
def test_every_reason_of_a_failed_attempt_is_named_by_a_test(reason: str) -> None:
    assert reason in SAID_IN_TESTS


@pytest.mark.parametrize("fault", list(UpstreamFault))
def test_every_fault_of_a_connection_is_named_by_a_test(fault: UpstreamFault) -> None:
    assert any(fault.name in members_of(path, "UpstreamFault") for path in WITNESSES)
