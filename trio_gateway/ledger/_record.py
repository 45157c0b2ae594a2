"""The record of one exchange, and the tally from which it is written once."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..contract import Ending, InternalRequest, Outcome, Phase, Style
from ..units import KiB
from ..wire import AgentRelay, NamedRelay, OllamaRelay, StreamRelay, Usage

_MARKS: Final = 256  # event ends kept before a kernel is asked which are past
_PIECES: Final = 16 * KiB  # bytes of pieces kept until then


@dataclass(slots=True)  # frozen, its fields would be set by calls
class Record:
    """One exchange, settled. Times are seconds of the wall clock; tokens None where nobody knows."""

    exchange_id: str
    client_request_id: str | None
    boot_id: str
    tenant: str
    key_id: str | None
    operation: str
    model: str
    stream: bool
    tier: str
    worker: str | None
    attempts: int
    arrived_at: float
    placed_at: float | None
    upstream_opened_at: float | None
    headers_at: float | None
    first_content_at: float | None
    last_content_at: float | None
    settled_at: float
    outcome: str
    phase: str
    code: str | None
    status: int | None
    tokens_prompt: int | None
    tokens_cached: int | None
    tokens_generated: int | None
    tokens_delivered: int | None
    tokens_acknowledged: int | None
    prompt_source: str
    usage_source: str
    events_delivered: int
    bytes_delivered: int
    events_dropped: int
    receipt: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Answer the record as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def microseconds(moment: float) -> float:
    """Round seconds to microseconds. `round` goes by the decimal text, which takes ten times as long."""
    return math.floor(moment * 1e6 + 0.5) / 1e6


TokensOf = Callable[[str, int], float]
"""Estimates how many tokens so many bytes for or from a model are."""


def four_bytes_each(model: str, size: int) -> float:
    """What tokens of English have, roughly, whatever the model."""
    return size / 4


class Tally:
    """What happens to one exchange, counted while it happens. Times are of the Trio clock, in seconds."""

    def __init__(self) -> None:
        self.worker: str | None = None
        self.attempts = 0
        self.placed: float | None = None
        self.opened: float | None = None
        self.headers: float | None = None
        self.first_content: float | None = None
        self.last_content: float | None = None
        self.status: int | None = None
        self.asked = False  # an engine may have worked on it
        self.usage: Usage | None = None
        self.answer_bytes = 0  # of a whole answer that was handed over at once
        self.events = 0
        self.content_events = 0
        self.silent_at_end = 0  # of the engine's events: those behind the last one that carries output
        self.own_events = 0  # that say why the answer ends; no engine made them
        self.events_delivered = 0
        self.bytes_delivered = 0
        self.dropped = 0
        self.committed = False
        self.acknowledged: int | None = None  # events with output
        self.receipt: str | None = None

    def begin(self, now: float, status: int) -> None:
        """The head of an answer goes out. Idempotent."""
        if self.headers is None:
            self.headers = now
            self.status = status

    def commit(self, now: float) -> None:
        """The first content goes out."""
        self.committed = True
        self.first_content = now
        if self.headers is None:
            self.begin(now, 200)

    def count(self, relay: StreamRelay | NamedRelay | OllamaRelay | AgentRelay, last_progress: float) -> None:
        """Take over the counts of an attempt's stream.

        Args:
            last_progress: when its last event came; infinite if none committed.
        """
        self.usage = relay.usage or self.usage
        self.dropped += relay.dropped
        self.events += relay.events
        self.content_events += relay.content_events
        self.silent_at_end = relay.silent_at_end
        self.receipt = relay.receipt if relay.committed else self.receipt
        if relay.committed and last_progress < math.inf:
            self.last_content = last_progress

    def phase(self) -> Phase:
        """Tell what the client has."""
        if self.committed:
            return Phase.AFTER_CONTENT
        if self.headers is not None:
            return Phase.BEFORE_CONTENT
        return Phase.QUEUED if self.placed is None else Phase.BEFORE_HEADERS

    def tokens_generated(self) -> tuple[int, str]:
        """Tokens that the engine made, as far as was seen, and who says so."""
        if self.usage is not None and self.usage.generated is not None:
            # Continuous usage may lag behind the events that came after it.
            return self.usage.generated, "engine"
        return self.content_events, "estimated" if self.asked else "none"

    def tokens_delivered(self) -> int:
        """Tokens in the events that the client's kernel acknowledged."""
        return min(self.tokens_in(self._content_delivered()), self.tokens_generated()[0])

    def tokens_in(self, content: int) -> int:
        """Tokens in so many of the events that carry output; while nobody knows better, one in each."""
        generated, source = self.tokens_generated()
        if source != "engine" and not self.content_events:
            return content
        content = min(content, self.content_events)
        if source == "estimated" or not content:
            return min(content, generated)
        return generated * content // self.content_events

    def _tokens_acknowledged(self, delivered: int | None) -> int | None:
        if self.acknowledged is None:
            return None
        return min(self.tokens_in(self.acknowledged), delivered or 0)

    def _content_delivered(self) -> int:
        """Delivered events that carry output, at least: those amid them without may all be delivered."""
        delivered = min(self.events_delivered - self.own_events, self.events - self.silent_at_end)
        silent = self.events - self.content_events - self.silent_at_end
        return max(delivered - silent, 0)

    def _usage(
        self, request: InternalRequest, tokens_of: TokensOf
    ) -> tuple[int | None, str, int | None, str]:
        """Tokens of prompt and answer, each with who says so; None where nobody can."""
        prompt = None if self.usage is None else self.usage.prompt
        prompt_source = "engine"
        if prompt is None:
            prompt_source = "estimated" if self.asked else "none"
            prompt = math.ceil(tokens_of(request.model, request.size)) if self.asked else 0
            if self.asked and request.operation.multipart:  # a recording is no text
                prompt, prompt_source = None, "none"
        generated, source = self.tokens_generated()
        if source == "engine":
            return prompt, prompt_source, generated, source
        if request.operation.style is Style.PLAIN:  # it generates nothing
            return prompt, prompt_source, None, "none"
        if self.answer_bytes and not self.content_events:
            generated = math.ceil(tokens_of(request.model, self.answer_bytes))
        return prompt, prompt_source, generated, source

    def record(
        self,
        request: InternalRequest,
        ending: Ending,
        boot_id: str,
        now: float,
        wall: float,
        tokens_of: TokensOf = four_bytes_each,
    ) -> Record:
        """Write the record.

        Args:
            now: Trio clock; ``wall``: the wall clock at the same moment.
            tokens_of: estimates the tokens in so many bytes for or from a model.
        """

        def at(moment: float | None) -> float | None:
            return None if moment is None else math.floor((wall - (now - moment)) * 1e6 + 0.5) / 1e6

        whole = ending.outcome == Outcome.COMPLETED
        prompt, prompt_source, generated, source = self._usage(request, tokens_of)
        delivered = generated if whole or generated is None else self.tokens_delivered()
        return Record(
            exchange_id=request.exchange_id,
            client_request_id=request.client_request_id,
            boot_id=boot_id,
            tenant=request.tenant,
            key_id=request.key_id,
            operation=request.operation.name,
            model=request.model,
            stream=request.stream,
            tier=request.tier,
            worker=self.worker,
            attempts=self.attempts,
            arrived_at=microseconds(wall - (now - request.arrived)),
            placed_at=at(self.placed),
            upstream_opened_at=at(self.opened),
            headers_at=at(self.headers),
            first_content_at=at(self.first_content),
            last_content_at=at(self.last_content),
            settled_at=microseconds(wall),
            outcome=ending.outcome.value,
            phase=self.phase().value,
            code=ending.problem.code if ending.problem else None,
            status=self.status,
            tokens_prompt=prompt,
            tokens_cached=None if self.usage is None else self.usage.cached,
            tokens_generated=generated,
            tokens_delivered=delivered,
            tokens_acknowledged=self._tokens_acknowledged(delivered),
            prompt_source=prompt_source,
            usage_source=source,
            events_delivered=self.events_delivered,
            bytes_delivered=self.bytes_delivered,
            events_dropped=self.dropped,
            receipt=self.receipt,
        )


