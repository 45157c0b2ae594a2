"""What top draws, at every size and whatever anybody is called, and what its keys do."""

from __future__ import annotations

from typing import Any, Final

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from trio_gateway.cli._top import written
from trio_gateway.cli._top_screen import (
    FEW,
    MANY,
    SORTS,
    TABS,
    Act,
    Piece,
    Screen,
    Tab,
    keys_of,
    size,
    span,
    where_of,
)
from trio_gateway.testing import FakeAdminPort, request_row

FIRST: Final = request_row(0)["id"]


def a_screen(*rows: dict[str, Any], **members: Any) -> Screen:
    """Make a screen that was told everything once; rows stand in the gateway's order."""
    port = FakeAdminPort()
    screen = Screen(**members)
    screen.snapshot = port.snapshot()
    tenants: list[Any] = trio.run(port.tenants)
    screen.rows |= {"workers": port.snapshot()["workers"], "tenants": tenants}
    found = list(rows or port.rows)
    screen.take_requests({"requests": found, "total": len(found), "offset": 0})
    return screen


def change(screen: Screen, tab: Tab, at: int, members: dict[str, Any]) -> None:
    screen.rows[tab][at] = {**screen.rows[tab][at], **members}


def text_of(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in screen.lines(width, height)]


# What is drawn ----------------------------------------------------------------------------------------------


def test_it_fits_the_smallest_terminal_that_people_use() -> None:
    lines = text_of(a_screen(*(request_row(number) for number in range(60))))
    assert len(lines) == 24
    assert lines[0] == "trio-gateway  live  2.0 requests/s  80 tokens/s  buffered 4.0 KiB"
    assert lines[1] == "running 3 in 8 of 16 slots   waiting 2"
    assert lines[2] == "wait 100ms p99 2.0s   first content 200ms p99 1.0s   gaps 20ms p99 -"
    assert lines[3] == "refused queue_full 1"
    assert "requests 60" in lines[4]
    assert lines[5].split() == ["ID", "TENANT", "MODEL", "STATE", "WHERE", "AGE", "TOKENS", "BUFFERED"]
    assert lines[6].split()[:4] == ["00000000", "tenant-0", "m1", "waiting"]
    assert sum(line.startswith("000000") for line in lines) == 24 - 7
    assert lines[-1].startswith("q quit")


NAMES = st.text(max_size=30)


@given(
    width=st.integers(1, 200),
    height=st.integers(1, 60),
    tab=st.sampled_from(TABS),
    names=st.tuples(NAMES, NAMES, NAMES, NAMES),
    selected=st.integers(0, 12),
    closely=st.booleans(),
    question=st.booleans(),
)
def test_nothing_leaves_its_line_and_no_name_speaks_to_the_terminal(
    width: int,
    height: int,
    tab: Any,
    names: tuple[str, str, str, str],
    selected: int,
    closely: bool,
    question: bool,
) -> None:
    id_, tenant, model, worker = names
    rows = [
        {**request_row(number), "tenant": tenant, "model": model, "worker": worker} for number in range(12)
    ]
    screen = a_screen(*rows, {**request_row(99), "id": id_}, tab=tab, search=model, typing=True)
    change(screen, "tenants", 0, {"id": tenant})
    change(screen, "workers", 0, {"id": worker, "breakers": {model: "open"}})
    screen.snapshot = {**(screen.snapshot or {}), "refusals": {tenant: 3}}
    screen.selected["requests"] = rows[selected]["id"] if selected < 12 else id_
    if closely:
        screen.closely = id_
        steps = [{"at": 0.5, "what": "placed", "detail": {"worker": worker}}]
        screen.timeline = {"request": {**request_row(1), "id": id_, "model": model}, "timeline": steps}
    screen.question = Act("/x", f"Cancel {id_}?") if question else None
    lines = screen.lines(width, height)
    assert len(lines) == height
    for line in lines:
        text = "".join(piece for piece, _ in line)
        assert cell_len(text) <= width
        assert text.isprintable()


@pytest.mark.parametrize("tab", TABS)
def test_the_row_that_keys_act_on_is_always_to_be_seen(tab: Any) -> None:
    screen = a_screen(*(request_row(number) for number in range(60)), tab=tab)
    for key in ("end", "up", "page up", "home", "down", "page down", "j", "k"):
        screen.press(key)
        turned = [line for line in screen.lines(80, 15) if any(style == "turned" for _, style in line)]
        assert len(turned) == 2  # it and the name of the tab
        name = screen.current
        assert name is not None
        assert name["id"][-8:] in "".join(text for text, _ in turned[1])


def test_an_empty_list_and_a_gateway_that_says_nothing_are_told() -> None:
    screen = Screen()
    assert text_of(screen, height=4) == ["trio-gateway  no figures yet", *text_of(screen, height=4)[1:]]
    screen.trouble = "no answer\x1b[2J"
    assert text_of(screen)[0] == "trio-gateway  no answer?[2J"
    assert not any(word in text_of(screen) for word in ("no requests", "nothing fits"))
    screen = a_screen(trouble="no answer")
    assert text_of(screen)[0].startswith("trio-gateway  no answer  ")


