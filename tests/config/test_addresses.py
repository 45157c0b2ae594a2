"""Where the gateway listens, where its workers are, and which web pages may call."""

from __future__ import annotations

import re
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.config import Bind, Endpoint, parse_bind, parse_network, parse_origin, parse_url
from trio_gateway.config._addresses import has_path


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("127.0.0.1:8080", Bind("127.0.0.1", 8080)),
        ("[::1]:8080", Bind("::1", 8080)),
        ("[0:0::1]:0", Bind("::1", 0)),
        ("LocalHost:65535", Bind("localhost", 65535)),
        ("0.0.0.0:80", Bind("0.0.0.0", 80)),
        ("gateway.internal:80", Bind("gateway.internal", 80)),
        ("unix:gw.sock", Bind(socket_path="gw.sock")),
        ("unix:/run/gw.sock", Bind(socket_path="/run/gw.sock")),
        ("unix:" + "x" * 107, Bind(socket_path="x" * 107)),
    ],
)
def test_an_address_to_listen_on_is_read(text: str, bind: Bind) -> None:
    assert parse_bind(text) == bind
    assert parse_bind(str(bind)) == bind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8080", 'must be "host:port", "[IPv6]:port" or "unix:path"'),
        (":8080", 'names no host: write "0.0.0.0:8080" or "[::]:8080" to listen everywhere'),
        ("*:8080", 'names no host: write "0.0.0.0:8080" or "[::]:8080" to listen everywhere'),
        ("::1:8080", "an IPv6 address needs brackets, as in [::1]:8080"),
        ("[::1%eth0]:8080", "has an IPv6 zone, which cannot be used here"),
        ("[127.0.0.1]:8080", "has no valid IPv6 address in its brackets"),
        ("[::1]", "an IPv6 address needs brackets, as in [::1]:8080"),
        ("127.0.0.256:1", "has no valid IPv4 address (four numbers from 0 to 255)"),
        ("127.1:1", "has no valid IPv4 address (four numbers from 0 to 255)"),
        ("a b:1", "has no valid host"),
        ("http://localhost:1", 'must be "host:port", "[IPv6]:port" or "unix:path"'),
        ("localhost:", "needs a port from 0 to 65535 after the last colon"),
        ("localhost:65536", "needs a port from 0 to 65535 after the last colon"),
        ("localhost:-1", "needs a port from 0 to 65535 after the last colon"),
        ("localhost:٨", "needs a port from 0 to 65535 after the last colon"),
        ("unix:", "names no socket file"),
        ("unix:/run/", "names no socket file"),
        ("unix:a\0b", "has a NUL byte in its path"),
        ("unix:" + "x" * 108, "has a socket path of more than 107 bytes, which no kernel accepts"),
        ("unix:" + "é" * 54, "has a socket path of more than 107 bytes, which no kernel accepts"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_refused_with_help(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_bind(text)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:gw.sock"])
def test_loopback_and_unix_sockets_are_local(text: str) -> None:
    assert parse_bind(text).local


@pytest.mark.parametrize(
    "text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "[fe80::1]:1", "gateway.internal:1", "localhost.example:1"]
)
def test_what_other_machines_can_reach_is_not_local(text: str) -> None:
    assert not parse_bind(text).local


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("http://127.0.0.1:8000", Endpoint("http", "127.0.0.1:8000", "127.0.0.1", 8000)),
        ("http://Engine.Test", Endpoint("http", "engine.test", "engine.test", 80)),
        ("http://engine.test:80/", Endpoint("http", "engine.test", "engine.test", 80)),
        ("http://engine.test:443", Endpoint("http", "engine.test:443", "engine.test", 443)),
        ("https://engine.test", Endpoint("https", "engine.test", "engine.test", 443)),
        ("HTTPS://engine.test:443", Endpoint("https", "engine.test", "engine.test", 443)),
        ("http://[::1]:8000", Endpoint("http", "[::1]:8000", "::1", 8000)),
        ("http://[0:0:0:0:0:0:0:1]", Endpoint("http", "[::1]", "::1", 80)),
        ("http://vllm_1:8000", Endpoint("http", "vllm_1:8000", "vllm_1", 8000)),
        ("http+unix:///run/e.sock", Endpoint("http+unix", "localhost", socket_path="/run/e.sock")),
        ("http+unix:///run/e%20x.sock", Endpoint("http+unix", "localhost", socket_path="/run/e x.sock")),
        ("http+unix:///run/%ff.sock", Endpoint("http+unix", "localhost", socket_path="/run/\udcff.sock")),
        ("http+unix:///run/v1", Endpoint("http+unix", "localhost", socket_path="/run/v1")),
    ],
)
def test_a_workers_url_is_taken_apart(text: str, endpoint: Endpoint) -> None:
    assert parse_url(text) == endpoint


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("", ""),
        ("/", ""),
        ("/v1", ""),
        ("/v1/", ""),
        ("/v1//", ""),
        ("//v1", ""),
        ("/openai", "/openai"),
        ("/openai/", "/openai"),
        ("/openai/v1", "/openai"),
        ("/openai/v1/", "/openai"),
        ("/v1/v1", "/v1"),
        ("/v10", "/v10"),
        ("/xv1", "/xv1"),
        ("/V1", "/V1"),
        ("/a%20b/v1", "/a%20b"),
        ("/a@b", "/a@b"),
    ],
)
def test_a_path_is_a_prefix_and_a_final_v1_is_left_out(path: str, prefix: str) -> None:
    assert parse_url("http://h:1" + path).prefix == prefix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("127.0.0.1:8000", "must begin with http://, https:// or http+unix:///"),
        ("ftp://h", "must begin with http://, https:// or http+unix:///"),
        ("unix:/run/e.sock", "must begin with http://, https:// or http+unix:///"),
        ("http://h/x?", "must have no query and no fragment"),
        ("http://h/x?a=b", "must have no query and no fragment"),
        ("http://h#", "must have no query and no fragment"),
        ("http://h?x", "must have no query and no fragment"),
        ("http://user:pass@h", "must have no user info"),
        ("http://@h", "must have no user info"),
        ("http://", "has no valid host"),
        ("http:///v1", "has no valid host"),
        ("http://:80", "has no valid host"),
        ("http://h h", "has no valid host"),
        ("http://bücher.example", "has no valid host"),
        ("http://::1:80", "an IPv6 address needs brackets"),
        ("http://[::1", "an IPv6 address needs brackets"),
        ("http://[::1]x", "an IPv6 address needs brackets"),
        ("http://[::1]:", "needs a port from 1 to 65535"),
        ("http://[fe80::1%25eth0]", "has an IPv6 zone"),
        ("http://h:", "needs a port from 1 to 65535"),
        ("http://h:0", "needs a port from 1 to 65535"),
        ("http://h:80x", "needs a port from 1 to 65535"),
        ("http://h:65536", "needs a port from 1 to 65535"),
        ("http://h/a b", "has a character in its path that must be percent-encoded"),
        ("http://h/a\r\nHost: x", "has a character in its path that must be percent-encoded"),
        ("http://h/%zz", "has a character in its path that must be percent-encoded"),
        ("http://h/é", "has a character in its path that must be percent-encoded"),
        ("http+unix://run/e.sock", "needs three slashes and an absolute path"),
        ("http+unix://", "names no socket file"),
        ("http+unix:///", "names no socket file"),
        ("http+unix:///a%00b", "has a NUL byte in its path"),
        ("http+unix:///" + "x" * 107, "has a socket path of more than 107 bytes"),
    ],
)
def test_a_url_that_names_no_worker_is_refused_with_help(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_url(text)


def test_a_password_in_a_url_is_not_repeated() -> None:
    for text in ("http://user:hunter2@h", "http://user:hunter2@h:x/", "gopher://u:hunter2@h"):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is judged below
            parse_url(text)
        assert "hunter2" not in str(caught.value)


@given(st.text())
def test_no_url_puts_more_than_one_line_into_a_request_head(text: str) -> None:
    for url in (f"http://{text}", f"http://h/{text}", f"https://h:1/{text}/v1"):
        try:
            endpoint = parse_url(url)
        except ValueError:
            continue
        head = endpoint.authority + endpoint.prefix
        assert head.isascii()
        assert head.isprintable()
        assert " " not in head
        assert endpoint.prefix == "" or endpoint.prefix[0] == "/"
        assert not endpoint.prefix.endswith("/")


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("*", "*"),
        ("https://app.example", "https://app.example"),
        ("HTTPS://App.Example", "https://app.example"),
        ("https://app.example:443", "https://app.example"),
        ("https://app.example:0443", "https://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://app.example:80", "http://app.example"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
        ("http://[0:0::1]:3000", "http://[::1]:3000"),
        ("http://[::1]", "http://[::1]"),
        ("chrome-extension://abcdefghijklmnop", "chrome-extension://abcdefghijklmnop"),
        ("tauri://localhost", "tauri://localhost"),
        ("app+x.y://host:80", "app+x.y://host:80"),
    ],
)
def test_an_origin_is_read_as_browsers_send_it(text: str, origin: str) -> None:
    assert parse_origin(text) == origin
    assert parse_origin(origin) == origin


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'must be "https://host", "https://host:port" or "*"'),
        ("app.example", 'must be "https://host", "https://host:port" or "*"'),
        ("app.example:443", 'must be "https://host", "https://host:port" or "*"'),
        ("//app.example", 'must be "https://host", "https://host:port" or "*"'),
        ("://app.example", 'must be "https://host", "https://host:port" or "*"'),
        ("1http://app.example", 'must be "https://host", "https://host:port" or "*"'),
        ("https:/app.example", 'must be "https://host", "https://host:port" or "*"'),
        ("*://app.example", 'must be "https://host", "https://host:port" or "*"'),
        ("null", 'would let in every sandboxed page and local file: write "*" if all may call'),
        ("https://app.example/", 'must end after the host or port, without a path or a final "/"'),
        ("https://app.example/chat", 'must end after the host or port, without a path or a final "/"'),
        ("https://app.example?x", 'must end after the host or port, without a path or a final "/"'),
        ("https://app.example#x", 'must end after the host or port, without a path or a final "/"'),
        ("file:///pages/page.html", 'must end after the host or port, without a path or a final "/"'),
        ("https://user@app.example", "must have no user info"),
        (
            "https://*.app.example",
            'has a wildcard, which is not known here: list each origin, or write "*" alone',
        ),
        (
            "https://app.example:*",
            'has a wildcard, which is not known here: list each origin, or write "*" alone',
        ),
        ("https://", "has no valid host"),
        ("https://:443", "has no valid host"),
        ("https://a b", "has no valid host"),
        ("https://a,https", "has no valid host"),
        ("https://bücher.example", "has no valid host"),
        ("https://app.example:", "needs a port from 1 to 65535"),
        ("https://app.example:0", "needs a port from 1 to 65535"),
        ("https://app.example:65536", "needs a port from 1 to 65535"),
        ("https://::1", "an IPv6 address needs brackets"),
        ("https://127.1", "has no valid IPv4 address"),
    ],
)
def test_what_no_browser_sends_as_an_origin_is_refused_with_help(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_origin(text)


@given(st.one_of(st.text(), st.text().map("https://{}".format), st.from_regex(r"\A\w+://[\w.:\[\]-]+\Z")))
def test_every_origin_is_refused_or_a_header_value_that_stays_as_it_is(text: str) -> None:
    try:
        origin = parse_origin(text)
    except ValueError:
        return
    assert origin.isascii()
    assert origin.isprintable()
    assert " " not in origin
    assert parse_origin(origin) == origin


@pytest.mark.parametrize(
    ("url", "named", "path"),
    [
        ("http://gpu.internal", True, False),
        ("https://localhost:1/", True, False),
        ("HTTP://localhost/v1", True, True),
        ("http://10.0.0.1:80", False, False),
        ("http://[::1]//", False, True),
        ("http+unix:///run/a.sock", False, False),
        ("HTTP+UNIX:///run/a.sock", False, False),
    ],
)
def test_a_url_tells_whether_it_has_a_name_and_a_path(url: str, named: bool, path: bool) -> None:
    assert parse_url(url).named is named
    assert has_path(url) is path


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("10.1.2.3", "10.1.2.3/32"),
        ("10.1.2.3/32", "10.1.2.3/32"),
        ("FD00:0::/8", "fd00::/8"),
        ("::1", "::1/128"),
        ("::/0", "::/0"),
    ],
)
def test_a_network_is_read(text: str, network: str) -> None:
    assert parse_network(text) == ip_network(network)
    assert str(parse_network(text)) == network


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a network such as"),
        ("/8", "must be a network such as"),
        ("10.0.0.0/", "must be a network such as"),
        ("10.0.0.0/33", "must be a network such as"),
        ("10.0.0.0/-1", "must be a network such as"),
        ("10.0.0.0/8/8", "must be a network such as"),
        ("10.0.0.0/255.0.0.0", "must be a network such as"),
        ("10.0.0/8", "must be a network such as"),
        ("010.0.0.0/8", "must be a network such as"),
        (" 10.0.0.0/8", "must be a network such as"),
        ("[::1]", "must be a network such as"),
        ("fe80::%eth0/64", "must be a network such as"),
        ("::/129", "must be a network such as"),
        ("localhost", "must be a network such as"),
        ("10.0.0.1/8", 'is an address inside of a network: write "10.0.0.0/8" if all of it is meant'),
        ("fd00::1/8", 'is an address inside of a network: write "fd00::/8" if all of it is meant'),
    ],
)
def test_what_is_no_network_is_refused_with_help(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_network(text)


@given(st.one_of(st.text(), st.ip_addresses().map(str), st.from_regex(r"\A[0-9a-f.:]{1,20}/[0-9]{1,3}\Z")))
def test_every_network_is_refused_or_stays_as_it_is(text: str) -> None:
    try:
        network = parse_network(text)
    except ValueError:
        return
    assert parse_network(str(network)) == network


@given(st.text())
def test_every_address_is_read_or_refused(text: str) -> None:
    for candidate in (text, f"unix:{text}", f"{text}:80", f"[{text}]:80"):
        try:
            bind = parse_bind(candidate)
        except ValueError:
            continue
        assert parse_bind(str(bind)) == bind
