"""What ``trio-gateway top`` shows and what its keys do. Pure: no terminal, no clock, no socket.

`Screen` is told what the gateway says and which keys are pressed; `Screen.lines` draws it for a
terminal of any size, and `Screen.press` answers what is to be done. Texts of clients (ids, models,
tenants) are drawn without control characters, so that none of them can speak to the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rich.cells import cell_len, set_cell_size

Row = Mapping[str, Any]
Tab = Literal["requests", "workers", "tenants"]
Style = Literal["", "bold", "dim", "good", "warn", "bad", "turned"]
Piece = tuple[str, Style]

TABS: Final[tuple[Tab, ...]] = ("requests", "workers", "tenants")
STATES: Final = (None, "waiting", "running", "ended")
SORTS: Final = ("oldest", "newest", "tokens", "buffered", "lag")
FEW: Final = 200  # rows that are asked for where the gateway's own order is the one wanted
MANY: Final = 1000  # where it is not
HEAD: Final = 5  # lines above the table
NOTHING: Final = "-"
HELP: Final = {
    "requests": "q quit  tab next  f state  s sort  / search  enter timeline  c cancel",
    "workers": "q quit  tab next  d drain/resume  x eject  b reset breakers",
    "tenants": "q quit  tab next  z freeze/thaw  c cancel all its requests",
    "timeline": "q or escape back  c cancel",
}
# Words that still fit behind a place where a terminal has 80 columns.
WHY: Final = {
    "tenant_at_concurrency": "own limit",
    "tenant_frozen": "frozen",
    "tier_share": "tier share",
    "no_slot": "no slot",
    "ahead_in_line": "in line",
    "outage": "outage",
    "model_without_worker": "no worker",
}
_ESCAPES: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
    b"\x1b[Z": "back tab",
}
_SEQUENCE: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O[@-~])")
_NAMED: Final = {"\r": "enter", "\n": "enter", "\t": "tab", "\x7f": "erase", "\b": "erase", "\x1b": "escape"}


@dataclass(frozen=True, slots=True)
class Act:
    """Something to be done at the gateway.

    Attributes:
        path: below the prefix of the admin API.
        question: which the operator has said yes to.
    """

    path: str
    question: str


Wish = Literal["quit", "ask"] | Act | None  # "ask": what is looked at has changed


def keys_of(data: bytes) -> list[str]:
    """Take what a terminal sent apart into names of keys; a letter names itself."""
    keys: list[str] = []
    at = 0
    while at < len(data):
        if found := _SEQUENCE.match(data, at):
            keys.append(_ESCAPES.get(found.group(), "other"))
            at = found.end()
            continue
        behind = data.find(b"\x1b", at + 1)
        text = data[at : len(data) if behind < 0 else behind]
        keys += [_NAMED.get(letter, letter) for letter in text.decode(errors="ignore")]
        at += len(text)
    return keys


def plain(text: object) -> str:
    """Write a value without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))


