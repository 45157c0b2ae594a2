"""Where events end: any cut of a stream into pieces tells the same, and comments are no events."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from trio_gateway.ledger import EventMarks

BLOCKS = st.sampled_from(
    [
        b"data: a\n\n",
        b'data: {"a": 1}\n\n',
        b"event: error\ndata: {}\n\n",
        b": keep-alive\n\n",
        b":\n\n",
        b"data: :\n\n",
    ]
)
GAP = 7  # bytes of framing between two pieces


def ends_of_events(blocks: list[bytes]) -> list[int]:
    """How many bytes of the stream have passed when each of its events is over."""
    ends, at = [], 0
    for block in blocks:
        at += len(block)
        if not block.startswith(b":"):
            ends.append(at)
    return ends


@given(st.lists(BLOCKS, max_size=8), st.lists(st.integers(0, 150), max_size=8), st.data())
@example([b"data: a\n\n", b"data: b\n\n"], [7], None)
@example([b"data: a\n\n", b"data: b\n\n"], [8], None)
@example([b'data: {"a": 1}\n\n'], [10], None)
@example([b": keep-alive\n\n", b"data: a\n\n"], [13], None)
def test_events_are_counted_wherever_the_pieces_are_cut(
    blocks: list[bytes], cuts: list[int], data: st.DataObject | None
) -> None:
    stream = b"".join(blocks)
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    marks = EventMarks()
    starts = [0, *accumulate(map(len, blocks))][:-1]
    # Framing stands between the pieces, so that offsets on the wire run ahead of the stream's.
    for number, (start, end) in enumerate(pairwise(places)):
        # Where a piece is nothing but events, as many may be told of.
        among = [blocks[at] for at, place in enumerate(starts) if start <= place < end]
        whole = b"".join(among) == stream[start:end] and not any(block.startswith(b":") for block in among)
        told = len(among) if whole and data and data.draw(st.booleans()) else 0
        marks.add(start + number * GAP, stream[start:end], (), told)
    offsets = [end + GAP * sum(place < end for place in places[1:-1]) for end in ends_of_events(blocks)]

    for offset in {0, *offsets, *(o - 1 for o in offsets), *(o + 1 for o in offsets)}:
        assert marks.delivered(offset) == sum(end <= offset for end in offsets)
    assert len(marks) == len(offsets)

    forgotten = data.draw(st.integers(0, 400)) if data else 0
    marks.forget(forgotten)
    assert len(marks) == sum(end > forgotten for end in offsets)
    for offset in (forgotten, forgotten + 5, 10_000):
        assert marks.delivered(offset) == sum(end <= offset for end in offsets)


def test_nothing_is_delivered_before_anything_was_added() -> None:
    marks = EventMarks()
    marks.forget(100)
    assert (marks.delivered(0), marks.delivered(100), len(marks)) == (0, 0, 0)


def test_half_an_event_is_none() -> None:
    marks = EventMarks()
    marks.add(0, b"data: a\n")
    assert marks.delivered(100) == 0
    marks.add(8, b"\ndata: b")
    assert (marks.delivered(8), marks.delivered(9), marks.delivered(100)) == (0, 1, 1)


def test_forgetting_twice_forgets_once() -> None:
    marks = EventMarks()
    marks.add(0, b"data: a\n\n" * 3)
    for _ in range(2):
        marks.forget(18)
        assert (len(marks), marks.delivered(18), marks.delivered(27)) == (1, 2, 3)


def test_an_event_to_which_others_were_joined_counts_as_all_of_them() -> None:
    marks = EventMarks()
    marks.add(0, b"data: a\n\ndata: b\n\n", [(9, 3)])
    marks.add(20, b"data: c\n\ndata: d\n\n", [(9, 1), (18, 10)])
    told = {8: 0, 9: 4, 17: 4, 18: 5, 28: 5, 29: 7, 37: 7, 38: 18}
    assert {at: marks.delivered(at) for at in told} == told
    marks.forget(28)
    assert [marks.delivered(at) for at in (28, 29, 38)] == [5, 7, 18]
    marks.forget(38)
    assert (marks.delivered(38), len(marks)) == (18, 0)


def test_it_is_time_to_forget_when_many_ends_or_bytes_are_kept() -> None:
    marks = EventMarks()
    block = b"data: a\n\n"
    assert [marks.add(9 * number, block, (), 1) for number in range(257)] == [False] * 256 + [True]
    assert marks.add(9 * 257, block * 2, (), 2)
    marks.forget(9 * 257)
    assert (len(marks), marks.delivered(9 * 258)) == (2, 258)
    assert not marks.add(9 * 259, block * 1820, (), 1820)
    assert marks.add(9 * 2079, block * 2, (), 2)
    marks.forget(9 * 2079)
    assert (len(marks), marks.delivered(9 * 2079), marks.delivered(9 * 2081)) == (2, 2079, 2081)
