"""From the headers of a request to the tenant that pays for it."""

from __future__ import annotations

from ..errors import BadFraming, Problem, Refused
from ..tenancy import Caller, Keyring
from ..wire import RequestHead


def authenticate(head: RequestHead, keyring: Keyring) -> Caller:
    """Answer who calls.

    Raises:
        Refused: ``invalid_api_key``.
    """
    key = presented_key(head)
    caller = keyring.find(key)
    if caller is None:
        what = "no API key was sent" if key is None else "the API key is not known"
        raise Refused(Problem.of("invalid_api_key", what))
    return caller


def presented_key(head: RequestHead) -> bytes | None:
    """Answer the key that a request shows, if it shows one.

    Raises:
        BadFraming: it shows two; whoever stands in front may have read the other one.
    """
    bearer = head.header(b"authorization")
    named = head.all(b"x-api-key")
    keys = {value.strip() for value in named}
    if bearer is not None:
        scheme, _, token = bearer.partition(b" ")
        if scheme.lower() == b"bearer":
            keys.add(token.strip())
    if len(keys) > 1 or len(named) > 1:
        raise BadFraming("Authorization and X-Api-Key differ")
    return next(iter(keys), None)