@dataclass
class Screen:
    """What is shown, and what was last said about it.

    Attributes:
        snapshot: the last of the feed; None before the first.
        rows: of each tab, as they came.
        total: requests that fit the filter.
        selected: id of the row that keys act on, by tab.
        first: rows that are scrolled away, by tab.
        timeline: of the request that is looked at closely; None: the list is.
        question: what is asked back, and what a yes would do.
        typing: whether letters go into the search.
        trouble: why there is nothing new; empty if there is.
        news: what the last action did.
    """

    snapshot: Row | None = None
    rows: dict[Tab, list[Row]] = field(default_factory=lambda: {tab: [] for tab in TABS})
    total: int = 0
    tab: Tab = "requests"
    state: str | None = None
    sort: str = "oldest"
    search: str = ""
    selected: dict[Tab, str] = field(default_factory=dict)
    first: dict[Tab, int] = field(default_factory=lambda: dict.fromkeys(TABS, 0))
    timeline: Row | None = None
    closely: str | None = None
    question: Act | None = None
    typing: bool = False
    trouble: str = ""
    news: str = ""

    # -- what to ask the gateway

    def query(self) -> dict[str, Any]:
        """Answer the parameters for the requests that are to be shown."""
        limit = FEW if self.sort in ("oldest", "newest") else MANY
        order = "oldest" if self.sort == "oldest" else "newest"
        return {"state": self.state, "search": self.search or None, "order": order, "limit": limit}

    def take_requests(self, answer: Row) -> None:
        """Take a list of requests."""
        self.total = answer["total"]
        self.rows["requests"] = _ORDER[self.sort](answer["requests"])

    # -- what is done with it

    @property
    def current(self) -> Row | None:
        """The row that keys act on."""
        found = self.rows[self.tab]
        chosen = self.selected.get(self.tab)
        return next((row for row in found if row["id"] == chosen), found[0] if found else None)

    def press(self, key: str) -> Wish:
        """Do what a key does, and answer what is to be done at the gateway."""
        if self.question is not None:
            return self._answer(key)
        if self.typing:
            return self._type(key)
        self.news = ""
        if key == "q":
            return self._back() if self.closely else "quit"
        if key == "escape":
            return self._back()
        if key in _MOVES:
            self._move(_MOVES[key])
            return None
        if key in ("tab", "back tab") and not self.closely:
            at = TABS.index(self.tab) + (1 if key == "tab" else -1)
            self.tab = TABS[at % len(TABS)]
            return "ask"
        return self._press_in_tab(key)

    def _press_in_tab(self, key: str) -> Wish:
        row = self.current
        if self.closely:
            # The list goes on behind it: what its keys mean is the request that is looked at.
            row = self.timeline["request"] if self.timeline else None
        elif self.tab == "requests":
            if key == "f":
                self.state = STATES[(STATES.index(self.state) + 1) % len(STATES)]
                return self._look()
            if key == "s":
                self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
                return self._look()
            self.typing = key == "/"
            if key == "enter" and row is not None:
                self.closely, self.timeline = row["id"], None
                return "ask"
        self.question = None if row is None else _act(self.tab, key, row)
        return None

    def _look(self) -> Wish:
        """Look at other requests than before."""
        self.total, self.first["requests"] = 0, 0
        self.selected.pop("requests", None)
        return "ask"

    def _answer(self, key: str) -> Wish:
        act, self.question = self.question, None
        if key in ("y", "Y"):
            return act
        self.news = "Nothing was done."
        return None

    def _type(self, key: str) -> Wish:
        if key in ("enter", "escape"):
            self.typing = False
            if key == "enter" or not self.search:
                return None
            self.search = ""
        elif key == "erase":
            self.search = self.search[:-1]
        elif len(key) == 1:
            self.search += key
        return self._look()

    def _back(self) -> Wish:
        self.closely, self.timeline = None, None
        return None

    def _move(self, by: int) -> None:
        found = self.rows[self.tab]
        row = self.current
        if row is not None and not self.closely:
            at = max(0, min(len(found) - 1, found.index(row) + by))
            self.selected[self.tab] = found[at]["id"]

    # -- what is to be seen

    def lines(self, width: int, height: int) -> list[list[Piece]]:
        """Draw it, in at most so many lines of at most so many cells."""
        body = self._timeline_lines(width) if self.closely else self._table(width, max(1, height - HEAD - 1))
        room = max(0, height - 1)
        drawn = [*self._head(width), *body][:room]
        drawn += [[] for _ in range(room - len(drawn))]
        return [_fit(line, width) for line in [*drawn, self._foot()][:height]]

    def plain_lines(self, width: int) -> list[str]:
        """Draw everything once, without keys and styles, as scripts take it."""
        screen = [*self._head(width, short=True), *self._table(width, len(self.rows["requests"]) + 1, True)]
        return ["".join(text for text, _ in _fit(line, width)).rstrip() for line in screen]

    def _head(self, width: int, *, short: bool = False) -> list[list[Piece]]:
        told = self.snapshot
        if told is None:
            return [[("trio-gateway  ", "bold"), (plain(self.trouble) or "no figures yet", "warn")]]
        health: Piece = ("live", "good")
        if self.trouble:
            health = (plain(self.trouble), "bad")
        elif told["stopping"] or not told["ready"]:
            health = ("stopping" if told["stopping"] else "not ready", "warn")
        pace, workers = told["throughput"], told["workers"]
        used = sum(worker["held"] + worker["draining"] for worker in workers)
        slots = used + sum(worker["free"] for worker in workers)  # that can be had now
        refused = sorted(told["refusals"].items(), key=lambda pair: -pair[1])
        words = ", ".join(f"{plain(code)} {count}" for code, count in refused) or "none"
        lines: list[list[Piece]] = [
            [
                ("trio-gateway  ", "bold"),
                health,
                (f"  {pace['requests_per_second']:.1f} requests/s", ""),
                (f"  {pace['tokens_per_second']:.0f} tokens/s", ""),
                (f"  buffered {size(told['buffered_bytes'])}", ""),
            ],
            [
                ("running ", "dim"),
                (f"{told['running']}", "bold"),
                (f" in {used} of {slots} slots", ""),
                ("   waiting ", "dim"),
                (f"{told['waiting']}", "bold"),
            ],
            [
                piece
                for name, key in (("wait", "wait"), ("   first content", "ttfc"), ("   gaps", "gap"))
                for piece in (
                    (f"{name} ", "dim"),
                    (f"{span(told[f'{key}_p50'])} p99 {span(told[f'{key}_p99'])}", ""),
                )
            ],
            [("refused ", "dim"), (words, "")],
        ]
        return lines if short else [*lines, self._tabs()]

    def _tabs(self) -> list[Piece]:
        pieces: list[Piece] = []
        for tab in TABS:
            known = self.rows[tab] or tab == self.tab  # tenants are not asked for before somebody looks
            count = f" {self.total if tab == 'requests' else len(self.rows[tab])}" if known else ""
            pieces += [(f" {tab}{count} ", "turned" if tab == self.tab else "dim"), (" ", "")]
        if self.tab == "requests":
            pieces.append(
                (f" {self.state or 'all'}, {self.sort} first" if self.sort in SORTS[:2] else "", "")
            )
            if self.sort not in SORTS[:2]:
                pieces.append((f" {self.state or 'all'}, by {self.sort}", ""))
            if self.search or self.typing:
                pieces.append((f"  /{plain(self.search)}{'_' if self.typing else ''}", "bold"))
        return pieces

    def _table(self, width: int, height: int, plainly: bool = False) -> list[list[Piece]]:
        columns = _COLUMNS[self.tab]
        found = self.rows[self.tab]
        widths = _widths(columns, width)
        heading = "".join(
            _cell(name, wide, right) for (name, _, _, right, _), wide in zip(columns, widths, strict=True)
        )
        current = self.current
        self._scroll(found, current, height - 1)
        shown = found[self.first[self.tab] :][: height - 1]
        lines: list[list[Piece]] = [[(heading, "" if plainly else "bold")]]
        for row in shown:
            cells: list[Piece] = [
                (_cell(plain(text), wide, right), style)
                for (_, draw, _, right, _), wide in zip(columns, widths, strict=True)
                for text, style in (draw(row, self.snapshot),)
            ]
            if row is current and not plainly:
                cells = [("".join(text for text, _ in cells), "turned")]
            lines.append(cells)
        return lines if found else [*lines, [(self._why_empty(), "dim")]]

    def _why_empty(self) -> str:
        if self.tab == "requests" and (self.state or self.search):
            return "nothing fits"
        return "" if self.snapshot is None else f"no {self.tab}"  # before the first figures nobody knows

    def _scroll(self, found: Sequence[Row], current: Row | None, room: int) -> None:
        """Let the row that keys act on be among those that are shown."""
        at = found.index(current) if current is not None else 0
        first = min(self.first[self.tab], max(0, len(found) - room))
        self.first[self.tab] = max(at - room + 1, min(first, at), 0)

    def _timeline_lines(self, width: int) -> list[list[Piece]]:
        told = self.timeline
        if told is None:
            return [[(f"request {plain(self.closely)}", "bold")], [("asking", "dim")]]
        row = told["request"]
        lines: list[list[Piece]] = [
            [
                (f"request {plain(row['id'])}", "bold"),
                (f"  {row['outcome'] or row['state']}, {row['phase']}", ""),
            ],
            [
                (
                    f"tenant {plain(row['tenant'])}  model {plain(row['model'])}  tier {plain(row['tier'])}",
                    "",
                ),
                ("  " + plain("  ".join(where_of(row))), "warn"),
            ],
            [
                (f"age {span(row['age'])}  left {span(row['deadline_in'])}  lag {span(row['lag'])}", ""),
                (f"  buffered {size(row['buffered_bytes'])}", ""),
            ],
            [],
        ]
        for step in told["timeline"]:
            detail = "  ".join(f"{plain(name)} {plain(value)}" for name, value in step["detail"].items())
            lines.append(
                [(f"{span(step['at']):>10}  ", "dim"), (f"{plain(step['what']):<16}", "bold"), (detail, "")]
            )
        return lines

    def _foot(self) -> list[Piece]:
        if self.question is not None:
            return [("[y/N] ", "bold"), (plain(self.question.question), "bad")]
        if self.news:
            return [(plain(self.news), "bold")]
        return [(HELP["timeline" if self.closely else self.tab], "dim")]


