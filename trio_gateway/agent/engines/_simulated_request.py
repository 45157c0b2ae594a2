"""What a chat or completions body asks of the simulated engine. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ._simulated_faults import Fault, Wishes, read_wishes
from ._simulated_text import Dice, Speech, call_pieces, seed_of, token_of, tokenize

MAX_CHOICES: Final = 128
SHORTEST: Final = 16  # tokens of an answer that ends by itself
LONGEST: Final = 128
COMPLETION_LIMIT: Final = 16  # what OpenAI's completions generate where nothing is said
_ENDLESS: Final = 2**62
_OTHER_PART: Final = 256  # tokens of an image or a sound


class AskError(Exception):
    """The body can not be served, whoever tries.

    Attributes:
        param: the field at fault.
        status: HTTP status.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(frozen=True, slots=True)
class Tool:
    """A call that the answer has to be.

    Attributes:
        parameters: JSON schema of its arguments.
        forced: the caller named this very tool, and then OpenAI's finish reason is ``stop``.
    """

    name: str
    parameters: object
    forced: bool


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A body, read.

    Attributes:
        chat: a chat, else a completion.
        prompts: the tokens of each prompt; a chat has one.
        n: choices for each prompt.
        limit: tokens that each choice may have; None: what the context leaves.
        length: tokens that a choice has by its own will; None: its seed says.
        seed: of everything it will be answered, but for the engine's own.
        salt: prompts of another salt share no memory with these.
        usage, running_usage: wanted at the end of a stream, and in every event.
        response: a chat that is answered as OpenAI's Responses are.
    """

    model: str
    chat: bool
    stream: bool
    prompts: tuple[list[int], ...]
    n: int = 1
    limit: int | None = None
    length: int | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    salt: int = 0
    tool: Tool | None = None
    usage: bool = False
    running_usage: bool = False
    reasoning: int = 0
    shortest: int = 0
    faults: tuple[Fault, ...] = ()
    response: bool = False

    @property
    def choices(self) -> int:
        """Choices of the whole answer."""
        return len(self.prompts) * self.n

    def speech(self, choice: int, engine_seed: int, context: int) -> Speech:
        """Determine what one choice will say; its prompt is shorter than ``context`` tokens."""
        prompt = self.prompts[choice // self.n]
        seed = seed_of(engine_seed, self.seed, choice, self.chat, prompt)
        length = self.length
        if length is None:
            length = max(SHORTEST + Dice(seed).below(LONGEST - SHORTEST), self.shortest)
        limit = min(self.limit or _ENDLESS, context - len(prompt))
        call = None
        if self.tool is not None:
            finish = "stop" if self.tool.forced else "tool_calls"
            call = call_pieces(self.tool.name, self.tool.parameters, seed), finish
        return Speech(seed, length, limit, self.stop, self.reasoning, call)


def read_ask(body: Mapping[str, Any], *, chat: bool) -> Ask:
    """Read a body.

    Raises:
        AskError: a field is missing, or has a value that can not be served.
    """
    wishes = _wishes(body)
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    prompts = (_chat_prompt(body),) if chat else tuple(_prompts(body.get("prompt")))
    limit = _integer(body, "max_completion_tokens", 1) or _integer(body, "max_tokens", 1)
    n = _integer(body, "n", 1) or 1
    if n > MAX_CHOICES:
        raise AskError(f"n must be at most {MAX_CHOICES}", "n")
    usage = options.get("include_usage") is True
    return Ask(
        model=_model(body),
        chat=chat,
        stream=body.get("stream") is True,
        prompts=prompts,
        n=n,
        limit=limit if chat or limit else COMPLETION_LIMIT,
        length=_ENDLESS if body.get("ignore_eos") is True else wishes.tokens,
        stop=_stop(body.get("stop")),
        seed=_integer(body, "seed", -(2**63)) or 0,
        salt=seed_of(body["cache_salt"]) if body.get("cache_salt") else 0,
        tool=_tool(body) if chat else None,
        usage=usage,
        running_usage=usage and options.get("continuous_usage_stats") is True,
        reasoning=wishes.reasoning,
        shortest=_integer(body, "min_tokens", 0) or 0,
        faults=wishes.faults,
    )


def _wishes(body: Mapping[str, Any]) -> Wishes:
    metadata = body.get("metadata")
    in_metadata = metadata.get("simulate") if isinstance(metadata, dict) else None
    try:
        return read_wishes(body.get("simulate", in_metadata))
    except ValueError as exc:
        raise AskError(f"simulate: {exc}", "simulate") from None


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model", "")
    if not isinstance(model, str):
        raise AskError("model must be a string", "model")
    return model


def _integer(body: Mapping[str, Any], name: str, least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise AskError(f"{name} must be an integer of at least {least}", name)
    return value


def _stop(value: object) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value] if value else []
    if not all(isinstance(text, str) and text for text in texts):
        raise AskError("stop must be a string or a list of strings", "stop")
    return tuple(texts)


# -- prompts


def _chat_prompt(body: Mapping[str, Any]) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise AskError("messages must be a list with a message in it", "messages")
    tokens = tokenize(msgspec.json.encode(body["tools"]).decode()) if body.get("tools") else []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise AskError("a message must be an object with a role", "messages")
        tokens.append(token_of(message["role"].encode("utf-8", "replace")))
        for part in _parts(message):
            tokens += tokenize(part) if isinstance(part, str) else [token_of(part)] * _OTHER_PART
    return tokens


def _parts(message: dict[str, Any]) -> Iterator[str | bytes]:
    """The texts of a message, and as bytes what is no text."""
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text
        elif part is not None:
            yield msgspec.json.encode(part)
    if message.get("tool_calls"):
        yield msgspec.json.encode(message["tool_calls"]).decode()


def _prompts(prompt: object) -> Iterator[list[int]]:
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise AskError("prompt must be a string, or a list of strings or tokens that is not empty", "prompt")
    if all(type(token) is int for token in prompt):
        prompt = [prompt]
    for one in prompt:
        if isinstance(one, str):
            yield tokenize(one) or [0]
        elif isinstance(one, list) and one and all(type(token) is int for token in one):
            yield one
        else:
            raise AskError("a prompt must be a string or a list of tokens", "prompt")


# -- tools


def _tool(body: Mapping[str, Any]) -> Tool | None:
    """Decide whether a tool is called.

    One that ``tool_choice`` names is; ``required`` calls the first; otherwise the first whose name stands in
    the last message is, unless that is a tool's own answer.
    """
    functions = list(_functions(body.get("tools")))
    choice = body.get("tool_choice")
    if choice == "none" or not functions:
        return None
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        found = next((tool for tool in functions if tool.get("name") == name), None)
        if found is None:
            raise AskError("tool_choice names no tool of the request", "tool_choice")
        return Tool(found["name"], found.get("parameters"), True)
    last = body["messages"][-1]
    said = " ".join(part for part in _parts(last) if isinstance(part, str))
    if choice != "required":
        mentioned = (tool for tool in functions if tool["name"] in said)
        functions = [] if last.get("role") == "tool" else list(itertools.islice(mentioned, 1))
    return Tool(functions[0]["name"], functions[0].get("parameters"), False) if functions else None


def _functions(tools: object) -> Iterator[dict[str, Any]]:
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise AskError("a tool must be a function with a name", "tools")
        yield function
