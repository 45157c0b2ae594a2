"""The page about routing draws the breaker's table and names the figures of the code."""

from __future__ import annotations

import ast
from typing import Final

from tests.docs.pages import modules, page, table
from trio_gateway.fleet.cores import TRANSITIONS, BreakerState

PAGE: Final = "explanation/routing.md"


def test_every_step_of_a_breaker_is_drawn() -> None:
    drawn = set()
    for row in table(PAGE, "Breakers"):
        before = [state.value for state in BreakerState] if row["From"] == "any" else [row["From"].strip("`")]
        drawn |= {(state, row["Because"], row["To"].strip("`")) for state in before}
    assert drawn == {(before.value, step.value, after.value) for (before, step), after in TRANSITIONS.items()}


def figure(module: str, name: str) -> float:
    """A constant of a module of the fleet."""
    (tree,) = modules(f"fleet/{module}.py").values()
    (found,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None
    ]
    assert isinstance(found, float | int)
    return found


def test_the_figures_of_the_page_are_those_of_the_code() -> None:
    text = " ".join(page(PAGE).split())
    for phrase, module, name, value in (
        ("1.15 times the mean load", "_choice", "BOUND", 1.15),
        ("hash of the first 1 KiB", "_choice", "SHARED", 1024),
        ("The first two workers in the order of the shared key", "_choice", "HOMES", 2),
        ("the newer half", "_choice", "NEWER", 0.5),
        ("Up to 32 workers of a model", "_choice", "MANY", 32),
        ("Of more, 16 are drawn first", "_choice", "LOOKED_AT", 16),
        ("has an order of 32 workers", "_choice", "MANY", 32),
        ("at least ten results", "_breaker", "MINIMUM", 10),
        ("for ten times that", "_progress", "TIMES", 10.0),
        ("for at least two seconds", "_progress", "SHORTEST", 2.0),
    ):
        assert phrase in text
        assert figure(module, name) == value