# Words ------------------------------------------------------------------------------------------------------


def span(seconds: float | None) -> str:
    """Write a length of time."""
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def size(count: int | None) -> str:
    """Write a number of bytes."""
    if count is None:
        return NOTHING
    left, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if left < 1024:
            break
        left, unit = left / 1024, larger
    return f"{count} B" if unit == "B" else f"{left:.1f} {unit}"


def where_of(row: Row) -> list[str]:
    """Say where a request is: its worker, or its place in line, why it waits and how long still."""
    if row["state"] != "waiting":
        where = [row["worker"] or NOTHING]
        if row["outcome"] is not None:
            where.append(row["code"] or row["outcome"])
        if row["attempt"] > 1:
            where.append(f"attempt {row['attempt']}")
        if _stalls(row):
            where.append(f"stalled {span(row['stalled_for'])}")
        return where
    where = [NOTHING if row["position"] is None else f"no. {row['position']}"]
    if row["why"] is not None:
        where.append(WHY.get(row["why"], row["why"]))
    if row["eta"] is not None:
        where.append(f"in {span(row['eta'])}")
    return where


def _stalls(row: Row) -> bool:
    return row["stalled_for"] is not None and row["stalled_for"] >= 2


# Rows -------------------------------------------------------------------------------------------------------

