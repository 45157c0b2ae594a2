"""Streams of chat and completion chunks, as each kind of engine writes them. Pure.

A token of text costs one small JSON string between two pieces of bytes that are
made once for each choice.
"""

from __future__ import annotations

from typing import Any, Final, final

from ._simulated_answer import call_id
from ._simulated_dialects import DONE, Manner, Trouble, encode, event
from ._simulated_generation import Generation
from ._simulated_request import Ask
from ._simulated_text import Piece

MALFORMED: Final = b'data: {"id":"\n\n'


@final
class ChunkWriter:
    """Writes the events of one stream.

    Args:
        created: the time, in seconds of Unix.

    Attributes:
        unfinished: choices without a finish.
    """

    def __init__(self, manner: Manner, ask: Ask, answer_id: str, created: int) -> None:
        self.unfinished = ask.choices
        self._manner = manner
        self._ask = ask
        self._id = answer_id
        self._running_usage = ask.running_usage and manner.running_usage
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        self._head = {"id": answer_id, "object": kind, "created": created, "model": ask.model}
        self._finishes: dict[int, str] = {}  # that are told behind the last choice's text
        self._begun = False
        self._begun_calls: set[int] = set()
        self._tokens = [0] * ask.choices
        self._around = [self._text_frame(index) for index in range(ask.choices)]

    def _text_frame(self, index: int) -> tuple[bytes, bytes]:
        mark = "\0"
        delta = {"content": mark} if self._ask.chat else mark
        before, after = event(encode(self._chunk(index, delta, None))).split(encode(mark))
        return before, after

    def _chunk(self, index: int, delta: object, finish: str | None) -> dict[str, Any]:
        said = {"delta": delta} if self._ask.chat else {"text": delta}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish}
        return {**self._head, "choices": [choice]}

    def piece(self, generation: Generation, choice: int, piece: Piece) -> bytes:
        """Write what one token adds; with the last one of all choices, the end of the stream."""
        self._tokens[choice] += 1
        first = b"" if self._begun else self._beginnings()
        if piece.finish is None and piece.kind == "text" and not self._running_usage:
            if not piece.text:
                return first
            before, after = self._around[choice]
            return first + before + encode(piece.text) + after
        return first + self._said(generation, choice, piece) + self._finish(generation, choice, piece)

    def _beginnings(self) -> bytes:
        """Write the first event of each choice, which only says whose words follow."""
        self._begun = True
        if not self._ask.chat:
            return b""
        chunks = (
            event(encode(self._chunk(index, {"role": "assistant", "content": "\0"}, None)))
            for index in range(self._ask.choices)
        )
        return b"".join(chunks).replace(encode("\0"), self._manner.first_content)

    def _said(self, generation: Generation, choice: int, piece: Piece) -> bytes:
        finish = None if self._manner.finish_apart else piece.finish
        if not piece.text and finish is None:
            return b""
        delta = self._delta(choice, piece) if self._ask.chat else piece.text
        return self._counted(generation, choice, self._chunk(choice, delta, finish))

    def _delta(self, choice: int, piece: Piece) -> dict[str, Any]:
        if piece.kind == "text":
            return {"content": piece.text}
        if piece.kind == "reasoning":
            return {self._manner.reasoning_field: piece.text}
        if choice in self._begun_calls:
            return {"tool_calls": [{"index": 0, "function": {"arguments": piece.text}}]}
        self._begun_calls.add(choice)
        function = {"name": piece.text, "arguments": ""}
        identity = {"index": 0, "id": call_id(self._id, choice), "type": "function"}
        return {"tool_calls": [{**identity, "function": function}]}

    def _finish(self, generation: Generation, choice: int, piece: Piece) -> bytes:
        if piece.finish is None:
            return b""
        self.unfinished -= 1
        told = b""
        if self._manner.finish_apart:
            self._finishes[choice] = piece.finish
            if not (self._manner.finish_last and self.unfinished):
                told = b"".join(self._end_choice(generation, *end) for end in self._finishes.items())
                self._finishes.clear()
        return told if self.unfinished else told + self._end(generation)

    def _end_choice(self, generation: Generation, choice: int, finish: str) -> bytes:
        delta: object = {} if self._ask.chat else ""
        return self._counted(generation, choice, self._chunk(choice, delta, finish))

    def _counted(self, generation: Generation, choice: int, chunk: dict[str, Any]) -> bytes:
        if self._running_usage:
            chunk["usage"] = self._usage(generation, self._tokens[choice])
        return event(encode(chunk))

    def _end(self, generation: Generation) -> bytes:
        if not self._ask.usage:
            return DONE
        usage = self._usage(generation, sum(self._tokens))
        return event(encode({**self._head, "choices": [], "usage": usage})) + DONE

    def _usage(self, generation: Generation, tokens: int) -> dict[str, Any]:
        prompt = generation.prompt_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        return {**counts, "prompt_tokens_details": {"cached_tokens": generation.cached_tokens}}

    def error(self, trouble: Trouble) -> bytes:
        """Write the event of an error, and what follows it."""
        told = event(encode({"error": self._manner.event_error(trouble)}))
        return told + DONE if self._manner.done_after_error else told
