"""Who stands near a key on a circle."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.fleet._circle import Circle, place_of

places = st.integers(0, 2**64 - 1)
named = st.dictionaries(places, st.text(max_size=4), max_size=30)


def circle(names: range) -> Circle[int]:
    return Circle((place_of(b"w%d" % name), name) for name in names)


@given(named, places, st.integers(0, 40))
def test_the_next_so_many_from_a_place_on_are_near_it(things: dict[int, str], place: int, count: int) -> None:
    found = Circle((at, (at, name)) for at, name in things.items()).near(place, count)
    around = sorted(things.items(), key=lambda item: (item[0] - place) % 2**64)
    assert found == around[:count]


@given(named)
def test_it_has_all_that_it_was_made_of(things: dict[int, str]) -> None:
    assert len(Circle(things.items())) == len(things)


def test_of_those_at_one_place_the_one_that_was_named_first_comes_first() -> None:
    assert Circle([(7, "b"), (7, "a"), (3, "c")]).near(5, 3) == ["b", "a", "c"]


@given(named.filter(bool), places, st.integers(1, 10), st.data())
def test_one_that_leaves_changes_one_neighbour_of_the_keys_it_was_near_to(
    things: dict[int, str], place: int, count: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(things)))
    before = Circle((at, at) for at in things).near(place, count)
    after = Circle((at, at) for at in things if at != gone).near(place, count)
    if gone in before:
        before.remove(gone)
        assert after[: len(before)] == before
        assert len(after) <= len(before) + 1
    else:
        assert after == before


def test_all_are_near_to_about_as_many_keys() -> None:
    workers, near = 500, 32
    found = Counter(
        name for key in range(20_000) for name in circle_of_500.near(place_of(b"key%d" % key), near)
    )
    mean = 20_000 * near / workers
    assert len(found) == workers
    assert 0.4 * mean < min(found.values())
    assert max(found.values()) < 1.8 * mean


circle_of_500 = circle(range(500))
