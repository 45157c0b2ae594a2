"""Room for requests that no worker has yet."""

from __future__ import annotations

from trio_gateway.edge._http_server import UnplacedBytes


def test_a_burst_that_is_over_is_told_once() -> None:
    room = UnplacedBytes(1000)
    room.take(500)
    assert not room.has_calmed(400)
    room.give(450)
    assert room.has_calmed(400)
    assert not room.has_calmed(400)


def test_little_that_comes_free_is_no_burst_and_neither_is_much_that_is_still_held() -> None:
    room = UnplacedBytes(1000)
    room.take(399)
    room.give(399)
    assert not room.has_calmed(400)
    room.take(800)
    room.give(600)
    assert not room.has_calmed(400)
