"""The journal's lines: what happens to some bytes costs the lines that they are in, and no other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.ledger._lines import frame, scan

PAYLOADS = st.lists(
    st.dictionaries(st.text(max_size=8), st.text(max_size=30) | st.integers(), max_size=4).map(
        lambda value: json.dumps(value).encode()
    ),
    max_size=8,
)


def written(payloads: list[bytes]) -> tuple[bytes, list[int]]:
    """A journal, and where each of its lines ends."""
    lines = [frame(payload) for payload in payloads]
    return b"".join(lines), [sum(map(len, lines[: number + 1])) for number in range(len(lines))]


@given(PAYLOADS)
def test_what_was_written_is_read(payloads: list[bytes]) -> None:
    data, _ = written(payloads)
    for final in (False, True):
        found = scan(data, final=final)
        assert (found.payloads, found.end, found.damaged) == (payloads, len(data), 0)


def test_a_line_can_be_read_by_people() -> None:
    assert frame(b'{"a":1}') == b'561bacaf 000007 {"a":1}\n'


@given(PAYLOADS.filter(bool), st.data())
def test_a_cut_anywhere_loses_only_what_was_cut(payloads: list[bytes], data: st.DataObject) -> None:
    whole, ends = written(payloads)
    cut = data.draw(st.integers(0, len(whole)))
    kept = sum(end <= cut for end in ends)
    found = scan(whole[:cut], final=False)
    assert found.payloads == payloads[:kept]
    assert found.end == ([0, *ends])[kept]  # the rest may still come
    assert not found.damaged
    # Nothing will come: a line of which only the line feed was cut is whole.
    found = scan(whole[:cut], final=True)
    assert found.payloads == payloads[: sum(end - 1 <= cut for end in ends)]
    assert found.end == cut
    assert found.damaged == (cut > 0 and cut not in ends and cut + 1 not in ends)


@given(PAYLOADS.filter(bool), st.data())
def test_a_bit_that_flips_anywhere_loses_at_most_its_own_line(
    payloads: list[bytes], data: st.DataObject
) -> None:
    whole, ends = written(payloads)
    at = data.draw(st.integers(0, len(whole) - 1))
    broken = bytearray(whole)
    broken[at] ^= 1 << data.draw(st.integers(0, 7))
    victim = sum(end <= at for end in ends)
    others = payloads[:victim] + payloads[victim + 1 :]
    found = scan(bytes(broken), final=True)
    assert found.payloads in (others, payloads)  # the line feed, or a blank in front, says nothing
    assert found.end == len(whole)
    assert bool(found.damaged) == (found.payloads != payloads)


@given(PAYLOADS, st.lists(st.binary(max_size=40), max_size=8), st.booleans())
def test_lines_are_found_between_any_garbage_that_ends_its_line(
    payloads: list[bytes], garbage: list[bytes], final: bool
) -> None:
    pieces = [
        piece
        for number in range(max(len(payloads), len(garbage)))
        for piece in (
            *(junk.replace(b"\n", b"") + b"\n" for junk in garbage[number : number + 1]),
            *map(frame, payloads[number : number + 1]),
        )
    ]
    found = scan(b"".join(pieces), final=final)
    assert found.payloads == payloads
    assert found.damaged == sum(bool(junk.replace(b"\n", b"")) for junk in garbage)


@given(PAYLOADS, st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_a_journal_that_grows_is_read_as_one_that_is_there(payloads: list[bytes], steps: list[int]) -> None:
    whole, _ = written(payloads)
    read: list[bytes] = []
    done = there = 0
    for step in [*steps, len(whole)]:
        there = min(there + step, len(whole))
        found = scan(whole[done:there], final=False)
        read += found.payloads
        done += found.end
        assert not found.damaged
    assert (read, done) == (payloads, len(whole))


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_are_too_strange(data: bytes, final: bool) -> None:
    found = scan(data, final=final)
    assert found.end <= len(data)
    assert not final or found.end == len(data)


@pytest.mark.parametrize("head", [b"00000000 ffffff ", b"00000000 000001 "])
def test_a_length_that_is_wrong_does_not_hide_the_next_line(head: bytes) -> None:
    found = scan(head + b"{}\n" + frame(b"[]"), final=False)
    assert (found.payloads, found.damaged) == ([b"[]"], 1)


def test_a_blank_line_makes_up_for_half_a_line_before_it() -> None:
    whole: Any = frame(b'"lost"')[:-3] + b"\n" + frame(b'"kept"') + b"\n" + frame(b'"too"')
    found = scan(whole, final=True)
    assert (found.payloads, found.damaged) == ([b'"kept"', b'"too"'], 1)
