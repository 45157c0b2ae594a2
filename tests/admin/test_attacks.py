"""The operators' door under attack: nothing is done or told, and streams of clients go on beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import h11
import pytest
import trio

from tests.admin.door import OPERATOR, VIEWER, Door, code_of, data, door
from tests.e2e.serving import open_descriptors, serving
from trio_gateway.admin import ACTS, PREFIX, Page
from trio_gateway.admin._server import MOST_OPERATORS
from trio_gateway.testing import (
    RawClient,
    WaitFor,
    chat_request,
    chat_stream,
    http_request,
    open_engine,
    request_row,
    until,
)

JSON = ("content-type", "application/json")
BEARER = ("authorization", f"Bearer {OPERATOR}")
Headers = tuple[tuple[str, str], ...]


class Stream:
    """A client's answer that goes on one event at a time."""

    def __init__(self, client: RawClient, steps: list[trio.Event]) -> None:
        self._client = client
        self._steps = steps
        self._seen = 0

    async def goes_on(self) -> None:
        """Let the engine make one more event, and see it come."""
        self._steps[self._seen].set()
        self._seen += 1
        with trio.fail_after(10):
            await self._client.read_events(2 + self._seen)


@asynccontextmanager
async def beside_a_stream(attacks: int = 1) -> AsyncIterator[tuple[Door, Stream]]:
    """Open the door in a loop that also serves a stream, which must go on after each attack and end well.

    When the block ends, the stream is read to its end, another request is answered, no descriptor of the
    attack is left, and nothing was called a bug.
    """
    steps = [trio.Event() for _ in range(attacks)]
    told = chat_stream("a", *"b" * attacks)
    waits = [step for go, event in zip(steps, told[3:], strict=False) for step in (WaitFor(go), event)]
    script = (*told[:3], *waits, *told[3 + attacks :])
    async with (
        open_engine(script, chat_stream("ok")) as engine,
        serving(engine) as gateway,
        door() as opened,
    ):
        before = open_descriptors()
        with await gateway.connect() as client:
            await client.send(chat_request())
            with trio.fail_after(10):
                await client.read_events(2)
            yield opened, Stream(client, steps)
            for step in steps:
                step.set()
            with trio.fail_after(10):
                assert (await client.read_to_end()).chat().text.startswith("a")
        assert (await gateway.ask(chat_request())).chat().text == "ok"
        assert opened.port.acts == []
        assert (await opened.ask("GET", "/livez")).status == 200
        assert opened.bugs == []
        kept = gateway.gateway.connections  # each to an engine of this process
        await gateway.until(lambda: open_descriptors() - 2 * kept.idle == before)


# From the pages of others -----------------------------------------------------------------------------------

