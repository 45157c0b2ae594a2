"""The page of engines is the table of dialects, and names every header that an engine is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import column, table, words
from tests.e2e.serving import serving
from trio_gateway.contract import CHAT, Dialect
from trio_gateway.fleet import DIALECTS
from trio_gateway.testing import chat_request, open_engine

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
        "Chat by": "`/api/chat`" if dialect.native(CHAT) else f"`{CHAT.path}`",
    }


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
    assert request.target == (words(row_of(DIALECTS[kind])["Chat by"])[0])
    assert headers["authorization"] == "Bearer sk-engine"
    listed = {name.lower() for name in column(PAGE, "What an engine is sent", "Header")}
    id_header = DIALECTS[kind].request_id_header
    assert headers.keys() == listed - (set() if id_header else {"x-request-id"})
