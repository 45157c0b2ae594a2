"""What a target is, and the words that targets share.

A target is a function that takes any bytes and raises if a promise is broken.
Options of a run stand in the last bytes of an input, so that a seed is readable
text with a few bytes behind it, and a mutation of the text leaves them alone.
"""

from __future__ import annotations

import importlib
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

TARGETS: Final = {
    "sse": "fuzz.wire.sse",
    "heads": "fuzz.wire.heads",
    "chunks": "fuzz.wire.chunks",
    "json": "fuzz.wire.json_bodies",
    "requests": "fuzz.wire.requests",
    "answers": "fuzz.wire.answers",
    "relay": "fuzz.wire.relay",
    "named_relay": "fuzz.wire.named_relay",
    "ollama": "fuzz.wire.ollama",
    "worker": "fuzz.wire.worker",
    "forms": "fuzz.wire.forms",
    "websocket": "fuzz.wire.websocket",
    "connection": "fuzz.edge.connection",
}


@dataclass(frozen=True)
class Target:
    """One thing to fuzz.

    Attributes:
        check: takes any bytes; raises AssertionError, or anything else, if a promise is broken.
        seeds: inputs to begin with; each of them is also run by the tests.
        words: what mutations may put in.
        max_bytes: of one input.
    """

    check: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...]
    max_bytes: int = 2048


def load(name: str) -> Target:
    """Import a target by its name in `TARGETS`."""
    target = importlib.import_module(TARGETS[name]).TARGET
    assert isinstance(target, Target)
    return target


def seed(payload: bytes, *options: int) -> bytes:
    """Write an input: the payload, and the options behind it."""
    return payload + bytes(options)


def split(data: bytes, count: int) -> tuple[bytes, list[int]]:
    """Take an input apart into its payload and ``count`` options; what is missing is 0."""
    at = max(len(data) - count, 0)
    options = list(data[at:])
    return data[:at], options + [0] * (count - len(options))


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """Cut ``data`` into the pieces that a peer may send: bytes, a few pieces, pieces that end with lines.

    The same data is always cut alike, so that a failure can be repeated.
    """
    dice = random.Random(zlib.crc32(data))
    yield [data[at : at + 1] for at in range(len(data))]
    yield _cut(data, [dice.randint(0, len(data)) for _ in range(dice.randint(1, 6))])
    ends = [at + 1 for at, byte in enumerate(data) if byte == 0x0A]
    yield _cut(data, [end for end in ends if dice.random() < 0.7])


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise([0, *sorted(places), len(data)])]
