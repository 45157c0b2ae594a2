"""What processes know of each other: their places, their parts, and who has how many connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.lending import Crowd, Place
from trio_gateway.units import WHOLE, Part


@contextmanager
def crowd(of: int) -> Iterator[list[Crowd]]:
    descriptor = Crowd.make(of)
    found = [Crowd(descriptor, of, number) for number in range(of)]
    try:
        yield found
    finally:
        for each in found:
            each.close()
        os.close(descriptor)


def test_who_has_more_connections_than_another_is_ahead() -> None:
    with crowd(2) as (one, other):
        one.enter()
        assert not one.ahead()
        one.count(1)
        assert not one.ahead()  # the other does not accept any yet
        other.enter()
        assert one.ahead()
        other.count(1)
        assert not one.ahead()
        assert not other.ahead()
        one.count(-1)
        assert other.ahead()


def test_nobody_waits_for_a_process_that_is_gone_however_few_connections_it_had() -> None:
    with crowd(2) as (one, other):
        one.enter()
        other.enter()
        one.count(1)
        assert one.ahead()
        one.leave(1)
        assert not one.ahead()
        other.count(1)  # it is not there, whatever it still says
        assert not one.ahead()


def test_a_process_reads_its_place_as_the_supervisor_wrote_it() -> None:
    place = Place(1, 4, "split", (7, 8), 9, 10, "/nowhere", "secret")
    assert Place.read(place.variables()) == place
    assert Place.read({}) is None
    assert (place.part, place.shares) == (Part(1, 4), False)
    assert place.secret_for("worker", "w", 1) == place.secret_for("worker", "w", 1)
    assert len({place.secret_for("worker", "w", n) for n in range(3)}) == 3
    assert place.secret_for("a", "bc") != place.secret_for("ab", "c")


def test_sockets_that_were_handed_over_are_not_handed_on() -> None:
    one, other = socket.socketpair()
    with other:
        os.set_inheritable(one.fileno(), True)
        place = Place(0, 1, "shared", (), one.detach(), -1, "/nowhere", "secret")
        with place.open_control() as control:
            assert not os.get_inheritable(control.fileno())
            assert not control.getblocking()


@given(st.integers(0, 10_000), st.integers(1, 64), st.text(max_size=5))
def test_all_parts_are_the_whole_and_none_is_larger_by_more_than_one(whole: int, of: int, name: str) -> None:
    parts = [Part(number, of).share(whole, name) for number in range(of)]
    assert sum(parts) == whole
    assert max(parts) - min(parts) <= 1


def test_who_has_more_is_another_one_for_another_name() -> None:
    assert {Part(0, 2).share(1, f"worker-{number}") for number in range(20)} == {0, 1}


@pytest.mark.parametrize("whole", [0, 1, 7])
def test_one_process_has_the_whole(whole: int) -> None:
    assert WHOLE.share(whole, "w") == whole


HANGS = """
import sys, time
from trio_gateway.lending import Place, _place
_place.ORPHAN_LIMIT = 0.1
Place(0, 2, "shared", (), int(sys.argv[1]), -1, "", "").end_with_supervisor()
print("hangs", flush=True)
while True:
    time.sleep(1)
"""


def test_a_process_that_hangs_ends_when_its_supervisor_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = (sys.executable, "-c", HANGS, str(theirs.fileno()))
            hanging = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdout=subprocess.PIPE)
        with hanging:
            assert hanging.stdout is not None
            assert hanging.stdout.readline() == b"hangs\n"
            ours.send(b"a word is no end")
            assert hanging.poll() is None
            ours.close()
            assert hanging.wait(10) == 1
