"""An agent at one gateway: registers, tells how it is, and signs off. The module that imports httpx here."""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable
from typing import Final, Protocol, Self

import httpx  # noqa: ASYNC127 - the constraints pin it; httpx2 has the same API
import trio

from ..contract import TlsPort
from ..errors import spoken_tls
from ..wire import Registered, Registration, WorkerReport, read_message, write_message

CALL_LIMIT: Final = 5.0  # seconds for one call
FIRST_RETRY: Final = 0.1  # seconds, doubling to the last
LAST_RETRY: Final = 2.0
LOOK_EVERY: Final = 0.1  # seconds between two looks for news that can not wait for the next heartbeat
_JSON: Final = {"content-type": "application/json"}


class Superseded(Exception):
    """A gateway wants no worker of this name from this process; the text is its reason, where it gave one."""


class Worker(Protocol):
    """What registrations tell of."""

    def registration(self) -> Registration:
        """Who it is and what it has."""

    def report(self) -> WorkerReport:
        """How it is right now, with its requests. Each report has a number of its own."""

    def news(self) -> object:
        """What gateways are told at once; equal values are no news."""


Told = Callable[[str, str, str], None]


class Registrar:
    """Keeps one gateway informed.

    Args:
        gateway: base URL of its internal listener.
        learn: takes the secret that the gateway will send, under the gateway's name.
        tell: told of what operators may want to know: gateway, event, detail.
        dice: numbers from 0 to 1.
        tls: what gateways at https are called with; None: as the system does.
    """

    def __init__(
        self,
        gateway: str,
        join_token: str,
        worker: Worker,
        learn: Callable[[str, str], None],
        tell: Told,
        dice: Callable[[], float] = random.random,
        tls: TlsPort | None = None,
    ) -> None:
        self.gateway: Final = gateway.rstrip("/")
        self._join_token = join_token
        self._worker = worker
        self._learn = learn
        self._tell = tell
        self._dice = dice
        self._registered: Registered | None = None
        self._tls = tls
        self._context = None if tls is None else tls.context
        self._client = self._make_client()

    @property
    def known(self) -> bool:
        """Whether the gateway has this worker, as far as the last call told."""
        return self._registered is not None

    async def run(self) -> None:
        """Register, send heartbeats, and register again whenever the gateway has lost the worker.

        Raises:
            Superseded: this process is an old incarnation.
        """
        while True:
            registered = await self._register()
            self._registered = registered
            self._tell(self.gateway, "registered", "")
            await self._beat(registered)
            self._registered = None
            self._tell(self.gateway, "gateway_lost", "the gateway does not know this worker any more")

    def _make_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            verify=self._context or True,
            trust_env=False,
            timeout=None,  # noqa: S113 - limits of time are scopes, here as everywhere
            limits=httpx.Limits(max_connections=None),
            follow_redirects=False,
        )

    async def _renew_client(self) -> None:
        """Call with what stands in the certificate's files by now."""
        if self._tls is not None and self._tls.context is not self._context:
            self._context = self._tls.context
            before, self._client = self._client, self._make_client()
            await before.aclose()

    async def sign_off(self) -> None:
        """Tell the gateway that this worker ends; what it does not hear, it sees by itself."""
        if self._registered is not None:
            incarnation = self._worker.registration().incarnation
            await self._call("DELETE", f"?incarnation={incarnation}", b"", self._registered.secret)
            self._registered = None

    async def close(self) -> None:
        """Close what is open towards the gateway."""
        await self._client.aclose()

    async def _register(self) -> Registered:
        wait = FIRST_RETRY
        while True:
            registration = self._worker.registration()
            answer = await self._call("POST", "", write_message(registration), self._join_token)
            if answer is not None:
                if answer.status_code == 409:
                    raise Superseded(_reason(answer))
                if answer.status_code in (200, 201):
                    try:
                        registered = read_message(answer.content, Registered)
                    except ValueError as exc:
                        self._tell(self.gateway, "not_registered", f"the answer is {exc}")
                    else:
                        self._learn(self.gateway, registered.secret)
                        return registered
                else:
                    reason = _reason(answer)
                    detail = f"status {answer.status_code}" + (f": {reason}" if reason else "")
                    self._tell(self.gateway, "not_registered", detail)
            await trio.sleep(wait)
            wait = min(wait * 2, LAST_RETRY)

    async def _beat(self, registered: Registered) -> None:
        """Send heartbeats until the gateway does not know the worker any more.

        The first interval, and one after news, is a part of one. Workers that start together, or that
        register again with a gateway that started again, would else tell how they are in the same order
        within each second, and gateways, which prefer newer news, would send nearly everything to the last.
        """
        part = self._dice()
        while True:
            news = self._worker.news()
            body = write_message(self._worker.report())
            answer = await self._call("PUT", "", body, registered.secret)
            if answer is not None:
                if answer.status_code == 409:
                    raise Superseded(_reason(answer))
                if answer.status_code in (401, 403, 404):
                    return
            with trio.move_on_after(registered.heartbeat_interval * part):
                while True:
                    await trio.sleep(LOOK_EVERY)
                    if self._worker.news() != news:
                        break
            part = 1.0 if self._worker.news() == news else self._dice()

    async def _call(self, method: str, query: str, body: bytes, secret: str) -> httpx.Response | None:
        """Make one call; None: there was no answer."""
        url = f"{self.gateway}/internal/v1/workers"
        if method != "POST":
            url += f"/{self._worker.registration().worker_id}{query}"
        headers = {
            **_JSON,
            "authorization": f"Bearer {secret}",
            "host": httpx.URL(url).netloc.decode("ascii"),
            "content-length": str(len(body)),
        }
        request = httpx.Request(method, url, headers=headers, stream=_Body(body))
        try:
            with trio.move_on_after(CALL_LIMIT) as limit:
                await self._renew_client()
                return await self._client.send(request)
        except httpx.HTTPError as exc:
            why = f"{type(exc).__name__}: {exc}"[:200] if str(exc) else type(exc).__name__
            if (cause := _tls_error(exc)) is not None:
                why = f"no TLS: {spoken_tls(cause)}"
            self._tell(self.gateway, "gateway_unreachable", why)
            return None
        if limit.cancelled_caught:
            self._tell(self.gateway, "gateway_unreachable", f"no answer within {CALL_LIMIT:g} s")
        return None


class _Body(httpx.AsyncByteStream):
    """A body. httpx's own is an async generator, which a connection that breaks leaves to the collector."""

    def __init__(self, body: bytes) -> None:
        self._rest = body

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:  # noqa: ASYNC910  (nothing to wait for)
        if not self._rest:
            raise StopAsyncIteration
        piece, self._rest = self._rest, b""
        return piece


def _tls_error(exc: BaseException | None) -> ssl.SSLError | None:
    """Answer what OpenSSL said, which clients wrap more than once."""
    while exc is not None and not isinstance(exc, ssl.SSLError):
        exc = exc.__cause__ or exc.__context__
    return exc


def _reason(answer: httpx.Response) -> str:
    """Answer why a gateway refused, in its own words, up to 200 characters; empty if it says nothing."""
    try:
        said = answer.json()["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return said[:200] if isinstance(said, str) else ""
