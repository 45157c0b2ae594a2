"""The commands ``admin``, as somebody types them, against a real door on a real socket."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from typer.testing import CliRunner

from tests.admin.door import OPERATOR, VIEWER, Door, door, token
from trio_gateway.admin import ACTS, READS, refusal
from trio_gateway.cli import app
from trio_gateway.testing import FakeAdminPort, refusing_port, request_row, until

Run = tuple[int, str, str]
FIRST = request_row(0)["id"]


def run(*arguments: str, **environ: str) -> Run:
    """Run a command inside this process; answers its exit code, output and errors."""
    result = CliRunner().invoke(app, ["admin", *arguments], env=environ)
    return result.exit_code, result.stdout, result.stderr


async def run_in_thread(*arguments: str, **environ: str) -> Run:
    return await trio.to_thread.run_sync(partial(run, *arguments, **environ))


class Operator:
    """Somebody at a terminal."""

    def __init__(self, opened: Door, secret: str = OPERATOR) -> None:
        assert isinstance(opened.address, tuple)
        host, port = opened.address
        self.port = opened.port
        self.where = ("--url", f"http://{host}:{port}", "--token", secret)

    async def types(self, *arguments: str) -> Run:
        return await run_in_thread(*self.where, *arguments)

    async def json(self, *arguments: str) -> Any:
        code, out, err = await self.types(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)


@asynccontextmanager
async def operator(secret: str = OPERATOR) -> AsyncIterator[Operator]:
    async with door() as opened:
        yield Operator(opened, secret)


# Command words, what the port answers for them, and words that the table must have.
READING: dict[str, tuple[tuple[str, ...], Callable[[FakeAdminPort], Any], tuple[str, ...]]] = {
    "requests": (("requests",), lambda port: port.rows, (FIRST, "tenant-0", "no_slot", "tokens generated")),
    "timeline": (("request", FIRST), lambda port: port.timeline(FIRST), ("arrived", "worker=w1", "position")),
    "tenants": (("tenants",), lambda port: port.tenants(), ("acme", "123.5", "590")),
    "queues": (("queues",), lambda port: port.queues(), ("w1,w2", "standard=2", "max_queued_bytes")),
    "workers": (("workers",), lambda port: port.workers(), ("w2", "m1=closed", "vllm")),
    "limits": (("limits",), lambda port: port.limits(), ("admission.max_queued", "1024", "default")),
    "tasks": (("tasks",), lambda port: port.tasks(), (f"exchange {FIRST}", "    pump: exchange/_attempt")),
    "endings": (("endings",), lambda port: port.endings(100), ("completed", "2.5")),
    "snapshot": (
        ("snapshot",),
        lambda port: {**port.snapshot(), "at": 2.0},
        ("wait_p99", "tokens_per_second"),
    ),
    "version": (("version",), lambda port: port.version(), ("1.2.3", "uptime", "12.5")),
    "configuration": (("configuration",), lambda port: port.configuration(), ("admin.tokens", "***")),
    "statistics": (("statistics",), lambda port: port.statistics(), ("arrived", "7")),
    "audit": (("audit",), lambda port: [], ("actor", "outcome")),
}

ACTING: dict[str, tuple[tuple[str, ...], str | None, dict[str, Any]]] = {
    "requests.cancel": (("cancel", FIRST), FIRST, {}),
    "tenants.cancel": (("cancel-tenant", "acme"), "acme", {}),
    "tenants.freeze": (("freeze", "acme"), "acme", {}),
    "tenants.thaw": (("thaw", "acme"), "acme", {}),
    "workers.drain": (("drain", "w1@127.0.0.1"), "w1@127.0.0.1", {}),
    "workers.resume": (("resume", "w1"), "w1", {}),
    "workers.eject": (("eject", "w1"), "w1", {}),
    "breakers.reset": (("reset-breaker", "w1", "--model", "org/m1"), "w1", {"model": "org/m1"}),
    "breakers.force": (("force-breaker", "w1", "m1", "open"), "w1", {"model": "m1", "state": "open"}),
    "limits.set": (
        ("set-limits", "admission.max_queued=10", "delivery.buffer_bytes=1 MiB", "stream.receipt=true"),
        None,
        {"set": {"admission.max_queued": 10, "delivery.buffer_bytes": "1 MiB", "stream.receipt": True}},
    ),
    "keys.rotate": (
        ("rotate-key", "acme", "k1", "--overlap", "60"),
        None,
        {"tenant": "acme", "id": "k1", "overlap": 60.0},
    ),
    "reload": (("reload",), None, {}),
    "processes.replace": (("replace-processes",), None, {}),
    "log_level.set": (("log-level", "debug"), None, {"level": "debug"}),
}


def test_there_is_a_command_for_everything_that_the_door_does() -> None:
    assert READING.keys() | {"self_audit", "flight"} == {read.name for read in READS}
    assert ACTING.keys() == {act.action for act in ACTS}


@pytest.mark.parametrize("name", READING)
async def test_what_is_read_is_a_table_or_json(name: str) -> None:
    words, answer, seen = READING[name]
    async with operator(VIEWER) as somebody:
        answered = answer(somebody.port)
        expected = json.loads(json.dumps(await answered if inspect.isawaitable(answered) else answered))
        told = await somebody.json(*words)
        assert expected in (told, *told.values())
        code, out, err = await somebody.types(*words)
        assert (code, err) == (0, "")
        for word in seen:
            assert word in out


@pytest.mark.parametrize("name", ACTING)
async def test_what_is_done_reaches_the_gateway_as_it_was_typed(name: str) -> None:
    words, target, arguments = ACTING[name]
    async with operator() as somebody:
        answer = await somebody.json(*words)
        assert answer["done"] == (name != "tenants.thaw")
        ((_, action, on, given),) = somebody.port.acts
        assert (action, on, given) == (name, target, arguments)


async def test_it_says_whether_something_was_done_and_what_changed() -> None:
    async with operator() as somebody:
        code, out, _ = await somebody.types("freeze", "acme")
        assert (code, out.splitlines()[0]) == (0, "Done.")
        assert re.search(r"^after\.frozen +yes$", out, re.MULTILINE)
        code, out, _ = await somebody.types("freeze", "acme")
        assert (code, out.splitlines()[0]) == (0, "There was nothing to do.")


async def test_rows_of_several_processes_say_of_which_they_are() -> None:
    async with operator() as somebody:
        somebody.port.rows = [{**row, "process": number} for number, row in enumerate(somebody.port.rows)]
        _, out, _ = await somebody.types("requests")
        heading, first, second, *_ = (line.split() for line in out.splitlines())
        assert (heading[-1], first[-1], second[-1]) == ("process", "0", "1")


async def test_what_only_begins_is_not_said_to_be_done() -> None:
    async with operator() as somebody:
        _, out, _ = await somebody.types("replace-processes")
        assert out.startswith("Begun: ")


async def test_requests_are_filtered_and_it_is_said_that_there_are_more() -> None:
    async with operator() as somebody:
        answer = await somebody.json("requests", "--state", "waiting", "--tenant", "tenant-1")
        assert [row["id"] for row in answer["requests"]] == [request_row(6)["id"]]
        code, _, err = await somebody.types("requests", "--limit", "2")
        assert (code, err) == (0, "2 of 7; see --limit and --offset\n")


async def test_a_self_audit_that_finds_something_is_a_failure_for_scripts() -> None:
    async with operator() as somebody:
        code, out, err = await somebody.types("self-audit")
        assert (code, err) == (1, "")
        assert "its exchange has ended" in out
        code, out, _ = await somebody.types("self-audit", "--json")
        assert (code, json.loads(out)["ok"]) == (1, False)


async def test_a_flight_is_saved_to_a_file(tmp_path: Path) -> None:
    async with operator() as somebody:
        file = tmp_path / "flight.json"
        assert await somebody.types("flight", FIRST, "--output", str(file)) == (0, "", "")
        code, out, _ = await somebody.types("flight", FIRST)
        assert code == 0
        assert json.loads(out) == json.loads(file.read_text()) == await somebody.port.flight(FIRST)
        code, _, err = await somebody.types("flight", FIRST, "--output", str(tmp_path / "no" / "x"))
        assert code == 1
        assert "No such file" in err


async def test_the_feed_is_followed_until_the_gateway_ends() -> None:
    async with door() as opened:
        somebody = Operator(opened, VIEWER)
        ended: list[Run] = []

        async def follow() -> None:
            ended.append(await somebody.types("feed"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            with trio.fail_after(10):
                await until(lambda: opened.port.snapshots == 2)
            opened.close()
    ((code, out, err),) = ended
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["event"], line["at"]) for line in lines[:2]] == [("snapshot", 1), ("snapshot", 2)]
    assert code == 1
    assert err.startswith("trio-gateway: the feed of http://127.0.0.1:")


# Where, and who ---------------------------------------------------------------------------------------------


async def test_the_environment_says_where_and_who() -> None:
    async with operator() as somebody:
        _, url, _, secret = somebody.where
        environ = {"TRIO_GATEWAY_ADMIN_URL": url, "TRIO_GATEWAY_ADMIN_TOKEN": secret}
        code, out, _ = await run_in_thread("version", **environ)
        assert (code, "1.2.3" in out) == (0, True)


async def test_a_file_says_who(tmp_path: Path) -> None:
    async with operator() as somebody:
        (tmp_path / "token").write_text(OPERATOR + "\n")
        where = ("--url", somebody.where[1], "--token-file", str(tmp_path / "token"))
        code, out, _ = await run_in_thread(*where, "version")
        assert (code, "1.2.3" in out) == (0, True)
        code, _, err = await run_in_thread("--token-file", str(tmp_path / "none"), "version")
        assert (code, "none" in err) == (2, True)


async def test_it_comes_over_a_unix_socket(tmp_path: Path) -> None:
    async with door(tokens=(), bind=f"unix:{tmp_path / 'admin.sock'}"):
        code, out, _ = await run_in_thread("--url", f"unix:{tmp_path / 'admin.sock'}", "version")
        assert (code, "1.2.3" in out) == (0, True)


@pytest.mark.parametrize(
    ("secret", "words", "told"),
    [
        (
            "wrong",
            ("version",),
            "the token is not known (401 invalid_admin_token); --token-file or TRIO_GATEWAY_ADMIN_TOKEN",
        ),
        (VIEWER, ("reload",), "the token eyes may read, but not act (403 role_not_allowed)"),
        (OPERATOR, ("drain", "nobody"), "there is no such one (404 not_found)"),
        (OPERATOR, ("request", "0"), "there is no such request (404 not_found)"),
        (
            OPERATOR,
            ("log-level", "loud"),
            "level must be one of debug, info, warning, error (400 invalid_value)",
        ),
        (OPERATOR, ("requests", "--state", "x"), "state must be one of waiting, running, ended (400 invalid"),
    ],
)
async def test_a_refusal_is_told_in_the_gateways_words(
    secret: str, words: tuple[str, ...], told: str
) -> None:
    async with operator(secret) as somebody:
        code, out, err = await somebody.types(*words)
        assert (code, out) == (1, "")
        assert err.startswith(f"trio-gateway: {told}")


async def test_each_problem_of_a_file_has_a_line_of_its_own() -> None:
    async with operator() as somebody:
        somebody.port.raises = refusal("invalid_configuration", "a.toml:1: x\na.toml:2: y")
        _, _, err = await somebody.types("reload")
        assert err == "trio-gateway: a.toml:1: x\na.toml:2: y\n(400 invalid_configuration)\n"


@pytest.mark.parametrize("words", [("drain", "a/b"), ("drain", ".."), ("freeze", ""), ("cancel", "a%2fb")])
def test_what_is_no_id_is_asked_of_nobody(words: tuple[str, ...]) -> None:
    code, _, err = run("--url", "http://127.0.0.1:1", *words)
    assert code == 2
    assert "is no id" in err


@pytest.mark.parametrize("value", ["admission.max_queued", "=1"])
def test_what_is_no_limit_is_asked_of_nobody(value: str) -> None:
    code, _, err = run("set-limits", value)
    assert (code, "is not name=value" in err) == (2, True)


@pytest.mark.parametrize("url", ["127.0.0.1:9090", "ftp://x", ""])
def test_what_is_no_address_is_told(url: str) -> None:
    code, _, err = run("--url", url, "version")
    assert code == 1
    assert "is no address: write http://host:port, https://host or unix:path" in err


@pytest.mark.parametrize("word", ["version", "feed"])
def test_where_nobody_listens_it_says_so(tmp_path: Path, word: str) -> None:
    with refusing_port() as port:
        code, _, err = run("--url", f"http://127.0.0.1:{port}", word)
    assert code == 1
    assert err.startswith("trio-gateway: no answer from http://127.0.0.1:")
    code, _, err = run("--url", f"unix:{tmp_path / 'none.sock'}", "feed")
    assert (code, err.startswith("trio-gateway: there is no socket ")) == (1, True)


async def test_somebody_else_who_answers_is_no_gateway() -> None:
    async with door() as opened:
        somebody = Operator(opened)
        code, _, err = await run_in_thread("--url", somebody.where[1] + "/other", "--token", OPERATOR, "feed")
        assert code == 1
        assert "there is no such path" in err


@asynccontextmanager
async def saying(body: bytes, status: bytes = b"200 OK") -> AsyncIterator[str]:
    """Somebody who answers every question with the same."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\n\r\n" % status
        with suppress(trio.BrokenResourceError):
            await stream.send_all(head + body)
            await stream.send_eof()
            while await stream.receive_some():
                pass  # what was left unread would reset the connection

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'{"requests": 5, "tenants": {"a": 1}, "limits": [], "tasks": [[]], "done": 1, "ok": 1}',
        b"[" * 20_000 + b"]" * 20_000,
        b'{"a": ' + b"[" * 800 + b"]" * 800 + b"}",
        b'{"total": ' + b"9" * 5000 + b"}",
        b"\xff{",
    ],
)
async def test_whatever_else_answers_is_told_to_be_no_gateway(body: bytes) -> None:
    commands = (("requests",), ("request", FIRST), ("queues",), ("tasks",), ("self-audit",), ("freeze", "a"))
    async with saying(body) as url:
        for words in commands:
            code, out, err = await run_in_thread("--url", url, *words)
            assert (code, out) == (1, ""), words
            assert err == f"trio-gateway: {url} answered 200, and not as a gateway does\n"


