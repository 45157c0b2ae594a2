"""The way to Redis or Valkey. Used by one task only, whose calls nobody cancels but the end of the process.

coredis gives a connection up when a call on it is cancelled, and its place in the pool with it. So there is
one client for one connection, thrown away as a whole after any trouble, and no request ever waits for it.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Protocol

import trio

SCRIPT: Final = resources.files(__package__).joinpath("turn.lua").read_text(encoding="utf-8")


class StoreLost(Exception):
    """The store did not answer, or answered something else than it should. Its text has no credentials."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store is, and who we are there.

    Attributes:
        tls: the connection is encrypted, and the store's certificate checked.
        prefix: of all keys there, in braces, so that one node of a sharded store has all.
        patience: seconds for connecting, and for each turn.
        ca: PEM file with the only authorities that may vouch for it; None: those of the system.
    """

    host: str
    port: int
    database: int = 0
    prefix: str = "trio-gateway"
    patience: float = 0.8
    user: str | None = None
    password: str | None = None
    tls: bool = False
    ca: str | None = None


class Link(Protocol):
    """An open connection to the store."""

    async def turn(self, told: bytes) -> bytes:
        """Make one turn. Raises StoreLost; the link is of no use then."""


Connect = AbstractAsyncContextManager[Link]


def prepare() -> None:
    """Load what the store needs: half a second in which a loop that serves must not stand still."""
    import coredis.retry  # noqa: F401  - only whoever shares needs it


class _CoredisLink:
    """See Link.

    Args:
        patience: seconds for one turn.
    """

    def __init__(self, client: Any, prefix: str, patience: float) -> None:
        self._client = client
        self._root = "{" + prefix + "}"
        self._patience = patience
        self._sha: Any = None

    async def turn(self, told: bytes) -> bytes:
        """See Link."""
        try:
            with trio.fail_after(self._patience):
                answer = await self._call(told)
        except trio.TooSlowError:
            raise StoreLost(f"no answer within {self._patience} s") from None
        except Exception as exc:
            raise StoreLost(_said(exc)) from None
        if not isinstance(answer, bytes):
            raise StoreLost("an answer that no turn has")
        return answer

    async def _call(self, told: bytes) -> object:
        import coredis

        for known in (self._sha is not None, False):
            if not known:
                self._sha = await self._client.script_load(SCRIPT)
            try:
                return await self._client.evalsha(self._sha, keys=[self._root], args=[told])
            except coredis.exceptions.NoScriptError:  # it was flushed, and did nothing
                continue
        raise StoreLost("it keeps no scripts")


@asynccontextmanager
async def connect(address: StoreAddress) -> AsyncIterator[Link]:
    """Open a connection to the store, and close it.

    Raises:
        StoreLost: there is none, or it ended in the block.
    """
    import coredis  # an extra: only whoever shares needs it
    from coredis.retry import NoRetryPolicy

    context = ssl.create_default_context(cafile=address.ca) if address.tls else None
    client = coredis.Redis(
        host=address.host,
        port=address.port,
        db=address.database,
        username=address.user,
        password=address.password,
        ssl_context=context,
        stream_timeout=address.patience,
        connect_timeout=address.patience,
        max_connections=1,
        verify_version=False,
        retry_policy=NoRetryPolicy(),
    )
    try:
        async with client:
            yield _CoredisLink(client, address.prefix, address.patience)
    except* StoreLost as lost:
        raise StoreLost(str(_first(lost))) from None
    except* (coredis.exceptions.RedisError, OSError, ssl.SSLError, EOFError) as lost:
        raise StoreLost(_said(_first(lost))) from None


def _first(found: BaseException) -> BaseException:
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _said(exc: BaseException) -> str:
    """What went wrong and why, on one line of bounded length; what a store says has no secrets of ours."""
    said, cause = f"{type(exc).__name__}: {exc}", exc.__cause__ or exc.__context__
    if cause is not None:
        said = f"{said} ({_first(cause)})"
    return " ".join(said.split())[:300]