def test_a_list_without_rows_says_whether_there_are_none_or_none_that_fit() -> None:
    screen = a_screen()
    screen.take_requests({"requests": [], "total": 0, "offset": 0})
    assert "no requests" in text_of(screen)
    assert screen.plain_lines(80)[-1] == "no requests"
    screen.search = "acme"
    assert "nothing fits" in text_of(screen)
    screen.search, screen.state = "", "waiting"
    assert "nothing fits" in text_of(screen)
    for tab in ("workers", "tenants"):
        empty = a_screen(tab=tab)
        empty.rows[tab] = []
        assert f"no {tab}" in text_of(empty)


@pytest.mark.parametrize(
    ("members", "word"), [({"ready": False}, "not ready"), ({"stopping": True}, "stopping")]
)
def test_a_gateway_that_is_not_ready_says_so(members: dict[str, bool], word: str) -> None:
    screen = a_screen()
    screen.snapshot = {**(screen.snapshot or {}), **members, "refusals": {}}
    assert word in text_of(screen)[0]
    assert text_of(screen)[3] == "refused none"


def test_a_request_is_told_by_what_it_waits_for_or_who_has_it() -> None:
    waits = {**request_row(0), "position": 3, "eta": 4.0, "why": "tenant_frozen"}
    assert where_of(waits) == ["no. 3", "frozen", "in 4.0s"]
    assert where_of({**waits, "position": None, "eta": None, "why": None}) == ["-"]
    assert where_of({**request_row(1), "attempt": 2}) == ["w2", "attempt 2"]
    assert where_of({**request_row(1), "worker": None}) == ["-"]
    assert where_of(request_row(2)) == ["w3", "engine_failed"]
    assert where_of({**request_row(2), "code": None}) == ["w3", "upstream_failed"]
    lines = text_of(a_screen({**request_row(1), "stalled_for": 12.0}), 120)
    assert lines[6].split()[3:7] == ["stalled", "w2", "stalled", "12.0s"]


def test_a_worker_that_was_taken_out_or_is_away_stands_out_with_its_breakers() -> None:
    screen = a_screen(tab="workers")
    change(screen, "workers", 0, {"operator": "drained", "breakers": {"m1": "open", "m2": "closed"}})
    change(screen, "workers", 1, {"ready": False})
    lines = text_of(screen)
    assert lines[6].split() == ["w1", "drained", "3", "1", "4", "8", "m1", "open"]
    assert lines[7].split() == ["w2", "not", "ready", "3", "1", "4", "8"]
    change(screen, "workers", 1, {"withheld": "terminating"})
    assert text_of(screen)[7].split()[:2] == ["w2", "withheld"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0123, "12ms"), (59.94, "59.9s"), (62, "1m02s"), (3720, "1h02m")]
)
def test_lengths_of_time_are_short(value: float | None, text: str) -> None:
    assert span(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5120.0 GiB")]
)
def test_sizes_are_short(value: int | None, text: str) -> None:
    assert size(value) == text


def test_colours_can_be_switched_off_but_what_is_chosen_is_still_to_be_seen() -> None:
    line: list[list[Piece]] = [[("a", "bad"), ("b", "turned"), ("c", "")]]
    assert written(line, colours=True) == "\x1b[H\x1b[31ma\x1b[0m\x1b[7mb\x1b[0mc\x1b[K\x1b[J"
    assert written(line, colours=False) == "\x1b[Ha\x1b[7mb\x1b[0mc\x1b[K\x1b[J"


# Keys -------------------------------------------------------------------------------------------------------


def test_keys_are_read_however_they_come() -> None:
    data = b"q\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[H\x1b[F\x1b[Z\t\r\n\x7f\x08\x1b[1;5C/\xc3\xa9\x1b"
    assert keys_of(data) == [
        *("q", "up", "down", "page up", "page down", "home", "end", "back tab", "tab"),
        *("enter", "enter", "erase", "erase", "other", "/", "\N{LATIN SMALL LETTER E WITH ACUTE}", "escape"),
    ]


@given(st.binary(max_size=60))
def test_no_bytes_of_a_terminal_are_too_odd(data: bytes) -> None:
    screen = a_screen()
    for key in keys_of(data):
        screen.press(key)
    assert len(screen.lines(80, 24)) == 24


def test_q_goes_back_and_then_ends_it() -> None:
    screen = a_screen()
    assert screen.press("enter") == "ask"
    assert screen.press("q") is None
    assert screen.press("escape") is None
    assert screen.press("q") == "quit"


