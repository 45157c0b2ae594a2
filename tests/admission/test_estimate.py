"""Tokens of requests that were not served yet: from their bytes, what they ask for, and what was learnt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tenancy.asking import asking
from trio_gateway.admission._estimate import OUTPUT_WEIGHT, Estimates
from trio_gateway.contract import EMBEDDINGS, MESSAGES, TRANSCRIPTIONS


def test_before_anything_was_learnt_four_bytes_are_a_token_and_answers_have_256() -> None:
    assert Estimates().tokens(asking(size=40)) == (10.0, 256.0)


@pytest.mark.parametrize(
    ("asked", "output"),
    [
        ({"tokens": 100}, 100.0),
        ({"output_limit": 50}, 50.0),
        ({"tokens": 100, "choices": 3}, 300.0),
        ({"tokens": 9000}, 512.0),
    ],
)
def test_an_answer_is_as_long_as_was_asked_for_unless_answers_lately_were_much_shorter(
    asked: dict[str, int], output: float
) -> None:
    assert Estimates().tokens(asking(**asked))[1] == output


def test_what_has_no_choices_and_generates_has_one_answer() -> None:
    estimates = Estimates()
    request = asking(operation=MESSAGES, choices=0, tokens=100)
    assert estimates.tokens(request)[1] == 100.0
    for _ in range(500):
        estimates.observe(request, 10, 20)
    assert estimates.tokens(asking(operation=MESSAGES, choices=0))[1] == pytest.approx(20.0)


def test_what_generates_nothing_has_no_answer() -> None:
    estimates = Estimates()
    request = asking(operation=EMBEDDINGS, choices=0, tokens=100, size=8)
    assert estimates.tokens(request) == (2.0, 0.0)
    estimates.observe(request, 2, 0)
    assert estimates.tokens(asking())[1] == 256.0


def test_a_recording_is_no_text() -> None:
    assert Estimates().tokens(asking(operation=TRANSCRIPTIONS, choices=0, size=10**7)) == (0.0, 0.0)


def test_the_bytes_of_a_text_are_taken_for_tokens_as_those_of_prompts() -> None:
    estimates = Estimates()
    assert estimates.tokens_of("m1", 40) == 10.0
    for _ in range(500):
        estimates.observe(asking(model="m1", size=200), 100, 20)
    assert estimates.tokens_of("m1", 40) == pytest.approx(20.0)
    assert estimates.tokens_of("m2", 40) == 10.0


def test_bytes_a_token_and_lengths_are_learnt_for_each_model_alone() -> None:
    estimates = Estimates()
    for _ in range(500):
        estimates.observe(asking(model="dense", size=100, choices=2), 10, 60)
    assert estimates.tokens(asking(model="dense", size=100)) == pytest.approx((10.0, 30.0))
    assert estimates.tokens(asking(model="other", size=100)) == (25.0, 256.0)


def test_what_is_known_takes_the_place_of_what_was_estimated() -> None:
    estimates, request = Estimates(), asking(size=40)
    assert estimates.expected(request) == 10 + OUTPUT_WEIGHT * 256
    assert estimates.cost(request, 7, None) == 7 + OUTPUT_WEIGHT * 256
    assert estimates.cost(request, None, 3) == 10 + OUTPUT_WEIGHT * 3
    assert estimates.cost(request, 7, 3) == 7 + OUTPUT_WEIGHT * 3


@given(st.lists(st.tuples(st.integers(0, 10**8), st.none() | st.integers(0, 10**6), st.integers(0, 10**6))))
def test_however_strange_what_was_seen_a_token_has_from_half_a_byte_to_64(
    story: list[tuple[int, int | None, int]],
) -> None:
    estimates = Estimates()
    for size, prompt, generated in story:
        estimates.observe(asking(size=size), prompt, generated)
    prompt_tokens, output = estimates.tokens(asking(size=6400))
    assert 100.0 <= prompt_tokens <= 12_800.0
    assert 0 <= output <= 10**6
