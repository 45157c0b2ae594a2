"""Every way in which a worker can say no or fail, played by engines, configured agents and registered ones.

One table. Each row is played twice. Alone, to see what the caller is told, what is known of
the worker afterwards, and that the gateway is ready again within five seconds, as the worker
is well again, and serves. And beside a good worker, to see who is tried instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import trio

from tests.admin.test_workers import EVENTS, TOKEN, heartbeat, register
from tests.e2e.serving import Serving, error_code, serving
from trio_gateway.fleet import WorkerBook
from trio_gateway.testing import (
    AGENT_HEAD,
    DONE,
    Chunk,
    CloseFin,
    CloseReset,
    EndChunks,
    EngineRequest,
    Head,
    Hold,
    Json,
    Raw,
    Repeat,
    Script,
    ScriptedEngine,
    Step,
    agent_failure,
    agent_record,
    agent_rejection,
    agent_result,
    agent_stream,
    chat_answer,
    chat_chunk,
    chat_request,
    chat_stream,
    error_answer,
    error_event,
    open_engine,
    refusing_port,
    silent_port,
)

Kind = Literal["engine", "agent", "registered"]
KINDS: Final[tuple[Kind, ...]] = ("engine", "agent", "registered")
READY_WITHIN: Final = 5.0  # seconds
SECRET: Final = "s" * 32

HEAD, ROLE, ONE = chat_stream("one")[:3]
ACCEPTED: Final = agent_record("accepted", slot=0)
WORD: Final = agent_record("delta", i=0, text="one", n=1)
JSON_HEAD: Final = Head(200, (("content-type", "application/json"), ("transfer-encoding", "chunked")))


# What is known of a worker afterwards -------------------------------------------------------------------


def nothing(book: WorkerBook) -> bool:
    state = book.snapshot
    return not (state.suspect or state.unready or state.missing or state.failed or book.outages)


def suspect(book: WorkerBook) -> bool:
    return book.snapshot.suspect


def full(book: WorkerBook) -> bool:
    return "m1" in book.outages


def draining(book: WorkerBook) -> bool:
    return book.snapshot.state == "draining"


def lacking(book: WorkerBook) -> bool:
    return book.snapshot.missing == {"m1"} and not book.outages


def unloadable(book: WorkerBook) -> bool:
    return book.snapshot.failed == {"m1"} and book.snapshot.suspect


def unready(book: WorkerBook) -> bool:
    return book.snapshot.unready


@dataclass(frozen=True)
class Row:
    """One way.

    Attributes:
        scripts: how each kind plays it; a kind that has no such way is left out.
        status, code: what the caller is told when nobody else is there.
        elsewhere: a good worker is tried instead.
        fault: it counts against the worker.
        known: what holds of the worker afterwards.
        stream: whether the caller asked for a stream.
    """

    scripts: Mapping[str, Script]
    status: int
    code: str
    elsewhere: bool
    fault: bool
    known: Callable[[WorkerBook], bool]
    stream: bool = True
    sections: dict[str, Any] = field(default_factory=dict)


def by(engine: Script | None = None, agent: Script | None = None) -> dict[str, Script]:
    """Scripts of engines and of agents, registered or not."""
    scripts = {"engine": engine, "agent": agent, "registered": agent}
    return {kind: script for kind, script in scripts.items() if script is not None}


def unexecuted(engine: Script | None, agent: Script | None, status: int = 503, **others: Any) -> Row:
    return Row(by(engine, agent), status, "engine_overloaded", True, False, **{"known": full, **others})


def failing(engine: Script | None, agent: Script | None, **others: Any) -> Row:
    row = {"status": 502, "code": "engine_failed", "elsewhere": True, "fault": True, "known": suspect}
    return Row(by(engine, agent), **{**row, **others})


def told(engine: Script | None, agent: Script | None, status: int, code: str, **others: Any) -> Row:
    return Row(by(engine, agent), status, code, False, False, **{"known": nothing, **others})


def stream_of(*steps: Step) -> tuple[Step, ...]:
    return (AGENT_HEAD, ACCEPTED, *steps)


SHORT: Final = {"deadlines": {"first_token": 0.15, "between_events": 0.15}}
TOO_SLOW: Final = {"code": "first_token_timeout", "status": 504, "sections": SHORT}
UNREADABLE: Final = {"code": "engine_protocol_error"}
ABORT: Final = chat_chunk({}, finish="abort")

TABLE: Final[dict[str, Row]] = {
    # Typed rejections, and what engines say in their place.
    "capacity": unexecuted(error_answer(429), agent_rejection("capacity"), 429),
    "503": unexecuted(error_answer(503), error_answer(503)),
    "429 in a 200": unexecuted(
        (HEAD, ROLE, error_event("full", code=429), EndChunks()), agent_failure("capacity"), 429
    ),
    "503 in a 200": unexecuted(
        (HEAD, error_event("full", code=503), DONE, EndChunks()), agent_failure("overloaded")
    ),
    "503 in a whole answer": unexecuted(
        error_answer(200, code=503), agent_result({"error": {"message": "full"}}, 503), stream=False
    ),
    "draining": unexecuted(None, agent_rejection("draining"), known=draining),
    "shutting_down": unexecuted(None, agent_rejection("shutting_down"), known=draining),
    "abort without content": unexecuted(
        (HEAD, ROLE, ABORT, DONE, EndChunks()), agent_failure("aborted"), known=draining
    ),
    "finish_reason abort": unexecuted(
        None, stream_of(agent_record("finish", i=0, reason="abort"), Hold()), known=draining
    ),
    "model_not_loaded": Row(
        by(error_answer(404, "model m1 does not exist"), agent_rejection("model_not_loaded")),
        404,
        "model_not_found",
        True,
        False,
        lacking,
    ),
    "model_not_loaded in a stream": Row(
        by(None, agent_failure("model_not_loaded")), 404, "model_not_found", True, False, lacking
    ),
    "model_load_failed": failing(None, agent_rejection("model_load_failed"), known=unloadable),
    "model_load_failed in a stream": failing(None, agent_failure("model_load_failed"), known=unloadable),
    "engine_unready": unexecuted(
        error_answer(503, "Loading model"), agent_rejection("engine_unready"), known=unready
    ),
    "deadline": told(None, agent_rejection("deadline"), 504, "deadline_exceeded"),
    # Failures.
    "500": failing(error_answer(500), error_answer(500)),
    "502": failing(error_answer(502), error_answer(502)),
    "424": failing(error_answer(424), error_answer(424)),
    "504": failing(error_answer(504), error_answer(504)),
    "501": told(error_answer(501), error_answer(501), 400, "invalid_value"),
    "500 in a 200": failing((HEAD, ROLE, error_event(), DONE, EndChunks()), agent_failure("engine_failed")),
    "500 in a whole answer": failing(
        error_answer(200, code=500), agent_result({"error": {"message": "broke"}}, 500), stream=False
    ),
    "first-token timeout": failing((HEAD, ROLE, Hold()), stream_of(Hold()), **TOO_SLOW),
    "first-token timeout before a head": failing((Hold(),), (Hold(),), **TOO_SLOW),
    "no progress": failing(
        (JSON_HEAD, Chunk(b'{"choices"'), Hold()),
        stream_of(agent_record("ping", generated=3, paused=False), Hold()),
        stream=False,
        sections=SHORT,
    ),
    "closed": failing((CloseFin(),), (CloseFin(),)),
    "reset": failing((CloseReset(),), (CloseReset(),)),
    "cut before content": failing((HEAD, ROLE, CloseReset()), stream_of(CloseReset())),
    "ended without a finish": failing((HEAD, ROLE, DONE, EndChunks()), stream_of(EndChunks())),
    "malformed": failing(
        (HEAD, ROLE, Raw(b"zz\r\n"), Hold()), stream_of(Chunk(b"zz\n"), Hold()), **UNREADABLE
    ),
    "malformed framing": failing((HEAD, Raw(b"zz\r\n")), (AGENT_HEAD, Raw(b"zz\r\n")), **UNREADABLE),
    "another step than the grammar has": failing(None, (AGENT_HEAD, WORD, Hold()), **UNREADABLE),
    "another content type": failing(chat_answer("x"), chat_stream("x"), **UNREADABLE),
    "an illegal head": failing((Raw(b"SSH-2.0\r\n\r\n"),), (Raw(b"SSH-2.0\r\n\r\n"),), **UNREADABLE),
    "an unreadable coding": failing(
        (Head(200, (*HEAD.headers, ("content-encoding", "br"))), Hold()),  # type: ignore[union-attr]
        (Head(200, (*AGENT_HEAD.headers, ("content-encoding", "br"))), Hold()),
        **UNREADABLE,
    ),
    # What nobody is to blame for, or the caller, or whoever configured the worker.
    "out of memory": told(
        error_answer(500, "CUDA out of memory"), agent_failure("out_of_memory"), 503, "engine_out_of_memory"
    ),
    "out of memory in a 200": told(
        (HEAD, ROLE, error_event("CUDA out of memory"), EndChunks()),
        agent_failure("engine_out_of_memory", retry="never"),
        503,
        "engine_out_of_memory",
    ),
    "400": told(error_answer(400), error_answer(400), 400, "invalid_value"),
    "413": told(error_answer(413), error_answer(413), 413, "request_too_large"),
    "422": told(error_answer(422), error_answer(422), 422, "invalid_value"),
    "400 in a 200": told(
        (HEAD, error_event("bad", code=400), EndChunks()),
        agent_failure("invalid_value", message="bad", status=400),
        400,
        "invalid_value",
    ),
    "401": told(error_answer(401), error_answer(401), 502, "engine_credentials"),
    "403": told(error_answer(403), error_answer(403), 502, "engine_credentials"),
    "307": told(error_answer(307), error_answer(307), 502, "engine_credentials"),
}


def plays(*kinds: Kind) -> list[Any]:
    return [
        pytest.param(kind, row, id=f"{name}-{kind}")
        for name, row in TABLE.items()
        for kind in kinds
        # Configured and registered agents differ in how it is learnt that they are well again.
        if kind in row.scripts and (kind != "agent" or row.known not in (nothing, suspect))
    ]


# The stage ----------------------------------------------------------------------------------------------


class Player:
    """An engine, or an agent, that plays a script until it is told to be well.

    Attributes:
        well: whether its health pages say so.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.well = True
        self.secret = ""
        self.engine: ScriptedEngine

    def health(self, request: EngineRequest) -> Script:
        listed = {"object": "list", "data": [{"id": "m1"}]}
        return (
            (Json(listed if request.target.endswith("models") else {}),) if self.well else error_answer(500)
        )

    def good(self, request: EngineRequest) -> Script:
        stream = bool(request.json().get("stream"))
        (whole,) = chat_answer("ok")
        assert isinstance(whole, Json)
        if self.kind == "engine":
            return chat_stream("ok") if stream else (whole,)
        return agent_stream("ok") if stream else agent_result(whole.body)

    def play(self, script: Script) -> None:
        """Answer requests by this, and be ill."""
        self.well = False
        self.engine.rescript(script)

    def recover(self) -> None:
        self.well = True
        self.engine.rescript(self.good)


