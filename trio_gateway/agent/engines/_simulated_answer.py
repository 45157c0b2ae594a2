"""What the simulated engine generated: records of the worker protocol, or a whole OpenAI answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, final

import msgspec

from ...wire import Delta, EngineRecord, Failed, Finish, NamedEvent, Result, ToolCall, UsageCounts
from ._simulated_generation import Generation, Output
from ._simulated_request import Ask, AskError
from ._simulated_responses import ResponseWriter
from ._simulated_text import Piece

FAILED: Final[dict[str, Failed]] = {
    "die": Failed(code="engine_failed", message="the engine died"),
    "out_of_memory": Failed(code="out_of_memory", message="CUDA out of memory", retry="never"),
    "malformed": Failed(code="engine_protocol_error", message="the engine wrote what it may not"),
}


def usage_of(generation: Generation) -> dict[str, Any]:
    """Write the usage of a request so far, as OpenAI does."""
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.generated,
        "total_tokens": generation.prompt_tokens + generation.generated,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


@final
class Gathering:
    """The choices of an answer that is wanted as a whole.

    Args:
        answer_id: of the answer; those of tool calls are made from it.
        reasoning_field: in which thinking stands.
    """

    def __init__(self, ask: Ask, answer_id: str, reasoning_field: str = "reasoning") -> None:
        self._ask = ask
        self._id = answer_id
        self._reasoning_field = reasoning_field
        self._said: list[list[Piece]] = [[] for _ in range(ask.choices)]

    def add(self, choice: int, piece: Piece) -> None:
        """Take in one token."""
        self._said[choice].append(piece)

    def answer(self, generation: Generation, created: int) -> dict[str, Any]:
        """Write the answer; every choice is finished.

        Args:
            created: the time, in seconds of Unix.
        """
        chat = self._ask.chat
        return {
            "id": self._id,
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": self._ask.model,
            "choices": [self._choice(at, said) for at, said in enumerate(self._said)],
            "usage": usage_of(generation),
        }

    def _choice(self, index: int, said: list[Piece]) -> dict[str, Any]:
        text, thinking, call = (
            [piece.text for piece in said if piece.kind == kind] for kind in ("text", "reasoning", "tool")
        )
        end = {"logprobs": None, "finish_reason": said[-1].finish}
        if not self._ask.chat:
            return {"index": index, "text": "".join((*thinking, *text)), **end}
        message: dict[str, Any] = {"role": "assistant", "content": None if call else "".join(text)}
        if thinking:
            message[self._reasoning_field] = "".join(thinking)
        if call:
            function = {"name": call[0], "arguments": "".join(call[1:])}
            identity = {"id": call_id(self._id, index), "type": "function"}
            message["tool_calls"] = [{**identity, "function": function}]
        return {"index": index, "message": message, **end}


def call_id(answer_id: str, choice: int) -> str:
    """Name the tool call of a choice."""
    return f"call_{answer_id.rpartition('-')[2][:24]}_{choice}"


@final
class RecordMaker:
    """Turns outputs into records, in the order of the grammar.

    Attributes:
        over: the answer is whole, or has failed; there is nothing more to say.
    """

    def __init__(self, ask: Ask, answer_id: str) -> None:
        self._ask = ask
        self._id = answer_id
        self._gathering = Gathering(ask, answer_id)
        self._response: ResponseWriter | None = None  # once there is something to write
        self._unsaid = [0] * ask.choices  # tokens whose text was held back
        self._begun_calls: set[int] = set()
        # The generation is further than its outputs: all of a step are told when it is over.
        self._tokens = 0
        self._unfinished = ask.choices
        self.over = False

    def records(self, output: Output, created: int) -> Iterator[EngineRecord]:
        """Write what one token, or a fault, adds to the answer; after a `Failed` nothing may follow."""
        if output.piece is None:
            assert output.fault is not None
            self.over = True
            yield FAILED[output.fault.kind]
            return
        self._tokens += 1
        self._unfinished -= output.piece.finish is not None
        self.over = not self._unfinished
        if self._ask.response:
            yield from self._respond(output.generation, output.piece, created)
            return
        if self._ask.stream:
            yield from self._stream(output.generation, output.choice, output.piece)
            return
        self._gathering.add(output.choice, output.piece)
        if self.over:
            answer = self._gathering.answer(output.generation, created)
            yield Result(status=200, body=msgspec.Raw(msgspec.json.encode(answer)))

    def _respond(self, generation: Generation, piece: Piece, created: int) -> Iterator[EngineRecord]:
        if self._response is None:
            self._response = ResponseWriter(None, self._ask, self._id, created)
        if self._ask.stream:
            for name, data in self._response.events(generation, piece):
                yield NamedEvent(data=data.decode(), event=name)
            return
        self._response.add(0, piece)
        if self.over:
            body = msgspec.Raw(msgspec.json.encode(self._response.answer(generation)))
            yield Result(status=200, body=body)

    def _stream(self, generation: Generation, choice: int, piece: Piece) -> Iterator[EngineRecord]:
        if self._tokens == 1:
            yield self._counts(generation, 0)  # whoever reads it adds the deltas that follow
        self._unsaid[choice] += 1
        if piece.text or piece.finish:
            yield self._said(choice, piece, self._unsaid[choice])
            self._unsaid[choice] = 0
        if piece.finish:
            yield Finish(i=choice, reason=piece.finish)
        if self.over:
            yield self._counts(generation, self._tokens)

    def _said(self, choice: int, piece: Piece, tokens: int) -> EngineRecord:
        if piece.kind == "text" or not self._ask.chat:
            return Delta(i=choice, text=piece.text, n=tokens)
        if piece.kind == "reasoning":
            return Delta(i=choice, reasoning=piece.text, n=tokens)
        if choice in self._begun_calls:
            return ToolCall(i=choice, arguments=piece.text, n=tokens)
        self._begun_calls.add(choice)
        return ToolCall(i=choice, id=call_id(self._id, choice), name=piece.text, n=tokens)

    def _counts(self, generation: Generation, said: int) -> UsageCounts:
        return UsageCounts(
            prompt_tokens=generation.prompt_tokens,
            completion_tokens=said,
            cached_tokens=generation.cached_tokens,
        )


def failed_by_caller(error: AskError) -> Failed:
    """Say what the caller did wrong."""
    return Failed(
        code="invalid_value",
        message=str(error),
        retry="never",
        status=error.status,
        type="invalid_request_error",
        param=error.param,
    )
