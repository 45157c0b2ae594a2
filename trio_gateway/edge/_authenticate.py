"""From the headers of a request to the tenant that pays for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

import trio

from ..errors import BadFraming, Problem, Refused
from ..tenancy import Caller, FailedKeys, Keyring
from ..wire import RequestHead
from ._client_address import Networks, client_of
from ._connection import Connection

SOON: Final = 2.0  # seconds, told to whom shows a key that may be in a database which is away


class Authenticator:
    """Asks for keys, and answers addresses that fail too often so.

    A good key is good from everywhere, however many bad ones came from the same address: many clients
    may share one.

    Args:
        trusted: where proxies stand whose word on the client's address is taken.
        wall: seconds since the epoch.
    """

    def __init__(
        self, keyring: Keyring, trusted: Networks = (), wall: Callable[[], float] = time.time
    ) -> None:
        self._keyring = keyring
        self._trusted = trusted
        self._wall = wall
        self._failed = FailedKeys()

    def authenticate(self, head: RequestHead, connection: Connection) -> Caller:
        """Answer who calls.

        Raises:
            Refused: ``invalid_api_key``, or ``rate_limit_exceeded`` where that was said too often; or
                ``keys_unavailable``, while nobody can say whether it is one.
        """
        return self.judge(presented_key(head), head, connection)

    def judge(self, key: bytes | None, head: RequestHead, connection: Connection) -> Caller:
        """Answer whose key it is that came with a request or over its connection. See `authenticate`."""
        caller = self._keyring.find(key)
        if caller is not None and not caller.expired(self._wall()):
            return caller
        if caller is None and not self._keyring.complete:
            what = "the keys have not been read yet"
            wait = SOON * random.uniform(1.0, 1.5)
            raise Refused(Problem.of("keys_unavailable", what, retry_after=wait))
        client = client_of(connection.peer, head, self._trusted)
        if wait := self._failed.note(client, trio.current_time()):
            what = "too many requests without a good API key came from this address"
            raise Refused(Problem.of("rate_limit_exceeded", what, retry_after=wait))
        what = "the API key is not known" if caller is None else "the API key has expired"
        raise Refused(Problem.of("invalid_api_key", "no API key was sent" if key is None else what))


def presented_key(head: RequestHead) -> bytes | None:
    """Answer the key that a request shows, if it shows one.

    Raises:
        BadFraming: it shows two; whoever stands in front may have read the other one.
    """
    bearer = head.header(b"authorization")
    named = head.all(b"x-api-key")
    if not named:
        scheme, _, token = (bearer or b"").partition(b" ")
        return token.strip() if scheme.lower() == b"bearer" else None
    keys = {value.strip() for value in named}
    if bearer is not None:
        scheme, _, token = bearer.partition(b" ")
        if scheme.lower() == b"bearer":
            keys.add(token.strip())
    if len(keys) > 1 or len(named) > 1:
        raise BadFraming("Authorization and X-Api-Key differ")
    return next(iter(keys), None)