@asynccontextmanager
async def player(kind: Kind) -> AsyncIterator[Player]:
    """Run one, well at first."""
    one = Player(kind)
    pages: dict[str, Any] = dict.fromkeys(("/readyz", "/livez", "/health", "/v1/models"), one.health)
    pages |= {"/internal/v1/events": EVENTS, "/internal/v1/requests/": error_answer(404)}
    async with open_engine(one.good, pages=pages) as one.engine:
        yield one


@asynccontextmanager
async def before(kind: Kind, folder: Path, *urls: str, **sections: Any) -> AsyncIterator[Serving]:
    """A gateway before workers of a kind, as ``w1``, ``w2`` and so on."""
    (folder / "token").write_text(TOKEN)
    (folder / "secret").write_text(SECRET)
    sections = {
        "models": [{"id": "m1"}],
        "probes": {"interval": 0.3},
        "retry": {"backoff": 0.05},
        "fleet": {"heartbeat_interval": 30, "ttl": 90},  # however busy the machine is
        **sections,
    }
    if kind == "registered":
        internal = {"bind": ["127.0.0.1:0"], "join_token_file": "token", "allowed_networks": ["127.0.0.0/8"]}
        async with serving(folder=folder, internal=internal, workers=[], **sections) as gateway:
            yield gateway
        return
    worker = {"kind": "agent", "api_key_file": "secret"} if kind == "agent" else {"kind": "openai"}
    async with serving(*urls, folder=folder, worker=worker, **sections) as gateway:
        yield gateway


