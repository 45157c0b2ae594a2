"""What two parsers could read differently is refused before anything else, and harms nobody else."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
import trio

from tests.e2e.serving import Serving, error_code, serving
from trio_gateway.testing import (
    Chunk,
    Repeat,
    WaitFor,
    chat_request,
    chat_stream,
    http_request,
    open_engine,
)

BODY = b'{"model":"m1","messages":[{"role":"user","content":"hi"}]}'
HOST = b"host: g\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"


def post(*fields: bytes, line: bytes = LINE, host: bytes = HOST) -> bytes:
    """A request with these lines in its head; each brings its own line end."""
    return line + host + b"".join(fields) + b"\r\n" + BODY


MALFORMED: dict[str, bytes] = {
    "length and coding": post(LENGTH, b"transfer-encoding: chunked\r\n"),
    "coding and length": post(b"transfer-encoding: chunked\r\n", LENGTH),
    "two lengths": post(LENGTH, b"content-length: 5\r\n"),
    "two equal lengths": post(LENGTH, LENGTH),
    "a list of lengths": post(b"content-length: 5, 5\r\n"),
    "a length that is no number": post(b"content-length: 5x\r\n"),
    "a signed length": post(b"content-length: +5\r\n"),
    "a negative length": post(b"content-length: -5\r\n"),
    "a length in hexadecimal": post(b"content-length: 0x5\r\n"),
    "an empty length": post(b"content-length: \r\n"),
    "an endless length": post(b"content-length: " + b"9" * 30 + b"\r\n"),
    "another coding": post(b"transfer-encoding: gzip\r\n"),
    "two codings": post(b"transfer-encoding: gzip, chunked\r\n"),
    "a coding twice": post(b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"),
    "a coding of HTTP/1.0": post(b"transfer-encoding: chunked\r\n", line=LINE.replace(b"1.1", b"1.0")),
    "an identity coding": post(b"transfer-encoding: identity\r\n"),
    "two hosts": post(HOST, LENGTH),
    "no host": post(LENGTH, host=b""),
    "two keys": post(LENGTH, b"authorization: Bearer a\r\nauthorization: Bearer a\r\n"),
    "keys that differ": post(LENGTH, b"authorization: Bearer a\r\nx-api-key: b\r\n"),
    "two types": post(LENGTH, b"content-type: application/json\r\ncontent-type: application/json\r\n"),
    "a bare LF": post(LENGTH, b"x: y\n"),
    "a bare CR": post(LENGTH, b"x: y\rz: 1\r\n"),
    "LF everywhere": post(LENGTH).replace(b"\r\n", b"\n"),
    "a NUL": post(LENGTH, b"x: a\x00b\r\n"),
    "a control character": post(LENGTH, b"x: a\x0bb\r\n"),
    "a DEL": post(LENGTH, b"x: a\x7fb\r\n"),
    "a folded header": post(LENGTH, b"x: a\r\n b\r\n"),
    "a folded first header": post(LENGTH, host=b" host: g\r\n"),
    "a blank before the colon": post(b"content-length : %d\r\n" % len(BODY)),
    "a header without a colon": post(LENGTH, b"nonsense\r\n"),
    "a header without a name": post(LENGTH, b": x\r\n"),
    "a name that is no token": post(LENGTH, b"a(b): x\r\n"),
    "no version": post(LENGTH, line=b"POST /v1/chat/completions\r\n"),
    "another version": post(LENGTH, line=LINE.replace(b"1.1", b"2.0")),
    "a version of the future": post(LENGTH, line=LINE.replace(b"1.1", b"1.2")),
    "a version in small letters": post(LENGTH, line=LINE.replace(b"HTTP", b"http")),
    "a target with a blank": post(LENGTH, line=b"POST /v1/chat completions HTTP/1.1\r\n"),
    "a target beyond ASCII": post(LENGTH, line="POST /v1/modèles HTTP/1.1\r\n".encode()),
    "a method that is no token": post(LENGTH, line=LINE.replace(b"POST", b"PO(ST")),
    "no method": post(LENGTH, line=b" /v1/chat/completions HTTP/1.1\r\n"),
    "the greeting of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(32)) + b"\r\n\r\n",
    "nothing but noise": b"\x00\xff\x80garbage\r\n\r\n",
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_head_is_a_400_and_the_end_of_its_connection(raw: bytes) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(raw + chat_request())
            answer = await client.read_to_end()
            assert (answer.status, error_code(answer)) == (400, "bad_framing")
            assert answer.header("connection") == "close"
            assert answer.header("x-should-retry") == "false"
            assert await client.read_closed() == "fin"
            assert len(client.answers) == 1
        assert engine.statistics().connections == 0
        assert gateway.turned_away() == {"bad_framing": 1}


@pytest.mark.parametrize(
    "raw", [b"GET / HTTP/1.1\nx", b"GET / HTTP/1.1\r\nx: \x00", b"\x16\x03\x01\x02\x00\x01"]
)
async def test_a_bad_character_is_answered_as_soon_as_it_is_seen(raw: bytes) -> None:
    async with serving(models=[]) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(raw)
            assert (await client.read_to_end()).status == 400


HARMLESS: dict[str, bytes] = {
    "equal keys": post(LENGTH, b"authorization: Bearer a\r\nx-api-key: a\r\n"),
    "another scheme": post(LENGTH, b"authorization: Basic abc\r\n"),
    "bytes beyond ASCII in a value": post(LENGTH, "x: é\r\n".encode()),
    "tabs and blanks around a value": post(LENGTH, b"x: \t y \t\r\n"),
    "an empty value": post(LENGTH, b"x:\r\n"),
    "names in any case": post(LENGTH.upper(), b"CONTENT-type: Application/JSON\r\n"),
    "a repeated other header": post(LENGTH, b"x: 1\r\nx: 2\r\n"),
    "a query": post(LENGTH, line=LINE.replace(b"completions ", b"completions?a=b ")),
}


@pytest.mark.parametrize("raw", HARMLESS.values(), ids=HARMLESS.keys())
async def test_what_is_only_unusual_is_served(raw: bytes) -> None:
    async with open_engine() as engine, serving(engine) as gateway:
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(raw)
            assert (await client.read_to_end()).status == 200


async def throw_noise(gateway: Serving, dice: random.Random) -> None:
    """Send something between a request and garbage, and see that it ends in an answer or a close."""
    request = bytearray(chat_request(stream=False))
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(request))
        match dice.randrange(4):
            case 0:
                request[at] = dice.randrange(256)
            case 1:
                del request[at : at + dice.randrange(1, 30)]
            case 2:
                request[at:at] = dice.randbytes(dice.randrange(1, 10))
            case 3:
                request[at:at] = dice.choice([b"\r\n", b"\n", b"\r\n\r\n", b":", b" ", b"chunked", b"\x00"])
    with await gateway.connect() as client:
        with suppress(OSError):  # the gateway may close before all was sent
            await client.send(bytes(request))
            client.half_close()
            await client.read_closed()
        assert all(answer.ended == "complete" for answer in client.answers), bytes(request)


async def test_noise_in_many_connections_disturbs_no_other(nursery: trio.Nursery) -> None:
    dice = random.Random(20)
    go = trio.Event()
    tick = Repeat((Chunk(b": x\n\n"),), times=1)
    stream = chat_stream("a", "b", "c")
    script = (*stream[:3], tick, WaitFor(go), *stream[3:])
    async with (
        open_engine(script, chat_stream("ok")) as engine,
        serving(engine, worker={"slots": 64}) as gateway,
    ):
        with trio.fail_after(60), await gateway.connect() as steady:
            await steady.send(chat_request())
            await steady.read_events(2)
            for _ in range(20):
                async with trio.open_nursery() as noisy:
                    for _ in range(10):
                        noisy.start_soon(throw_noise, gateway, dice)
            go.set()
            reading = (await steady.read_to_end()).chat()
            assert (reading.text, reading.done, reading.errors) == ("abc", 1, [])
            await steady.send(http_request("GET", "/livez"))
            assert (await steady.read_to_end()).status == 200
        assert engine.statistics().violations == ()
        assert gateway.gateway.books.arrived >= 150
        assert gateway.gateway.books.turned_away["bad_framing"] >= 50
