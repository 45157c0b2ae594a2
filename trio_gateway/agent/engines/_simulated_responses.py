"""OpenAI's Responses by the simulated engine: a chat that is asked for and answered in other words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, final

from ._simulated_dialects import Manner, Trouble, encode
from ._simulated_generation import Generation
from ._simulated_request import Ask, AskError, read_ask
from ._simulated_text import Piece

Event = tuple[str, bytes]
"""Its name, and its data."""

_AS_THEY_ARE: Final = (
    "model", "stream", "seed", "stop", "metadata", "simulate", "cache_salt", "min_tokens", "ignore_eos"
)  # fmt: skip


def read_response_ask(body: Mapping[str, Any]) -> Ask:
    """Read a body. It is answered in the words that a chat with the same messages gets.

    Raises:
        AskError: a field is missing, or has a value that can not be served.
    """
    earlier = body.get("previous_response_id")
    if earlier is not None:
        raise AskError(f"Response with id '{earlier}' not found.", "previous_response_id", 404)
    chat: dict[str, Any] = {name: body[name] for name in _AS_THEY_ARE if name in body}
    chat["max_tokens"] = body.get("max_output_tokens")
    chat["messages"] = [*_instructions(body.get("instructions")), *_messages(body.get("input"))]
    chat["tools"] = [*_tools(body.get("tools"))]
    choice = body.get("tool_choice")
    chat["tool_choice"] = {"function": choice} if isinstance(choice, dict) else choice
    return replace(read_ask(chat, chat=True), response=True)


def _instructions(text: object) -> Iterator[dict[str, Any]]:
    if text is not None:
        yield {"role": "system", "content": text}


def _messages(given: object) -> Iterator[dict[str, Any]]:
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise AskError("input must be a string, or a list with an item in it", "input")
    for item in given:
        if item.get("type") == "function_call_output":
            yield {"role": "tool", "content": item.get("output")}
        elif item.get("type", "message") == "message":
            yield item
        else:
            yield {"role": "assistant", "content": encode(item).decode()}


def _tools(given: object) -> Iterator[dict[str, Any]]:
    for tool in given if isinstance(given, list) else ():
        if isinstance(tool, dict) and tool.get("type") == "function":
            yield {"type": "function", "function": tool}


@final
class ResponseWriter:
    """Writes one response, as events or as a whole.

    Args:
        created: the time, in seconds of Unix.

    Attributes:
        unfinished: 1 until it is whole, then 0.
    """

    def __init__(self, manner: Manner | None, ask: Ask, answer_id: str, created: int) -> None:
        self.unfinished = 1
        self._manner = manner
        self._head = {
            "id": answer_id,
            "object": "response",
            "created_at": created,
            "model": ask.model,
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
        self._number = 0
        self._tokens = 0
        self._thought = 0  # tokens of those
        self._items: list[dict[str, Any]] = []
        self._kind = ""  # of the piece that the open item is made of
        self._text = ""  # of the open item
        self._finish: str | None = None

    # -- as events

    def events(self, generation: Generation, piece: Piece) -> Iterator[Event]:
        """Write what one token adds."""
        if not self._tokens:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        yield from self._take(piece)
        if piece.finish is not None:
            yield from self._close()
            answer = self.answer(generation)
            yield self._event(f"response.{answer['status']}", response=answer)

    def piece(self, generation: Generation, choice: int, piece: Piece) -> bytes:
        """Write it as it is streamed over HTTP."""
        return b"".join(_block(*event) for event in self.events(generation, piece))

    def error(self, trouble: Trouble) -> bytes:
        """Write the event of an error."""
        assert self._manner is not None
        return _block(*self._event("error", error=self._manner.event_error(trouble)))

    # -- as a whole

    def add(self, choice: int, piece: Piece) -> None:
        """Take in one token, of which no event is wanted."""
        for _ in self._take(piece):
            pass
        if piece.finish is not None:
            for _ in self._close():
                pass

    def answer(self, generation: Generation, created: int | None = None) -> dict[str, Any]:
        """Write it whole; it is finished."""
        usage = {
            "input_tokens": generation.prompt_tokens,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": generation.prompt_tokens + self._tokens,
        }
        if self._finish == "length":
            return self._response("incomplete", usage, {"reason": "max_output_tokens"})
        return self._response("completed", usage)

    def _response(self, status: str, usage: object = None, incomplete: object = None) -> dict[str, Any]:
        said = {"status": status, "incomplete_details": incomplete, "output": [*self._items], "usage": usage}
        return {**self._head, **said}

    def _event(self, name: str, /, **members: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return name, encode({"type": name, "sequence_number": number, **members})

    # -- items

    def _take(self, piece: Piece) -> Iterator[Event]:
        self._tokens += 1
        self._thought += piece.kind == "reasoning"
        if piece.finish is not None:
            self.unfinished = 0
            self._finish = piece.finish
        begins = piece.kind != self._kind
        if begins:
            yield from self._close()
            yield from self._open(piece)
        # The first word of a call is its name, which stands in the item.
        if piece.text and not (begins and piece.kind == "tool"):
            self._text += piece.text
            yield self._event(_DELTAS[piece.kind], **self._where(), delta=piece.text, **_extra(piece.kind))

    def _open(self, piece: Piece) -> Iterator[Event]:
        self._kind, self._text = piece.kind, ""
        item = {"id": f"{_PREFIXES[piece.kind]}_{len(self._items)}_{self._head['id']}", **_ITEMS[piece.kind]}
        if piece.kind == "tool":
            item |= {"call_id": f"call_{item['id']}", "name": piece.text}
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if piece.kind == "text":
            yield self._event("response.content_part.added", **self._where(), part=_part(""))

    def _close(self) -> Iterator[Event]:
        """Say that the open item is whole, if there is one."""
        kind, self._kind = self._kind, ""
        if not kind:
            return
        item, where = self._items[-1], self._where(kind)
        if kind == "tool":
            done = {**item, "arguments": self._text, "status": "completed"}
            yield self._event(
                "response.function_call_arguments.done", **where, name=item["name"], arguments=self._text
            )
        elif kind == "reasoning":
            done = {**item, "content": [{"type": "reasoning_text", "text": self._text}]}
            yield self._event("response.reasoning_text.done", **where, text=self._text)
        else:
            done = {**item, "content": [_part(self._text)], "status": "completed"}
            yield self._event("response.output_text.done", **where, text=self._text, logprobs=[])
            yield self._event("response.content_part.done", **where, part=_part(self._text))
        self._items[-1] = done
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=done)

    def _where(self, kind: str | None = None) -> dict[str, Any]:
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return where if (kind or self._kind) == "tool" else {**where, "content_index": 0}


_DELTAS: Final = {
    "text": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "tool": "response.function_call_arguments.delta",
}
_PREFIXES: Final = {"text": "msg", "reasoning": "rs", "tool": "fc"}
_ITEMS: Final[dict[str, dict[str, Any]]] = {
    "text": {"type": "message", "role": "assistant", "status": "in_progress", "content": []},
    "reasoning": {"type": "reasoning", "summary": [], "content": []},
    "tool": {"type": "function_call", "status": "in_progress", "arguments": ""},
}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _extra(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "text" else {}


def _block(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