class EventMarks:
    """Where events end in the bytes that a client's socket accepted.

    Kept only for the newest bytes, which its kernel may not have acknowledged
    yet; what is older is a count. Lets *delivered* be told in whole events.
    """

    def __init__(self) -> None:
        self._ends = array("q")  # a list would cost four times as much for a client that never reads
        self._joined: list[tuple[int, int]] = []  # ends of events that stand for more, and for how many more
        # Behind all ends, with where they begin and how many events they are: mostly, that is all one needs.
        self._pieces: list[tuple[int, bytes, int]] = []
        self._size = 0  # of these pieces
        self._before = 0
        # Pieces end anywhere: what is known of the event that is under way.
        self._fresh = True
        self._comment = False
        self._half_blank = False

    def add(self, start: int, piece: bytes, joined: Sequence[tuple[int, int]] = (), events: int = 0) -> bool:
        """Note the events that end in the next piece of the stream; answers whether it is time to `forget`.

        Comments are no events.

        Args:
            start: offset of its first byte.
            joined: where in it events end to which others were joined, and how many.
            events: how many events it is, if it is nothing else; 0: not known.
        """
        if events > 1 and self._fresh:
            self._pieces.append((start, piece, events))
            self._size += len(piece)
            return self._size > _PIECES or len(self._ends) > _MARKS
        if self._pieces:
            self._spell_out()
        if events and self._fresh:
            self._ends.append(start + len(piece))
        else:
            if joined:
                self._joined += [(start + end, more) for end, more in joined]
            if not (self._fresh and self._add_lines(start, piece)):
                self._add_any(start, piece)
        return len(self._ends) > _MARKS

    def _spell_out(self) -> None:
        """Note the ends of all events in the pieces that were kept."""
        for start, piece, _ in self._pieces:
            if not self._add_lines(start, piece):
                self._add_any(start, piece)
        self._pieces.clear()
        self._size = 0

    def _add_any(self, start: int, piece: bytes) -> None:
        at = 0
        if self._half_blank and piece.startswith(b"\n"):
            at = 1
            self._note_end(start + at)
        while at < len(piece):
            if self._fresh:
                self._fresh = False
                self._comment = piece.startswith(b":", at)
            found = piece.find(b"\n\n", at)
            if found < 0:
                break
            at = found + 2
            self._note_end(start + at)
        self._half_blank = not self._fresh and piece.endswith(b"\n")

    def _add_lines(self, start: int, piece: bytes) -> bool:
        """Note the events of a piece that is nothing but events of one line each; else answer False."""
        ends: list[int] = []
        at, size = 0, len(piece)
        while True:
            if piece.startswith(b":", at):
                return False
            at = piece.find(b"\n", at) + 2
            if at < 2 or not piece.startswith(b"\n", at - 1):
                return False
            if at == size:
                break
            ends.append(start + at)
        if ends:
            self._ends.extend(ends)
        self._ends.append(start + size)
        return True

    def _note_end(self, offset: int) -> None:
        self._fresh = True
        if not self._comment:
            self._ends.append(offset)

    def forget(self, acknowledged: int) -> None:
        """Drop the marks of events that end at or before ``acknowledged``, and keep their count."""
        while self._pieces and self._pieces[0][0] + len(self._pieces[0][1]) <= acknowledged:
            _, piece, events = self._pieces.pop(0)
            self._size -= len(piece)
            self._before += events
        self._spell_out()
        self._before = self.delivered(acknowledged)
        del self._ends[: bisect_right(self._ends, acknowledged)]
        self._joined = [each for each in self._joined if each[0] > acknowledged]

    def delivered(self, acknowledged: int) -> int:
        """How many events of the engine end at or before ``acknowledged``."""
        more = sum(more for end, more in self._joined if end <= acknowledged)
        for start, piece, events in self._pieces:
            past = acknowledged - start
            more += events if past >= len(piece) else piece.count(b"\n\n", 0, max(past, 0))
        return self._before + bisect_right(self._ends, acknowledged) + more

    def __len__(self) -> int:
        return len(self._ends) + sum(events for _, _, events in self._pieces)
