"""Units of measure: sizes are whole bytes, durations are seconds.

Multiply to say a unit (``64 * KiB``, ``500 * MILLISECONDS``); `parse_size` and `parse_duration` read the
same words in text that people write.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB

MILLISECONDS: Final = 0.001
SECONDS: Final = 1.0
MINUTES: Final = 60.0
HOURS: Final = 3600.0

_SIZES: Final = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}
_DURATIONS: Final = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}

# Whoever writes kB or MB may mean 1000 or 1024; a limit is no place to guess.
_MEANT: Final = {"k": "KiB", "m": "MiB", "g": "GiB"}

# 20 digits hold any size or time that a machine can have, and keep Python from calculating with novels.
_QUANTITY: Final = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]+)")


@dataclass(frozen=True, slots=True)
class Part:
    """What one of several equals has of a whole that can only be split by number; all parts are the whole.

    Attributes:
        number: of the one, from 0.
        of: how many there are.
    """

    number: int = 0
    of: int = 1

    def share(self, whole: int, name: str = "") -> int:
        """Answer its part of a number of at least 0; some have one more where it does not divide.

        Args:
            name: of the whole; for another one others have more.
        """
        turn = (self.number + zlib.crc32(name.encode())) % self.of
        return whole // self.of + (turn < whole % self.of)


WHOLE: Final = Part()


def parse_size(text: str) -> int:
    """Read a size such as ``"4 MiB"``, ``"64KiB"`` or ``"100 B"``.

    Returns:
        Bytes, at least 0.

    Raises:
        ValueError: no number with a unit, a unit that is unknown or ambiguous, or no whole number of bytes.
    """
    number, unit = _split(text, example="4 MiB")
    factor = _SIZES.get(unit)
    if factor is None:
        meant = _MEANT.get(unit[:1].lower())
        hint = f"write {meant}" if meant else f"use one of {', '.join(_SIZES)}"
        raise ValueError(f'unit "{unit}" is not known: {hint}')
    size = number * factor
    if size.denominator != 1:
        raise ValueError(f'"{text}" is not a whole number of bytes')
    return size.numerator


def parse_duration(text: str) -> float:
    """Read a duration such as ``"500ms"``, ``"1.5 s"``, ``"2m"`` or ``"1h"``.

    Returns:
        Seconds, at least 0; the float nearest to what was written.

    Raises:
        ValueError: no number with a unit, or a unit other than these.
    """
    number, unit = _split(text, example="1.5 s")
    factor = _DURATIONS.get(unit)
    if factor is None:
        raise ValueError(f'unit "{unit}" is not known: use one of {", ".join(_DURATIONS)}')
    return float(number * factor)


def format_size(size: int) -> str:
    """Say a size of at least 0 bytes in the largest unit that divides it; `parse_size` reads it back."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if size and size % _SIZES[unit] == 0), "B")
    return f"{size // _SIZES[unit]} {unit}"


def _split(text: str, *, example: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'write a number and a unit, such as "{example}"')
    return Fraction(match[1]), match[2]
