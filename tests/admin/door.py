"""The operators' door before a `FakeAdminPort`, on a real socket or called directly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio

from tests.e2e.serving import parse_address
from trio_gateway.admin import (
    SHAPES,
    Access,
    AdminToken,
    Metrics,
    Page,
    Role,
    complaints,
    make_admin_app,
    serve_admin,
)
from trio_gateway.testing import Address, Answer, FakeAdminPort, RawClient

LIMIT: Final = 10.0  # seconds; a wait that takes longer has failed
OPERATOR: Final = "tg_ops_secret"
VIEWER: Final = "tg_eyes_secret"

Headers = tuple[tuple[str, str], ...]


def token(id_: str, secret: str, role: Role) -> AdminToken:
    """Write a token as the door knows it."""
    return AdminToken(id_, hashlib.sha256(secret.encode()).digest(), role)


TOKENS: Final = (token("ops", OPERATOR, "operator"), token("eyes", VIEWER, "viewer"))


@dataclass
class Door:
    """A running door.

    Attributes:
        bugs: exceptions that should not have happened.
        close: ends it.
    """

    port: FakeAdminPort
    address: Address
    bugs: list[BaseException] = field(default_factory=list)
    close: Callable[[], None] = lambda: None

    async def ask(
        self,
        method: str,
        path: str,
        secret: str | None = None,
        *,
        body: bytes | None = None,
        headers: Headers = (),
        host: str = "localhost",
    ) -> Answer:
        """Ask on a connection of its own."""
        if secret is not None:
            headers = (*headers, ("authorization", f"Bearer {secret}"))
        with trio.fail_after(LIMIT), await RawClient.connect(self.address) as client:
            await client.request(method, path, headers=headers, body=body, host=host)
            return await client.read_to_end()

    async def act(self, path: str, secret: str | None = None, **arguments: Any) -> Answer:
        """Do something, as clients do it."""
        kind = (("content-type", "application/json"),)
        return await self.ask(
            "POST", f"/admin/v1{path}", secret, body=json.dumps(arguments).encode(), headers=kind
        )


@asynccontextmanager
async def door(
    *,
    tokens: Sequence[AdminToken] = TOKENS,
    hosts: Sequence[str] = (),
    bind: str = "127.0.0.1:0",
    pages: Mapping[str, Page] | None = None,
    most: int = 32,
) -> AsyncIterator[Door]:
    """Open the door for the length of the block."""
    opened = Door(FakeAdminPort(), "")
    app = make_admin_app(
        opened.port,
        Access(tokens, hosts),
        Metrics(lambda figures: iter((b"arrived ", b"%d\n" % figures["arrived"])), "text/plain"),
        lambda where, exc: opened.bugs.append(exc),
        pages or {},
    )
    async with trio.open_nursery() as nursery:
        serve = partial(serve_admin, app, (bind,), lambda where, exc: opened.bugs.append(exc), most)
        (url,) = await nursery.start(serve)
        opened.address = bind.removeprefix("unix:") if bind.startswith("unix:") else parse_address(url)
        opened.close = nursery.cancel_scope.cancel
        yield opened
        nursery.cancel_scope.cancel()


def expect_shape(value: object, name: str) -> None:
    """Fail if a value is not of a shape."""
    assert not list(complaints(value, SHAPES[name], SHAPES))


def code_of(answer: Answer) -> tuple[int | None, str]:
    """Status and code of a refusal, which has the shape of one."""
    expect_shape(answer.json(), "Error")
    return answer.status, data(answer)["error"]["code"]


def data(answer: Answer) -> Any:
    """What a JSON answer holds."""
    return json.loads(answer.body)