async def test_a_feed_that_is_none_says_so() -> None:
    for body in (b"event: snapshot\ndata: {\n\n", b"event: snapshot\ndata: []\n\n"):
        async with saying(body) as url:
            code, out, err = await run_in_thread("--url", url, "feed")
            assert (code, out) == (1, "")
            assert err == f"trio-gateway: the feed of {url} is none of a gateway\n"


async def test_what_a_refusal_says_does_not_move_the_cursor() -> None:
    body = b'{"error": {"message": "a\\u001b[2Jb", "code": "x", "type": "x", "param": null}}'
    async with saying(body, b"400 No") as url:
        code, _, err = await run_in_thread("--url", url, "version")
        assert (code, err) == (1, "trio-gateway: a\\x1b[2Jb (400 x)\n")


async def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trio_gateway.cli._admin_client.LONGEST", 10_000)
    async with saying(b" " * 20_000) as url:
        code, _, err = await run_in_thread("--url", url, "version")
        assert (code, "the answer does not end" in err) == (1, True)
        code, _, err = await run_in_thread("--url", url, "feed")
        assert (code, "is none of a gateway" in err) == (1, True)


async def test_what_a_client_chose_does_not_move_the_cursor() -> None:
    async with operator() as somebody:
        somebody.port.rows[0]["model"] = "a\x1b[2Jb"
        code, out, _ = await somebody.types("requests")
        assert (code, "\x1b" in out, '"a\\u001b[2Jb"' in out) == (0, False, True)


# Tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_a_new_token_is_shown_once_with_the_line_that_lets_it_in(role: str) -> None:
    code, out, err = run("token", "create", "--id", "ops", "--role", role)
    assert code == 0
    secret, line = out.splitlines()
    assert "admin.tokens" in err
    digest = token("ops", secret, "viewer").digest.hex()
    assert line == f'{{id = "ops", hash = "sha256:{digest}", role = "{role}"}}'
    assert secret != run("token", "create", "--id", "ops", "--role", role)[1].splitlines()[0]


@pytest.mark.parametrize("words", [("--role", "root"), ("--role", "viewer", "--id", 'a"b')])
def test_a_token_that_could_not_be_configured_is_not_made(words: tuple[str, ...]) -> None:
    code, out, _ = run("token", "create", *words)
    assert (code, out) == (2, "")
