"""Which worker is chosen: filter, keys, dice, order."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.fleet._choice import (
    BOUND,
    HOMES,
    LIGHT,
    LONGEST,
    SHARED,
    Candidate,
    choose,
    drawn,
    in_order,
    looks,
    prefix_keys,
    session_keys,
)


def worker(
    name: str = "w",
    work: float = 0.0,
    *,
    own: float | None = None,
    room: float = 8.0,
    free: int = 8,
    age: float = 0.0,
    suspect: bool = False,
    loaded: bool = False,
) -> Candidate:
    """A candidate whose work is all ours unless it is said."""
    return Candidate(
        name, work, work if own is None else own, room, free, age, suspect=suspect, loaded=loaded
    )


def fleet(*works: float, own: float | None = None) -> list[Candidate]:
    return [worker(f"w{number}", work, own=own) for number, work in enumerate(works, 1)]


def chosen(
    candidates: list[Candidate], dice: Callable[[], float] | None = None, **asked: object
) -> str | None:
    found = choose(candidates, dice or random.Random(1).random, **asked)  # type: ignore[arg-type]
    return None if found is None else found.name


def no_dice() -> float:
    raise AssertionError("there was nothing to draw")


# The filter -----------------------------------------------------------------------------------------------


def test_without_a_worker_there_is_no_choice_and_one_worker_is_none_either() -> None:
    assert chosen([], no_dice) is None
    assert chosen([worker("only", 7)], no_dice, keys=(b"k",)) == "only"


def test_workers_that_may_not_take_it_or_have_no_room_are_not_taken() -> None:
    shut = dataclasses.replace(worker("shut"), open=False)
    assert chosen([shut, worker("narrow", free=1), worker("wide", 5, free=3)], need=2) == "wide"
    assert chosen([shut, worker("narrow", free=1)], need=2) is None


def test_suspect_workers_are_taken_only_if_there_is_no_other() -> None:
    doubted = worker("doubted", suspect=True)
    assert chosen([doubted, worker("busy", 7)]) == "busy"
    assert chosen([doubted, worker("full", 8, free=0)]) == "doubted"


def test_only_workers_with_news_are_taken_where_that_is_asked() -> None:
    workers = [worker("old", age=0.9), worker("new", 5, age=0.01)]
    assert chosen(workers, oldest=0.02) == "new"
    assert chosen(workers[:1], oldest=0.02) is None


# The least loaded of a few --------------------------------------------------------------------------------


def test_equal_workers_are_taken_in_file_order() -> None:
    assert chosen(fleet(0, 0, 0), no_dice) == "w1"
    assert chosen(fleet(1, 0, 0), no_dice) == "w2"
    assert chosen(fleet(0.1 + 0.2, 0.3), no_dice) == "w1"  # sums of floats are not exact


def test_load_is_work_for_room() -> None:
    assert chosen([worker("small", 3, room=4), worker("large", 5, room=8)], no_dice) == "large"


def test_a_loaded_worker_is_behind_all_that_have_a_slot_free() -> None:
    assert chosen([worker("stale", loaded=True), worker("busy", 7)], no_dice) == "busy"
    assert chosen([worker("stale", 1, loaded=True), worker("flooded", 10)], no_dice) == "stale"


def test_all_are_looked_at_where_all_known_work_is_ours() -> None:
    assert looks(fleet(3, 2, 1, 0)) == 4
    assert looks(fleet(0, 0, 0, 0)) == 4


def test_two_are_looked_at_where_the_work_is_others_and_more_the_more_of_it_is_ours() -> None:
    assert looks(fleet(*[4] * 16, own=0)) == 2
    assert looks(fleet(*[4] * 16, own=1)) == 4
    assert looks(fleet(*[4] * 16, own=2)) == 8


def test_of_two_that_are_drawn_the_less_loaded_is_taken_whoever_is_least_of_all() -> None:
    rng = random.Random(1)
    taken = Counter(chosen(fleet(0, 5, 6, 7, own=0), rng.random) for _ in range(2000))
    # The best is drawn in half of all pairs; the worst is never better than another.
    assert 900 < taken["w1"] < 1100
    assert taken["w4"] == 0


def test_those_with_the_newest_readings_are_drawn() -> None:
    workers = [worker(f"w{n}", 4 - n, own=0, age=0.1 * (4 - n)) for n in range(4)]
    workers = [dataclasses.replace(each, work=each.work + 1) for each in workers]
    rng = random.Random(1)
    taken = {chosen(workers, rng.random) for _ in range(100)}
    assert taken == {"w3"}  # of the newer two, w2 and w3


def test_larger_workers_are_drawn_more_often() -> None:
    workers = [worker(f"s{n}", 4, own=0, room=4) for n in range(8)] + [worker("big", 4, own=0, room=32)]
    rng = random.Random(1)
    taken = Counter(chosen(workers, rng.random) for _ in range(1000))
    assert taken["big"] > 550  # of 2 in 9 draws, if all were alike: 222


def test_dice_may_answer_zero() -> None:
    assert chosen(fleet(1, 1, 1, 1, own=0), lambda: 0.0) == "w1"


@given(
    st.lists(
        st.builds(
            Candidate,
            name=st.sampled_from("abcdefgh"),
            work=st.floats(0, 9),
            own=st.floats(0, 9),
            room=st.floats(0.5, 9),
            free=st.integers(0, 3),
            age=st.floats(0, 2),
            open=st.booleans(),
            suspect=st.booleans(),
            loaded=st.booleans(),
        ),
        max_size=8,
        unique_by=lambda each: each.name,
    ),
    st.lists(st.binary(min_size=1, max_size=8), max_size=3),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_whoever_is_chosen_was_eligible_and_somebody_is_chosen_if_anybody_was(
    candidates: list[Candidate], keys: list[bytes], need: int, seed: int
) -> None:
    found = choose(candidates, random.Random(seed).random, need=need, keys=keys)
    able = [each for each in candidates if each.open and each.free >= need]
    assert (found is None) is (not able)
    if found is not None:
        assert found in able
        assert not found.suspect or all(each.suspect for each in able)


# Keys -----------------------------------------------------------------------------------------------------

KEYS = [number.to_bytes(4, "big") for number in range(400)]


def test_a_key_leads_to_one_worker_whatever_the_dice_and_the_order_of_the_file() -> None:
    workers = fleet(*[0] * 8)
    for key in KEYS[:20]:
        found = {chosen(list(order), no_dice, keys=(key,)) for order in (workers, workers[::-1])}
        assert len(found) == 1


def test_keys_are_spread_evenly_and_by_room() -> None:
    workers = [worker("single", room=8), worker("double", room=16), worker("other", room=8)]
    taken = Counter(chosen(workers, no_dice, keys=(key,)) for key in KEYS)
    assert 70 < taken["single"] < 130
    assert 160 < taken["double"] < 240


def test_a_worker_that_leaves_moves_only_its_own_keys() -> None:
    workers = fleet(*[0] * 8)
    for key in KEYS:
        before = chosen(workers, no_dice, keys=(key,))
        after = chosen(workers[1:], no_dice, keys=(key,))
        assert after == before or before == "w1"


def test_a_worker_over_its_bound_passes_on_to_the_next_in_the_order_of_the_key() -> None:
    workers = fleet(*[4] * 4)
    first, second, *_ = in_order(b"key", workers)
    busy = [dataclasses.replace(each, work=8) if each is first else each for each in workers]
    assert chosen(busy, no_dice, keys=(b"key",)) == second.name


@given(st.lists(st.integers(0, 8), min_size=2, max_size=8), st.binary(min_size=1, max_size=4))
def test_a_worker_is_taken_for_its_key_only_within_its_bound(works: list[int], key: bytes) -> None:
    workers = fleet(*works)
    found = next(each for each in workers if each.name == chosen(workers, no_dice, keys=(key,)))
    mean = (sum(works) + 1) / len(works)
    assert found.work < max(BOUND * mean, LIGHT * found.room, min(works) + 1)


def test_a_worker_with_little_to_do_passes_nothing_on() -> None:
    workers = fleet(*[0] * 8)
    home = in_order(b"key", workers)[0]
    busy = [dataclasses.replace(each, work=1) if each is home else each for each in workers]
    assert chosen(busy, no_dice, keys=(b"key",)) == home.name


def test_a_loaded_worker_is_nobodys_home() -> None:
    workers = fleet(0, 0, 0)
    first, second, _ = in_order(b"key", workers)
    stale = [dataclasses.replace(each, loaded=True) if each is first else each for each in workers]
    assert chosen(stale, no_dice, keys=(b"key",)) == second.name


def test_where_no_worker_is_within_its_bound_the_key_leads_nowhere() -> None:
    assert chosen([worker("a", 2, loaded=True), worker("b", 1, loaded=True)], no_dice, keys=(b"k",)) == "b"


def test_a_shared_key_fills_its_homes_before_the_longer_key_decides() -> None:
    workers = fleet(*[4] * 8)
    shared = in_order(b"shared", workers)
    for busy in range(HOMES + 1):
        now = [dataclasses.replace(each, work=9 if each in shared[:busy] else 4) for each in workers]
        expected = shared[busy] if busy < HOMES else in_order(b"own", workers)[0]
        assert expected not in shared[:busy]
        assert chosen(now, no_dice, keys=(b"shared", b"own")) == expected.name


# Keys of bodies -------------------------------------------------------------------------------------------


def members(**fields: object) -> dict[str, bytes]:
    return {name: json.dumps(value).encode() for name, value in fields.items()}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_sessions_of_one_name_are_one_key_for_a_tenant_and_another_for_others() -> None:
    assert session_keys("s", "acme") == session_keys("s", "acme")
    assert len({*session_keys("s", "acme"), *session_keys("s", "other"), *session_keys("t", "acme")}) == 3


def test_a_body_without_text_has_no_key() -> None:
    assert prefix_keys(members(model="m", temperature=1), "acme") == ()


def test_all_turns_of_a_conversation_have_its_key() -> None:
    turns = [said("system", "be brief"), said("user", "hello"), said("assistant", "hi"), said("user", "bye")]
    first = prefix_keys(members(messages=turns[:2]), "acme")
    assert len(first) == 1
    assert prefix_keys(members(messages=turns), "acme") == first
    assert prefix_keys(members(messages=[turns[0], said("user", "other")]), "acme") != first


def test_words_of_a_caller_do_not_end_an_opening() -> None:
    tricky = [said("user", 'say "assistant" and "role":"assistant"')]
    other = [said("user", 'say "assistant" and something else')]
    assert prefix_keys(members(messages=tricky), "acme") != prefix_keys(members(messages=other), "acme")


def test_long_texts_that_begin_alike_share_their_first_key_only() -> None:
    system = said("system", "x" * SHARED)
    bodies = [members(messages=[system, said("user", text)]) for text in ("one", "two")]
    (shared, own), (also, other) = (prefix_keys(body, "acme") for body in bodies)
    assert shared == also
    assert own != other


def test_tools_stand_in_front_of_messages_wherever_the_caller_put_them() -> None:
    tools, messages = [{"type": "function"}], [said("user", "hello")]
    one = prefix_keys(members(messages=messages, tools=tools), "acme")
    assert one == prefix_keys(members(tools=tools, messages=messages), "acme")
    assert one != prefix_keys(members(messages=messages), "acme")


def test_no_key_of_one_tenant_is_a_key_of_another() -> None:
    body = members(messages=[said("user", "x" * 2 * SHARED)])
    keys = [*prefix_keys(body, "acme"), *prefix_keys(body, "other")]
    assert len(set(keys)) == 4


def test_what_stands_far_behind_is_not_looked_at() -> None:
    one, two = (prefix_keys({"prompt": b'"' + b"x" * LONGEST + end}, "acme") for end in (b'a"', b'b"'))
    assert one == two


@pytest.mark.parametrize("field", ["prompt", "input", "instructions", "system", "messages", "tools"])
def test_every_text_of_an_operation_counts(field: str) -> None:
    one, two = (prefix_keys(members(**{field: text}), "acme") for text in ("one", "two"))
    assert one != two


@given(st.dictionaries(st.sampled_from(["messages", "tools", "prompt", "model"]), st.binary(max_size=40)))
def test_any_bytes_have_keys_that_choose_accepts(body: dict[str, bytes]) -> None:
    keys = prefix_keys(body, "acme")
    assert len(set(keys)) == len(keys)
    for key in itertools.chain(keys, session_keys("\N{SNOWMAN}" * 200, "acme")):
        assert choose(fleet(0, 0), no_dice, keys=(key,)) is not None


# Of many only some ----------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(0, 60), st.randoms(use_true_random=False))
def test_so_many_are_drawn_in_order_and_none_twice(count: int, more: int, random_: random.Random) -> None:
    items = list(range(count + more))
    found = drawn(items, count, random_.random)
    assert len(found) == count
    assert found == sorted(set(found))
    assert set(found) <= set(items)


def test_each_is_drawn_as_often_as_any_other() -> None:
    dice = random.Random(7)
    counts = Counter(at for _ in range(20_000) for at in drawn(range(10), 3, dice.random))
    assert all(5_700 < counts[at] < 6_300 for at in range(10))
