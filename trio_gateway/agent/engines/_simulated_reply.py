"""One generation of the simulated engine as one HTTP answer, in the manner of one kind of engine."""

from __future__ import annotations

from typing import Any, Final, final

import trio

from ...wire import LAST_CHUNK, write_chunk, write_response_head
from ._simulated_answer import Gathering
from ._simulated_chunks import MALFORMED, ChunkWriter
from ._simulated_connection import EngineConnection
from ._simulated_dialects import Manner, Trouble, encode
from ._simulated_engine import SimulatedEngine
from ._simulated_faults import Fault
from ._simulated_generation import Generation, Output
from ._simulated_request import Ask
from ._simulated_responses import ResponseWriter

_JSON: Final = "application/json"


def write_json(status: int, body: Any, headers: tuple[tuple[str, str], ...] = ()) -> bytes:
    """Write a whole JSON answer."""
    return write_body(status, encode(body), _JSON, headers)


def write_body(
    status: int, body: bytes, content_type: str, headers: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """Write a whole answer."""
    sized = [("content-type", content_type), ("content-length", str(len(body))), *headers]
    return write_response_head(status, sized) + body


@final
class Reply:
    """Writes what the engine generates, as it comes; a `Sink`.

    Attributes:
        over: set when there is nothing more to write, whole or not.
        generation: what the engine knows of it, once `begin` was called.
    """

    def __init__(
        self, engine: SimulatedEngine, manner: Manner, ask: Ask, answer_id: str, created: int
    ) -> None:
        self.over: Final = trio.Event()
        self.generation: Generation | None = None
        self._engine = engine
        self._manner = manner
        self._ask = ask
        self._created = created
        self._whole: Gathering | ResponseWriter
        self._chunks: ChunkWriter | ResponseWriter | None
        if ask.response:
            self._whole = writer = ResponseWriter(manner, ask, answer_id, created)
            self._chunks = writer if ask.stream else None
        else:
            self._chunks = ChunkWriter(manner, ask, answer_id, created) if ask.stream else None
            self._whole = Gathering(ask, answer_id, manner.reasoning_field)
        self._unfinished = ask.choices
        self._connection: EngineConnection | None = None
        self._head_sent = False

    def begin(self, connection: EngineConnection) -> None:
        """Submit it, and write from now on what comes.

        Raises:
            Refusal, AskError: nothing was begun, and nothing written.
        """
        self.generation = self._engine.submit(self._ask, self)
        self._connection = connection
        if self._chunks and self._manner.early_head and not self.generation.silent_at_first:
            self._send(b"")

    def refuse(self, connection: EngineConnection, trouble: Trouble) -> None:
        """Tell in place of an answer that there will be none."""
        self._connection = connection
        if self._chunks and self._manner.busy_in_band and trouble.status in (429, 503):
            self._end(self._chunks.error(trouble))
        else:
            self._answer(trouble.status, self._manner.error(trouble))

    def leave(self) -> None:
        """The caller has left: nothing more is written, and the engine is told. Idempotent."""
        self._connection = None
        self.over.set()
        if self.generation is not None:
            self._engine.cancel(self.generation)

    # -- as a sink

    def output(self, output: Output) -> None:
        """See Sink."""
        if self._connection is None:
            return
        if output.piece is None:
            assert output.fault is not None
            self._fault(output.fault)
        elif self._chunks:
            data = self._chunks.piece(output.generation, output.choice, output.piece)
            if not self._chunks.unfinished:
                self._end(data)
            elif data:
                self._send(data)
        else:
            self._whole.add(output.choice, output.piece)
            self._unfinished -= output.piece.finish is not None
            if not self._unfinished:
                self._answer(200, self._whole.answer(output.generation, self._created))

    def let_go(self) -> None:
        """See Sink."""

    def _fault(self, fault: Fault) -> None:
        assert self._connection is not None
        if fault.kind == "malformed":
            self._malformed()
        elif fault.kind == "out_of_memory":
            self._out_of_memory(headers=fault.after == "headers")
        else:
            if fault.after != "headers" and self._chunks:
                self._send(b"")
            self._connection.abort()
            self.over.set()

    def _malformed(self) -> None:
        if self._chunks:
            self._send(MALFORMED)
            return
        assert self._connection is not None
        self._connection.write(write_body(200, b'{"choices": [', _JSON))
        self.leave()

    def _out_of_memory(self, *, headers: bool) -> None:
        trouble = self._manner.troubles["out_of_memory"]
        if self._chunks and not headers:
            self._end(self._chunks.error(trouble))
        else:
            self._answer(trouble.status, self._manner.error(trouble))

    # -- writing

    def _send(self, data: bytes) -> None:
        """Write events; the head in front of the first, even if there are none yet."""
        assert self._connection is not None
        chunk = write_chunk(data) if data else b""
        if not self._head_sent:
            self._head_sent = True
            chunk = self._stream_head() + chunk
        if chunk:
            self._connection.write(chunk)
            if self._connection.broken:
                self.leave()

    def _stream_head(self) -> bytes:
        fields = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
        return write_response_head(200, [*fields, ("cache-control", "no-cache"), *self._manner.headers])

    def _end(self, data: bytes) -> None:
        head = b"" if self._head_sent else self._stream_head()
        self._write_last(head + write_chunk(data) + LAST_CHUNK)

    def _answer(self, status: int, body: Any) -> None:
        self._write_last(write_json(status, body))

    def _write_last(self, data: bytes) -> None:
        assert self._connection is not None
        self._connection.write(data)
        self._connection = None
        self.over.set()
