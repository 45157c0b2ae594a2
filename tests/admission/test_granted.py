"""Placing only what is granted: who is told of, and who gets a grant."""

from __future__ import annotations

from trio.testing import MockClock

from trio_gateway.testing import WorkerSet, make_request, make_worker


async def test_of_each_line_those_are_told_that_need_the_same_and_no_more_than_asked_for(
    autojump_clock: MockClock,
) -> None:
    workers = WorkerSet(make_worker(slots=4))
    admission = workers.admission
    admission.place_by_grants()
    tickets = [admission.enter(make_request(n=n)) for n in (1, 1, 1, 2, 1)]
    assert [line.alike for line in admission.lines(10)] == [3]
    assert [line.alike for line in admission.lines(2)] == [2]
    for ticket in tickets:
        ticket.leave()
    assert workers.left_over() == []


async def test_a_grant_is_for_the_first_that_needs_as_much_and_can_use_the_worker(
    autojump_clock: MockClock,
) -> None:
    workers = WorkerSet(make_worker(slots=8), make_worker("w2", slots=8))
    admission = workers.admission
    admission.place_by_grants()
    tickets = [admission.enter(make_request(n=n)) for n in (2, 1, 2, 1)]
    (line,) = admission.lines(10)  # of two slots
    granted = []
    while admission.grant(line, "w1"):
        granted.append([ticket.waiting for ticket in tickets])
    assert granted == [[False, True, True, True], [False, True, False, True]]
    assert not admission.grant(line, "unknown")
    (line,) = admission.lines(10)  # of one slot
    assert line.alike == 2
    assert admission.grant(line, "w2")
    assert [ticket.waiting for ticket in tickets] == [False, False, False, True]
    for ticket in tickets:
        ticket.leave()
    assert workers.left_over() == []
