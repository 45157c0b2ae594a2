"""The page of the token protocol has every message, member and close code of the code, and no others."""

from __future__ import annotations

import ast
from collections import defaultdict
from typing import Any

import msgspec
import trio

from tests.docs.pages import DOCS, column, modules, table, words
from tests.e2e.serving import serving
from tests.e2e.sockets import TokenSocket, handshake, opened
from trio_gateway.testing import Hold, chat_stream, open_engine
from trio_gateway.wire import Ack, Auth, CancelStream, GenerateStream, Resume

PAGE = "reference/websocket.md"
CLIENT = (Auth, GenerateStream, Ack, CancelStream, Resume)
FROM_LIBRARY = {1002, 1007}  # wsproto names them


def test_every_message_of_clients_is_described_with_its_members() -> None:
    described: dict[str, list[str]] = defaultdict(list)
    kind = ""
    for row in table(PAGE, "What a client says"):
        kind = (words(row["Type"]) or [kind])[0]
        described[kind] += words(row["Member"])
    read: dict[Any, list[str]] = {
        message.__struct_config__.tag: list(message.__struct_fields__) for message in CLIENT
    }
    assert {kind: sorted(members) for kind, members in described.items()} == {
        kind: sorted(members) for kind, members in read.items()
    }


def test_what_may_be_absent_is_said_to_be() -> None:
    for message in CLIENT:
        assert set(message.__struct_fields__) >= {field.name for field in msgspec.structs.fields(message)}
    assert [field.name for field in msgspec.structs.fields(GenerateStream) if field.required] == [
        "stream_id",
        "body",
    ]


async def test_every_message_of_the_gateway_is_described_with_its_members() -> None:
    seen: dict[str, set[str]] = defaultdict(set)
    endless = (*chat_stream("x", finish=None, done=False, end=False), Hold())
    scripts = (chat_stream("ok", usage=(3, 1)), endless)
    shutdown = {"readiness_delay": 0, "grace": 0.2}
    async with (
        open_engine(*scripts) as engine,
        serving(engine, worker={"slots": 1}, shutdown=shutdown) as gateway,
        opened(gateway, handshake("x-gateway-receipt: 1", key="")) as client,
    ):
        await client.generate("whole")
        await client.read_last("whole")
        await client.generate("endless")
        await client.read_delta(1, "endless")
        await client.generate("waits")
        await client.read_until(lambda m: m["type"] == "queued")
        await client.send("cancel", stream_id="waits")
        await client.read_last("waits")
        await client.generate("refused", model="m9")
        await client.read_last("refused")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gateway.gateway.shut_down, trio.Event())
            await _read_all(client)
        for message in client.messages:
            seen[message["type"]] |= message.keys() - {"type"}
    described = {
        words(row["Type"])[0]: set(words(row["Members"])) for row in table(PAGE, "What the gateway says")
    }
    assert seen == described


async def _read_all(client: TokenSocket) -> None:
    await client.read_closed()


def test_every_close_code_is_described() -> None:
    written = set(FROM_LIBRARY)
    for tree in modules(
        "edge/_tokens.py", "edge/_sockets.py", "edge/_websocket.py", "wire/_websocket.py"
    ).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and type(node.value) is int and 4400 <= node.value < 4500:
                written.add(node.value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Close":
                code = node.args[0]
                written |= (
                    {code.value} if isinstance(code, ast.Constant) and isinstance(code.value, int) else set()
                )
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") in (
                "GOING_AWAY",
                "OVERLOADED",
                "TOO_SLOW",
            ):
                assert isinstance(node.value, ast.Constant)
                assert isinstance(node.value.value, int)
                written.add(node.value.value)
    assert {int(code) for code in column(PAGE, "How sockets close", "Code")} == written


def test_the_page_is_listed() -> None:
    assert "(websocket.md)" in (DOCS / "reference/README.md").read_text("utf-8")
