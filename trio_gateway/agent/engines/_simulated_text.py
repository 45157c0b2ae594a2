"""The simulated engine's language: a tokenizer, and speech that depends on the prompt alone. Pure.

Neither resembles a model's. What matters is that equal text gives equal tokens in
every process, that about four characters make a token, and that equal requests
get equal answers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

_PIECE: Final = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s")
_MASK: Final = 2**64 - 1

# Some are not ASCII, so that whoever splits bytes in a wrong place is found out.
WORDS: Final = (
    "a", "able", "amber", "an", "and", "as", "at", "Bäume", "before", "bird", "blue", "bridge", "by", "calm",
    "café", "clear", "cloud", "deep", "door", "drift", "early", "ever", "far", "field", "first", "for",
    "from", "glass", "green", "harbour", "high", "hill", "in", "into", "is", "it", "late", "leaf", "light",
    "low", "moon", "near", "night", "of", "old", "on", "over", "quiet", "rain", "river", "road", "sea",
    "slow", "stone", "the", "then", "tide", "to", "tree", "under", "wind", "with", "日本", "🌊",
)  # fmt: skip


def tokenize(text: str) -> list[int]:
    """Cut a text into tokens: words of up to six letters with the blank before them, and single signs."""
    return [zlib.crc32(piece.encode("utf-8", "replace")) for piece in _PIECE.findall(text)]


def token_of(value: bytes) -> int:
    """Answer one token that stands for something that is no text."""
    return zlib.crc32(value)


def seed_of(*parts: object) -> int:
    """Mix numbers and words into 64 bits, equal in every process."""
    text = repr(parts).encode("utf-8", "replace")
    return (zlib.crc32(text) << 32 | zlib.crc32(text, 0x5EED)) & _MASK


class Piece(NamedTuple):
    """What one token says.

    Attributes:
        text: of the answer, of its thinking, or of a tool call's arguments.
        kind: ``text``, ``reasoning`` or ``tool``.
        finish: the choice is whole with this token: ``stop``, ``length`` or ``tool_calls``.
    """

    text: str
    kind: str = "text"
    finish: str | None = None


class Dice:
    """A sequence of numbers that a seed determines (Knuth's 64-bit congruential generator)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def below(self, bound: int) -> int:
        """Answer the next number from 0 to ``bound - 1``."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & _MASK
        return (self._state >> 33) % bound


class Speech:
    """What one choice says, a token at a time.

    Args:
        seed: determines all of it.
        length: tokens after which it would stop by itself.
        limit: tokens after which it is cut; at least 1.
        stop: texts that end it and are not said; none is empty.
        reasoning: tokens of thinking in front.
        call: pieces of a tool call that is made instead of a text, with its finish reason.
    """

    def __init__(
        self,
        seed: int,
        length: int,
        limit: int,
        stop: Sequence[str] = (),
        reasoning: int = 0,
        call: tuple[Sequence[str], str] | None = None,
    ) -> None:
        self._dice = Dice(seed)
        self._limit = limit
        self._stop = stop
        self._held = ""  # said by the model, and perhaps the beginning of a stop text
        self._hold = max((len(text) for text in stop), default=1) - 1
        self._reasoning = reasoning
        self._call = call
        self._length = len(call[0]) if call else length
        self.said = 0

    def next(self) -> Piece:
        """Say the next token; not after one that finished."""
        self.said += 1
        last = self.said >= self._length
        finish = "stop" if last else "length" if self.said >= self._limit else None
        if self._call is not None:
            return Piece(self._call[0][self.said - 1], "tool", self._call[1] if last else finish)
        word = WORDS[self._dice.below(len(WORDS))]
        if self.said <= self._reasoning:
            return Piece(word if self.said == 1 else " " + word, "reasoning", finish)
        first = self.said == self._reasoning + 1
        if not self._stop:
            return Piece(word if first else " " + word, "text", finish)
        return self._watched(word if first else " " + word, finish)

    def _watched(self, word: str, finish: str | None) -> Piece:
        """Hold back what may become a stop text, and end in front of one."""
        text = self._held + word
        at = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            return Piece(text[:at], "text", "stop")
        keep = 0 if finish else self._hold
        cut = max(len(text) - keep, 0)
        self._held = text[cut:]
        return Piece(text[:cut], "text", finish)


def call_pieces(name: str, parameters: object, seed: int) -> list[str]:
    """Write a tool call: its name, then the JSON of its arguments in tokens of up to six characters.

    Args:
        parameters: the tool's JSON schema; what is no schema asks for no arguments.
    """
    dice = Dice(seed)
    arguments = msgspec.json.encode(_value(parameters, dice, 0)).decode() if parameters else "{}"
    return [name, *(arguments[at : at + 6] for at in range(0, len(arguments), 6))]


def _value(schema: object, dice: Dice, depth: int) -> Any:
    """Make up a value that fits a schema's type; schemas nest at most eight levels here."""
    schema = schema if isinstance(schema, dict) else {}
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return choices[dice.below(len(choices))]
    match schema.get("type"):
        case "object" if depth < 8:
            return dict(_members(schema.get("properties"), dice, depth))
        case "array" if depth < 8:
            return [_value(schema.get("items"), dice, depth + 1)]
        case "integer" | "number":
            return dice.below(100)
        case "boolean":
            return bool(dice.below(2))
        case "null" | "object" | "array":
            return None
    return WORDS[dice.below(len(WORDS))]


def _members(properties: object, dice: Dice, depth: int) -> Iterator[tuple[str, Any]]:
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        yield name, _value(schema, dice, depth + 1)