@asynccontextmanager
async def staged(
    kind: Kind, count: int, folder: Path, **sections: Any
) -> AsyncIterator[tuple[Serving, list[Player]]]:
    """A gateway before so many workers of a kind, all of them known and well."""
    async with AsyncExitStack() as stack:
        players = [await stack.enter_async_context(player(kind)) for _ in range(count)]
        urls = [each.engine.url for each in players]
        async with before(kind, folder, *urls, **sections) as gateway:
            for number, each in enumerate(players, 1):
                if kind == "registered":
                    each.secret = await join(gateway, each.engine.url, f"w{number}")
            yield gateway, players
            if kind == "registered":  # another process each, so nothing drains in the old ones any more
                for number, each in enumerate(players, 1):
                    await register(gateway, each.engine.url, worker_id=f"w{number}", incarnation=2)
        for each in players:
            with trio.fail_after(10):
                await each.engine.wait_disconnected()


async def join(gateway: Serving, url: str, worker_id: str) -> str:
    """Register a worker, and let it say that it is ready; answers its secret."""
    secret = await register(gateway, url, worker_id=worker_id)
    assert (await heartbeat(gateway, secret, worker_id)).status == 200
    return secret


async def expect_ready(gateway: Serving) -> None:
    with trio.fail_after(READY_WITHIN):
        while (await gateway.get("/readyz")).status != 200:  # noqa: ASYNC110  (as its watchers ask)
            await trio.sleep(0.02)


