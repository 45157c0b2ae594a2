"""Making keys: what is shown once, and what is stored of it."""

from __future__ import annotations

import hashlib
import secrets

RANDOM_BYTES = 20  # 160 bits; nobody guesses one of them
ID_BYTES = 4


def new_key(key_id: str | None = None) -> tuple[str, str, str]:
    """Make a key ``tg_<id>_<secret>``.

    Args:
        key_id: its name in records; None: one that is made up.

    Answers its id, the key, which has to be forgotten once it was shown, and the hash by which it is known.
    """
    id_ = key_id or f"k{secrets.token_hex(ID_BYTES)}"
    key = f"tg_{id_}_{secrets.token_hex(RANDOM_BYTES)}"
    return id_, key, f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
