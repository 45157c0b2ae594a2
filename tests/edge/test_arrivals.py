"""How far messages of a stream have come: in what order, and by whose word."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.edge._arrivals import Arrivals


class Kernel:
    """Stands for a socket: how many bytes the other side has."""

    def __init__(self) -> None:
        self.there = 0

    def acknowledged(self) -> int:
        return self.there


def sent(arrivals: Arrivals, kernel: Any, lengths: list[int], numbered: bool = True) -> list[int]:
    """Send messages of some lengths; answers where each ends."""
    ends: list[int] = []
    for number, length in enumerate(lengths, 1):
        arrivals.take(number if numbered else 0, sum(lengths[:number]), length)
    for length in lengths:
        ends.append((ends or [0])[-1] + length)
        arrivals.sent(ends[-1], kernel)
    return ends


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), data=st.data())
def test_a_message_has_arrived_when_its_last_byte_has(lengths: list[int], data: st.DataObject) -> None:
    arrivals, kernel = Arrivals(), Kernel()
    ends = sent(arrivals, kernel, lengths)
    assert (arrivals.sending, arrivals.arrived) == (0, (0, 0))
    for there in sorted(data.draw(st.lists(st.integers(0, ends[-1]), max_size=5))):
        kernel.there = there
        arrivals.look(kernel)  # type: ignore[arg-type]
        count = sum(end <= there for end in ends)
        assert arrivals.arrived == (count, sum(lengths[:count]))


def test_what_the_socket_is_taking_is_told_and_a_message_without_a_number_is_no_event() -> None:
    arrivals, kernel = Arrivals(), Kernel()
    arrivals.take(0, 0, 7)
    assert arrivals.sending == 7
    arrivals.sent(7, kernel)  # type: ignore[arg-type]
    kernel.there = 100
    arrivals.look(kernel)  # type: ignore[arg-type]
    assert (arrivals.sending, arrivals.arrived) == (0, (0, 0))


def test_the_kernel_is_asked_from_time_to_time_though_nobody_looks() -> None:
    arrivals, kernel = Arrivals(), Kernel()
    kernel.there = 10**6
    sent(arrivals, kernel, [1] * 300)
    assert arrivals.arrived[0] > 200


def test_without_a_socket_nothing_more_arrives_and_what_is_forgotten_never_does() -> None:
    arrivals, kernel = Arrivals(), Kernel()
    sent(arrivals, kernel, [5, 5])
    arrivals.look(None)
    assert arrivals.arrived == (0, 0)
    arrivals.take(3, 15, 5)
    arrivals.forget()
    kernel.there = 100
    arrivals.look(kernel)  # type: ignore[arg-type]
    assert (arrivals.sending, arrivals.arrived) == (0, (0, 0))
