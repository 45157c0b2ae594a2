"""The simulated engine behind HTTP, speaking as vLLM, SGLang, llama.cpp, TGI or OpenAI do."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, final
from urllib.parse import parse_qs

import msgspec
import trio

from ...wire import RequestHead
from ._simulated_connection import EngineConnection, PeerLeft
from ._simulated_dialects import MANNERS, Trouble
from ._simulated_engine import SimulatedEngine
from ._simulated_faults import PlannedFault
from ._simulated_generation import Output, Refusal
from ._simulated_metrics import PAGES, log_of, metrics_page
from ._simulated_reply import Reply, write_body, write_json
from ._simulated_request import Ask, AskError, read_ask
from ._simulated_responses import read_response_ask

KEEP_ALIVE: Final = 5.0  # seconds, as all of them
HEALTH_LIMIT: Final = 20.0  # seconds that SGLang gives its own token
LOG_ENTRIES: Final = 100  # requests and steps that the log tells one by one, unless asked for more

_RESPONSES: Final = "/v1/responses"
Reader = Callable[[dict[str, Any]], Ask]
_GENERATING: Final[dict[str, Reader]] = {
    "/v1/chat/completions": partial(read_ask, chat=True),
    "/v1/completions": partial(read_ask, chat=False),
    _RESPONSES: read_response_ask,
}

Route = Callable[[RequestHead, bytes], Awaitable[bytes]]


class _PlannedFaults(msgspec.Struct, forbid_unknown_fields=True):
    faults: tuple[PlannedFault, ...]


@final
class SimulatedServer:
    """Serves one engine on listening sockets.

    Args:
        engine: runs meanwhile; the server does not run it.
        kind: a key of `MANNERS`.
        metrics: serve the metrics page where the kind has it only on demand.

    Attributes:
        connections: that are open.
    """

    def __init__(self, engine: SimulatedEngine, kind: str, *, metrics: bool = False) -> None:
        self.connections = 0
        self._engine = engine
        self._kind = kind
        self._manner = MANNERS[kind]
        self._numbers = itertools.count(1)
        self._in_use: set[str] = set()
        self._started = int(time.time())
        self._metrics = self._manner.metrics and (metrics or not self._manner.metrics_asked)
        self._generating = {
            path: read for path, read in _GENERATING.items() if self._manner.responses or path != _RESPONSES
        }
        self._routes = self._table()

    @property
    def routes(self) -> set[str]:
        """Method and path of everything that it answers."""
        generating = {f"POST {path}" for path in self._generating}
        return generating | {f"{method} {path}" for method, path in self._routes}

    async def wait_answering(self) -> None:
        """Wait until this kind of engine listens; many do not while they load."""
        await trio.sleep_until(0 if self._manner.answers_while_loading else self._engine.core.ready_at)

    async def serve(self, listeners: list[trio.SocketListener]) -> None:
        """Serve until cancelled."""
        await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, stream: trio.SocketStream) -> None:
        connection = EngineConnection(stream)
        self.connections += 1
        try:
            keep = True
            while keep:
                spoken = False
                with trio.move_on_after(KEEP_ALIVE):
                    spoken = await connection.wait_spoken()
                if not spoken:
                    return
                head, body = await connection.next_request()
                keep = await self._answer(connection, head, body) and head.keep_alive
        except PeerLeft:
            pass  # between two answers, or in front of the first
        finally:
            connection.abort()
            self.connections -= 1

    async def _answer(self, connection: EngineConnection, head: RequestHead, body: bytes) -> bool:
        """Answer one request; False if the connection can not be used again."""
        if head.method == "POST" and head.path in self._generating:
            return await self._generate(connection, head, body, self._generating[head.path])
        route = self._routes.get((head.method, head.path))
        loading = self._kind == "llamacpp" and not self._engine.ready
        if loading and not head.path.startswith("/simulate/"):
            connection.write(self._error(self._manner.troubles["engine_unready"]))
        elif route is None:
            connection.write(self._error(self._manner.troubles["no_route"]))
        else:
            connection.write(await route(head, body))
        await connection.flush()
        return not connection.broken

    def _error(self, trouble: Trouble) -> bytes:
        return write_json(trouble.status, self._manner.error(trouble))

    # -- generating

    async def _generate(
        self, connection: EngineConnection, head: RequestHead, body: bytes, reader: Reader
    ) -> bool:
        try:
            ask, answer_id = self._read(head, body, reader)
        except AskError as error:
            connection.write(self._error(self._invalid(error)))
            await connection.flush()
            return not connection.broken
        reply = Reply(self._engine, self._manner, ask, answer_id, int(time.time()))
        try:
            reply.begin(connection)
        except AskError as error:
            reply.refuse(connection, self._invalid(error))
        except Refusal as refusal:
            trouble = self._manner.troubles[refusal.code]
            reply.refuse(connection, replace(trouble, message=trouble.message.format(model=ask.model)))
        self._in_use.add(answer_id)
        try:
            return await self._attend(connection, reply, ask)
        finally:
            self._in_use.discard(answer_id)
            reply.leave()

    async def _attend(self, connection: EngineConnection, reply: Reply, ask: Ask) -> bool:
        """Wait until the answer is written or the caller has left; answers whether it was the first."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, connection, reply, ask, nursery.cancel_scope)
            nursery.start_soon(connection.keep_flushing)
            await reply.over.wait()
            await connection.wait_sent()
            nursery.cancel_scope.cancel()
        return not connection.broken

    async def _watch(
        self, connection: EngineConnection, reply: Reply, ask: Ask, scope: trio.CancelScope
    ) -> None:
        """Tell the engine when the caller left, as late as this kind of engine looks."""
        await connection.wait_left()
        every = self._manner.looks_every[not ask.stream]
        if every and reply.generation is not None:
            looks = math.floor((trio.current_time() - reply.generation.arrived) / every) + 1
            await trio.sleep_until(reply.generation.arrived + looks * every)
        reply.leave()
        connection.abort()
        scope.cancel()

    def _read(self, head: RequestHead, body: bytes, reader: Reader) -> tuple[Ask, str]:
        """Read a request and name its answer."""
        try:
            members: Any = msgspec.json.decode(body)
        except (ValueError, RecursionError):
            raise AskError("The body is not valid JSON.") from None
        if not isinstance(members, dict):
            raise AskError("The body must be a JSON object.")
        ask = reader(members)
        if not self._manner.knows_models and ask.model not in self._engine.models:
            ask = replace(ask, model=self._engine.models[0])
        return ask, self._name(head, members, ask)

    def _name(self, head: RequestHead, members: dict[str, Any], ask: Ask) -> str:
        manner = self._manner
        given: object = members.get(manner.id_field) if manner.id_field else None
        in_header = head.header(manner.id_header) if manner.id_header else None
        if in_header:
            given = in_header.decode("latin-1")
        if not isinstance(given, str) or not given:
            given = f"{next(self._numbers):024x}"
        if manner.id_field == "rid" and given in self._in_use:
            raise AskError(f"Duplicate request ID detected: {given}")
        if ask.response:
            return f"resp_{given}"
        prefix = manner.id_prefix if ask.chat else manner.id_prefix.removeprefix("chat")
        return prefix + given

    def _invalid(self, error: AskError) -> Trouble:
        trouble = replace(self._manner.troubles["invalid"], message=str(error), param=error.param)
        return trouble if error.status == 400 else replace(trouble, status=error.status)

    # -- everything else

    def _table(self) -> dict[tuple[str, str], Route]:
        table: dict[tuple[str, str], Route] = {
            ("GET", "/v1/models"): self._models,
            ("POST", "/simulate/faults"): self._plan,
            ("GET", "/simulate/log"): self._log,
        }
        if self._kind != "openai":
            table["GET", "/health"] = self._health
        if self._metrics:
            table["GET", "/metrics"] = self._metrics_page
        match self._kind:
            case "vllm":
                table["GET", "/version"] = partial(self._constant, {"version": "0.33.0"})
            case "sglang":
                table["GET", "/ready"] = self._ready
                table["GET", "/v1/loads"] = self._loads
            case "llamacpp":
                table["GET", "/slots"] = self._slots
                table["GET", "/props"] = self._props
                if not self._metrics:
                    table["GET", "/metrics"] = self._no_metrics
            case "tgi":
                table["GET", "/info"] = partial(self._constant, {"model_id": self._engine.models[0]})
        return table

    async def _constant(self, body: Any, head: RequestHead, _: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return write_json(200, body)

    async def _models(self, head: RequestHead, _: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        said = {"object": "model", "created": self._started, "owned_by": self._kind}
        longest = {"max_model_len": self._engine.core.limits.context} if self._kind == "vllm" else {}
        models = [{"id": name, **said, **longest} for name in self._engine.models]
        return write_json(200, {"object": "list", "data": models})

    async def _health(self, head: RequestHead, body: bytes) -> bytes:
        if self._kind == "sglang":
            return await self._health_by_token()
        await trio.lowlevel.checkpoint()
        return (
            write_json(200, {"status": "ok"})
            if self._kind == "llamacpp"
            else write_body(200, b"", "text/plain")
        )

    async def _health_by_token(self) -> bytes:
        """Generate a token, as SGLang does: health is not free there."""
        probe = _Probe()
        generation = None
        try:
            one = Ask(self._engine.models[0], False, True, ([0],), limit=1)
            generation = self._engine.submit(one, probe)
            with trio.move_on_after(HEALTH_LIMIT):
                await probe.answered.wait()
        except Refusal:
            pass  # it has no room for the token, or still loads
        finally:
            if generation is not None:
                self._engine.cancel(generation)
        return write_body(200 if probe.answered.is_set() else 503, b"", "text/plain")

    async def _ready(self, head: RequestHead, _: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return write_body(200 if self._engine.ready else 503, b"", "text/plain")

    async def _metrics_page(self, head: RequestHead, _: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        assert self._kind in PAGES
        page = metrics_page(self._kind, self._engine.core, self._engine.models[0], trio.current_time())
        return write_body(200, page, "text/plain; version=0.0.4; charset=utf-8")

    async def _no_metrics(self, head: RequestHead, _: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        message = "This server does not support metrics endpoint. Start it with `--metrics`"
        return self._error(Trouble(501, message, "not_supported_error"))

    async def _slots(self, head: RequestHead, _: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        core = self._engine.core
        if "fail_on_no_slot" in head.target and core.running >= core.limits.slots:
            return self._error(self._manner.troubles["capacity"])
        slots = [{"id": at, "is_processing": at < core.running} for at in range(core.limits.slots)]
        return write_json(200, slots)

    async def _props(self, head: RequestHead, _: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        limits = self._engine.core.limits
        return write_json(200, {"total_slots": limits.slots, "n_ctx": limits.context, "is_sleeping": False})

    async def _loads(self, head: RequestHead, _: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        core = self._engine.core
        load = {
            "dp_rank": 0,
            "num_running_reqs": core.running,
            "num_waiting_reqs": core.waiting,
            "max_running_requests": core.limits.slots,
            "token_usage": core.memory.usage,
            "gen_throughput": core.tokens_per_second(trio.current_time()),
        }
        return write_json(200, {"loads": [load]})

    # -- for tests

    async def _plan(self, head: RequestHead, body: bytes) -> bytes:
        """Exchange the planned faults."""
        await trio.lowlevel.checkpoint()
        try:
            planned = msgspec.json.decode(body, type=_PlannedFaults)
        except ValueError as exc:
            return write_json(400, {"error": str(exc)})
        self._engine.plan_faults(planned.faults)
        return write_json(200, {"faults": len(planned.faults)})

    async def _log(self, head: RequestHead, _: bytes) -> bytes:
        """Tell what the engine knows of itself; ``?entries=N`` says of how many requests one by one."""
        await trio.lowlevel.checkpoint()
        asked = parse_qs(head.target.partition("?")[2]).get("entries", [""])[0]
        entries = int(asked) if asked.isascii() and asked.isdigit() else LOG_ENTRIES
        log = log_of(self._engine.core, trio.current_time(), entries)
        return write_json(200, {**log, "connections": self.connections})


@final
class _Probe:
    """A sink that only wants to see a token."""

    def __init__(self) -> None:
        self.answered = trio.Event()

    def output(self, output: Output) -> None:
        self.answered.set()

    def let_go(self) -> None:
        """Nothing is held."""
