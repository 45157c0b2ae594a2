"""What shows a replica that another one said something, and secrets that all of them make alike. Pure.

All replicas have the join token, and the store does not; the store has a salt, which agents do not see. So
who reads or writes the store learns no worker's secret and can not make up a worker, and an agent, which has
the token too, does not know the secrets of others.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Final

_DIGITS: Final = 64  # of a seal
_SECRET: Final = 48


class Vouching:
    """See the module's docstring.

    Args:
        token: what all replicas have, and nobody who only reaches the store.
        prefix: of the cluster; what was said in another one is not believed.
    """

    def __init__(self, token: str, prefix: str) -> None:
        self._key: Final = _mac(token.encode(), ["cluster", prefix])

    def seal(self, name: str, text: str) -> str:
        """Answer the text in such a form that others believe it, under that name only."""
        return _mac(self._key, ["news", name, text]).hex() + text

    def opened(self, name: str, sealed: str) -> str | None:
        """Answer the text that was sealed under a name; None: it was not."""
        seal, text = sealed[:_DIGITS], sealed[_DIGITS:]
        expected = _mac(self._key, ["news", name, text]).hex()
        return text if hmac.compare_digest(seal.encode(errors="replace"), expected.encode()) else None

    def secret_for(self, salt: str, *words: object) -> str:
        """Make a secret for some words, the same at every replica that knows the salt."""
        return _mac(self._key, ["secret", salt, *map(str, words)]).hex()[:_SECRET]


def _mac(key: bytes, words: list[str]) -> bytes:
    return hmac.digest(key, json.dumps(words).encode(), hashlib.sha256)
