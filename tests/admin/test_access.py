"""Who comes in at the operators' door: by token, by the name of the listener, and from no other page."""

from __future__ import annotations

import pytest

from tests.admin.door import OPERATOR, TOKENS, VIEWER, token
from trio_gateway.admin import LOCAL, Access
from trio_gateway.admin._access import UNIX
from trio_gateway.errors import Refused
from trio_gateway.tenancy import FAILURES_A_MINUTE

PEER = "192.0.2.1"


def page_code(access: Access, *headers: tuple[bytes, bytes], address: str = PEER) -> str | None:
    try:
        access.check_page(list(headers), address)
    except Refused as refused:
        return refused.problem.code
    return None


@pytest.mark.parametrize(
    "host",
    [
        b"localhost",
        b"localhost:9090",
        b"LOCALHOST:1",
        b"127.0.0.1:9090",
        b"10.1.2.3",
        b"[::1]:9090",
        b"[2001:db8::1]",
        b"admin.example",
        b"Admin.Example:443",
    ],
)
def test_a_name_or_address_of_this_listener_is_let_in(host: bytes) -> None:
    assert page_code(Access(hosts=["admin.example"]), (b"host", host)) is None


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example",
        b"evil.example:9090",
        b"localhost.evil.example",
        b"127.0.0.1.evil.example",
        b"127.1",
        b"2130706433",
        b"::1",
        b"[::1",
        b"[::1]evil.example",
        b"[::1%25eth0]",
        b"",
        b":9090",
        b"localhost:9090:1",
        b"localhost:x",
        b"evil.example/localhost",
        b"user@localhost",
        b"\xff",
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(host: bytes) -> None:
    assert page_code(Access(hosts=["admin.example"]), (b"host", host)) == "host_not_allowed"


def test_a_request_without_a_host_is_refused_but_on_a_unix_socket() -> None:
    assert page_code(Access()) == "host_not_allowed"
    assert page_code(Access(), address=UNIX) is None
    assert page_code(Access(), (b"host", b"gateway"), address=UNIX) is None


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        (b"http://localhost:9090", None),
        (b"https://LOCALHOST:9090", None),
        (b"http://localhost:3000", "origin_not_allowed"),
        (b"http://localhost", "origin_not_allowed"),
        (b"http://127.0.0.1:9090", "origin_not_allowed"),
        (b"https://evil.example", "origin_not_allowed"),
        (b"null", "origin_not_allowed"),
        (b"", "origin_not_allowed"),
    ],
)
def test_only_a_page_of_the_same_origin_may_ask(origin: bytes, code: str | None) -> None:
    assert page_code(Access(), (b"host", b"localhost:9090"), (b"origin", origin)) == code


def test_a_null_origin_is_refused_where_there_is_no_host_either() -> None:
    assert page_code(Access(), (b"origin", b"null"), address=UNIX) == "origin_not_allowed"


@pytest.mark.parametrize(
    ("site", "mode", "code"),
    [
        (b"same-origin", b"cors", None),
        (b"none", b"navigate", None),
        (b"cross-site", b"navigate", None),
        (b"cross-site", b"no-cors", "origin_not_allowed"),
        (b"same-site", b"cors", "origin_not_allowed"),
    ],
)
def test_what_browsers_say_of_the_asking_page_counts(site: bytes, mode: bytes, code: str | None) -> None:
    headers = ((b"host", b"localhost"), (b"Sec-Fetch-Site", site), (b"sec-fetch-mode", mode))
    assert page_code(Access(), *headers) == code


@pytest.mark.parametrize("name", [b"host", b"authorization"])
def test_what_two_readers_could_read_differently_is_refused(name: bytes) -> None:
    assert page_code(Access(), (b"host", b"localhost"), (name, b"a"), (name, b"a")) == "bad_request"


def who(access: Access, value: bytes | None, address: str = PEER, now: float = 0.0) -> tuple[str, str]:
    headers = [] if value is None else [(b"Authorization", value)]
    try:
        return access.who(headers, address, now)
    except Refused as refused:
        return "refused", refused.problem.code


def test_without_tokens_whoever_can_connect_is_an_operator() -> None:
    assert who(Access(), None) == who(Access(), b"Bearer x") == (LOCAL, "operator")


def test_where_other_machines_come_nobody_is_let_in_because_the_last_token_was_taken_away() -> None:
    access = Access(TOKENS, local=False)
    access.admit(())
    assert who(access, None) == ("refused", "invalid_admin_token")
    assert access.asks_for_a_token([])
    access.admit(TOKENS[1:])
    assert who(access, b"Bearer " + OPERATOR.encode()) == ("refused", "invalid_admin_token")
    assert who(access, b"Bearer " + VIEWER.encode()) == ("eyes", "viewer")


def test_a_token_has_its_name_and_role() -> None:
    access = Access(TOKENS)
    assert who(access, b"Bearer " + OPERATOR.encode()) == ("ops", "operator")
    assert who(access, b"bearer  " + VIEWER.encode()) == ("eyes", "viewer")


@pytest.mark.parametrize(
    "value", [None, b"", b"Bearer", b"Bearer ", b"Bearer x", b"Basic " + OPERATOR.encode(), OPERATOR.encode()]
)
def test_anything_else_is_no_token(value: bytes | None) -> None:
    assert who(Access(TOKENS), value) == ("refused", "invalid_admin_token")


def test_an_empty_token_is_none_even_where_one_was_configured() -> None:
    assert who(Access([token("empty", "", "operator")]), b"Bearer ") == ("refused", "invalid_admin_token")


def test_who_guesses_is_told_to_wait_and_a_good_token_from_there_is_still_good() -> None:
    access = Access(TOKENS)
    codes = [who(access, b"Bearer guess")[1] for _ in range(FAILURES_A_MINUTE + 1)]
    assert codes == ["invalid_admin_token"] * FAILURES_A_MINUTE + ["rate_limit_exceeded"]
    assert who(access, b"Bearer " + OPERATOR.encode()) == ("ops", "operator")
    assert who(access, b"Bearer guess", "192.0.2.2")[1] == "invalid_admin_token"
    assert who(access, b"Bearer guess", now=60.0)[1] == "invalid_admin_token"