_ORDER: Final[dict[str, Callable[[list[Row]], list[Row]]]] = {
    "oldest": lambda rows: rows,
    "newest": lambda rows: rows,
    "tokens": lambda rows: sorted(rows, key=lambda row: -(row["tokens"]["generated"] or 0)),
    "buffered": lambda rows: sorted(rows, key=lambda row: -row["buffered_bytes"]),
    "lag": lambda rows: sorted(rows, key=lambda row: -(row["lag"] or 0)),
}
_MOVES: Final = {
    "up": -1,
    "k": -1,
    "down": 1,
    "j": 1,
    "page up": -15,
    "page down": 15,
    "home": -MANY,
    "end": MANY,
}

Draw = Callable[[Row, Row | None], Piece]
# Heading, text and style of a row, cells that it needs, whether it stands at the right, and how much of
# what is left over it takes.
Column = tuple[str, Draw, int, bool, int]


def _state_of(row: Row) -> Piece:
    if _stalls(row):
        return "stalled", "bad"
    styles: dict[str, Style] = {"waiting": "warn", "running": "good"}
    return row["state"], styles.get(row["state"], "dim")


def _breakers_of(worker: Row) -> Piece:
    unclosed = [f"{model} {state}" for model, state in worker["breakers"].items() if state != "closed"]
    return ", ".join(unclosed), "bad"


def _worker_state(worker: Row) -> Piece:
    if worker["operator"] != "none":
        return worker["operator"], "warn"
    if worker.get("withheld") is not None:  # an older gateway does not tell
        return "withheld", "warn"
    return ("ready", "good") if worker["ready"] else ("not ready", "bad")


def _service_of(tenant: Row, snapshot: Row | None) -> Piece:
    return f"{(snapshot or {'service': {}})['service'].get(tenant['id'], 0.0):.0f}", ""


def _of(limit: Any) -> str:
    return "" if limit is None else f"/{limit}"


