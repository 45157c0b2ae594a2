"""Outages of one worker for one model, step by step, and against a model that keeps every rejection."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.fleet._outage import LONGEST, Outage


def out_after(*rejections: tuple[float, float | None], pause: float = 1.0) -> Outage:
    """An outage after rejections at given moments, each of an attempt that was placed just before."""
    outage = Outage(pause)
    for now, retry_after in rejections:
        outage.rejected(now, 503, retry_after, placed_at=now - 0.001)
    return outage


def test_a_worker_that_said_nothing_is_open() -> None:
    outage = Outage(1.0)
    assert outage.over
    assert outage.open(0.0)
    assert outage.opens_at() is None
    assert outage.remaining(0.0) == 0.0


@pytest.mark.parametrize(("retry_after", "pause"), [(None, 1.0), (0.0, 0.0), (30.0, 30.0), (0.25, 0.25)])
def test_a_rejection_puts_a_worker_out_for_the_time_it_named_else_for_a_pause(
    retry_after: float | None, pause: float
) -> None:
    outage = out_after((100.0, retry_after))
    assert not outage.over
    assert outage.opens_at() == 100.0 + pause
    assert outage.remaining(100.0) == pause
    assert outage.remaining(100.0 + pause + 5) == 0.0
    assert not outage.open(100.0 + pause - 0.01)
    assert outage.open(100.0 + pause)


def test_pauses_double_up_to_eight_times_the_first() -> None:
    outage, now, pauses = Outage(0.5), 100.0, []
    for _ in range(6):
        outage.rejected(now, 503, None, placed_at=now - 0.001)
        pauses.append(outage.remaining(now))
        now += pauses[-1]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert LONGEST == 8


def test_output_makes_the_next_pause_short_again() -> None:
    outage = out_after((100.0, None), (101.0, None))
    outage.output(103.0)
    assert outage.over
    outage.rejected(110.0, 503, None, placed_at=109.0)
    assert outage.remaining(110.0) == 1.0


def test_a_named_time_does_not_lengthen_the_next_pause() -> None:
    outage = out_after((100.0, 5.0), (105.0, None))
    assert outage.remaining(105.0) == 1.0


def test_a_burst_counts_as_one() -> None:
    outage = Outage(1.0)
    for now in (100.0, 100.1, 100.2, 101.5):
        outage.rejected(now, 503, None, placed_at=99.0)
    assert outage.opens_at() == 101.0


def test_a_named_time_counts_whoever_brings_it() -> None:
    outage = Outage(1.0)
    outage.rejected(100.0, 503, None, placed_at=99.0)
    outage.rejected(100.5, 503, 30.0, placed_at=99.0)
    assert outage.opens_at() == 130.5
    outage.rejected(100.6, 503, 5.0, placed_at=99.0)
    assert outage.opens_at() == 130.5


def test_the_class_is_that_of_the_last_rejection() -> None:
    outage = Outage(1.0)
    assert outage.status == 503
    outage.rejected(100.0, 429, None, placed_at=99.0)
    assert outage.status == 429
    outage.rejected(100.1, 503, None, placed_at=99.0)
    assert outage.status == 503


# Trials -----------------------------------------------------------------------------------------------------


def test_one_exchange_tries_first_and_the_others_follow_on_its_output() -> None:
    outage = out_after((100.0, None))
    assert outage.open(101.0)
    outage.placed()
    assert not outage.open(101.0)
    assert not outage.open(500.0)
    assert outage.opens_at() is None
    outage.output(102.0)
    assert outage.over
    assert outage.open(102.0)


def test_a_trial_that_told_nothing_lets_another_try() -> None:
    outage = out_after((100.0, None))
    outage.placed()
    outage.trial_over()
    assert outage.open(101.0)
    assert not outage.open(100.5)
    assert not outage.over


def test_a_rejected_trial_begins_a_longer_pause_and_another_may_try_then() -> None:
    outage = out_after((100.0, None))
    outage.placed()
    outage.rejected(101.5, 503, None, placed_at=101.0)
    assert not outage.open(103.4)
    assert outage.open(103.5)


def test_an_older_rejection_does_not_end_a_trial() -> None:
    outage = out_after((100.0, None))
    outage.placed()
    outage.rejected(101.5, 503, None, placed_at=99.0)
    assert not outage.open(102.0)


def test_a_placement_without_an_outage_is_no_trial() -> None:
    outage = Outage(1.0)
    outage.placed()
    outage.rejected(100.0, 503, None, placed_at=99.0)
    assert outage.open(101.0)


# Output of others -------------------------------------------------------------------------------------------


def test_output_ends_a_pause_at_once() -> None:
    outage = out_after((100.0, None))
    outage.output(100.2)
    assert outage.over
    assert outage.open(100.2)


def test_output_does_not_end_a_time_that_was_named() -> None:
    outage = out_after((100.0, 30.0))
    outage.output(129.9)
    assert not outage.open(129.9)
    assert outage.opens_at() == 130.0
    outage.output(130.0)
    assert outage.over


@pytest.mark.parametrize("order", [((100.0, 30.0), (100.5, None)), ((100.0, None), (100.5, 29.5))])
def test_a_named_time_stays_named_whatever_else_is_said(
    order: tuple[tuple[float, float | None], ...],
) -> None:
    outage = out_after(*order)
    outage.output(101.0)
    assert outage.opens_at() == 130.0


def test_output_ends_the_pause_behind_a_named_time() -> None:
    outage = out_after((100.0, None), (101.0, None), (103.0, None), (107.0, 2.0))
    assert outage.opens_at() == 109.0
    longer = out_after((100.0, 2.0), (100.5, None), (101.0, None), (101.5, None))
    assert longer.opens_at() == 105.5
    longer.output(101.6)
    assert longer.opens_at() == 102.0
    longer.output(102.0)
    assert longer.over


# A model ----------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """The same by keeping all times and asking each of them."""

    first: float
    named: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    doubled: int = 0
    began: float = 0.0
    trial: bool = False

    @property
    def out(self) -> bool:
        return bool(self.named or self.pauses)

    def ends(self) -> float:
        return max(self.named + self.pauses)

    def rejected(self, now: float, retry_after: float | None, placed_at: float) -> None:
        if self.out and retry_after is None and placed_at <= self.began:
            return
        self.trial = False
        self.began = now
        if retry_after is None:
            self.pauses.append(now + self.first * min(2**self.doubled, LONGEST))
            self.doubled += 1
        else:
            self.named.append(now + retry_after)

    def output(self, now: float) -> None:
        self.pauses = []
        if self.named and now < max(self.named):
            return
        self.named, self.doubled, self.trial = [], 0, False


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 0.5, 1.0, 4.0]),
        st.one_of(
            st.tuples(
                st.just("rejected"),
                st.none() | st.sampled_from([0.0, 0.5, 1.0, 3.0]),
                st.sampled_from([0.0, 0.25, 2.0]),
            ),
            st.tuples(st.sampled_from(["output", "trial_over", "placed"]), st.none(), st.just(0.0)),
        ),
    ),
    max_size=25,
)


@given(STEPS, st.sampled_from([0.5, 1.0]))
def test_any_story_goes_as_the_model_says(
    steps: list[tuple[float, tuple[str, float | None, float]]], first: float
) -> None:
    outage, model, now = Outage(first), Model(first), 100.0
    for wait, (what, retry_after, age) in steps:
        now += wait
        if what == "rejected":
            outage.rejected(now, 503, retry_after, now - age)
            model.rejected(now, retry_after, now - age)
        elif what == "output":
            outage.output(now)
            model.output(now)
        elif what == "trial_over":
            outage.trial_over()
            model.trial = False
        elif outage.open(now):  # only where it is open is anybody placed
            outage.placed()
            model.trial = model.out
        assert outage.over is (not model.out)
        assert outage.open(now) is (not model.out or (now >= model.ends() and not model.trial))
        assert outage.remaining(now) == (max(model.ends() - now, 0.0) if model.out else 0.0)
        assert outage.opens_at() == (model.ends() if model.out and not model.trial else None)
