"""Those who wait, by kind."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.admission._alike import Alike

TIMES = st.sampled_from([None, 0.0, 1.0, 2.0, 3.0, 4.0])


@dataclass(frozen=True)
class Waiter:
    kind: str
    number: int
    limit: float


@given(st.data())
def test_those_are_too_late_whose_limit_is_not_after_the_time_at_which_their_kind_is_tried(
    data: st.DataObject,
) -> None:
    alike: Alike[Waiter] = Alike()
    waiting: list[Waiter] = []
    leaving = data.draw(st.lists(st.booleans(), min_size=1, max_size=30))
    for number in range(len(leaving)):
        if waiting and leaving[number]:
            leaves = data.draw(st.sampled_from(waiting))
            alike.remove(leaves)
            waiting.remove(leaves)
        else:
            comes = Waiter(
                data.draw(st.sampled_from("abc")), number, data.draw(st.sampled_from([1.0, 2.0, 3.0]))
            )
            alike.add(comes)
            waiting.append(comes)
        times: dict[str, float | None] = {kind: data.draw(TIMES) for kind in "abc"}
        late = {waiter for waiter in waiting if (at := times[waiter.kind]) is None or waiter.limit <= at}
        found = alike.too_late(lambda waiter, times=times: times[waiter.kind])  # type: ignore[misc]
        assert set(found) == late
        assert len(found) == len(late)


def test_one_of_a_kind_is_asked_for_however_many_wait() -> None:
    alike: Alike[Waiter] = Alike()
    for number in range(1000):
        alike.add(Waiter("ab"[number % 2], number, 10.0))
    asked: list[str] = []

    def tries_at(waiter: Waiter) -> float:
        asked.append(waiter.kind)
        return 9.0

    assert alike.too_late(tries_at) == []
    assert sorted(asked) == ["a", "b"]


def test_who_is_not_in_can_not_leave() -> None:
    alike: Alike[Waiter] = Alike()
    with pytest.raises(KeyError):
        alike.remove(Waiter("a", 1, 1.0))
