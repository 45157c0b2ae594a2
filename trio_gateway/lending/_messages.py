"""What borrowers and the lender say to each other: one JSON object a line, over a socket pair.

Nothing on it is from outside: both ends are this program, of one version.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from ..units import MiB

LONGEST: Final = 16 * MiB  # bytes of a line; no want is so long

T = TypeVar("T")


class Said(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What a borrower says; judged in the order of the fields.

    Attributes:
        of: units and grace, by thing.
        back: units that are given back, by thing.
        want: by name: things, units and count; None: not wanted any more.
        asks: number of a question, which is answered when all before was judged; 0: none.
        ready: it could serve, and what operators may want to know of it; empty: it serves.
        alive: number of the last call that was heard; 0: none.
        last: what a process has counted that serves no more.
    """

    of: dict[str, tuple[int, float]] = {}
    back: dict[str, int] = {}
    want: dict[str, tuple[tuple[str, ...], int, int] | None] = {}
    asks: int = 0
    ready: dict[str, Any] | None = None
    alive: int = 0
    last: dict[str, Any] | None = None


class Told(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What the lender says.

    Attributes:
        lent: name of the want, thing and units.
        wanted: things of which others wait for more.
        calm: things of which nobody else waits for more.
        heard: number of the last question that is answered; 0: none.
        go: the borrower may begin to serve.
        call: number of a call, which is answered at once by a process whose loop runs; 0: none.
        retire: accept nothing more, and end once all that was accepted is served.
    """

    lent: list[tuple[str, str, int]] = []
    wanted: list[str] = []
    calm: list[str] = []
    heard: int = 0
    go: bool = False
    call: int = 0
    retire: bool = False


_ENCODER: Final = msgspec.json.Encoder()


def encode(message: Said | Told) -> bytes:
    """Write one line."""
    return _ENCODER.encode(message) + b"\n"


class Lines(msgspec.Struct):
    """Takes bytes in, gives whole lines out."""

    rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Answer the lines that are whole by now.

        Raises:
            ValueError: one is too long.
        """
        *whole, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > LONGEST:
            raise ValueError("a line is too long")
        return whole


read_said: Final = msgspec.json.Decoder(Said).decode
read_told: Final = msgspec.json.Decoder(Told).decode
