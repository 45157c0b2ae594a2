"""Exchange ids: of fixed length, never the same, and in the order of time."""

from __future__ import annotations

import re
import time

from trio_gateway.edge._generate import new_id


def test_ids_are_32_hexadecimal_digits_and_differ() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_an_id_begins_with_the_millisecond_in_which_it_was_made() -> None:
    before = time.time_ns() // 1_000_000
    made = int(new_id()[:12], 16)
    assert before <= made <= time.time_ns() // 1_000_000


def test_what_cannot_be_guessed_is_long_enough() -> None:
    """Of the same millisecond, no two share more of the rest than chance lets them."""
    rests = {new_id()[12:] for _ in range(10_000)}
    assert len(rests) == 10_000
    assert len({rest[:4] for rest in rests}) > 5_000