async def expect_service(gateway: Serving) -> None:
    with trio.fail_after(READY_WITHIN):
        while (await gateway.ask(chat_request())).status != 200:  # noqa: ASYNC110
            await trio.sleep(0.02)


# The table, played --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "row"), plays(*KINDS))
async def test_alone_the_caller_is_told_and_the_worker_comes_back(
    kind: Kind, row: Row, tmp_path: Path
) -> None:
    sections = {**row.sections, "retry": {"backoff": 0.05, "max_attempts": 1}}
    async with staged(kind, 1, tmp_path, **sections) as (gateway, (worker,)):
        await expect_ready(gateway)
        worker.play(row.scripts[kind])
        answer = await gateway.ask(chat_request(stream=row.stream))
        assert (answer.status, error_code(answer)) == (row.status, row.code)
        again = row.status in (429, 503) and row.code != "engine_out_of_memory"
        assert (answer.header("retry-after") is not None) is again
        book = gateway.gateway.fleet.books["w1"]
        assert row.known(book)
        assert book.faults == row.fault
        worker.recover()
        if kind == "registered":
            assert (await heartbeat(gateway, worker.secret, "w1", seq=9)).status == 200
        await expect_ready(gateway)
        if kind == "agent" and row.known in (lacking, unloadable):
            return  # it has no list: it is asked again after half a minute
        await expect_service(gateway)
        assert row.known is nothing or not row.known(book)


@pytest.mark.parametrize(("kind", "row"), plays("engine", "registered"))
async def test_beside_a_good_worker_that_one_is_tried_where_it_makes_sense(
    kind: Kind, row: Row, tmp_path: Path
) -> None:
    async with staged(kind, 2, tmp_path, **row.sections) as (gateway, (bad, good)):
        await expect_ready(gateway)
        bad.play(row.scripts[kind])
        answer = await gateway.ask(chat_request(stream=row.stream))
        record = await gateway.settled()
        if row.elsewhere:
            assert answer.status == 200
            assert (record.outcome, record.worker, record.attempts) == ("completed", "w2", 2)
            if row.stream:
                assert (answer.chat().text, answer.chat().done) == ("ok", 1)
        else:
            assert (answer.status, error_code(answer)) == (row.status, row.code)
            assert (record.worker, record.attempts, good.engine.requests) == ("w1", 1, [])
        assert (await gateway.get("/readyz")).status == 200
        assert gateway.gateway.fleet.books["w2"].faults == 0


# Workers that can not be reached ------------------------------------------------------------------------

UNREACHABLE: Final = {
    "connection refused": (refusing_port, "http://127.0.0.1:{}"),
    "no connection within the limit": (silent_port, "http://127.0.0.1:{}"),
    "a name that is not resolved": (None, "http://engine.invalid:1"),
    "a socket that is missing": (None, "http+unix:///nowhere/engine.sock"),
    "a socket that is forbidden": (None, "http+unix:///proc/1/root/engine.sock"),
    "no TLS": (refusing_port, "https://127.0.0.1:{}"),
}