def test_states_sorts_and_tabs_go_round_and_what_changed_is_asked_for() -> None:
    screen = a_screen()
    for state in ("waiting", "running", "ended", None):
        assert screen.press("f") == "ask"
        assert screen.query()["state"] == state
    for sort in (*SORTS[1:], SORTS[0]):
        assert screen.press("s") == "ask"
        assert screen.query()["limit"] == (FEW if sort in ("oldest", "newest") else MANY)
        assert sort in text_of(screen, 120)[4]
    for tab in ("workers", "tenants", "requests"):
        assert screen.press("tab") == "ask"
        assert screen.tab == tab
    assert screen.press("back tab") == "ask"
    assert screen.tab == "tenants"
    assert screen.press("f") is None


@pytest.mark.parametrize(
    ("sort", "first"), [("oldest", 0), ("newest", 0), ("tokens", 5), ("buffered", 4), ("lag", 2)]
)
def test_requests_are_sorted(sort: str, first: int) -> None:
    rows = [request_row(number) for number in range(7)]
    rows[5]["tokens"]["generated"] = 99
    rows[4]["buffered_bytes"] = 1 << 20
    rows[2]["lag"] = 7.0
    row = a_screen(*rows, sort=sort).current
    assert row is not None
    assert row["id"] == rows[first]["id"]


def test_the_gateway_is_asked_for_the_oldest_where_they_come_first() -> None:
    assert [Screen(sort=sort).query()["order"] for sort in SORTS] == ["oldest", *["newest"] * 4]


def test_tenants_are_not_counted_before_they_were_asked_for() -> None:
    screen = a_screen()
    screen.rows["tenants"] = []
    assert "tenants  " in text_of(screen, 120)[4]
    screen.tab = "tenants"
    assert "tenants 0" in text_of(screen, 120)[4]


def test_a_search_is_typed_mended_and_given_up() -> None:
    screen = a_screen()
    assert screen.press("/") is None
    for key in ("a", "q", "erase", "c"):
        assert screen.press(key) == "ask"
    screen.press("up")
    assert screen.query()["search"] == "ac"
    assert "/ac_" in text_of(screen)[4]
    assert screen.press("enter") is None
    assert "/ac" in text_of(screen)[4]
    screen.press("/")
    assert screen.press("escape") == "ask"
    assert screen.query()["search"] is None
    screen.press("/")
    assert screen.press("escape") is None


@pytest.mark.parametrize(
    ("tab", "key", "path"),
    [
        ("requests", "c", f"/requests/{FIRST}/cancel"),
        ("workers", "d", "/workers/w1/drain"),
        ("workers", "x", "/workers/w1/eject"),
        ("workers", "b", "/workers/w1/breakers/reset"),
        ("tenants", "z", "/tenants/acme/freeze"),
        ("tenants", "c", "/tenants/acme/cancel"),
    ],
)
def test_nothing_is_done_before_a_yes(tab: Any, key: str, path: str) -> None:
    screen = a_screen(request_row(0), tab=tab)
    assert screen.press(key) is None
    assert text_of(screen)[-1].startswith("[y/N] ")
    assert screen.press("enter") is None
    assert text_of(screen)[-1] == "Nothing was done."
    screen.press(key)
    act = screen.press("y")
    assert isinstance(act, Act)
    assert act.path == path
    assert screen.question is None


def test_what_was_done_can_be_undone_and_what_has_ended_can_not_be_cancelled() -> None:
    screen = a_screen(request_row(2), tab="workers")
    change(screen, "workers", 0, {"operator": "drained"})
    screen.press("d")
    assert screen.press("y") == Act("/workers/w1/resume", "Resume worker w1?")
    screen.tab = "tenants"
    change(screen, "tenants", 0, {"frozen": True})
    screen.press("z")
    assert screen.press("y") == Act("/tenants/acme/thaw", "Thaw tenant acme?")
    screen.tab = "requests"
    screen.press("c")
    assert screen.question is None


def test_looking_closely_the_request_that_is_looked_at_is_cancelled() -> None:
    screen = a_screen(request_row(0), request_row(1))
    screen.press("enter")  # the oldest
    assert "asking" in text_of(screen)
    screen.press("c")
    assert screen.question is None  # nothing is known of it yet
    screen.timeline = FakeAdminPort().timeline(request_row(1)["id"])
    lines = text_of(screen)
    assert lines[5].startswith(f"request {request_row(1)['id']}  running")
    assert "     500ms  placed          worker w1" in lines
    for key in ("down", "tab", "f", "s", "/", "enter"):
        assert screen.press(key) is None
    screen.press("c")
    assert screen.question is not None
    assert screen.question.path == f"/requests/{request_row(1)['id']}/cancel"


def test_plain_lines_hold_every_row_without_styles_or_keys() -> None:
    lines = a_screen(*(request_row(number) for number in range(60)), sort="newest").plain_lines(100)
    assert len(lines) == 4 + 1 + 60
    assert lines[4].startswith("ID")
    assert all(line.isprintable() and line == line.rstrip() and len(line) <= 100 for line in lines)
