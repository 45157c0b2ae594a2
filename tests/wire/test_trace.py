"""What of a caller's trace is passed on to engines, by W3C Trace Context."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.wire import trace_context

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
PARENT = b"00-" + TRACE + b"-" + SPAN + b"-01"
PASSED = (b"traceparent", PARENT)


def test_a_trace_passes_as_it_came() -> None:
    assert trace_context([PARENT], []) == (PASSED,)
    state = b"rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
    assert trace_context([PARENT], [state]) == (PASSED, (b"tracestate", state))


@pytest.mark.parametrize(
    "parent",
    [
        b"",
        PARENT[:-1],
        PARENT + b"0",
        PARENT + b"-",
        PARENT + b"-00",
        b"00-" + TRACE + b"-" + SPAN,
        b"ff-" + TRACE + b"-" + SPAN + b"-01",
        b"ff-" + TRACE + b"-" + SPAN + b"-01-x",
        b"00-" + b"0" * 32 + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + b"0" * 16 + b"-01",
        PARENT.upper(),
        b"00-" + TRACE + b"-" + SPAN + b"-1g",
        b"0-" + TRACE + b"-" + SPAN + b"-01",
        b"00_" + TRACE + b"_" + SPAN + b"_01",
        b"00-" + TRACE[1:] + b"-" + SPAN + b"0-01",
        PARENT + b"\n",
        b" " + PARENT,
        b"01-" + TRACE + b"-" + SPAN + b"-01x",
        b"01-" + TRACE + b"-" + SPAN + b"-010",
        PARENT.replace(b"4", b"\xb2"),
    ],
)
def test_an_invalid_parent_is_dropped_and_its_state_with_it(parent: bytes) -> None:
    assert trace_context([parent], []) == ()
    assert trace_context([parent], [b"a=1"]) == ()


def test_only_one_parent_is_one() -> None:
    assert trace_context([], [b"a=1"]) == ()
    assert trace_context([PARENT, PARENT], [b"a=1"]) == ()


@pytest.mark.parametrize("rest", [b"", b"-", b"-what\xff-ever"])
@pytest.mark.parametrize(("flags", "known"), [(b"00", b"00"), (b"01", b"01"), (b"fe", b"00"), (b"ff", b"01")])
def test_a_later_version_is_passed_on_as_the_known_one(rest: bytes, flags: bytes, known: bytes) -> None:
    later = b"cc-" + TRACE + b"-" + SPAN + b"-" + flags + rest
    assert trace_context([later], []) == ((b"traceparent", b"00-" + TRACE + b"-" + SPAN + b"-" + known),)


@pytest.mark.parametrize(
    "state",
    [
        b"a=1",
        b"a=1,b=2",
        b"a=1 , \tb=2",
        b",a=1,,b=2,",
        b"0a@b=1",
        b"a_-*/=1",
        b"a= !~",
        b"a" * 256 + b"=1",
        b"a=" + b"x" * 256,
        b",".join(b"k%d=1" % number for number in range(32)),
        b"a=" + b"x" * 250 + b",b=" + b"x" * 256 + b" " * 1,
    ],
)
def test_a_valid_state_passes_as_it_came(state: bytes) -> None:
    assert trace_context([PARENT], [state]) == (PASSED, (b"tracestate", state))


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b" , ",
        b"a",
        b"a=",
        b"=1",
        b"A=1",
        b"a=1;b=2,c",
        b"a=1=2",
        b"a=1,a=2",
        b"a b=1",
        b"a=\xff",
        b"a=\x7f",
        b"_a=1",
        b"a" * 257 + b"=1",
        b"a=" + b"x" * 257,
        b",".join(b"k%d=1" % number for number in range(33)),
        b"a=" + b"x" * 250 + b",b=" + b"x" * 256 + b" " * 2,
    ],
)
def test_an_invalid_or_too_long_state_is_dropped_whole_and_its_parent_stays(state: bytes) -> None:
    assert trace_context([PARENT], [state]) == (PASSED,)


def test_states_in_several_headers_are_one() -> None:
    assert trace_context([PARENT], [b"a=1", b"b=2"]) == (PASSED, (b"tracestate", b"a=1,b=2"))
    assert trace_context([PARENT], [b"a=1", b"a=2"]) == (PASSED,)
    assert trace_context([PARENT], [b"a=" + b"x" * 255, b"b=" + b"x" * 256]) == (PASSED,)


_LOWER_HEX = st.text(string.digits + "abcdef", min_size=1, max_size=34).map(str.encode)


@given(
    st.lists(
        st.one_of(st.just(PARENT), st.binary(max_size=60), st.lists(_LOWER_HEX).map(b"-".join)), max_size=2
    ),
    st.lists(st.binary(max_size=300), max_size=3),
)
def test_what_passes_is_printable_and_short(parents: list[bytes], states: list[bytes]) -> None:
    for name, value in trace_context(parents, states):
        assert value.isascii()
        assert value.decode().replace("\t", " ").isprintable()
        assert len(value) == 55 if name == b"traceparent" else 0 < len(value) <= 512
