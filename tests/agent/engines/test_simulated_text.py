"""The simulated engine's tokens and what it says."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.agent.engines._simulated_text import (
    WORDS,
    Dice,
    Piece,
    Speech,
    call_pieces,
    seed_of,
    tokenize,
)


def says(speech: Speech) -> list[Piece]:
    """All that it says."""
    pieces = [speech.next()]
    while pieces[-1].finish is None:
        pieces.append(speech.next())
    return pieces


def text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(st.text(max_size=50), st.text(max_size=50))
def test_equal_beginnings_give_equal_tokens(first: str, second: str) -> None:
    together = tokenize(f"{first} {second}")
    alone = tokenize(first)
    assert together[: len(alone)] == alone


def test_about_four_letters_make_a_token() -> None:
    sentence = "The gateway admits, schedules, streams and sheds requests for engines on other machines. "
    assert 3 < len(sentence * 10) / len(tokenize(sentence * 10)) < 6
    assert tokenize("") == []


def test_tokens_and_seeds_are_the_same_in_every_process() -> None:
    code = (
        "from trio_gateway.agent.engines._simulated_text import *;"
        "print(tokenize('some words, and more'), seed_of('a', 1, [2]))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == f"{tokenize('some words, and more')} {seed_of('a', 1, [2])}"


@given(st.integers(), st.integers(1, 1000))
def test_dice_stay_below_their_bound_and_depend_on_their_seed_alone(seed: int, bound: int) -> None:
    numbers = [Dice(seed).below(bound) for _ in range(3)]
    assert len(set(numbers)) == 1
    assert 0 <= numbers[0] < bound


def test_dice_show_every_side() -> None:
    dice = Dice(1)
    assert len({dice.below(len(WORDS)) for _ in range(2000)}) == len(WORDS)


@given(st.integers(0, 2**64), st.integers(1, 40), st.integers(1, 40))
def test_an_answer_ends_by_itself_or_at_its_limit(seed: int, length: int, limit: int) -> None:
    pieces = says(Speech(seed, length, limit))
    assert len(pieces) == min(length, limit)
    assert pieces[-1].finish == ("stop" if length <= limit else "length")
    assert text(pieces).split(" ") == [piece.text.strip() for piece in pieces]


@given(st.integers(0, 2**64), st.lists(st.sampled_from([" the", "a", "th", "zzz", "e b", "n"]), max_size=3))
def test_a_stop_text_ends_the_answer_and_is_not_said(seed: int, stop: list[str]) -> None:
    free = text(says(Speech(seed, 60, 60)))
    pieces = says(Speech(seed, 60, 60, stop))
    places = [at for one in stop if (at := free.find(one)) >= 0]
    assert text(pieces) == free[: min(places)] if places else free
    assert pieces[-1].finish == "stop"


def test_thinking_comes_first_and_stands_apart() -> None:
    pieces = says(Speech(3, 10, 99, reasoning=4))
    assert [piece.kind for piece in pieces] == ["reasoning"] * 4 + ["text"] * 6
    assert [piece.text.startswith(" ") for piece in pieces] == [False] + [True] * 3 + [False] + [True] * 5


def test_a_call_is_said_in_its_pieces_and_ends_with_its_own_finish() -> None:
    pieces = says(Speech(3, 10, 99, call=(["weather", '{"a":', "1}"], "tool_calls")))
    assert [(piece.text, piece.kind) for piece in pieces] == [
        ("weather", "tool"),
        ('{"a":', "tool"),
        ("1}", "tool"),
    ]
    assert pieces[-1].finish == "tool_calls"


def test_a_call_that_is_over_its_limit_is_cut() -> None:
    pieces = says(Speech(3, 10, 2, call=(["weather", '{"a":', "1}"], "tool_calls")))
    assert [piece.finish for piece in pieces] == [None, "length"]


DEEP: dict[str, Any] = {}
for _ in range(12):
    DEEP = {"type": "object", "properties": {"inner": DEEP}}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "integer"}, int),
        ({"type": "number"}, int),
        ({"type": "boolean"}, bool),
        ({"type": "null"}, type(None)),
        ({"type": "string"}, str),
        ({}, str),
        ("no schema", str),
        ({"type": "array", "items": {"type": "integer"}}, list),
        ({"type": "object"}, dict),
        ({"enum": ["x"]}, str),
        ({"enum": []}, str),
    ],
)
def test_arguments_fit_their_types(schema: Any, kind: type) -> None:
    pieces = call_pieces("f", {"type": "object", "properties": {"it": schema}}, 5)
    assert pieces[0] == "f"
    arguments = msgspec.json.decode("".join(pieces[1:]))
    assert type(arguments["it"]) is kind
    assert arguments["it"] == "x" or schema != {"enum": ["x"]}


def test_a_schema_without_end_and_no_schema_make_arguments_too() -> None:
    assert "".join(call_pieces("f", None, 5)[1:]) == "{}"
    assert msgspec.json.decode("".join(call_pieces("f", DEEP, 5)[1:]))
