"""Any OpenAI-compatible server on this machine, spoken to through the gateway's own dialects.

What such a server does with a request that is given up it does not say: its slot
counts as held for the dialect's cancel grace. It can not be paused, since none
of them slows down for a reader.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, final
from urllib.parse import urlsplit

import httpx  # noqa: ASYNC127 - the constraints pin it; httpx2 has the same API
import msgspec
import trio

from ...contract import OPERATIONS, EngineAnswer, InternalRequest, LeasePort
from ...contract import Worker as Upstream
from ...errors import EngineProtocolError, Refused, UpstreamFailed, UpstreamFault
from ...fleet import DIALECTS
from ...units import KiB, MiB
from ...upstream import ConnectionPool, HttpEngine, UpstreamLimits
from ...wire import (
    Delta,
    EngineError,
    EngineRecord,
    EngineRecords,
    Failed,
    NamedRelay,
    OllamaRelay,
    Result,
    StreamRelay,
    StreamShape,
    ToolCall,
    failed_of,
    may_hold_infinity,
    ollama_answer,
    read_error,
    read_form_body,
    with_finite_numbers,
)
from .._engine import EngineStatus, EngineStream, Rejected, Released, Work

IDLE_EXPIRY: Final = 3.0  # seconds
CONNECT_LIMIT: Final = 5.0
RECEIVE_BUFFER: Final = 64 * KiB
LOOK_EVERY: Final = 2.0  # seconds between two looks at the server
LOOK_LIMIT: Final = 2.0
FAILURES: Final = 3  # looks in vain until the server counts as not ready
MAX_EVENT: Final = 1 * MiB
MAX_ANSWER: Final = 64 * MiB
MAX_ERROR: Final = 64 * KiB
ERROR_LIMIT: Final = 3.0  # seconds to read the body of an error
TAIL_WAIT: Final = 0.05  # seconds for a server to end its message after [DONE]
_CUT: Final = Failed("engine_failed", "the connection to the engine broke")
_LIST = msgspec.json.Decoder(dict[str, Any])


@final
class OpenAIEngine:
    """See the module and AgentEngine.

    Args:
        url: base URL of the server, http.
        dialect: a key of `DIALECTS`.
        models: names it serves; none: those that it lists.
        slots: requests at a time, where the operator says.

    Raises:
        ValueError: the URL or the dialect is none.
    """

    can_pause: Final = False
    version: Final = ""

    def __init__(
        self,
        url: str,
        dialect: str = "openai",
        *,
        models: tuple[str, ...] = (),
        slots: int | None = None,
        api_key: str | None = None,
    ) -> None:
        if dialect not in DIALECTS:
            raise ValueError(f"no dialect {dialect}: there are {', '.join(DIALECTS)}")
        self.kind: Final = dialect
        self._upstream = _upstream(url, dialect, api_key)
        self._named = models
        self._listed: tuple[str, ...] = ()
        self._slots = slots
        self._ready = False
        self._open: set[OpenAIStream] = set()
        self._pool = ConnectionPool(IDLE_EXPIRY, trio.current_time)
        limits = UpstreamLimits(CONNECT_LIMIT, RECEIVE_BUFFER)
        self._engine = HttpEngine(self._pool, limits, "trio-gateway-agent", b"")
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See AgentEngine."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._watch)
                task_status.started()
                while True:
                    await trio.sleep(1)
                    self._pool.sweep()
        finally:
            self._pool.close()

    def status(self) -> EngineStatus:
        """See AgentEngine."""
        return EngineStatus(
            ready=self._ready,
            models=(self._named or self._listed) if self._ready else (),
            slots=self._slots,
            running=len(self._open),
            queued=0,
        )

    async def open(self, work: Work) -> EngineStream:
        """See AgentEngine. A request that is given up in here is counted as running for the cancel grace."""
        assert self._nursery is not None
        stream = OpenAIStream(self._upstream, work)
        self._open.add(stream)
        # From the nursery, so that it counts whoever is still there to wait for it.
        self._nursery.start_soon(self._count, stream)
        try:
            await stream.begin(self._engine, self._nursery)
        except BaseException:
            stream.cancel()
            raise
        return stream

    async def _count(self, stream: OpenAIStream) -> None:
        await stream.wait_released()
        self._open.discard(stream)

    async def _watch(self) -> None:
        """Look whether the server is there, and what it has."""
        failures = 0
        headers = {"authorization": f"Bearer {self._upstream.api_key}"} if self._upstream.api_key else {}
        async with httpx.AsyncClient(trust_env=False, timeout=None, headers=headers) as client:  # noqa: S113
            while True:
                listed = None
                with trio.move_on_after(LOOK_LIMIT):
                    listed = await self._list(client)
                if listed is None:
                    failures += 1
                    self._ready = self._ready and failures < FAILURES
                else:
                    failures, self._ready, self._listed = 0, True, listed
                await trio.sleep(LOOK_EVERY if self._ready else LOOK_EVERY / 10)

    async def _list(self, client: httpx.AsyncClient) -> tuple[str, ...] | None:
        """Ask for the models; None: no good answer."""
        upstream = self._upstream
        try:
            answer = await client.get(f"http://{upstream.authority}{upstream.prefix}/v1/models")
            models = _LIST.decode(answer.content).get("data") if answer.status_code == 200 else None
        except (httpx.HTTPError, msgspec.MsgspecError):
            return None
        if not isinstance(models, list):
            return None
        ids = [model.get("id") for model in models if isinstance(model, dict)]
        return tuple(each for each in ids if isinstance(each, str) and each)


def _upstream(url: str, dialect: str, api_key: str | None) -> Upstream:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{url} is no http URL of a server on this machine")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Upstream(
        id="engine",
        url=url,
        dialect=DIALECTS[dialect],
        host=parts.hostname,
        port=parts.port or 80,
        authority=f"{host}:{parts.port or 80}",
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
        slots=1,
        cancel_grace=DIALECTS[dialect].cancel_grace,
        api_key=api_key,
    )


@dataclass(eq=False)
class _Lease:
    """The lease port, as far as opening an engine's answer asks for it."""

    worker: Upstream
    started: bool = False
    done: bool = False

    @property
    def engine_asked(self) -> bool:
        return self.started

    def engine_started(self, attempt_id: str = "") -> None:
        self.started = True

    def engine_done(self) -> None:
        self.done = True

    def __enter__(self) -> LeasePort:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@final
