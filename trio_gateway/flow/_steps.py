"""Work on the loop that grows with what there is, and must not hold up the streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import trio

T = TypeVar("T")


async def in_steps(found: Iterable[T | None], size: int) -> list[T]:
    """Collect what is found, and let all others run after every so many; None is one too, but left out.

    Args:
        found: what it looks at may change between two steps.
        size: of a step; what is done for so many should take less than a millisecond.
    """
    collected: list[T] = []
    for number, each in enumerate(found, 1):
        if each is not None:
            collected.append(each)
        if number % size == 0:
            await trio.lowlevel.checkpoint()
    await trio.lowlevel.checkpoint()
    return collected