_COLUMNS: Final[dict[Tab, tuple[Column, ...]]] = {
    "requests": (
        ("ID", lambda row, _: (row["id"][-8:], ""), 8, False, 0),
        ("TENANT", lambda row, _: (row["tenant"], ""), 8, False, 2),
        ("MODEL", lambda row, _: (row["model"], ""), 8, False, 3),
        ("STATE", lambda row, _: _state_of(row), 7, False, 0),
        ("WHERE", lambda row, _: (" ".join(where_of(row)), ""), 21, False, 5),
        ("AGE", lambda row, _: (span(row["age"]), ""), 6, True, 0),
        ("TOKENS", lambda row, _: (_count(row["tokens"]["generated"]), ""), 6, True, 0),
        ("BUFFERED", lambda row, _: (size(row["buffered_bytes"]), ""), 9, True, 0),
    ),
    "workers": (
        ("WORKER", lambda row, _: (row["id"], "bold"), 12, False, 2),
        ("STATE", lambda row, _: _worker_state(row), 9, False, 0),
        ("HELD", lambda row, _: (str(row["held"]), ""), 5, True, 0),
        ("DRAINING", lambda row, _: (str(row["draining"]), "warn" if row["draining"] else ""), 8, True, 0),
        ("FREE", lambda row, _: (str(row["free"]), ""), 5, True, 0),
        ("SLOTS", lambda row, _: (str(row["slots"]), ""), 5, True, 0),
        ("", lambda row, _: ("", ""), 1, False, 0),
        ("BREAKERS NOT CLOSED", lambda row, _: _breakers_of(row), 19, False, 3),
    ),
    "tenants": (
        ("TENANT", lambda row, _: (row["id"], "bold"), 14, False, 2),
        ("", lambda row, _: ("frozen" if row["frozen"] else "", "warn"), 6, False, 0),
        ("RUNNING", lambda row, _: (f"{row['running']}{_of(row['max_concurrency'])}", ""), 10, True, 0),
        ("WAITING", lambda row, _: (f"{row['queued']}{_of(row['max_queued'])}", ""), 10, True, 0),
        ("TOKENS/S", _service_of, 8, True, 0),
        ("WEIGHT", lambda row, _: (f"{row['weight']:g}", ""), 6, True, 0),
        ("COUNTER", lambda row, _: (f"{row['counter']:.0f}", ""), 9, True, 0),
    ),
}


def _count(number: int | None) -> str:
    return NOTHING if number is None else str(number)


def _act(tab: Tab, key: str, row: Row) -> Act | None:
    """Answer what a key does to a row, before it is asked back."""
    name, found = row["id"], None
    match tab, key:
        case "requests", "c" if row["state"] != "ended":
            found = ("/requests/{}/cancel", f"Cancel request {name} of {row['tenant']}?")
        case "workers", "d" if row["operator"] == "none":
            found = ("/workers/{}/drain", f"Drain worker {name}? What runs goes on.")
        case "workers", "d":
            found = ("/workers/{}/resume", f"Resume worker {name}?")
        case "workers", "x":
            found = ("/workers/{}/eject", f"Eject worker {name}? What runs there ends.")
        case "workers", "b":
            found = ("/workers/{}/breakers/reset", f"Reset all breakers of {name}?")
        case "tenants", "z":
            verb = "thaw" if row["frozen"] else "freeze"
            found = (f"/tenants/{{}}/{verb}", f"{verb.capitalize()} tenant {name}?")
        case "tenants", "c":
            found = ("/tenants/{}/cancel", f"Cancel all requests of {name}?")
    return None if found is None else Act(found[0].format(name), found[1])


# Cells ------------------------------------------------------------------------------------------------------


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Share out the cells of a line; one stays free between two columns."""
    widths = [least for _, _, least, _, _ in columns]
    spare = max(0, width - sum(widths) - len(columns) + 1)
    parts = sum(part for *_, part in columns)
    return [least + spare * part // parts for least, (*_, part) in zip(widths, columns, strict=True)]


def _cell(text: str, width: int, right: bool) -> str:
    if cell_len(text) > width:
        text = set_cell_size(text, max(0, width - 1)) + "~"
    gap = " " * (width - cell_len(text))
    return f"{gap}{text} " if right else f"{text}{gap} "


def _fit(line: Sequence[Piece], width: int) -> list[Piece]:
    """Cut a line where the terminal ends."""
    fitted: list[Piece] = []
    for text, style in line:
        left = width - sum(cell_len(piece) for piece, _ in fitted)
        if left <= 0:
            break
        fitted.append((text if cell_len(text) <= left else set_cell_size(text, left), style))
    return fitted
