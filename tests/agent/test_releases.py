"""What was released is told to the gateway that sent it, also if it listens a little later."""

from __future__ import annotations

import json

from trio.testing import MockClock

from trio_gateway.agent._releases import MAX_KEPT, Releases, Subscription
from trio_gateway.wire import ReleasedRequest


def release(number: int) -> ReleasedRequest:
    return ReleasedRequest(f"x{number}", 1, number, True)


async def told(subscription: Subscription) -> list[str]:
    """The exchanges of all lines that wait."""
    lines = (await subscription.wait()).splitlines()
    return [json.loads(line)["released"]["id"] for line in lines]


async def test_each_gateway_hears_of_its_own_attempts_on_every_stream_it_has(
    autojump_clock: MockClock,
) -> None:
    releases = Releases()
    with (
        releases.subscribe("a") as first,
        releases.subscribe("a") as second,
        releases.subscribe("b") as other,
    ):
        releases.push("a", release(1))
        releases.push("b", release(2))
        assert [await told(each) for each in (first, second, other)] == [["x1"], ["x1"], ["x2"]]


async def test_what_was_released_before_anybody_listened_is_told_once_to_whoever_sent_it(
    autojump_clock: MockClock,
) -> None:
    releases = Releases()
    releases.push("a", release(1))
    releases.push("b", release(2))
    with releases.subscribe("a"):
        pass  # and gone before it could read: the heartbeat has to do
    releases.push("a", release(3))
    with releases.subscribe("a") as again, releases.subscribe("b") as other:
        releases.push("a", release(4))
        assert [await told(each) for each in (again, other)] == [["x3", "x4"], ["x2"]]


async def test_the_newest_are_kept(autojump_clock: MockClock) -> None:
    releases = Releases()
    for number in range(MAX_KEPT + 5):
        releases.push("a", release(number))
    with releases.subscribe("a") as late:
        names = await told(late)
    assert len(names) == MAX_KEPT
    assert (names[0], names[-1]) == ("x5", f"x{MAX_KEPT + 4}")
