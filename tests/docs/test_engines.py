"""The page of engines is the table of dialects, and names every header and question that engines get."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import trio

from tests.docs.pages import assigned, column, constants, section, table, words
from tests.e2e.serving import serving
from trio_gateway.contract import CHAT, Dialect
from trio_gateway.fleet import DIALECTS
from trio_gateway.testing import chat_request, open_engine
from trio_gateway.wire import GENERATE

PAGE = "reference/engines.md"


def row_of(dialect: Dialect) -> dict[str, str]:
    attempt_id = ""
    if dialect.request_id_header is not None:
        attempt_id = f"header `{dialect.request_id_header.decode()}`"
    if dialect.request_id_field is not None:
        attempt_id = f"field `{dialect.request_id_field}`"
    return {
        "`kind`": f"`{dialect.kind}`",
        "Running usage": "yes" if dialect.running_usage else "no",
        "Attempt id": attempt_id,
        "Cache salt": "yes" if dialect.cache_salt else "no",
        "Slots of a request": "`n`" if dialect.slot_per_choice else "1",
        "Cancel grace": f"{dialect.cancel_grace:g} s",
        "Chat by": f"`{chat_by(dialect)}`",
    }


def chat_by(dialect: Dialect) -> str:
    if dialect.agent:
        return GENERATE
    return "/api/chat" if dialect.native(CHAT) else CHAT.path


def test_the_table_of_dialects_is_the_one_of_the_code() -> None:
    assert table(PAGE, "Dialects") == [row_of(dialect) for dialect in DIALECTS.values()]


def test_every_field_that_callers_may_not_send_is_listed() -> None:
    listed = {
        row["`kind`"].strip("`"): words(row["Fields"])
        for row in table(PAGE, "Fields that callers may not send")
    }
    assert listed == {kind: sorted(dialect.engine_fields) for kind, dialect in DIALECTS.items()}


@pytest.mark.parametrize("kind", DIALECTS)
async def test_an_engine_is_sent_the_listed_headers_and_no_others(kind: str, tmp_path: Path) -> None:
    (tmp_path / "engine.key").write_text("sk-engine\n")
    trace = (("traceparent", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"), ("tracestate", "a=b"))
    secret = (("cookie", "c=1"), ("x-conversation-id", "7"), ("authorization", "Bearer of-the-caller"))
    async with (
        open_engine() as engine,
        serving(engine, folder=tmp_path, worker={"kind": kind, "api_key_file": "engine.key"}) as gateway,
    ):
        await gateway.ask(chat_request(headers=(*trace, *secret)))
        request = await engine.request()
        headers = dict(request.headers)
    assert request.target == chat_by(DIALECTS[kind])
    assert headers["authorization"] == "Bearer sk-engine"
    listed = {name.lower() for name in column(PAGE, "What an engine is sent", "Header")}
    id_header = DIALECTS[kind].request_id_header
    assert headers.keys() == listed - (set() if id_header else {"x-request-id"})


# Questions ------------------------------------------------------------------------------------------------

ASKED = "What an engine is asked besides"


def pages_by_kind(name: str) -> dict[str, list[str]]:
    """The pages in one of the tables of the watch, by kind of engine."""
    found = assigned("fleet/_watch.py", name)
    assert isinstance(found, ast.Dict)
    pairs = zip(found.keys, found.values, strict=True)
    return {
        ast.literal_eval(kind): [text for text in constants(pages, str) if text.startswith("/")]
        for kind, pages in pairs
        if kind is not None
    }


def test_every_page_that_an_engine_is_asked_for_is_listed() -> None:
    rows = {words(row["`kind`"])[0]: row for row in table("reference/engines.md", ASKED)}
    assert list(rows) == list(DIALECTS)
    health, sources = pages_by_kind("HEALTH"), pages_by_kind("_SOURCES")
    for kind, row in rows.items():
        assert words(row["Health"]) == health[kind]
        assert words(row["How busy it is"]) == sources.get(kind, [])
        assert words(row["Models"]) == ([] if DIALECTS[kind].agent else ["/v1/models"])


@pytest.mark.parametrize(
    ("phrase", "name"),
    [
        ("Two probes of a worker are {:g} seconds apart at least", "AT_LEAST"),
        ("left alone for {:g} seconds", "LIST_EVERY"),
        ("Read every {:g} seconds", "LIST_EVERY"),
    ],
)
def test_the_pace_of_questions_is_the_one_of_the_code(phrase: str, name: str) -> None:
    value = ast.literal_eval(assigned("fleet/_watch.py", name))
    assert phrase.format(value) in " ".join(section(PAGE, ASKED).split())


NOT_THERE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("kind", [kind for kind, dialect in DIALECTS.items() if not dialect.agent])
async def test_an_engine_is_asked_for_the_listed_pages_and_no_others(
    kind: str, tmp_path: Path, nursery: trio.Nursery
) -> None:
    (tmp_path / "engine.key").write_text("sk-engine\n")
    heads: list[list[str]] = []

    async def answer(stream: trio.SocketStream) -> None:
        """Have none of the pages, so that all of them are tried."""
        head = b""
        while b"\r\n\r\n" not in head:
            head += await stream.receive_some(4096)
        heads.append(head.decode().split("\r\n"))
        await stream.send_all(NOT_THERE)
        await stream.aclose()

    row = next(row for row in table(PAGE, ASKED) if words(row["`kind`"]) == [kind])
    listed = {page for name in ("Health", "How busy it is", "Models") for page in words(row[name])}
    listeners = await nursery.start(trio.serve_tcp, answer, 0)
    port = listeners[0].socket.getsockname()[1]
    worker = {"kind": kind, "api_key_file": "engine.key"}
    async with serving(
        f"http://127.0.0.1:{port}", folder=tmp_path, worker=worker, probes={"interval": 0.25}
    ) as gateway:
        await gateway.until(lambda: len(heads) > len(listed))
    assert {head[0].split()[1] for head in heads} == listed
    assert all("Authorization: Bearer sk-engine" in head for head in heads)
