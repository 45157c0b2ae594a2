"""Replacing keys of the database, in a thread: the loop never waits for it."""

from __future__ import annotations

import time
from typing import Any

import trio

from ..admin import refusal
from ..database import StoreFailed
from ..tenancy import RosterRefused, new_key, open_roster

LIMIT = 10.0  # seconds for the database


async def rotate(
    url: str, key: str, tenant: str, overlap: float, turn: trio.CapacityLimiter
) -> dict[str, Any]:
    """Make a key like another one, which ends; answers both, the new one in full, this once.

    Who asked and then left is not waited for, but what the database does: there would be a key of which
    the trail says that there is none.

    Args:
        tenant: whose key it is thought to be.
        overlap: seconds for which the old one is still good.
        turn: of the threads for it; one that the database does not answer keeps its token.

    Raises:
        Refused: there is no such key, or the database does not answer.
    """
    id_, whole, hash_ = new_key()
    now = time.time()

    def replace() -> None:
        roster = open_roster(url)
        try:
            roster.replace_key(key, tenant, id_, hash_, now, now + overlap)
        finally:
            roster.close()

    with trio.move_on_after(LIMIT, shield=True):
        try:
            await trio.to_thread.run_sync(replace, abandon_on_cancel=True, limiter=turn)
        except RosterRefused as error:
            code = "not_found" if "no key" in str(error) else "not_possible"
            raise refusal(code, str(error)) from None
        except (OSError, StoreFailed) as error:
            raise refusal("database_unavailable", str(error)[:200]) from None
        return {"id": id_, "tenant": tenant, "key": whole, "replaces": key, "old_ends_in": overlap}
    raise refusal("database_unavailable", "the database does not answer; look whether there is a new key")
