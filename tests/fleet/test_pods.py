"""What is told of pods, and what follows for the workers in them: pure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.fleet._pods import (
    LAST_PAUSE,
    MOST_PAGES,
    MOST_PODS,
    Arrived,
    Decision,
    Described,
    Left,
    OutOfDate,
    Page,
    Pod,
    PodSet,
    PodState,
    PodWatch,
    Resumed,
    Withheld,
    pause_after,
    read_page,
    read_pod,
)
from trio_gateway.testing import make_pod

KEY = "trio-gateway/slots"
READY, UNREADY, ENDING, GONE = PodState.READY, PodState.UNREADY, PodState.TERMINATING, PodState.GONE


def pod(
    state: PodState = READY, name: str = "a", uid: str = "u", address: str = "10.0.0.1", **more: Any
) -> Pod:
    return Pod(name, uid, address, state, **more)


def line(kind: str, shown: object) -> bytes:
    return json.dumps({"type": kind, "object": shown}).encode()


def event(kind: str, version: str = "7", name: str = "a", **options: Any) -> bytes:
    shown = make_pod(name, **options)
    shown["metadata"]["resourceVersion"] = version
    return line(kind, shown)


# One pod after the other ------------------------------------------------------------------------------------


def test_a_pod_is_a_worker_from_the_moment_it_is_ready_until_it_is_gone() -> None:
    pods = PodSet()
    assert pods.saw(pod(UNREADY, address="")) == []
    assert pods.saw(pod(UNREADY)) == []
    assert pods.saw(pod()) == [Arrived(pod())]
    assert pods.saw(pod()) == []
    assert pods.saw(pod(UNREADY)) == [Withheld("a", "not ready")]
    assert pods.saw(pod()) == [Resumed("a")]
    assert pods.saw(pod(ENDING)) == [Withheld("a", "terminating")]
    assert pods.saw(pod(ENDING, address="")) == []
    assert pods.deleted(pod(ENDING)) == [Left("a")]
    assert pods.deleted(pod(ENDING)) == []


def test_a_pod_that_ends_before_it_was_ready_is_never_a_worker() -> None:
    pods = PodSet()
    assert pods.saw(pod(UNREADY)) == []
    assert pods.saw(pod(ENDING)) == []
    assert pods.saw(pod(GONE)) == []


def test_one_that_is_not_ready_and_then_terminates_says_so() -> None:
    pods = PodSet()
    pods.saw(pod())
    pods.saw(pod(UNREADY))
    assert pods.saw(pod(ENDING)) == [Withheld("a", "terminating")]


def test_a_pod_whose_containers_are_over_is_gone() -> None:
    pods = PodSet()
    pods.saw(pod())
    assert pods.saw(pod(GONE)) == [Left("a")]


@pytest.mark.parametrize("changed", [{"uid": "v"}, {"address": "10.0.0.2"}])
def test_another_process_under_the_same_name_is_another_worker(changed: dict[str, Any]) -> None:
    pods = PodSet()
    pods.saw(pod())
    assert pods.saw(pod(**changed)) == [Left("a"), Arrived(pod(**changed))]
    pods.saw(pod(uid="w"))
    assert pods.saw(pod(UNREADY, uid="x")) == [Left("a")]


def test_the_end_of_an_earlier_process_is_not_that_of_a_later_one() -> None:
    pods = PodSet()
    pods.saw(pod(uid="v"))
    assert pods.deleted(pod(uid="u")) == []


def test_another_number_of_slots_describes_the_worker_anew() -> None:
    pods = PodSet()
    pods.saw(pod(slots=4))
    assert pods.saw(pod(slots=8)) == [Described(pod(slots=8))]
    assert pods.saw(pod(UNREADY, slots=2)) == [
        Withheld("a", "not ready"),
        Described(pod(UNREADY, slots=2)),
    ]


def test_a_list_tells_who_is_gone_too() -> None:
    pods = PodSet()
    pods.listed([pod(name="a"), pod(name="b")])
    assert pods.listed([pod(name="b"), pod(name="c")]) == [Left("a"), Arrived(pod(name="c"))]


def test_no_more_pods_are_workers_than_a_gateway_can_look_at() -> None:
    pods = PodSet()
    many = [pod(name=str(number)) for number in range(MOST_PODS + 1)]
    assert len(pods.listed(many)) == MOST_PODS
    assert pods.saw(many[-1]) == []


NAMES = st.sampled_from("abc")
PODS = st.builds(
    Pod, NAMES, st.sampled_from("uv"), st.sampled_from(["", "10.0.0.1"]), st.sampled_from(PodState), st.none()
)
STORY = st.lists(
    st.one_of(st.tuples(st.just("saw"), PODS), st.tuples(st.just("deleted"), PODS)),
    max_size=30,
)


@given(story=STORY, last=st.lists(PODS, max_size=4, unique_by=lambda each: each.name))
def test_whatever_happened_a_list_leaves_what_it_alone_would(story: list[Any], last: list[Pod]) -> None:
    """Decisions, applied in order, are consistent, and a list brings any state to the one it shows."""
    pods, workers = PodSet(), dict[str, str]()

    def apply(decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Arrived(new):
                    assert new.name not in workers
                    assert new.state is READY
                    workers[new.name] = new.uid
                case Left(name):
                    del workers[name]
                case Withheld(name) | Resumed(name):
                    assert name in workers
                case Described(new):
                    assert workers[new.name] == new.uid

    for how, told in story:
        apply(pods.saw(told) if how == "saw" else pods.deleted(told))
    apply(pods.listed(last))
    assert workers.keys() <= {each.name for each in last}
    assert {each.name for each in last if each.state is READY} <= workers.keys()
    assert not workers.keys() & {each.name for each in last if each.state is GONE}
    assert all(workers[each.name] == each.uid for each in last if each.name in workers)


# Reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({}, READY),
        ({"ready": False}, UNREADY),
        ({"address": ""}, UNREADY),
        ({"address": "nowhere"}, UNREADY),
        ({"terminating": True}, ENDING),
        ({"terminating": True, "ready": False}, ENDING),
        ({"phase": "Succeeded"}, GONE),
        ({"phase": "Failed", "terminating": True}, GONE),
        ({"phase": "Pending", "ready": False}, UNREADY),
    ],
)
def test_the_state_of_a_pod_is_read(options: dict[str, Any], state: PodState) -> None:
    read = read_pod(make_pod("a", **options), KEY)
    assert read is not None
    assert read.state is state


def test_a_pod_without_conditions_is_not_ready() -> None:
    shown = make_pod("a")
    for conditions in (None, "x", [1], [{"type": "Ready"}]):
        shown["status"]["conditions"] = conditions
        read = read_pod(shown, KEY)
        assert read is not None
        assert read.state is UNREADY


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("8", 8),
        ("100000", 100_000),
        ("0", None),
        ("100001", None),
        ("-1", None),
        ("x", None),
        ("1234567", None),
    ],
)
def test_slots_are_read_from_the_annotation_or_the_label(text: str, slots: int | None) -> None:
    for where in ("annotations", "labels"):
        shown = make_pod("a")
        shown["metadata"][where] = {KEY: text}
        read = read_pod(shown, KEY)
        assert read is not None
        assert read.slots == slots
    both = read_pod(make_pod("a", labels={KEY: "3"}, annotations={KEY: "4"}), KEY)
    assert both is not None
    assert both.slots == 4


NO_NAMES = ["", "A", "a/b", "a\nb", "a@b", "\ud800", "ä", "-a", "a" * 254]


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"metadata": {"name": "a"}}, {"metadata": {"name": 1, "uid": "u"}}]
    + [{"metadata": {"name": name, "uid": "u"}} for name in NO_NAMES],
)
def test_what_is_no_pod_is_none(value: object) -> None:
    assert read_pod(value, KEY) is None


def test_a_page_of_a_list_is_read() -> None:
    body = {"metadata": {"resourceVersion": "5", "continue": "next"}, "items": [make_pod("a"), 7]}
    page = read_page(json.dumps(body).encode(), KEY)
    assert ([each.name for each in page.pods], page.version, page.rest) == (["a"], "5", "next")
    empty = read_page(b'{"metadata": {"resourceVersion": "5"}, "items": null}', KEY)
    assert empty == Page((), "5", "")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no",
        b"[]",
        b"{}",
        b"[" * 200_000,
        b'{"metadata": {"resourceVersion": 5}, "items": []}',
        b'{"metadata": {"resourceVersion": ""}, "items": []}',
        b'{"metadata": {"resourceVersion": "5"}, "items": {}}',
    ],
)
def test_what_is_no_list_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_page(body, KEY)


# Lists and watches ------------------------------------------------------------------------------------------


def listed(*pods: Pod) -> PodWatch:
    watch = PodWatch(KEY)
    watch.take_page(Page(pods, "5", ""))
    return watch


def test_a_list_of_several_pages_counts_when_it_is_whole() -> None:
    watch = PodWatch(KEY)
    assert watch.take_page(Page((pod(name="a"),), "5", "more")) == []
    assert (watch.version, watch.rest) == (None, "more")
    assert watch.take_page(Page((pod(name="b"),), "5", "")) == [
        Arrived(pod(name="a")),
        Arrived(pod(name="b")),
    ]
    assert (watch.version, watch.rest) == ("5", "")


def test_a_list_that_is_begun_anew_forgets_its_pages() -> None:
    watch = PodWatch(KEY)
    watch.take_page(Page((pod(name="a"),), "5", "more"))
    watch.start_anew()
    assert watch.take_page(Page((pod(name="b"),), "6", "")) == [Arrived(pod(name="b"))]


def test_a_list_without_end_is_given_up() -> None:
    watch = PodWatch(KEY)
    for _ in range(MOST_PAGES - 1):
        assert watch.take_page(Page((), "5", "more")) == []
    with pytest.raises(OutOfDate, match="more than 1000 pages"):
        watch.take_page(Page((), "5", "more"))
    assert (watch.version, watch.rest) == (None, "")


def test_a_list_of_too_many_pods_ends_where_they_are() -> None:
    watch = PodWatch(KEY)
    pods = tuple(pod(name=str(number)) for number in range(MOST_PODS))
    assert len(watch.take_page(Page(pods, "5", "more"))) == MOST_PODS
    assert watch.version == "5"


def test_events_move_the_version_on() -> None:
    watch = listed()
    assert watch.take_line(event("ADDED", "7")) != []
    assert watch.version == "7"
    assert watch.take_line(line("BOOKMARK", {"metadata": {"resourceVersion": "9"}})) == []
    assert watch.version == "9"
    assert watch.take_line(event("MODIFIED", "10", ready=False)) == [Withheld("a", "not ready")]
    assert watch.take_line(event("DELETED", "11", ready=False)) == [Left("a")]
    assert watch.version == "11"


def test_an_event_of_what_is_no_pod_only_moves_the_version_on() -> None:
    watch = listed()
    assert watch.take_line(line("ADDED", {"metadata": {"resourceVersion": "8"}})) == []
    assert watch.version == "8"


def test_a_version_that_is_too_old_has_all_listed_again() -> None:
    watch = listed(pod())
    with pytest.raises(OutOfDate, match="fell behind"):
        watch.take_line(line("ERROR", {"kind": "Status", "code": 410}))
    assert watch.version is None
    assert watch.take_page(Page((), "9", "")) == [Left("a")]


@pytest.mark.parametrize("status", [{"code": 500}, None, []])
def test_another_error_keeps_the_version(status: object) -> None:
    watch = listed()
    with pytest.raises(ValueError, match="ends with code"):
        watch.take_line(line("ERROR", status))
    assert watch.version == "5"


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        b"[]",
        b"{}",
        line("NEWS", make_pod("a")),
        line("ADDED", make_pod("a")),
        line("ADDED", None),
    ],
)
def test_after_a_line_that_can_not_be_read_nobody_knows_what_was_missed(data: bytes) -> None:
    watch = listed(pod())
    with pytest.raises(OutOfDate):
        watch.take_line(data)
    assert watch.version is None


@given(failures=st.integers(1, 10_000), dice=st.floats(0, 1))
def test_pauses_grow_up_to_a_bound_and_are_spread(failures: int, dice: float) -> None:
    pause = pause_after(failures, dice)
    assert 0.25 <= pause <= LAST_PAUSE
    assert pause_after(failures, 0.0) <= pause <= pause_after(failures, 1.0)
    assert pause_after(failures + 1, dice) >= pause
