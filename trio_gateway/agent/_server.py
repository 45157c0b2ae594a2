"""The agent's HTTP server: who may call, what can be asked, and what it is answered."""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
from collections.abc import Callable
from typing import Final

import trio

from ..contract import OPERATIONS
from ..units import KiB
from ..wire import Generate, RequestHead, choices_asked, read_message
from ._connection import Connection, Gone, Refusal, Stream
from ._engine import Work
from ._generation import Generations
from ._releases import Releases
from ._slots import Slots

HEAD_LIMIT: Final = 75.0  # seconds for a head, idle time in front of it included
BODY_LIMIT: Final = 30.0
EVENT_PING: Final = 10.0  # seconds of silence on a stream of events, until a blank line is sent
_SMALL_BODY: Final = 64 * KiB
_CANCEL = re.compile(r"/internal/v1/requests/([A-Za-z0-9._-]{1,128})/([0-9]{1,2})/cancel")


class Credentials:
    """Who may call: secrets by the name of whoever has them."""

    def __init__(self) -> None:
        self._secrets: dict[str, bytes] = {}

    def learn(self, name: str, secret: str) -> None:
        """Take a new secret; the one that the same gateway had before is of no use any more."""
        self._secrets[name] = secret.encode()

    def name_of(self, head: RequestHead) -> str | None:
        """Answer whose secret a request shows. Looks at all of them, each in constant time."""
        scheme, _, shown = (head.header(b"authorization") or b"").partition(b" ")
        found = None
        for name, secret in self._secrets.items():
            if secrets.compare_digest(shown.strip(), secret):
                found = name
        return found if scheme.lower() == b"bearer" else None


class AgentServer:
    """Serves gateways and health checks.

    Args:
        not_ready: why the worker is not ready; None: it is.
        report_bug: told of exceptions that nobody expected.
    """

    def __init__(
        self,
        credentials: Credentials,
        generations: Generations,
        slots: Slots,
        releases: Releases,
        body_bytes: int,
        not_ready: Callable[[], str | None],
        report_bug: Callable[[BaseException], None],
    ) -> None:
        self._credentials = credentials
        self._generations = generations
        self._slots = slots
        self._releases = releases
        self._body_bytes = body_bytes
        self._not_ready = not_ready
        self._report_bug = report_bug
        self.busy = 0

    async def serve(self, stream: Stream) -> None:
        """Serve one connection until it ends. Closes it."""
        connection = Connection(stream)
        try:
            while await self._serve_next(connection) and connection.reusable:
                pass
        except Gone:
            pass
        except Exception as exc:  # one connection's bug must not end the others
            self._report_bug(exc)
        finally:
            connection.close()

    async def _serve_next(self, connection: Connection) -> bool:
        """Serve one request; False: there is none."""
        try:
            head = None
            with trio.move_on_after(HEAD_LIMIT):
                head = await connection.read_head()
            if head is None:
                return False
            self.busy += 1
            try:
                await self._answer(head, connection)
            finally:
                self.busy -= 1
        except Refusal as refusal:
            await connection.respond(refusal.status, _problem(refusal.message))
        return True

    async def _answer(self, head: RequestHead, connection: Connection) -> None:
        if head.path in ("/livez", "/readyz"):
            await self._answer_health(head, connection)
            return
        credential = self._credentials.name_of(head)
        if credential is None:
            connection.reusable = False
            raise Refusal(401, "the secret is not known here")
        cancel = _CANCEL.fullmatch(head.path)
        if head.path == "/internal/v1/generate" and head.method == "POST":
            body = await self._read(head, connection, self._body_bytes)
            await self._generations.serve(_read_work(body), credential, connection)
        elif head.path == "/internal/v1/events" and head.method == "GET":
            await self._read(head, connection, 0)
            await self._send_events(credential, connection)
        elif cancel is not None and head.method == "POST":
            await self._read(head, connection, _SMALL_BODY)
            await self._cancel(cancel[1], int(cancel[2]), connection)
        else:
            connection.reusable = False
            raise Refusal(404, "no such route")

    async def _read(self, head: RequestHead, connection: Connection, most: int) -> bytes:
        with trio.move_on_after(BODY_LIMIT):
            return await connection.read_body(head, most)
        connection.reusable = False
        raise Refusal(408, "the body did not come in time")

    async def _answer_health(self, head: RequestHead, connection: Connection) -> None:
        await self._read(head, connection, 0)
        why = self._not_ready() if head.path == "/readyz" else None
        state = {"status": "ok"} if why is None else {"status": "not ready", "reason": why}
        await connection.respond(200 if why is None else 503, json.dumps(state).encode())

    async def _cancel(self, request_id: str, attempt: int, connection: Connection) -> None:
        slot = self._slots.find(request_id, attempt)
        if slot is None:
            await connection.respond(404, b'{"known": false}')
            return
        slot.cancel()
        await connection.respond(202, b'{"known": true}')

    async def _send_events(self, credential: str, connection: Connection) -> None:
        with self._releases.subscribe(credential) as subscription:
            async with trio.open_nursery() as nursery:

                async def leave_with_the_reader() -> None:
                    await connection.watch()
                    nursery.cancel_scope.cancel(reason="the gateway left")

                nursery.start_soon(leave_with_the_reader)
                try:
                    await connection.send(connection.begin() + connection.piece(b"\n"))
                    while not subscription.overrun:
                        lines = b"\n"
                        with trio.move_on_after(EVENT_PING):
                            lines = await subscription.wait()
                        if lines:
                            await connection.send(connection.piece(lines))
                except Gone:
                    pass
                nursery.cancel_scope.cancel(reason="the stream of events is over")
        connection.close()


def _read_work(body: bytes) -> Work:
    """Read an envelope.

    Raises:
        Refusal: it can not be read, or asks for an operation that is not known.
    """
    try:
        asked = read_message(body, Generate)
        operation = next((each for each in OPERATIONS if each.name == asked.operation), None)
        if operation is None:
            raise ValueError("the operation is not known here")
        inner, content_type = bytes(asked.body), asked.content_type or None
        if content_type is not None:
            inner = base64.b64decode(json.loads(inner), validate=True)
        if asked.stream and not operation.streams:
            raise ValueError("the operation has no stream")
        choices = choices_asked(operation, inner)
    except (ValueError, TypeError, binascii.Error) as exc:
        raise Refusal(400, str(exc)) from None
    return Work(
        request_id=asked.request_id,
        attempt=asked.attempt,
        operation=asked.operation,
        model=asked.model,
        remaining=asked.deadline_ms / 1000,
        priority=asked.priority,
        stream=asked.stream,
        body=inner,
        content_type=content_type,
        choices=choices,
    )


def _problem(message: str) -> bytes:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_value"}
    return json.dumps({"error": error}).encode()
