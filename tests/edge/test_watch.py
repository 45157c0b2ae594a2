"""Seeing that the other side left, without reading from its socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import trio

from trio_gateway.edge import HangupWatch
from trio_gateway.edge._watch import Hangup


@contextmanager
def connected(unix: bool) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection: the other side's, and ours."""
    if unix:
        theirs, ours = socket.socketpair(socket.AF_UNIX)
    else:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
    with theirs, ours:
        yield theirs, ours


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def close_unread(sock: socket.socket) -> None:
    sock.close()


@pytest.fixture
async def watch(nursery: trio.Nursery) -> HangupWatch:
    watch = HangupWatch()
    nursery.start_soon(watch.run)
    return watch


@pytest.mark.parametrize(
    ("act", "unix", "gone"),
    [(half_close, False, False), (half_close, True, False), (reset, False, True), (close_unread, True, True)],
    ids=["tcp FIN", "unix FIN", "tcp reset", "unix close"],
)
async def test_a_fin_is_told_from_a_reset(
    act: Callable[[socket.socket], None], unix: bool, gone: bool, watch: HangupWatch
) -> None:
    with connected(unix) as (theirs, ours), Hangup(watch, ours.fileno()) as hangup:
        act(theirs)
        with trio.fail_after(5):
            await hangup.wait_fin()
        assert hangup.gone == gone
        assert hangup.fin or gone
    assert len(watch) == 0


async def test_after_a_fin_a_write_brings_the_reset(watch: HangupWatch) -> None:
    with connected(unix=False) as (theirs, ours), Hangup(watch, ours.fileno()) as hangup:
        theirs.close()
        with trio.fail_after(5):
            await hangup.wait_fin()
            assert not hangup.gone
            ours.send(b"anybody there?")
            await hangup.wait_gone()


async def test_bytes_that_wait_unread_neither_wake_nor_hide_anything(watch: HangupWatch) -> None:
    with connected(unix=False) as (theirs, ours), Hangup(watch, ours.fileno()) as hangup:
        theirs.send(b"the next request")
        with trio.move_on_after(0.05):
            await hangup.wait_fin()
        assert not hangup.fin
        half_close(theirs)
        with trio.fail_after(5):
            await hangup.wait_fin()
        assert ours.recv(100) == b"the next request"


async def test_after_a_fin_the_watch_sleeps(watch: HangupWatch) -> None:
    class Steps(trio.abc.Instrument):
        count = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.count += 1

    with connected(unix=False) as (theirs, ours), Hangup(watch, ours.fileno()) as hangup:
        half_close(theirs)
        with trio.fail_after(5):
            await hangup.wait_fin()
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        with trio.move_on_after(0.1):
            await hangup.wait_gone()
        trio.lowlevel.remove_instrument(steps)
        assert steps.count < 10


async def test_what_a_stopped_watch_would_say_is_not_said_of_the_next_owner_of_the_number(
    watch: HangupWatch,
) -> None:
    with connected(unix=False) as (_, ours):
        number = ours.fileno()
        old = Hangup(watch, number)
        with old:
            pass
        with Hangup(watch, number) as new:
            old.stop()  # again, late
            await trio.lowlevel.checkpoint()
            assert len(watch) == 1
            assert not new.gone
    assert len(watch) == 0


async def test_many_that_leave_at_once_are_all_seen(watch: HangupWatch) -> None:
    ends = [socket.socketpair() for _ in range(300)]
    hangups = [Hangup(watch, ours.fileno()) for _, ours in ends]
    for hangup in hangups:
        hangup.__enter__()
    for theirs, _ in ends:
        theirs.close()
    with trio.fail_after(5):
        for hangup in hangups:
            await hangup.wait_gone()
    for hangup in hangups:
        hangup.__exit__(None, None, None)
    for _, ours in ends:
        ours.close()
    assert len(watch) == 0
