"""When answers say that they were made (RFC 9110 6.6.1)."""

from __future__ import annotations

import datetime
from email.utils import parsedate_to_datetime

import pytest

from tests.e2e.serving import serving
from trio_gateway.edge._head import http_date
from trio_gateway.testing import (
    Answer,
    Script,
    chat_answer,
    chat_request,
    chat_stream,
    error_answer,
    http_request,
    open_engine,
)

PAGE = ("origin", "https://page.example")
QUESTION = ("access-control-request-method", "POST")


def test_a_date_is_written_in_the_form_that_must_be_sent() -> None:
    assert http_date(784111777) == "Sun, 06 Nov 1994 08:49:37 GMT"  # the example of RFC 9110 5.6.7
    assert http_date(784111778) == "Sun, 06 Nov 1994 08:49:38 GMT"


ASKED: dict[str, tuple[bytes, Script]] = {
    "a stream": (chat_request(), chat_stream("ok")),
    "a stream over HTTP/1.0": (chat_request().replace(b"HTTP/1.1", b"HTTP/1.0"), chat_stream("ok")),
    "a whole answer": (chat_request(stream=False), chat_answer("ok")),
    "an engine's error": (chat_request(), error_answer(400)),
    "health": (http_request("GET", "/livez"), ()),
    "models": (http_request("GET", "/v1/models"), ()),
    "a browser's question": (http_request("OPTIONS", "/v1/models", headers=(PAGE, QUESTION)), ()),
    "an unknown route": (http_request("GET", "/nowhere"), ()),
    "a body that can not be read": (http_request("POST", "/v1/chat/completions", body=b"{"), ()),
    "a head that can not be read": (b"GET / HTTP/1.1\r\nbroken\r\n\r\n", ()),
}


@pytest.mark.parametrize("asked", ASKED)
async def test_every_answer_says_once_when_it_was_made(asked: str) -> None:
    request, script = ASKED[asked]
    server = {"bind": ["127.0.0.1:0"], "cors_origins": ["*"]}
    async with open_engine(script) as engine, serving(engine, server=server) as gateway:
        check(await gateway.ask(request))


async def test_an_answer_to_head_says_it_too() -> None:
    async with serving(models=[]) as gateway:
        check(await gateway.fetch("HEAD", "/livez"))


def check(answer: Answer) -> None:
    (date,) = (value for name, value in answer.head.fields if name == "date")
    age = datetime.datetime.now(datetime.UTC) - parsedate_to_datetime(date)
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=1)
