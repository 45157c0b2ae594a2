"""How long things took: each figure from its two moments, under labels from bounded sets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.ledger.making import make_record
from trio_gateway.ledger import Books, Names, Record, Times

ARRIVED = 1000.0


def record(**changes: Any) -> Record:
    moments = {
        "arrived_at": ARRIVED,
        "placed_at": ARRIVED + 2,
        "first_content_at": ARRIVED + 3,
        "settled_at": ARRIVED + 10,
        "stream": True,
        "tier": "batch",
    }
    return dataclasses.replace(make_record(), **{**moments, **changes})


def rows(times: Times, name: str) -> dict[str, tuple[int, float]]:
    """Count and sum, by the value of the one label."""
    return {
        "".join(row["labels"].values()): (sum(row["counts"]), row["seconds"]) for row in times.figures()[name]
    }


def test_a_stream_counts_its_wait_its_first_content_and_the_rest() -> None:
    times = Times()
    times.settle(record(), "m")
    assert rows(times, "admission_wait") == {"batch": (1, 2.0)}
    assert rows(times, "time_to_first_content") == {"m": (1, 3.0)}
    assert rows(times, "stream_duration") == {"m": (1, 7.0)}


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"placed_at": None}, set()),
        ({"first_content_at": None}, {"admission_wait"}),
        ({"stream": False}, {"admission_wait", "time_to_first_content"}),
    ],
)
def test_what_did_not_happen_is_not_counted(changes: dict[str, Any], counted: set[str]) -> None:
    times = Times()
    times.settle(record(**changes), "m")
    names = ("admission_wait", "time_to_first_content", "stream_duration")
    assert {name for name in names if rows(times, name)} == counted


def test_a_wall_clock_that_was_set_back_makes_nothing_negative() -> None:
    times = Times()
    times.settle(record(placed_at=ARRIVED - 5, first_content_at=ARRIVED - 4, settled_at=ARRIVED - 9), "m")
    assert rows(times, "admission_wait") == {"batch": (1, 0.0)}
    assert rows(times, "stream_duration") == {"m": (1, 0.0)}


def test_a_draining_lease_is_what_is_not_idle_yet() -> None:
    times = Times()
    times.held.see(4.0)
    times.idle.see(0.5)
    assert rows(times, "lease_held") == {"held": (1, 4.0), "draining": (1, 0.5)}
    assert rows(times, "cancel_to_idle") == {"": (1, 0.5)}


def test_figures_are_of_one_moment() -> None:
    times = Times()
    before = times.figures()["inter_event_gap"]
    times.gaps.see(1.0)
    assert sum(before[0]["counts"]) == 0


def test_names_beyond_the_bound_share_one() -> None:
    names = Names(2)
    assert [names.of(name) for name in ("a", "b", "c", "a", "d", "b")] == [
        *("a", "b", "other", "a", "other", "b")
    ]


def test_labels_of_counts_are_bounded_and_nothing_is_lost() -> None:
    books = Books(models=Names(2), tenants=Names(1))
    for number in range(5):
        books.arrive()
        books.accept(waiting=False)
        books.settle(record(model=f"m{number}", tenant=f"t{number}"), waiting=False)
    assert sum(books.requests.values()) == 5
    assert {key[1:3] for key in books.requests} == {("m0", "t0"), ("m1", "other"), ("other", "other")}
    assert set(rows(books.times, "time_to_first_content")) == {"m0", "m1", "other"}
