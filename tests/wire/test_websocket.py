"""Frames of a WebSocket, read and written, beside a library that does both."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Message, Ping, Pong, TextMessage

from tests.e2e.sockets import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, close_payload, frame
from trio_gateway.wire import (
    Close,
    Heard,
    RequestHead,
    SocketReader,
    accept_of,
    close_frame,
    offered_protocols,
    parse_request_head,
    ping_frame,
    text_frame,
    upgrade_fault,
    wants_upgrade,
)
from trio_gateway.wire._websocket import REASON_BYTES, SocketEvent, control_frame

MOST = 1000
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def read(data: bytes, most: int = MOST) -> list[SocketEvent]:
    return SocketReader(most).feed(data)


# Reading ----------------------------------------------------------------------------------------------------


@st.composite
def fragmented(draw: st.DrawFn, text: str) -> bytes:
    """A text message in any fragments, with any control frames between them."""
    data = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    found = b""
    for number, piece in enumerate(pieces):
        mask = draw(st.binary(min_size=4, max_size=4))
        opcode = CONTINUATION if number else TEXT
        found += frame(opcode, piece, fin=number == len(pieces) - 1, mask=mask)
        if number < len(pieces) - 1 and draw(st.booleans()):
            found += frame(draw(st.sampled_from([PING, PONG])), draw(st.binary(max_size=125)))
    return found


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[str], bytes]:
    """Messages, and the bytes that carry them."""
    texts = draw(st.lists(TEXTS, max_size=4))
    return texts, b"".join(draw(fragmented(text)) for text in texts)


def pieces_of(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    ends = sorted(cut for cut in cuts if cut < len(data))
    return (data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True))


@given(conversations(), st.lists(st.integers(0, 600), max_size=20))
def test_any_fragments_and_any_split_of_bytes_give_the_same_events(
    conversation: tuple[list[str], bytes], cuts: list[int]
) -> None:
    texts, data = conversation
    reader = SocketReader(MOST)
    events = [event for piece in pieces_of(data, cuts) for event in reader.feed(piece)]
    assert events == read(data)
    assert [event for event in events if isinstance(event, str)] == texts


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=10))
def test_any_bytes_in_any_split_are_judged_alike(data: bytes, cuts: list[int]) -> None:
    reader = SocketReader(MOST)
    events = [event for piece in pieces_of(data, cuts) for event in reader.feed(piece)]
    assert events == read(data)
    assert all(not isinstance(event, Close) for event in events[:-1])


def test_control_frames_are_heard_in_the_middle_of_a_message() -> None:
    data = frame(TEXT, b"a", fin=False) + frame(PING, b"p") + frame(PONG, b"q") + frame(CONTINUATION, b"b")
    assert read(data) == [Heard(b"p", b"\x8a\x01p"), Heard(b"q", b""), "ab"]


@pytest.mark.parametrize("pieces", [[b"x" * 11], [b"x" * 6, b"x" * 5], ["äöüäöü".encode()]])
def test_a_message_over_its_bound_ends_the_socket(pieces: list[bytes]) -> None:
    data = b"".join(
        frame(CONTINUATION if number else TEXT, piece, fin=number == len(pieces) - 1)
        for number, piece in enumerate(pieces)
    )
    assert read(data, 10) == [Close(1009, "a message is over 10 bytes", fault=True)]


def test_messages_up_to_their_bound_are_read_one_after_the_other() -> None:
    assert read(frame(TEXT, b"x" * 10) * 3, 10) == ["x" * 10] * 3


def test_a_message_over_its_bound_is_not_waited_for() -> None:
    reader = SocketReader(10)
    assert reader.feed(frame(TEXT, b"x" * 11, length=1 << 40)) == [
        Close(1009, "a message is over 10 bytes", fault=True)
    ]


def test_nothing_is_read_behind_an_end() -> None:
    reader = SocketReader(MOST)
    assert reader.feed(frame(BINARY, b"x") + frame(TEXT, b"x")) == [
        Close(1003, "messages are text", fault=True)
    ]
    assert reader.feed(frame(TEXT, b"x")) == []
    assert SocketReader(MOST).feed(frame(BINARY, b"") + b"x" * 40_000) == [
        Close(1003, "messages are text", fault=True)
    ]


@pytest.mark.parametrize(
    ("payload", "close"),
    [
        (b"", Close(1000, "", fault=False)),
        (close_payload(1001), Close(1001, "", fault=False)),
        (close_payload(4999, "tschüss".encode()), Close(4999, "tschüss", fault=False)),
    ],
)
def test_a_close_of_the_other_side_is_no_fault(payload: bytes, close: Close) -> None:
    assert read(frame(CLOSE, payload)) == [close]


def test_what_has_come_of_a_message_takes_no_more_memory_than_its_bytes() -> None:
    reader = SocketReader(1 << 20)
    data = frame(TEXT, ("\N{GRINNING FACE}" + "a" * 900).encode() * 500, fin=False)
    tracemalloc.start()
    for at in range(0, len(data), 2048):
        assert reader.feed(data[at : at + 2048]) == []
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert reader.held > 400_000
    assert used < 1.5 * reader.held


# Writing ----------------------------------------------------------------------------------------------------


def read_by_library(data: bytes) -> list[Event]:
    client = Connection(ConnectionType.CLIENT)
    client.receive_data(data)
    return list(client.events())


@given(TEXTS | st.sampled_from(["x" * size for size in (0, 125, 126, 127, 65535, 65536, 70_000)]))
def test_a_message_is_written_as_one_frame_that_others_read(text: str) -> None:
    events = read_by_library(text_frame(text.encode()))
    assert all(isinstance(event, TextMessage) for event in events)
    messages = [event for event in events if isinstance(event, Message)]
    assert "".join(str(event.data) for event in messages) == text
    assert [event.message_finished for event in messages][-1:] == [True]


@given(st.binary(max_size=125))
def test_control_frames_are_written_as_others_read_them(payload: bytes) -> None:
    assert read_by_library(ping_frame(payload)) == [Ping(payload)]
    assert read_by_library(control_frame(0x8A, payload)) == [Pong(payload)]


@given(st.sampled_from([1000, 1001, 1009, 4400]), st.text(max_size=200))
def test_a_reason_is_cut_between_two_characters(code: int, reason: str) -> None:
    (event,) = read_by_library(close_frame(code, reason))
    assert isinstance(event, CloseConnection)
    said = event.reason or ""
    assert event.code == code
    assert len(said.encode()) <= REASON_BYTES
    whole = reason.encode(errors="replace").decode()
    assert whole.startswith(said)
    assert said == whole or len(said.encode()) > REASON_BYTES - 4


def test_binary_frames_of_a_library_are_none_of_ours() -> None:
    client = Connection(ConnectionType.CLIENT)
    (event,) = read(client.send(BytesMessage(b"x")))
    assert event == Close(1003, "messages are text", fault=True)


# Handshakes -------------------------------------------------------------------------------------------------

GOOD = {
    "host": "h",
    "upgrade": "websocket",
    "connection": "Upgrade",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def head_of(*lines: str, version: str = "1.1", **changed: str | None) -> RequestHead:
    """A handshake with some headers changed, left out, or added as lines."""
    headers = {**GOOD, **{name.replace("_", "-"): value for name, value in changed.items()}}
    shown = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    text = "\r\n".join([f"GET /v1/tokens HTTP/{version}", *shown, *lines, "", ""])
    return parse_request_head(text.encode("latin-1"), 100)


def test_the_example_of_the_standard_is_accepted_as_it_says() -> None:
    head = head_of()
    assert wants_upgrade(head)
    assert upgrade_fault(head) is None
    assert accept_of(head) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


@pytest.mark.parametrize("value", ["WebSocket", "h2c, websocket", "  websocket  "])
def test_who_asks_for_a_socket_among_others_asks_for_one(value: str) -> None:
    assert wants_upgrade(head_of(upgrade=value))


@pytest.mark.parametrize("value", [None, "h2c", "websockets"])
def test_who_asks_for_something_else_asks_for_none(value: str | None) -> None:
    assert not wants_upgrade(head_of(upgrade=value))


@pytest.mark.parametrize(
    "head",
    [
        head_of(version="1.0"),
        head_of(connection="keep-alive"),
        head_of(connection=None),
        head_of(sec_websocket_version="12"),
        head_of(sec_websocket_version=None),
        head_of("sec-websocket-version: 13"),
        head_of(sec_websocket_key=None),
        head_of(sec_websocket_key="AAAA"),
        head_of(sec_websocket_key="not base 64 at all, though long"),
        head_of("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="),
        head_of("content-length: 1"),
        head_of("transfer-encoding: chunked"),
        head_of("sec-websocket-protocol: \xe4"),
        head_of("sec-websocket-extensions: \xff"),
    ],
)
def test_a_handshake_that_breaks_the_rules_has_its_fault_named(head: RequestHead) -> None:
    assert upgrade_fault(head)


def test_extensions_are_offered_in_vain() -> None:
    assert upgrade_fault(head_of("sec-websocket-extensions: permessage-deflate")) is None


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ([], []),
        (["sec-websocket-protocol: a"], ["a"]),
        (["sec-websocket-protocol: a, b ,, c"], ["a", "b", "c"]),
        (["sec-websocket-protocol: a", "sec-websocket-protocol: b"], ["a", "b"]),
    ],
)
def test_offered_protocols_are_read_in_their_order(lines: list[str], names: list[str]) -> None:
    assert offered_protocols(head_of(*lines)) == names


# The table --------------------------------------------------------------------------------------------------

Case = tuple[str, bytes, Sequence[object]]


def pings(*payloads: bytes) -> Sequence[object]:
    return [(payload, control_frame(0x8A, payload)) for payload in payloads]


def text(*pieces: bytes) -> bytes:
    """A message in these fragments."""
    last = len(pieces) - 1
    return b"".join(frame(CONTINUATION if n else TEXT, p, fin=n == last) for n, p in enumerate(pieces))


GREETING = "Hello-µ@ßöäüàá-UTF-8!!"
KOSME = "κόσμε"
BAD_IN_THE_MIDDLE = KOSME.encode() + b"\xed\xa0\x80edited"
FIRST, SECOND = frame(TEXT, b"fragment1", fin=False), frame(CONTINUATION, b"fragment2")
VALID_CLOSES = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999)
INVALID_CLOSES = (0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999, 5000, 65535)
# What the suite calls valid in 6.5 to 6.19 and 6.22, in UTF-8.
VALID_TEXTS = (
    KOSME,
    "\x00",
    "\x80",
    "ࠀ",
    "\U00010000",
    "\x7f",
    "\u07ff",
    "\uffff",
    "\U0010ffff",
    "\ud7ff",
    "\ue000",
    "\ufffd",
    "\ufffe",
    "\U0001fffe\U0001ffff\U0010fffe",
    "Hello-µ@ßöäüàá-UTF-8!!",
)
# 6.3, 6.4, 6.6, 6.8, 6.10, 6.12 to 6.18, 6.20, 6.21: no UTF-8, or none that anybody may write.
INVALID_TEXTS = (
    BAD_IN_THE_MIDDLE,
    KOSME.encode() + b"\xf4\x90\x80\x80edited",
    b"\xce",
    b"\xce\xba\xe1",
    b"\xf8\x88\x80\x80\x80",
    b"\xfc\x84\x80\x80\x80\x80",
    b"\xf7\xbf\xbf\xbf",
    b"\xfb\xbf\xbf\xbf\xbf",
    b"\xfd\xbf\xbf\xbf\xbf\xbf",
    b"\xf4\x90\x80\x80",
    b"\x80",
    b"\xbf",
    b"\x80\xbf\x80\xbf",
    bytes(range(0x80, 0xC0)),
    b"\xc0 \xc1 \xc2 ",
    b"\xe0 \xe1 ",
    b"\xf0 \xf1 ",
    b"\xc0",
    b"\xe0\x80",
    b"\xf0\x80\x80",
    b"\xdf",
    b"\xef\xbf",
    b"\xf7\xbf\xbf",
    b"\xfe",
    b"\xff",
    b"\xfe\xfe\xff\xff",
    b"\xc0\xaf",
    b"\xe0\x80\xaf",
    b"\xf0\x80\x80\xaf",
    b"\xc1\xbf",
    b"\xe0\x9f\xbf",
    b"\xf0\x8f\xbf\xbf",
    b"\xc0\x80",
    b"\xe0\x80\x80",
    b"\xf0\x80\x80\x80",
    b"\xed\xa0\x80",
    b"\xed\xad\xbf",
    b"\xed\xb0\x80",
    b"\xed\xbf\xbf",
    b"\xed\xa0\x80\xed\xb0\x80",
)

# Autobahn's cases 1 to 7, as far as they are about text: its numbers, what the client sends, and what has
# to be heard: messages, pings with their pongs, and the code of a close.
CASES: list[Case] = [
    *((f"1.1 {n}", text(b"*" * n), ["*" * n]) for n in (0, 125, 126, 127, 128, 65535, 65536)),
    ("1.2 binary", frame(BINARY, b"\xfe"), [1003]),
    ("2.1", frame(PING), pings(b"")),
    ("2.2", frame(PING, b"Hello, world!"), pings(b"Hello, world!")),
    ("2.3", frame(PING, b"\x00\xff\xfe\xfd"), pings(b"\x00\xff\xfe\xfd")),
    ("2.4", frame(PING, b"\xfe" * 125), pings(b"\xfe" * 125)),
    ("2.5", frame(PING, b"\xfe" * 126), [1002]),
    ("2.7", frame(PONG), [(b"", b"")]),
    ("2.8", frame(PONG, b"unsolicited"), [(b"unsolicited", b"")]),
    ("2.9", frame(PONG, b"u") + frame(PING, b"p"), [(b"u", b""), *pings(b"p")]),
    ("2.10", b"".join(frame(PING, b"%d" % n) for n in range(10)), pings(*(b"%d" % n for n in range(10)))),
    *((f"3 reserved {bits}", frame(TEXT, b"x", reserved=bits), [1002]) for bits in range(1, 8)),
    ("3.2", text(b"ok") + frame(TEXT, b"x", reserved=2) + frame(PING), ["ok", 1002]),
    ("3.6", frame(PING, b"x", reserved=6), [1002]),
    ("3.7", frame(CLOSE, reserved=7), [1002]),
    *((f"4.1 opcode {code}", frame(code), [1002]) for code in range(3, 8)),
    *((f"4.2 opcode {code}", text(b"ok") + frame(code, b"x"), ["ok", 1002]) for code in range(11, 16)),
    ("5.1", frame(PING, b"a", fin=False) + frame(CONTINUATION, b"b"), [1002]),
    ("5.2", frame(PONG, b"a", fin=False) + frame(CONTINUATION, b"b"), [1002]),
    ("5.3", FIRST + SECOND, ["fragment1fragment2"]),
    ("5.6", FIRST + frame(PING, b"p") + SECOND, [*pings(b"p"), "fragment1fragment2"]),
    ("5.9", frame(CONTINUATION, b"x") + text(b"ok"), [1002]),
    ("5.12", frame(CONTINUATION, b"x", fin=False) + text(b"ok"), [1002]),
    (
        "5.15",
        FIRST + SECOND + frame(CONTINUATION, b"x", fin=False) + text(b"x"),
        ["fragment1fragment2", 1002],
    ),
    ("5.18", FIRST + frame(TEXT, b"fragment2"), [1002]),
    ("5.19", text(b"a", b"b", b"c") + frame(PING, b"p") + text(b"d", b"e"), ["abc", *pings(b"p"), "de"]),
    ("6.1", text() + text(b"", b"", b"") + text(b"", b"middle", b""), ["", "middle"]),
    ("6.2.1", text(GREETING.encode()), [GREETING]),
    ("6.2.3", text(*(bytes([byte]) for byte in GREETING.encode())), [GREETING]),
    ("6.2.4", text(*(bytes([byte]) for byte in KOSME.encode())), [KOSME]),
    ("6.4.1", text(KOSME.encode(), b"\xf4\x90\x80\x80", b"edited"), [1007]),
    (
        "6.4.2 at once",
        frame(TEXT, KOSME.encode(), fin=False) + frame(CONTINUATION, b"\xf4\x90", length=12),
        [1007],
    ),
    *((f"6 valid {value!r}", text(value.encode()), [value]) for value in VALID_TEXTS),
    *((f"6 invalid {value!r}", text(value), [1007]) for value in INVALID_TEXTS),
    ("7.1.1", text(b"ok") + frame(CLOSE), ["ok", 1000]),
    ("7.1.2", frame(CLOSE) + frame(CLOSE), [1000]),
    ("7.1.3", frame(CLOSE) + frame(PING), [1000]),
    ("7.1.4", frame(CLOSE) + text(b"x"), [1000]),
    ("7.1.5", FIRST + frame(CLOSE) + SECOND, [1000]),
    ("7.3.1", frame(CLOSE, b""), [1000]),
    ("7.3.2", frame(CLOSE, b"a"), [1002]),
    ("7.3.3", frame(CLOSE, close_payload(1000)), [1000]),
    ("7.3.4", frame(CLOSE, close_payload(1000, b"Hello World!")), [1000]),
    ("7.3.5", frame(CLOSE, close_payload(1000, b"*" * 123)), [1000]),
    ("7.3.6", frame(CLOSE, close_payload(1000, b"*" * 124)), [1002]),
    ("7.5.1", frame(CLOSE, close_payload(1000, BAD_IN_THE_MIDDLE)), [1007]),
    *((f"7.7 {code}", frame(CLOSE, close_payload(code)), [code]) for code in VALID_CLOSES),
    *((f"7.9 {code}", frame(CLOSE, close_payload(code)), [1002]) for code in INVALID_CLOSES),
    ("unmasked", frame(TEXT, b"x", mask=None), [1002]),
    ("longer than needed", struct.pack("!BBH", 0x81, 0xFE, 1) + b"\0\0\0\0x", [1002]),
    ("much longer than needed", struct.pack("!BBQ", 0x81, 0xFF, 1) + b"\0\0\0\0x", [1002]),
    ("longer than anything", struct.pack("!BBQ", 0x81, 0xFF, 1 << 63), [1002]),
]


def heard(events: Sequence[SocketEvent]) -> list[object]:
    """Say events as the table does."""
    return [
        event.code if isinstance(event, Close) else event if isinstance(event, str) else tuple(event)
        for event in events
    ]


@pytest.mark.parametrize("chop", [None, 997, 1])
@pytest.mark.parametrize(("name", "data", "wanted"), CASES, ids=[name for name, _, _ in CASES])
def test_the_case(name: str, data: bytes, wanted: Sequence[object], chop: int | None) -> None:
    reader = SocketReader(1 << 20)
    size = chop or len(data)
    if chop == 1 and len(data) > 2000:
        return
    events = [event for at in range(0, len(data), size) for event in reader.feed(data[at : at + size])]
    assert heard(events) == wanted
