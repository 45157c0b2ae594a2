"""Who is at the other end: what trusted proxies say, and nothing that anybody else could have written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.config import parse_network
from trio_gateway.edge._client_address import client_of
from trio_gateway.wire import RequestHead, parse_request_head

TRUSTED = [parse_network("10.0.0.0/8"), parse_network("fd00::/8")]


def head(*lines: str) -> RequestHead:
    raw = "\r\n".join(("GET / HTTP/1.1", "Host: x", *lines, "", ""))
    return parse_request_head(raw.encode("latin-1"), 100)


def client(peer: str | None, *lines: str) -> str:
    return client_of(peer, head(*lines), TRUSTED)


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        (None, "unix socket"),
    ],
)
def test_without_proxies_the_client_is_the_connection(peer: str | None, name: str) -> None:
    assert client(peer, "X-Forwarded-For: 203.0.113.9", "Via: 1.1 proxy") == name


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("203.0.113.9:4711", "203.0.113.9"),
        ("[2001:db8::1]:4711", "2001:db8::/64"),
        ("2001:db8::1", "2001:db8::/64"),
        ("1.1.1.1, 203.0.113.9", "203.0.113.9"),
        ("1.1.1.1, 203.0.113.9, 10.2.2.2", "203.0.113.9"),
        ("10.3.3.3, 10.2.2.2", "10.3.3.3"),
        ("203.0.113.9, unknown, 10.2.2.2", "10.2.2.2"),
        ("203.0.113.9,", "10.1.1.1"),
        ("garbage", "10.1.1.1"),
        ("", "10.1.1.1"),
    ],
)
def test_a_trusted_proxy_is_believed_from_the_end_of_its_list(told: str, name: str) -> None:
    assert client("10.1.1.1", f"X-Forwarded-For: {told}") == name


def test_several_lines_are_one_list() -> None:
    lines = ("X-Forwarded-For: 1.1.1.1", "X-Forwarded-For: 203.0.113.9, 10.2.2.2")
    assert client("10.1.1.1", *lines) == "203.0.113.9"


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("for=203.0.113.9", "203.0.113.9"),
        ("For=203.0.113.9;proto=http;by=10.9.9.9", "203.0.113.9"),
        ("proto=http; for=203.0.113.9 ;by=10.9.9.9", "203.0.113.9"),
        ('for="[2001:db8::1]:4711"', "2001:db8::/64"),
        ("for=1.1.1.1, for=203.0.113.9", "203.0.113.9"),
        ("for=203.0.113.9, for=10.2.2.2", "203.0.113.9"),
        ("for=unknown", "10.1.1.1"),
        ("for=_hidden", "10.1.1.1"),
        ("by=203.0.113.9", "10.1.1.1"),
        ("xfor=203.0.113.9", "10.1.1.1"),
    ],
)
def test_the_standard_header_is_understood_too(told: str, name: str) -> None:
    assert client("10.1.1.1", f"Forwarded: {told}") == name


def test_where_both_headers_are_there_a_client_may_have_sent_one_and_neither_counts() -> None:
    lines = ("Forwarded: for=203.0.113.9", "X-Forwarded-For: 203.0.113.9")
    assert client("10.1.1.1", *lines) == "10.1.1.1"


WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)


@given(WORDS, WORDS)
def test_nobody_who_is_not_trusted_can_name_another(one: str, other: str) -> None:
    assert client("192.0.2.7", f"X-Forwarded-For: {one}", f"Forwarded: {other}") == "192.0.2.7"


@given(WORDS, st.sampled_from(["X-Forwarded-For: {}, 203.0.113.9", "Forwarded: {}, for=203.0.113.9"]))
def test_what_stands_before_the_trusted_part_of_a_list_changes_nothing(word: str, line: str) -> None:
    assert client("10.1.1.1", line.format(word)) == "203.0.113.9"