class OpenAIStream:
    """One request at the server; see EngineStream."""

    def __init__(self, upstream: Upstream, work: Work) -> None:
        self._work = work
        self._operation = next(each for each in OPERATIONS if each.name == work.operation)
        self._lease = _Lease(upstream)
        self._secrets = tuple(filter(None, (upstream.api_key, upstream.url, upstream.authority)))
        self._answer: EngineAnswer | None = None
        self._reader: EngineRecords | None = None
        self._records: deque[EngineRecord] = deque()
        self._reading: trio.CancelScope | None = None
        self._cancelled = False
        self._closed = trio.Event()  # no further record comes
        self._closed_at = 0.0
        self.generated = 0

    # -- to the server

    async def begin(self, engine: HttpEngine, nursery: trio.Nursery) -> None:
        """Send the request and read the head of the answer.

        Raises:
            Rejected: the server was not reached, or has no room.
        """
        try:
            request = self._request()
            answer = await engine.open(request, self._lease, request.attempt_id(self._work.attempt), nursery)
        except UpstreamFailed as failed:
            if failed.fault is UpstreamFault.UNREACHABLE:
                raise Rejected("engine_unready") from None
            self._fail(_CUT)
            return
        except (Refused, ValueError) as refused:
            text = refused.problem.message if isinstance(refused, Refused) else str(refused)
            self._fail(Failed("invalid_value", text, "never", 400))
            return
        self._answer = answer.__enter__()
        if answer.status != 200:
            await self._read_failure(answer)
        elif self._work.stream:
            self._reader = EngineRecords(self._relay(), self._operation)
            if _kind(answer) != self._stream_kind:
                self._fail(Failed("engine_protocol_error", "the engine's answer is no stream"))

    def _request(self) -> InternalRequest:
        work, now = self._work, trio.current_time()
        form, members, tenant = None, {}, ""
        if work.content_type is None:
            members = {
                key: bytes(raw)
                for key, raw in msgspec.json.decode(work.body, type=dict[str, msgspec.Raw]).items()
            }
            # The gateway's mark of the tenant: made our own where the engine knows salts, else not sent on.
            tenant = members.pop("cache_salt", b"").decode()
            members.setdefault("model", msgspec.json.encode(work.model))
            if self._operation.streams:
                members["stream"] = b"true" if work.stream else b"false"
        else:
            form = read_form_body(work.body, work.content_type.encode("latin-1")).form
        return InternalRequest(
            exchange_id=work.request_id,
            client_request_id=None,
            tenant=tenant,
            key_id=None,
            operation=self._operation,
            model=work.model,
            upstream_model=work.model,
            members=dict(members),
            size=len(work.body),
            stream=work.stream,
            choices=work.choices,
            n=1,
            wants_usage=True,
            wants_running_usage=False,
            arrived=now,
            deadline=now + work.remaining,
            tier=work.priority,
            form=form,
        )

    def _relay(self) -> StreamRelay | NamedRelay | OllamaRelay:
        work, operation = self._work, self._operation
        shape = StreamShape(work.choices, True, False, work.model, work.model, MAX_EVENT, self._secrets)
        if self._lease.worker.dialect.native(operation):
            return OllamaRelay(shape, self._answer_id, 0)
        if operation.choices:
            return StreamRelay(shape)
        # The gateway begins what its engine does not: of us it would take that the prompt has no tokens.
        return NamedRelay(shape, operation.style, None)

    @property
    def _stream_kind(self) -> str:
        native = self._lease.worker.dialect.native(self._operation)
        return "application/x-ndjson" if native else "text/event-stream"

    async def _read_failure(self, answer: EngineAnswer) -> None:
        """Read why the server does not answer.

        Raises:
            Rejected: it has no room.
        """
        body = bytearray()
        with contextlib.suppress(UpstreamFailed), trio.move_on_after(ERROR_LIMIT):
            while len(body) < MAX_ERROR and (data := await answer.receive()):
                body += data
        error = read_error(bytes(body[:MAX_ERROR]), answer.status, self._secrets)
        if error.status in (429, 503) and not error.out_of_memory:
            raise Rejected("capacity")
        if error.status == 404:
            raise Rejected("model_not_loaded")
        self._fail(failed_of(error))

    # -- as a stream

    async def receive(self) -> EngineRecord | None:
        """See EngineStream."""
        await trio.lowlevel.checkpoint()
        try:
            with trio.CancelScope() as self._reading:
                while not self._records and not self._closed.is_set():
                    await self._read_more()
        finally:  # also where whoever reads was cancelled from outside
            self._reading = None
            if self._cancelled:
                self._close()
        if not self._records:
            return None
        record = self._records.popleft()
        if isinstance(record, Delta | ToolCall):
            self.generated += record.n
        return record

    async def _read_more(self) -> None:
        assert self._answer is not None
        try:
            if self._reader is None:
                await self._read_whole(self._answer)
                return
            data = await self._answer.receive()
            self._records.extend(self._reader.feed(data) if data else ())
            if not data or self._reader.over:
                await self._read_end(self._reader, self._answer)
        except UpstreamFailed:
            self._fail(_CUT)

    async def _read_end(self, reader: EngineRecords, answer: EngineAnswer) -> None:
        self._records.extend(reader.end())
        if not answer.ended:
            # [DONE] came: a server ends its message now, and its connection can be used again.
            with trio.move_on_after(TAIL_WAIT), contextlib.suppress(UpstreamFailed):
                await answer.receive()
        self._close()

    async def _read_whole(self, answer: EngineAnswer) -> None:
        pieces: list[bytes] = []
        size = 0
        while data := await answer.receive():
            pieces.append(data)
            size += len(data)
            if size > MAX_ANSWER:
                self._fail(Failed("engine_protocol_error", "the engine's answer is too large", "never"))
                return
        self._records.append(self._whole(b"".join(pieces), _kind(answer)))
        self._close()

    def _whole(self, body: bytes, kind: str) -> EngineRecord:
        """Say a whole 200 body as a record; what it means, the gateway judges."""
        if self._lease.worker.dialect.native(self._operation):
            try:
                answer = ollama_answer(body, self._answer_id, 0, self._work.model, self._secrets)
            except EngineProtocolError as exc:
                return Failed("engine_protocol_error", str(exc))
            if isinstance(answer, EngineError):
                return failed_of(answer)
            body = answer[0]
        if kind.startswith("text/"):
            return Result(200, msgspec.Raw(msgspec.json.encode(body.decode("utf-8", "replace"))), kind)
        body = with_finite_numbers(body) if may_hold_infinity(body) else body
        try:
            msgspec.json.decode(body)
            body.decode()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return Failed("engine_protocol_error", "the engine's answer is not the JSON that was asked for")
        return Result(200, msgspec.Raw(body))

    @property
    def _answer_id(self) -> str:
        return f"chatcmpl-{self._work.request_id}-{self._work.attempt:02d}"

    def pause(self) -> None:
        """See EngineStream; no such server can."""

    def resume(self) -> None:
        """See EngineStream."""

    def cancel(self) -> None:
        """See EngineStream."""
        self._cancelled = True
        self._records.clear()
        if self._reading is not None:
            self._reading.cancel(reason="the request was cancelled")  # whoever reads closes, too
        else:
            self._close()

    async def wait_released(self) -> Released:
        """See EngineStream. Of a request that was given up, nobody tells when the server has let go."""
        await self._closed.wait()
        if self._lease.done or not self._lease.started:
            return Released(self.generated, kv_released=True)
        await trio.sleep_until(self._closed_at + self._lease.worker.cancel_grace)
        return Released(self.generated, kv_released=False)

    def _fail(self, failed: Failed) -> None:
        self._records.append(failed)
        self._close()

    def _close(self) -> None:
        """No further record comes. Gives the connection back, or closes it. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._closed_at = trio.current_time()
        if self._answer is not None:
            self._answer.__exit__(None, None, None)


def _kind(answer: EngineAnswer) -> str:
    value = answer.header(b"content-type") or b""
    return value.partition(b";")[0].strip().lower().decode("latin-1")
