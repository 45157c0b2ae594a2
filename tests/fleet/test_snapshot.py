"""What is known about a worker, after readings, attempts and rejections."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.fleet._snapshot import FULL_CACHE, Snapshot, Source


def reading(
    *, seq: int = 1, at: float = 100.0, running: int = 0, queued: int = 0, own: int = 0, incarnation: int = 1
) -> Snapshot:
    return Snapshot(incarnation, seq, Source.SCRAPED, at, running, queued, own)


# Age and load ---------------------------------------------------------------------------------------------


def test_own_counts_are_never_old_and_readings_age() -> None:
    assert Snapshot().age(1e9) == 0.0
    assert not Snapshot().stale(1e9, 3.0)
    assert reading(at=100.0).age(102.5) == 2.5
    assert reading(at=100.0).age(99.0) == 0.0
    assert not reading(at=100.0).stale(103.0, 3.0)
    assert reading(at=100.0).stale(103.1, 3.0)


def test_a_worker_that_is_stale_or_whose_cache_is_full_counts_as_loaded() -> None:
    assert not reading().loaded(101.0, 3.0)
    assert reading().loaded(104.0, 3.0)
    full = dataclasses.replace(reading(), kv_usage=FULL_CACHE)
    assert full.loaded(100.0, 3.0)
    assert not dataclasses.replace(full, kv_usage=FULL_CACHE - 0.01).loaded(100.0, 3.0)


def test_others_work_is_what_was_read_less_what_was_ours() -> None:
    assert reading(running=5, queued=2, own=3).others == 4
    assert reading(running=1, own=3).others == 0  # ours were on their way


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_every_placement_and_every_end_since_the_reading_is_credited(
    others: int, then: int, placed: int, ended: int
) -> None:
    known = reading(running=others + then, own=then)
    now = then + placed - min(ended, then)
    assert known.free(100, now) == 100 - others - now


def test_a_worker_that_holds_more_than_its_slots_has_none_free() -> None:
    assert reading(running=9, own=0).free(8, 1) == 0


# Readings -------------------------------------------------------------------------------------------------


def test_a_newer_reading_replaces_an_older_one_and_never_the_other_way() -> None:
    newer, older = reading(seq=2, running=2), reading(seq=1, running=1)
    assert older.read(newer).running == 2
    assert newer.read(older) is newer
    assert newer.read(reading(seq=2, running=3)).running == 3  # told again, later


def test_a_higher_incarnation_is_another_process_and_a_lower_one_says_nothing() -> None:
    old = reading(incarnation=1, seq=9, running=7).faulted()
    new = reading(incarnation=2, seq=1)
    assert old.read(new) == new
    assert new.read(old) is new


def test_suspicion_and_models_survive_a_reading_and_readiness_is_what_was_read() -> None:
    known = reading().faulted()
    for reason in ("engine_unready", "model_not_loaded", "draining"):
        known = known.rejected(reason, "m", 100.0, 8, 0)
    known = known.read(reading(seq=2))
    assert known.suspect
    assert (known.unready, known.state) == (False, "ready")
    assert not known.takes("m")
    assert known.takes("other")


# What attempts and probes teach ---------------------------------------------------------------------------


def test_output_ends_suspicion_and_unreadiness_but_no_draining() -> None:
    known = reading().faulted().rejected("loading", "m", 100.0, 8, 0).rejected("draining", "m", 100.0, 8, 0)
    known = known.gave_output()
    assert (known.suspect, known.unready, known.state) == (False, False, "draining")
    assert known.gave_output() is known


@pytest.mark.parametrize(("source", "state"), [(Source.SCRAPED, "ready"), (Source.HEARTBEAT, "draining")])
def test_a_good_probe_ends_what_an_engine_said_and_not_what_an_agent_reports(
    source: Source, state: str
) -> None:
    known = dataclasses.replace(reading(), source=source, state="draining", suspect=True, unready=True)
    known = known.probed_well()
    assert (known.suspect, known.unready, known.state) == (False, False, state)


@pytest.mark.parametrize("reason", ["draining", "shutting_down", "engine_unready", "loading"])
def test_a_worker_that_drains_or_is_not_ready_takes_nothing(reason: str) -> None:
    assert not reading().rejected(reason, "m", 100.0, 8, 0).takes("other")


@pytest.mark.parametrize("reason", ["model_not_loaded", "model_load_failed"])
def test_a_model_that_is_not_there_keeps_the_others_until_the_list_is_read(reason: str) -> None:
    known = reading().rejected(reason, "m", 100.0, 8, 0)
    assert not known.takes("m")
    assert known.takes("other")
    assert known.listed().takes("m")


@pytest.mark.parametrize("reason", ["deadline", "some newer word"])
def test_a_rejection_that_is_not_about_the_worker_changes_nothing(reason: str) -> None:
    known = reading()
    assert known.rejected(reason, "m", 101.0, 8, 0) is known


def test_a_worker_without_capacity_has_no_slot_free_from_now_on() -> None:
    known = reading(running=3, own=1).rejected("capacity", "m", 101.0, slots=8, own=2)
    assert known.free(8, 2) == 0
    assert known.age(101.0) == 0.0
    assert known.free(8, 1) == 1  # one of ours has ended since


def test_a_worker_that_was_known_to_be_full_stays_as_it_is_but_that_it_turned_somebody_away() -> None:
    """A rejection may come with a reading: without this, nobody would try before the next report."""
    known = reading(running=8)
    said = known.rejected("capacity", "m", 101.0, slots=8, own=0)
    assert said == dataclasses.replace(known, turned_away=True)


def test_where_nothing_is_ever_read_no_count_says_full_for_ever() -> None:
    assert Snapshot().rejected("capacity", "m", 101.0, slots=8, own=2).free(8, 2) == 6
