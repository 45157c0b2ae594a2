"""A buffer capped in bytes: who waits, who passes, who is woken, and what is counted."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_gateway.flow import BufferPool, ByteChannel, Gathering
from trio_gateway.units import KiB

SMALL = 2 * KiB  # up to which blocks wait as one

CAP = 10
PLENTY = 1_000_000


def channel_of(cap: int = CAP, total: int = PLENTY) -> tuple[ByteChannel, BufferPool]:
    pool = BufferPool(total)
    return ByteChannel(cap, pool), pool


class Putting:
    """A put in the background, and whether it has come through."""

    def __init__(self, channel: ByteChannel, block: bytes, nursery: trio.Nursery) -> None:
        self.through = False
        self.scope = trio.CancelScope()
        nursery.start_soon(self._put, channel, block)

    async def _put(self, channel: ByteChannel, block: bytes) -> None:
        with self.scope:
            await channel.put(block)
            self.through = True


# The cap --------------------------------------------------------------------------------------------------


async def test_blocks_pass_up_to_the_cap_and_the_next_one_waits(nursery: trio.Nursery) -> None:
    channel, _ = channel_of()
    await channel.put(b"a" * 6)
    await channel.put(b"b" * 4)
    putting = Putting(channel, b"c", nursery)
    await wait_all_tasks_blocked()
    assert not putting.through
    assert (channel.used, channel.statistics().sender_waiting) == (10, True)
    assert channel.take(6) == b"a" * 6
    await wait_all_tasks_blocked()
    assert putting.through
    assert channel.take(100) == b"b" * 4 + b"c"
    assert (channel.used, channel.statistics().sender_waiting) == (0, False)


async def test_a_waiting_put_needs_room_for_its_whole_block(nursery: trio.Nursery) -> None:
    channel, _ = channel_of()
    await channel.put(b"a" * 10)
    putting = Putting(channel, b"c" * 5, nursery)
    await wait_all_tasks_blocked()
    channel.take(4)
    await wait_all_tasks_blocked()
    assert not putting.through
    channel.take(1)
    await wait_all_tasks_blocked()
    assert putting.through
    assert channel.used == 10


async def test_a_block_over_the_cap_passes_when_the_channel_is_empty(nursery: trio.Nursery) -> None:
    channel, pool = channel_of()
    await channel.put(b"a" * 35)
    assert (channel.used, pool.used) == (35, 35)
    putting = Putting(channel, b"b" * 35, nursery)
    await wait_all_tasks_blocked()
    channel.take(34)
    await wait_all_tasks_blocked()
    assert not putting.through  # one byte of the first still waits
    channel.take(1)
    await wait_all_tasks_blocked()
    assert putting.through


async def test_an_empty_block_is_no_block() -> None:
    channel, _ = channel_of()
    await channel.put(b"")
    assert channel.oldest_since is None
    assert channel.take(10) == b""


async def test_what_must_be_said_is_put_whatever_the_cap_says() -> None:
    channel, pool = channel_of(total=CAP)
    await channel.put(b"a" * 10)
    channel.put_nowait(b"b" * 10)
    assert (channel.used, pool.used) == (20, 20)


async def test_a_block_waits_from_when_it_was_to_be_put(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    channel, _ = channel_of()
    await channel.put(b"a" * 8)
    putting = Putting(channel, b"b" * 20, nursery)
    await trio.sleep(5)
    assert not putting.through
    assert channel.take_dated(CAP) == (b"a" * 8, [(8, 0.0, 0)])
    await trio.sleep(1)
    assert putting.through
    assert channel.oldest_since == 0


async def test_what_is_taken_tells_where_each_block_in_it_ends_and_since_when_it_waits(
    autojump_clock: MockClock,
) -> None:
    channel, _ = channel_of(cap=100)
    for block in (b"aaa", b"bb", b"c" * 12):
        await channel.put(block)
        await trio.sleep(1)
    assert channel.take_dated(4) == (b"aaa", [(3, 0.0, 0)])
    assert channel.take_dated(12) == (b"bb", [(2, 1.0, 0)])
    assert channel.take_dated(10) == (b"c" * 10, [(10, 2.0, 0)])
    await channel.put(b"d")
    assert channel.take_dated(10) == (b"ccd", [(2, 2.0, 0), (3, 3.0, 0)])
    assert channel.take_dated(10) == (b"", [])


# The pool -------------------------------------------------------------------------------------------------


async def test_channels_share_what_the_pool_has_left(nursery: trio.Nursery) -> None:
    pool = BufferPool(12)
    one, two = ByteChannel(CAP, pool), ByteChannel(CAP, pool)
    await one.put(b"a" * 8)
    await two.put(b"b" * 2)
    putting = Putting(two, b"c" * 3, nursery)  # its own cap has room for it
    await wait_all_tasks_blocked()
    assert not putting.through
    assert (pool.left, pool.waiting) == (2, 1)
    one.take(8)  # room that another channel gave back
    await wait_all_tasks_blocked()
    assert putting.through
    assert pool.waiting == 0
    assert pool.used == two.used == 5


async def test_a_channel_holds_no_more_than_is_left_for_others(nursery: trio.Nursery) -> None:
    pool = BufferPool(12)
    one, two = ByteChannel(CAP, pool), ByteChannel(CAP, pool)
    await one.put(b"a" * 7)
    await two.put(b"b")
    with trio.fail_after(1):
        await two.put(b"c")  # two here, two left and one for this
    assert (pool.used, pool.left) == (9, 3)
    putting = Putting(two, b"d" * 2, nursery)  # there is room, but then it would hold more than is left
    await wait_all_tasks_blocked()
    assert not putting.through
    one.take(1)
    await wait_all_tasks_blocked()
    assert putting.through
    assert (two.used, pool.left) == (4, 2)


async def test_of_those_who_wait_the_emptiest_go_on_and_no_more_than_find_room(nursery: trio.Nursery) -> None:
    pool = BufferPool(100)
    hog, *channels = (ByteChannel(1000, pool) for _ in range(5))
    await hog.put(b"h" * 80)
    for number, channel in enumerate(channels):
        await channel.put(b"c" * (5 - number))
    puts = [Putting(channel, b"d" * 4, nursery) for channel in channels]
    await wait_all_tasks_blocked()
    assert [put.through for put in puts] == [False, False, False, True]  # the last found room at once
    assert (pool.left, pool.waiting) == (2, 3)
    hog.take(8)  # of the ten that are left now, one of 3 may take 4; for one of 4 too few are left then
    await wait_all_tasks_blocked()
    assert [put.through for put in puts] == [False, False, True, True]
    assert (pool.left, pool.waiting) == (6, 2)


async def test_who_gave_up_waiting_does_not_stay_in_the_way(nursery: trio.Nursery) -> None:
    pool = BufferPool(20)
    hog, channel, other = (ByteChannel(1000, pool) for _ in range(3))
    await hog.put(b"h" * 18)
    await channel.put(b"c")
    await other.put(b"o")
    for _ in range(500):
        putting = Putting(channel, b"d", nursery)
        await wait_all_tasks_blocked()
        putting.scope.cancel()
        await wait_all_tasks_blocked()
    last = Putting(other, b"d" * 2, nursery)
    await wait_all_tasks_blocked()
    assert (last.through, pool.waiting) == (False, 1)
    hog.take(3)
    await wait_all_tasks_blocked()
    assert last.through
    assert pool.waiting == 0


async def test_whole_answers_go_over_the_bound_one_after_the_other_whoever_gives_up(
    nursery: trio.Nursery,
) -> None:
    pool = BufferPool(10)
    pool.take(10)
    through: list[Gathering] = []
    with Gathering(pool) as third:
        with Gathering(pool) as first:
            await first.take(1)
            with Gathering(pool) as second:
                async with trio.open_nursery() as inner:
                    inner.start_soon(take, second, 1, through)
                    await wait_all_tasks_blocked()
                    nursery.start_soon(take, third, 1, through)
                    await wait_all_tasks_blocked()
                    inner.cancel_scope.cancel()
            assert not through
        await wait_all_tasks_blocked()
        assert through == [third]


async def test_an_empty_channel_may_always_hold_one_block(nursery: trio.Nursery) -> None:
    pool = BufferPool(12)
    one, two = ByteChannel(12, pool), ByteChannel(12, pool)
    await one.put(b"a" * 12)
    with trio.fail_after(1):
        await two.put(b"b" * 5)
    assert pool.used == 17
    assert pool.left == 0  # never negative
    putting = Putting(two, b"c", nursery)
    await wait_all_tasks_blocked()
    assert not putting.through
    two.take(5)  # empty again: one more block may pass, though the pool is still full
    await wait_all_tasks_blocked()
    assert putting.through


async def test_the_pool_counts_what_is_dropped_as_free(nursery: trio.Nursery) -> None:
    pool = BufferPool(12)
    one, two = ByteChannel(12, pool), ByteChannel(12, pool)
    await one.put(b"a" * 10)
    await two.put(b"b")
    putting = Putting(two, b"c" * 5, nursery)
    await wait_all_tasks_blocked()
    assert not putting.through
    one.clear()
    await wait_all_tasks_blocked()
    assert putting.through
    assert (one.used, pool.used) == (0, 6)


async def take(gathering: Gathering, size: int, through: list[Gathering]) -> None:
    await gathering.take(size)
    through.append(gathering)


async def test_of_the_whole_answers_that_find_no_room_the_first_goes_on_and_the_others_wait(
    nursery: trio.Nursery,
) -> None:
    pool = BufferPool(10)
    through: list[Gathering] = []
    with Gathering(pool) as first, Gathering(pool) as second:
        await first.take(5)
        await second.take(5)
        nursery.start_soon(take, first, 4, through)
        await wait_all_tasks_blocked()
        nursery.start_soon(take, second, 4, through)
        await wait_all_tasks_blocked()
        assert (through, first.held, second.held, pool.used) == ([first], 9, 5, 14)
        await first.take(20)  # still, until it is whole
        first.__exit__()
        await wait_all_tasks_blocked()
        assert (through, first.held, second.held, pool.used) == ([first, second], 0, 9, 9)
    assert pool.used == 0


async def test_a_whole_answer_waits_for_room_behind_another_that_goes_on(nursery: trio.Nursery) -> None:
    pool = BufferPool(10)
    through: list[Gathering] = []
    pool.take(10)
    with Gathering(pool) as first, Gathering(pool) as second:
        await first.take(1)
        nursery.start_soon(take, second, 4, through)
        await wait_all_tasks_blocked()
        pool.give(4)
        await wait_all_tasks_blocked()
        assert not through  # 3 are left
        pool.give(1)
        await wait_all_tasks_blocked()
        assert (through, pool.used) == ([second], 10)


async def test_a_whole_answer_that_is_given_up_lets_the_next_go_on(nursery: trio.Nursery) -> None:
    pool = BufferPool(10)
    pool.take(10)
    through: list[Gathering] = []
    with Gathering(pool) as second:
        with Gathering(pool) as first:
            await first.take(1)
            nursery.start_soon(take, second, 1, through)
            await wait_all_tasks_blocked()
            assert not through
        await wait_all_tasks_blocked()
        assert (through, pool.used) == ([second], 11)


async def test_a_cancelled_wait_for_room_holds_nothing(autojump_clock: MockClock) -> None:
    pool = BufferPool(10)
    pool.take(10)
    with Gathering(pool) as first, Gathering(pool) as second:
        await first.take(1)
        with trio.move_on_after(1) as scope:
            await second.take(4)
        assert scope.cancelled_caught
        assert (second.held, pool.used) == (0, 11)
    assert pool.used == 10


# Cancelling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [PLENTY, 12], ids=["by its own cap", "by the pool"])
async def test_a_put_that_is_cancelled_while_it_waits_adds_nothing(total: int, nursery: trio.Nursery) -> None:
    pool = BufferPool(total)
    channel, other = ByteChannel(CAP, pool), ByteChannel(CAP, pool)
    await channel.put(b"a" * 6)
    await other.put(b"o" * 2)
    putting = Putting(channel, b"b" * 5, nursery)
    await wait_all_tasks_blocked()
    putting.scope.cancel()
    await wait_all_tasks_blocked()
    assert putting.scope.cancelled_caught
    assert not channel.statistics().sender_waiting
    assert (channel.used, pool.used, pool.waiting) == (6, 8, 0)
    other.take(2)
    assert channel.take(100) == b"a" * 6
    assert pool.used == 0
    await channel.put(b"c")  # and nobody is in its way
    assert channel.take(100) == b"c"


async def test_a_put_in_a_cancelled_scope_adds_nothing_though_there_is_room() -> None:
    channel, pool = channel_of()
    with trio.CancelScope() as scope:
        scope.cancel()
        await channel.put(b"a")
    assert scope.cancelled_caught
    assert (channel.used, pool.used) == (0, 0)


async def test_a_wait_that_is_cancelled_takes_nothing(autojump_clock: MockClock) -> None:
    channel, _ = channel_of()
    with trio.move_on_after(1) as scope:
        await channel.wait()
    assert scope.cancelled_caught
    await channel.put(b"a")
    with trio.move_on_after(0) as scope:
        await channel.wait()
    assert scope.cancelled_caught  # though something waits
    with trio.fail_after(1):
        await channel.wait()
    assert channel.take(10) == b"a"


# Taking ---------------------------------------------------------------------------------------------------


async def test_small_blocks_are_taken_together_and_kept_whole(autojump_clock: MockClock) -> None:
    channel, _ = channel_of(100)
    for block in (b"aaa", b"bbb", b"ccc"):
        await channel.put(block)
        await trio.sleep(1)
    assert channel.take(8) == b"aaabbb"
    assert channel.take(8) == b"ccc"


async def test_a_block_larger_than_a_piece_is_taken_in_parts() -> None:
    channel, pool = channel_of(100)
    await channel.put(b"aaabbbc")
    await channel.put(b"dd")
    assert channel.take(3) == b"aaa"
    assert (channel.used, pool.used) == (6, 6)
    assert channel.take(3) == b"bbb"
    assert channel.take(3) == b"cdd"
    assert channel.take(3) == b""


# Joining --------------------------------------------------------------------------------------------------


class Vowels:
    """Joins a block to the last one if both are one vowel, as its double; drops spaces at its end."""

    def __init__(self) -> None:
        self.more = 0
        self.asked: list[tuple[bytes, bytes]] = []

    def join(self, last: bytes, block: bytes) -> list[tuple[bytes, int, bool]]:
        self.asked.append((last, block))
        head, tail = block.rstrip(b" ")[:1], block.rstrip(b" ")[1:]
        if last[-1:] != head:
            self.more = 0
            return [(last, 0, True), (block, 0, False)]
        self.more += 1
        joined = [(last, self.more, True)]
        return [*joined, (tail, 0, False)] if tail else joined


async def test_what_waits_is_joined_and_dated_by_its_oldest_part(autojump_clock: MockClock) -> None:
    pool = BufferPool(PLENTY)
    joiner = Vowels()
    channel = ByteChannel(100, pool, joiner)
    await channel.put(b"xa")
    await trio.sleep(1)
    await channel.put(b"a  ")
    assert (channel.used, pool.used, channel.oldest_since) == (2, 2, 0)
    await trio.sleep(1)
    await channel.put(b"ae")
    await channel.put(b"u")
    assert (channel.used, pool.used) == (4, 4)
    assert joiner.asked == [(b"xa", b"a  "), (b"xa", b"ae"), (b"e", b"u")]
    assert channel.take_dated(1) == (b"x", [(1, 0.0, 0)])  # what was joined counts where the event ends
    assert channel.take_dated(2) == (b"ae", [(1, 0.0, 2), (2, 2.0, 0)])
    assert channel.take_dated(2) == (b"u", [(1, 2.0, 0)])
    assert (channel.used, pool.used) == (0, 0)


async def test_what_becomes_less_makes_room(nursery: trio.Nursery) -> None:
    class Shorter:
        def join(self, last: bytes, block: bytes) -> list[tuple[bytes, int, bool]]:
            return [(b"-", 2, True)]

    pool = BufferPool(PLENTY)
    channel, other = ByteChannel(CAP, pool, Shorter()), ByteChannel(CAP, pool)
    await other.put(b"o")
    await channel.put(b"abcdef")
    await channel.put(b"ghi")
    assert (channel.used, pool.used) == (1, 2)
    with trio.fail_after(1):
        await channel.put(b"a" * 9)
    assert channel.take(CAP) == b"-"
    assert pool.used == 1


async def test_nothing_is_joined_to_what_is_empty_or_begun_nor_to_last_words() -> None:
    joiner = Vowels()
    channel = ByteChannel(100, BufferPool(PLENTY), joiner)
    await channel.put(b"aa")
    assert channel.take(1) == b"a"
    await channel.put(b"a")
    channel.put_nowait(b"a")
    await channel.put(b"")
    assert joiner.asked == []
    assert channel.take(100) == b"aaa"
    await channel.put(b"a")
    assert joiner.asked == []
    assert channel.take(100) == b"a"
    await channel.put(b"bb")
    await channel.put(b"a")
    assert channel.take(1) == b"b"  # begun, but it is not the last
    await channel.put(b"a")
    assert joiner.asked == [(b"bb", b"a"), (b"a", b"a")]


# Waking ---------------------------------------------------------------------------------------------------


async def test_the_receiver_is_woken_by_a_block_by_the_end_and_by_a_poke(nursery: trio.Nursery) -> None:
    channel, _ = channel_of()
    woken: list[str] = []

    async def receive() -> None:
        while not channel.closed:
            await channel.wait()
            woken.append(channel.take(100).decode())

    nursery.start_soon(receive)
    await wait_all_tasks_blocked()
    assert woken == []
    await channel.put(b"a")
    await wait_all_tasks_blocked()
    assert woken == ["a"]
    channel.poke()
    await wait_all_tasks_blocked()
    assert woken == ["a", ""]
    channel.close()
    await wait_all_tasks_blocked()
    assert woken == ["a", "", ""]


async def test_a_poke_in_advance_is_not_lost_and_counts_once(autojump_clock: MockClock) -> None:
    channel, _ = channel_of()
    channel.poke()
    with trio.fail_after(1):
        await channel.wait()
    with trio.move_on_after(1) as scope:
        await channel.wait()
    assert scope.cancelled_caught


async def test_what_waits_at_the_end_can_still_be_taken() -> None:
    channel, _ = channel_of()
    await channel.put(b"last words")
    channel.close()
    channel.close()
    assert channel.closed
    assert channel.take(100) == b"last words"
    with trio.fail_after(1):
        await channel.wait()


# Statistics -----------------------------------------------------------------------------------------------


async def test_statistics_tell_bytes_and_since_when_they_wait(autojump_clock: MockClock) -> None:
    channel, _ = channel_of()
    begin = trio.current_time()
    assert channel.statistics().oldest_since is None
    await channel.put(b"aaaa")
    await trio.sleep(2)
    await channel.put(b"bb")
    told = channel.statistics()
    assert (told.used, told.cap, told.oldest_since, told.closed) == (6, CAP, begin, False)
    channel.take(2)
    assert channel.oldest_since == begin  # half of it still waits
    channel.take(2)
    assert channel.oldest_since == begin + 2
    channel.take(2)
    assert channel.oldest_since is None
    channel.close()
    assert channel.statistics().closed


# A begun event --------------------------------------------------------------------------------------------

ONE, TWO, THREE = b"data: one\n\n", b"data: two\n\n", b"data: three\n\n"


@pytest.mark.parametrize("taken", range(1, len(ONE)))
async def test_of_an_event_taken_in_part_the_rest_is_kept(taken: int) -> None:
    channel, pool = channel_of(100)
    await channel.put(ONE + TWO)
    await channel.put(THREE)
    begun = channel.take(taken)
    channel.keep_begun_event()
    assert begun + channel.take(100) == ONE
    assert (channel.used, pool.used) == (0, 0)


@pytest.mark.parametrize("blocks", [[ONE + TWO], [ONE, TWO], [ONE + TWO, THREE]])
@pytest.mark.parametrize("taken", [0, len(ONE)])
async def test_between_two_events_nothing_is_kept(blocks: list[bytes], taken: int) -> None:
    channel, pool = channel_of(100)
    for block in blocks:
        await channel.put(block)
    if taken:
        assert channel.take(taken) == ONE
    channel.keep_begun_event()
    assert channel.take(100) == b""
    assert (channel.used, pool.used, channel.oldest_since) == (0, 0, None)


@given(
    texts=st.lists(st.text(st.sampled_from("a\nb"), max_size=6), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 9), max_size=8),
)
async def test_whatever_was_taken_the_kept_rest_completes_whole_events_and_no_more(
    texts: list[str], cuts: list[int]
) -> None:
    channel, pool = channel_of(PLENTY)
    events = ["".join(f"data: {line}\n" for line in text.split("\n")).encode() + b"\n" for text in texts]
    channel.put_nowait(b"".join(events))
    taken = b"".join(channel.take(cut) for cut in cuts)
    channel.keep_begun_event()
    whole = taken + channel.take(PLENTY)
    ends = [b"".join(events[:count]) for count in range(len(events) + 1)]
    assert whole == min((end for end in ends if len(end) >= len(taken)), key=len)
    assert pool.used == 0


# Against a naive model ------------------------------------------------------------------------------------

Operation = tuple[str, int]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 14)),
        st.tuples(st.just("put_nowait"), st.integers(0, 14)),
        st.tuples(st.just("take"), st.integers(1, 14)),
        st.tuples(st.just("others"), st.integers(0, 20)),
        st.tuples(st.just("clear"), st.just(0)),
    ),
    max_size=40,
)


@given(OPERATIONS)
async def test_bytes_come_out_once_and_in_order_and_are_counted_at_every_moment(
    operations: list[Operation],
) -> None:
    """A model in three variables: what waits, what waits to be put, what others hold."""
    pool = BufferPool(20)
    channel = ByteChannel(CAP, pool)
    waits, others = b"", 0
    serial = 0

    def fresh(size: int) -> bytes:
        nonlocal serial
        serial += 1
        return bytes([serial % 256]) * size

    for operation, size in operations:
        match operation:
            case "put":
                block = fresh(size)
                fits = not waits or (
                    len(waits) + size <= CAP and len(waits) + size <= max(20 - others - len(waits), 0)
                )
                with trio.move_on_after(0 if not fits else 5) as scope:
                    await channel.put(block)
                assert scope.cancelled_caught is not fits
                waits += block if fits else b""
            case "put_nowait":
                block = fresh(size)
                channel.put_nowait(block)
                waits += block
            case "take":
                piece = channel.take(size)
                assert len(piece) <= size
                assert bool(piece) is bool(waits)
                assert waits.startswith(piece)
                waits = waits[len(piece) :]
            case "others":
                pool.give(others)
                pool.take(size)
                others = size
            case "clear":
                channel.clear()
                waits = b""
        assert channel.used == len(waits)
        assert pool.used == len(waits) + others
        assert (channel.oldest_since is None) is (not waits)


# Small blocks ---------------------------------------------------------------------------------------------


async def test_small_blocks_that_come_at_once_wait_as_one_and_large_or_late_ones_do_not(
    autojump_clock: MockClock,
) -> None:
    channel, pool = channel_of(cap=PLENTY)
    for block in (b"a" * 100, b"b" * 100):
        await channel.put(block)
    await trio.sleep(1)
    await channel.put(b"c" * 100)
    await channel.put(b"d" * SMALL)
    assert (channel.used, pool.used) == (300 + SMALL, 300 + SMALL)
    data, ends = channel.take_dated(PLENTY)
    assert data == b"a" * 100 + b"b" * 100 + b"c" * 100 + b"d" * SMALL
    assert [(taken.end, taken.since) for taken in ends] == [
        (200, ends[0].since),
        (300, ends[0].since + 1),
        (300 + SMALL, ends[0].since + 1),
    ]


async def test_what_is_put_behind_a_block_that_was_taken_in_part_follows_it() -> None:
    channel, _ = channel_of(cap=PLENTY)
    await channel.put(b"abcdef")
    assert channel.take(4) == b"abcd"
    await channel.put(b"ghi")
    assert channel.take(100) == b"efghi"
    assert channel.used == 0
