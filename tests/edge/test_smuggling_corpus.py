"""The corpus of `fuzz.smuggling` at a gateway: one clear answer each, and never one to what is hidden."""

from __future__ import annotations

from collections import Counter

import pytest
import trio
import trio.testing

from fuzz.smuggling import BODY, CASES, HIDDEN, HOST, LINE, Case
from tests.e2e.serving import error_code, serving
from trio_gateway.testing import RawClient, chat_answer, http_request, open_engine

LIMIT = 20.0  # seconds


def pieces_of(raw: bytes) -> list[list[bytes]]:
    """Send it at once, cut in its middle, and with a request line that comes alone."""
    middle, line = len(raw) // 2, raw.find(b"\n") + 1
    return [[raw], [raw[:middle], raw[middle:]], [raw[:line], raw[line:]]]


async def send(client: RawClient, pieces: list[bytes]) -> None:
    """Send each piece when the gateway has most likely taken the one before; either way is right."""
    for piece in pieces:
        await client.send(piece)
        await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_request_that_two_readers_see_differently_has_one_clear_answer(case: Case) -> None:
    async with open_engine(chat_answer("ok"), chat_answer("ok"), chat_answer("ok")) as engine:
        async with serving(engine) as gateway:
            for pieces in pieces_of(case.raw):
                with trio.fail_after(LIMIT), await gateway.connect() as client:
                    await send(client, pieces)
                    await expect_one_answer(client, case)
        assert engine.statistics().violations == ()
        bodies = [request.body for request in engine.requests]
        assert bodies == ([BODY] * 3 if case.asked else [])


async def expect_one_answer(client: RawClient, case: Case) -> None:
    answer = await client.read_to_end()
    assert answer.status == case.status
    if case.code is not None:
        assert error_code(answer) == case.code
    if case.kept:
        # What comes next is answered as what it is: the connection is where both sides think it is.
        await client.send(http_request("GET", "/v1/models/next"))
        after = await client.read_to_end()
        assert (after.status, error_code(after)) == (404, "model_not_found")
        client.half_close()
    assert await client.read_closed() == "fin"
    assert len(client.answers) == (2 if case.kept else 1)


def test_the_corpus_holds_no_case_twice() -> None:
    assert not [name for name, count in Counter(case.name for case in CASES).items() if count > 1]
    assert not [raw for raw, count in Counter(case.raw for case in CASES).items() if count > 1]


CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (2000, b"x" * 2000)
TOO_LARGE = LINE + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS


@pytest.mark.parametrize("end", [b"", b"POST /v1/models/next HTTP/1.1\r\nHost: g\r\n", b"\r"])
async def test_what_came_with_the_end_of_a_body_over_its_bound_belongs_to_the_next_request(
    end: bytes,
) -> None:
    """A gateway that forgot what it had read would take a part of the next request for a request."""
    body = b"Content-Length: %d\r\n\r\n%b" % (len(HIDDEN), HIDDEN)
    post = b"POST /v1/models/next HTTP/1.1\r\nHost: g\r\n" + body
    rest = (b"\r\n" + post if end == b"\r" else post).removeprefix(end)
    async with serving(models=[], limits={"body_bytes": 1000}) as gateway:
        with trio.fail_after(LIMIT), await gateway.connect() as client:
            await client.send(TOO_LARGE + end)
            answer = await client.read_to_end()
            assert (answer.status, answer.header("connection")) == (413, None)
            await client.send(rest)
            assert (await client.read_to_end()).status == 405
            client.half_close()
            await client.read_closed()
            assert len(client.answers) == 2


@pytest.mark.parametrize("pieces", [[b"\r\n\r\n"], [b"\r", b"\n"], [b"\r\n", b"\r\n"]])
@pytest.mark.parametrize("first", [b"", b"GET /livez HTTP/1.1\r\nHost: g\r\n\r\n"])
async def test_blank_lines_alone_are_no_request_that_could_be_answered(
    first: bytes, pieces: list[bytes]
) -> None:
    """Whoever sent a line end too many would take an answer to it for the answer to the next request."""
    limits = {"head_timeout": 0.1, "keep_alive": 0.2}
    async with serving(models=[], limits=limits) as gateway:
        with trio.fail_after(LIMIT), await gateway.connect() as client:
            await send(client, [first + pieces[0], *pieces[1:]])
            assert await client.read_closed() == "fin"
            assert [answer.status for answer in client.answers] == ([200] if first else [])
        assert gateway.turned_away() == {}