FOREIGN: dict[str, tuple[str, Headers, str]] = {
    "a page of another origin": ("localhost", (("origin", "https://evil.example"),), "origin_not_allowed"),
    "another port of this machine": (
        "localhost:9090",
        (("origin", "http://localhost:3000"),),
        "origin_not_allowed",
    ),
    "a sandboxed page": ("localhost", (("origin", "null"),), "origin_not_allowed"),
    "a name that was made to point here": (
        "evil.example",
        (("origin", "http://evil.example"),),
        "host_not_allowed",
    ),
    "such a name in a browser that tells no origin": ("evil.example:9090", (), "host_not_allowed"),
    "a picture in a page": (
        "localhost",
        (("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")),
        "origin_not_allowed",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_a_foreign_page_neither_reads_nor_acts_even_where_no_token_is_needed(name: str) -> None:
    host, headers, code = FOREIGN[name]
    async with door(tokens=()) as opened:
        for act in ACTS:
            path = PREFIX + act.path.replace("{id}", "acme")
            answer = await opened.ask("POST", path, headers=(*headers, JSON), body=b"{}", host=host)
            assert code_of(answer) == (403, code)
        for path in ("/admin/v1/workers", "/metrics", "/admin/v1/feed", "/admin/v1/openapi.json"):
            answer = await opened.ask("GET", path, headers=headers, host=host)
            assert code_of(answer) == (403, code)
        assert opened.port.acts == []


async def test_no_preflight_is_answered_as_pages_need_it() -> None:
    asked = (("origin", "https://evil.example"), ("access-control-request-method", "POST"))
    async with door(tokens=()) as opened:
        for headers in (asked, asked[1:]):
            answer = await opened.ask("OPTIONS", "/admin/v1/reload", headers=headers)
            assert answer.status in (403, 405)
            assert answer.header("access-control-allow-origin") is None


# Paths ------------------------------------------------------------------------------------------------------

TRICKS = [
    "//admin/v1/workers",
    "/admin//v1/workers",
    "/admin/v1//workers",
    "/admin/v1/workers/",
    "/admin/v1/./workers",
    "/admin/v1/x/../workers",
    "/livez/../admin/v1/workers",
    "/livez/..;/admin/v1/workers",
    "/livez%2f..%2fadmin%2fv1%2fworkers",
    "/livez/%2e%2e/admin/v1/workers",
    "/admin/v1/%77orkers",
    "/admin/v1/workers%00",
    "/admin/v1/workers%20",
    "/admin/v1/workers;a=b",
    "/admin/v1/workers\\",
    "/admin\\v1\\workers",
    "/ADMIN/V1/WORKERS",
    "http://localhost/admin/v1/workers",
    "http://localhost/livez/../admin/v1/workers",
    "admin/v1/workers",
    "*",
    "/admin/v1/requests/..%2fworkers",
    "/livez?/../admin/v1/workers#",
]


@pytest.mark.parametrize("target", TRICKS)
async def test_no_path_that_is_written_in_another_way_leads_in(target: str) -> None:
    async with door() as opened:
        for headers in ((), (("authorization", f"Bearer {VIEWER}"),)):
            answer = await opened.ask("GET", target, headers=headers)
            if target.startswith("/livez?"):
                assert data(answer) == {"status": "ok"}
            else:
                assert answer.status in (400, 401, 404), answer.body
                assert b"w1" not in answer.body


@pytest.mark.parametrize("id_", ["a%2Ffreeze", "..", "a/../b", "%2e%2e", "a%0d%0ax", "a b", "a?x=/freeze"])
async def test_no_id_reaches_for_another_action(id_: str) -> None:
    async with door() as opened:
        with trio.fail_after(10), await RawClient.connect(opened.address) as client:
            target = f"/admin/v1/tenants/{id_}/cancel"
            await client.request("POST", target, headers=(JSON, BEARER), body=b"{}", host="localhost")
            assert (await client.read_to_end()).status in (400, 404)
        assert opened.port.acts == []


async def test_a_method_in_a_header_or_query_means_nothing() -> None:
    headers = (("x-http-method-override", "POST"), ("x-method-override", "POST"), BEARER)
    async with door() as opened:
        for path in ("/admin/v1/limits", "/admin/v1/limits?_method=POST"):
            await opened.ask("GET", path, headers=headers)
        assert (await opened.ask("GET", "/admin/v1/reload", headers=headers)).status == 405
        assert opened.port.acts == []


@pytest.mark.parametrize(
    "head",
    [
        b"POST /admin/v1/reload HTTP/1.1\r\nhost: localhost\r\n"
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"POST /admin/v1/reload HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\ncontent-length: 3\r\n",
        b"POST /admin/v1/reload HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\ncontent-length: 2\r\n",
        b"POST /admin/v1/reload HTTP/1.1\r\ncontent-length: 2\r\n",
        b"POST /admin/v1/reload HTTP/1.0\r\ncontent-length: 2\r\n",
    ],
)
async def test_a_head_that_two_readers_read_differently_acts_at_most_once(head: bytes) -> None:
    smuggled = http_request("POST", "/admin/v1/tenants/acme/freeze", headers=(JSON, BEARER), body=b"{}")
    async with door() as opened:
        with trio.move_on_after(10), await RawClient.connect(opened.address) as client:
            await client.send(head + b"content-type: application/json\r\n")
            await client.send(b"authorization: Bearer %b\r\nconnection: close\r\n\r\n" % OPERATOR.encode())
            await client.send(b"{}" + smuggled)
            await client.read_closed()
        assert [action for _, action, _, _ in opened.port.acts] in ([], ["reload"])


# Bytes that end a stock Hypercorn ---------------------------------------------------------------------------


def frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    """Write a frame of HTTP/2 (RFC 9113 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def block(*fields: tuple[bytes, bytes]) -> bytes:
    """Write fields as literals without indexing (RFC 7541 6.2.2)."""
    return b"".join(b"\0" + bytes([len(n)]) + n + bytes([len(v)]) + v for n, v in fields)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b"", 0)
HTTPS = ((b":scheme", b"http"), (b":authority", b"a"))
UPGRADE = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade%b\r\nupgrade: %b\r\n"
WEBSOCKET = UPGRADE % (b"", b"websocket") + (
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)

DEADLY: dict[str, bytes] = {
    "h2c with bad settings": UPGRADE % (b", http2-settings", b"h2c") + b"http2-settings: a\r\n\r\n",
    "h2c behind a blank of Latin-1": UPGRADE % (b"", b"\xa0h2c") + b"\r\n",
    "HTTP/2 data behind an early answer": PREFACE
    + frame(1, 4, block((b":method", b"POST"), (b":path", b"/admin/v1/reload"), *HTTPS))
    + frame(0, 0, b"x" * 10) * 20,
    "an HTTP/2 path beyond ASCII": PREFACE
    + frame(1, 5, block((b":method", b"GET"), (b":path", b"/\xff"), *HTTPS)),
    "an HTTP/2 method beyond ASCII": PREFACE
    + frame(1, 5, block((b":method", b"\xff"), (b":path", b"/"), *HTTPS)),
    "a plain HTTP/2 CONNECT": PREFACE + frame(1, 5, block((b":method", b"CONNECT"), (b":authority", b"a"))),
    "a WebSocket protocol beyond ASCII": WEBSOCKET + b"sec-websocket-protocol: \xff\r\n\r\n",
    "a WebSocket extension beyond ASCII": WEBSOCKET + b"sec-websocket-extensions: \xff\r\n\r\n",
    "a WebSocket frame before the answer": WEBSOCKET + b"\r\n\x81\x85\x00\x00\x00\x00hello",
    "a WebSocket with a body": WEBSOCKET + b"content-length: 5\r\n\r\nhello",
    "half a WebSocket": UPGRADE % (b"", b"websocket\xa0") + b"\r\n\x81\x85",
}


@pytest.mark.parametrize("name", DEADLY)
async def test_one_request_that_ends_a_stock_server_ends_only_its_connection(name: str) -> None:
    raw = DEADLY[name]
    after_upgrade = (
        UPGRADE % (b", http2-settings", b"h2c") + b"http2-settings: AAMAAABkAAQAAP__\r\n\r\n" + raw
    )
    async with beside_a_stream(2) as (opened, stream):
        with ExitStack() as attackers:
            for bytes_ in (raw, after_upgrade):
                for how in ("wait", "half-close", "reset"):
                    client = attackers.enter_context(await RawClient.connect(opened.address))
                    await client.send(bytes_)
                    if how == "half-close":
                        client.half_close()
                    elif how == "reset":
                        client.leave_reset()
            await stream.goes_on()
            assert (await opened.ask("GET", "/admin/v1/workers", VIEWER)).status == 200
        await stream.goes_on()


async def test_every_websocket_is_refused() -> None:
    async with door(tokens=()) as opened:
        with trio.fail_after(10), await RawClient.connect(opened.address) as client:
            await client.send(WEBSOCKET + b"\r\n")
            assert (await client.read_to_end()).status == 403
            await client.read_closed()


async def test_a_connection_that_is_closed_while_its_peer_is_told_of_a_fault_is_no_bug() -> None:
    """The answer closes it, and what came behind the last request is answered with 400 at the same time."""
    last = http_request("GET", "/livez", headers=(("connection", "close"),), host="localhost")
    async with door() as opened:
        for _ in range(100):  # each of them is a race, which about one of six loses
            with trio.fail_after(10), await RawClient.connect(opened.address) as client:
                await client.send(last + b"\0")
                await client.read_closed()
        assert opened.bugs == []


async def test_a_fault_of_our_own_is_told_and_ends_only_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = h11.LocalProtocolError("as Hypercorn's own")

    async def fails(*_: object) -> None:  # noqa: ASYNC124
        raise fault

    async with door() as opened:
        with monkeypatch.context() as broken:
            broken.setattr("trio_gateway.admin._server.NoUpgrade.handle", fails)
            with trio.fail_after(10), await RawClient.connect(opened.address) as client:
                await client.send(b"GET /livez")
                await client.read_closed()
                await until(lambda: opened.bugs != [])
        (told,) = opened.bugs
        assert isinstance(told, ExceptionGroup)
        assert told.subgroup(lambda exc: exc is fault) is not None
        assert (await opened.ask("GET", "/livez")).status == 200


# Slow, stuck and many ---------------------------------------------------------------------------------------


async def test_idle_connections_lock_no_operator_out() -> None:
    async with beside_a_stream() as (opened, stream):
        with ExitStack() as flood:
            for number in range(5 * MOST_OPERATORS):
                client = flood.enter_context(await RawClient.connect(opened.address))
                await client.send(b"GET /admin/v1/wor"[: number % 18])  # heads that never end, too
            assert (await opened.ask("GET", "/admin/v1/workers", VIEWER)).status == 200
            await stream.goes_on()


async def test_bodies_that_never_end_cost_who_has_no_token_its_connection_at_once() -> None:
    head = http_request(
        "POST", "/admin/v1/reload", headers=(JSON, ("transfer-encoding", "chunked")), host="localhost"
    )
    async with beside_a_stream() as (opened, stream):
        before = open_descriptors()
        for _ in range(10):
            with trio.fail_after(10), await RawClient.connect(opened.address) as client:
                await client.send(head + b"1\r\n \r\n" * 50)
                assert (await client.read_to_end()).status == 401
                await client.read_closed()
        await stream.goes_on()
        with trio.fail_after(10):
            await until(lambda: open_descriptors() == before)


async def test_with_a_token_slow_bodies_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_gateway.admin._guard.BODY_LIMIT", 0.2)
    headers = (JSON, BEARER, ("content-length", "100"))
    async with beside_a_stream() as (opened, stream):
        with ExitStack() as slow, trio.fail_after(20):
            clients = [
                slow.enter_context(await RawClient.connect(opened.address)) for _ in range(MOST_OPERATORS)
            ]
            for client in clients:
                await client.request("POST", "/admin/v1/reload", headers=headers, host="localhost")
                await client.send(b" ")
            for client in clients:
                assert (await client.read_to_end()).status == 408
            assert (await opened.ask("GET", "/admin/v1/workers", VIEWER)).status == 200
            await stream.goes_on()


def much(path: str) -> bytes:
    return http_request("GET", path, headers=(BEARER,), host="localhost")


async def stuck_operators(opened: Door, stuck: ExitStack) -> int:
    """Let operators ask for much and read nothing: of a list, and of a feed of large snapshots."""
    opened.port.rows = [request_row(number) for number in range(1000)]
    snapshot = opened.port.snapshot()
    snapshot["service"] = {f"tenant-{number}": 1.0 for number in range(50_000)}
    opened.port.snapshot = lambda: snapshot  # type: ignore[method-assign]
    for path in ("/admin/v1/requests?limit=1000", "/admin/v1/feed") * 3:
        client = stuck.enter_context(await RawClient.connect(opened.address, receive_buffer=4096))
        await client.send(much(path) * 20)
    return 6


async def test_operators_who_do_not_read_are_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_gateway.admin._server.STUCK", 0.3)
    async with beside_a_stream(2) as (opened, stream):
        before = open_descriptors()
        with ExitStack() as stuck:
            number = await stuck_operators(opened, stuck)
            await stream.goes_on()
            with trio.fail_after(20):
                await until(lambda: open_descriptors() == before + number)  # the ends of their own
            await stream.goes_on()
            assert (await opened.ask("GET", "/admin/v1/workers", VIEWER)).status == 200


@pytest.mark.parametrize("leaves", [True, False])
async def test_who_asks_again_before_it_reads_gives_its_place_back(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader waits for the answer to be out, which it never is."""
    if not leaves:
        monkeypatch.setattr("trio_gateway.admin._server.STUCK", 0.3)
    page = Page(b"x" * 4_000_000, "text/html", "default-src 'none'")
    async with door(pages={"/": page}, most=2) as opened:
        before = open_descriptors()
        with ExitStack() as stuck:
            for _ in range(2):  # without a token
                client = stuck.enter_context(await RawClient.connect(opened.address, receive_buffer=4096))
                await client.send(http_request("GET", "/", host="localhost") * 20)
            with trio.fail_after(10):
                await until(lambda: open_descriptors() == before + 4)
                if leaves:
                    await trio.testing.wait_all_tasks_blocked(0.05)
                    stuck.close()
                await until(lambda: open_descriptors() == before + (0 if leaves else 2))
            for _ in range(3):
                assert (await opened.ask("GET", "/admin/v1/workers", VIEWER)).status == 200
        assert not opened.bugs


async def test_operators_who_do_not_read_hold_up_no_shutdown() -> None:
    with ExitStack() as stuck:
        async with door() as opened:
            before = open_descriptors()
            number = await stuck_operators(opened, stuck)
            with trio.fail_after(10):
                await until(lambda: open_descriptors() == before + 2 * number)
            # Their writes are under way, each with almost all of `STUCK` to go.
            await trio.testing.wait_all_tasks_blocked(0.05)
            ended = trio.current_time()
            opened.close()
    assert trio.current_time() - ended < 3  # of the 5 that a write may take


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    return (text[at : at + size] for at in range(0, len(text), size))


async def test_a_head_in_single_bytes_is_a_head() -> None:
    async with beside_a_stream() as (opened, stream):
        with trio.fail_after(10), await RawClient.connect(opened.address) as client:
            for piece in pieces(much("/admin/v1/version"), 1):
                await client.send(piece)
            assert (await client.read_to_end()).status == 200
        await stream.goes_on()


async def test_guesses_of_a_token_are_slowed_and_stop_nobody_else() -> None:
    async with beside_a_stream() as (opened, stream):
        codes = set()
        with trio.fail_after(30), await RawClient.connect(opened.address) as client:
            for number in range(150):
                guess = (("authorization", f"Bearer {number}"),)
                await client.request("GET", "/admin/v1/workers", headers=guess, host="localhost")
                answer = await client.read_to_end()
                codes.add(code_of(answer))
        assert codes == {(401, "invalid_admin_token"), (429, "rate_limit_exceeded")}
        assert int(answer.header("retry-after") or 0) >= 1
        assert (await opened.ask("GET", "/admin/v1/workers", VIEWER)).status == 200
        await stream.goes_on()
