"""What a store answers is read or refused, whatever it is: who reaches it could else end every replica."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from trio_gateway.cluster import Member, Survey, decode_reply

ANSWER: Final[dict[str, Any]] = {
    "state": "joined",
    "epoch": 3,
    "live": 2,
    "grants": [
        {"number": 1, "grant": {"want": "w", "worker": "worker:a", "takes": {"worker:a": 1}, "cost": 1.5}}
    ],
    "rates": {"acme": 5},
    "settling": False,
    "version": 2,
    "contended": True,
    "born": "1700000000000",
    "members": ["a", "b"],
    "marks": {"frozen:acme": "1"},
    "news": {"spared:w\nm": {"value": "", "rank": "", "left": 1500}},
    "seen": 4,
}
ODD: Final[tuple[Any, ...]] = (
    *(None, 0, -1, 1.5, 1e300, True, "", "x", "9" * 5000),
    *([], [1], ["a"], [[1]], [{}], {}, {"a": 1}, {"a": None}, {"a": []}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Name each place in a value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def with_odd(path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    changed = copy.deepcopy(ANSWER)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return changed


def hear(answer: bytes) -> None:
    """Read an answer, and have a replica hear it and tell what it has then."""
    member = Member("a", 1.0)
    member.turn(Survey({}, {}, {}))
    heard = member.hear(decode_reply(answer))
    # What is used of it is of the types that it should be.
    texts = [*heard.marks.items(), *((each.want, each.worker) for each in heard.grants)]
    texts += [(name, news.value) for name, news in heard.news.items()]
    for pair in texts:
        "".join(pair).encode()
    told = json.loads(member.turn(Survey({}, {}, {})).encode(), parse_constant=pytest.fail)
    assert told["replica"] == "a"


def test_an_answer_is_heard() -> None:
    hear(json.dumps(ANSWER).encode())


@pytest.mark.parametrize("path", list(places(ANSWER)), ids=repr)
def test_whatever_stands_anywhere_in_an_answer_is_heard_or_refused(path: tuple[Any, ...]) -> None:
    for odd in ODD:
        try:
            hear(json.dumps(with_odd(path, odd)).encode())
        except ValueError:
            continue


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"state":"joined","x":' + b"[" * 100_000,
        b'{"state":"elsewhere"}',
        json.dumps(ANSWER).replace("1.5", "NaN").encode(),
        json.dumps(ANSWER).replace("1.5", "1e999").encode(),
        json.dumps(ANSWER).encode().replace(b"worker:a", b"\xed\xa0\x80"),  # half of a surrogate pair
    ],
    ids=lambda answer: repr(answer[:30]),
)
def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_reply(answer)


def test_large_numbers_are_read_as_lua_writes_them() -> None:
    answer = json.dumps(ANSWER).replace('"seen": 4', '"seen": 1e+15').encode()
    assert decode_reply(answer).seen == 10**15


@pytest.mark.parametrize("empty", [[], {}])
def test_lua_tells_no_empty_list_from_an_empty_map(empty: object) -> None:
    answer = {**ANSWER, "grants": empty, "members": empty}
    read = decode_reply(json.dumps(answer).encode())
    assert (read.grants, read.members) == ((), ())