@pytest.mark.parametrize(
    ("kind", "port_of", "url"),
    [
        pytest.param(kind, *where, id=f"{name}-{kind}")
        for name, where in UNREACHABLE.items()
        for kind in KINDS
        if kind != "registered" or where[1].startswith("http://127")  # others can not register
    ],
)
async def test_a_worker_that_can_not_be_reached_is_passed_over(
    kind: Kind, port_of: Any, url: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        at = url.format(stack.enter_context(port_of())) if port_of else url
        sections = {"deadlines": {"connect": 0.2}, "probes": {"interval": 60}}
        async with player(kind) as good, before(kind, tmp_path, at, good.engine.url, **sections) as gateway:
            if kind == "registered":
                await join(gateway, at, "w1")
                await join(gateway, good.engine.url, "w2")
            answer = await gateway.ask(chat_request())
            assert answer.chat().text == "ok"
            record = await gateway.settled()
            book = gateway.gateway.fleet.books["w1"]
            assert (record.worker, record.attempts, book.faults) == ("w2", 2, 1)
            assert suspect(book)
            assert (await gateway.get("/readyz")).status == 200


# What happens to an attempt says nothing of its worker --------------------------------------------------

STREAMING: Final = {
    "engine": (HEAD, ROLE, ONE, Hold()),
    "agent": stream_of(WORD, Hold()),
    "registered": stream_of(WORD, Hold()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how", ["the client left", "the deadline passed", "its owner cancelled", "it stalled"]
)
async def test_an_end_that_is_not_the_workers_is_not_counted(kind: Kind, how: str, tmp_path: Path) -> None:
    sections = {"delivery": {"stall_timeout": 0.3}} if how == "it stalled" else {}
    async with staged(kind, 1, tmp_path, **sections) as (gateway, (worker,)):
        script = STREAMING[kind]
        if how == "it stalled":
            word = script[-2]
            script = (*script[:-1], Repeat((word,), times=None))
        worker.engine.rescript(script)
        headers = (("x-gateway-timeout-ms", "300"),) if how == "the deadline passed" else ()
        with trio.fail_after(10), await gateway.connect(receive_buffer=4096) as client:
            await client.send(chat_request(headers=headers))
            await client.read_until(b"one")
            if how == "the client left":
                client.leave_reset()
            elif how == "its owner cancelled":
                request_id = client.answers[0].header("x-request-id")
                assert (await gateway.fetch("DELETE", f"/v1/requests/{request_id}")).status == 200
            elif how == "it stalled":
                await client.stall()
            record = await gateway.settled()
        outcomes = {
            "the client left": "client_gone",
            "the deadline passed": "deadline_exceeded",
            "its owner cancelled": "client_cancelled",
            "it stalled": "client_stalled",
        }
        assert record.outcome == outcomes[how]
        book = gateway.gateway.fleet.books["w1"]
        assert (book.faults, nothing(book)) == (0, True)
        worker.recover()
        await expect_ready(gateway)
        await expect_service(gateway)


# Breakers -----------------------------------------------------------------------------------------------


def breaker_of(gateway: Serving) -> str:
    (figures,) = gateway.gateway.statistics()["workers"]
    return str(figures["breakers"]["m1"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["cancelled", "400", "full", "failed", "good"])
async def test_only_the_output_of_a_single_trial_closes_a_breaker(
    kind: Kind, how: str, tmp_path: Path
) -> None:
    scripts: dict[str, Script] = {
        "cancelled": (Hold(),),
        "400": error_answer(400),
        "full": error_answer(503) if kind == "engine" else agent_rejection("capacity"),
        "failed": error_answer(500),
    }
    after = {"good": "closed", "failed": "open"}.get(how, "half_open")
    sections = {
        "breaker": {"consecutive_faults": 2, "cooldown": 0.3 if how == "failed" else 0.2},
        "retry": {"max_attempts": 1, "backoff": 0.05},
    }
    async with staged(kind, 1, tmp_path, **sections) as (gateway, (worker,)):
        worker.engine.rescript(error_answer(500))
        for _ in range(2):
            assert (await gateway.ask(chat_request())).status == 502
        assert breaker_of(gateway) == "open"
        refused = await gateway.ask(chat_request())
        assert (refused.status, error_code(refused)) == (503, "engine_unavailable")
        await gateway.until(lambda: breaker_of(gateway) == "half_open")
        await expect_ready(gateway)
        worker.engine.rescript(scripts.get(how, worker.good))
        await gateway.ask(
            chat_request(headers=(("x-gateway-timeout-ms", "100"),) if how == "cancelled" else ())
        )
        assert breaker_of(gateway) == after
        worker.engine.rescript(worker.good)
        if kind == "registered":
            await heartbeat(gateway, worker.secret, "w1", seq=9)
        await expect_ready(gateway)
        await expect_service(gateway)
        assert breaker_of(gateway) == "closed"
