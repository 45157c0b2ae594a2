"""Requests for llama.cpp that are odd but legal, made by dice with a seed; and some that were recorded.

Each request is the text of a body in which the model's name is still open, so that the
same body can be sent to an engine, under the name that it knows, and to a gateway.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MODEL: Final = "@model@"
RECORDED: Final = Path(__file__).with_name("recorded_requests.jsonl")
MAX_TOKENS: Final = 16
LARGE: Final = 300_000  # characters: more than a gateway reads without a thread

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OddRequest:
    """One request.

    Attributes:
        name: what it is, for people.
        path: of the route.
        text: the body, JSON, in which the string `MODEL` stands for the model's name.
        choices: how many slots it takes.
    """

    name: str
    path: str
    text: str
    choices: int = 1

    def body(self, model: str) -> bytes:
        """Write the body for a model."""
        assert self.text.count(f'"{MODEL}"') == 1
        return self.text.replace(f'"{MODEL}"', json.dumps(model)).encode()


class Spelled(str):
    """JSON text that is written as it stands."""

    __slots__ = ()


# Writing ----------------------------------------------------------------------------------------------------

BLANKS: Final = ("", "", "", " ", "  ", "\n", "\t", "\r\n  ")
SHORT_ESCAPES: Final = {
    '"': '\\"',
    "\\": "\\\\",
    "\n": "\\n",
    "\t": "\\t",
    "\b": "\\b",
    "\f": "\\f",
    "\r": "\\r",
}


class OddWriter:
    """Writes JSON as no serializer does: every spelling that the grammar leaves open is used."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._escapes = dice.choice((0.0, 0.0, 0.1, 1.0))
        self._blanks: Sequence[str] = dice.choice((("",), BLANKS))

    def write(self, value: object) -> str:
        """Write a value."""
        if isinstance(value, Spelled):
            return str(value)
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, Mapping):
            return self._object(value)
        if isinstance(value, list | tuple):
            return "[" + self._joined([self.write(item) for item in value]) + "]"
        return json.dumps(value)

    def _object(self, value: Mapping[str, object]) -> str:
        members = [
            self._string(key) + self._blank() + ":" + self._blank() + self.write(item)
            for key, item in value.items()
        ]
        return "{" + self._joined(members) + "}"

    def _joined(self, parts: list[str]) -> str:
        return ",".join(self._blank() + part + self._blank() for part in parts)

    def _blank(self) -> str:
        return self._dice.choice(self._blanks)

    def _string(self, text: str) -> str:
        if text == MODEL:
            return f'"{MODEL}"'
        return '"' + "".join(map(self._character, text)) + '"'

    def _character(self, char: str) -> str:
        if self._dice.random() < self._escapes:
            units = char.encode("utf-16-be")
            codes = [units[at : at + 2].hex() for at in range(0, len(units), 2)]
            return "".join(f"\\u{self._dice.choice((code, code.upper()))}" for code in codes)
        if char in SHORT_ESCAPES:
            return SHORT_ESCAPES[char]
        if char < " ":
            return f"\\u{ord(char):04x}"
        return "\\/" if char == "/" and self._escapes else char


# Values -----------------------------------------------------------------------------------------------------

ZEROS: Final = tuple(map(Spelled, ("0", "0.0", "0e0", "-0.0", "0E+0", "0.000", "0e-7")))
ONES: Final = tuple(map(Spelled, ("1", "1.0", "1e0", "10E-1", "0.1e1", "1.000000000000000000001")))
SMALL: Final = tuple(map(Spelled, ("0", "0.25", "2.5e-1", "-0.5", "5E-2")))
BIG: Final = tuple(
    map(
        Spelled,
        ("123456789012345678901234567890", "-9007199254740993", "1e308", "18446744073709551616", "1E-400"),
    )
)
WORDS: Final = (
    "Say hello.",
    "Zoë and 世界",
    "Emoji \U0001f600\U0001f468‍\U0001f469",
    "Tab\tand\nline\r\n",
    'Quote " and \\ and /',
    "Controls \x00\x01\x1f\x7f",
    "Separators \u2028\u2029\ufeff",
    "<|im_end|> is text",
    "data: [DONE]\n\n",
    '{"error": {"message": "no"}}',
    "",
)
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name"],
    "additionalProperties": False,
}
PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rom\u00e9"]}},
    "required": ["city"],
}
TOOL: Final = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS},
}


class Dice:
    """The dice of one request, with the choices that all operations share."""

    def __init__(self, seed: str) -> None:
        self.dice = random.Random(seed)

    def one(self, *choices: Any) -> Any:
        """Answer one of these."""
        return self.dice.choice(choices)

    def chance(self, share: float) -> bool:
        """Whether this time it is so."""
        return self.dice.random() < share

    def tokens(self) -> int:
        """How many tokens to ask for, few more often than many."""
        return self.dice.choice((1, 2, 2, 3, 3, 4, 5, 6, 8, MAX_TOKENS))

    def text(self) -> str:
        """Some text, never empty."""
        return str(self.dice.choice([word for word in WORDS if word]))

    def some(self, **fields: Any) -> Fields:
        """Some of these fields, each in one of its values; functions are asked for one."""
        chosen = [name for name in fields if self.chance(0.2)]
        return {name: self._value(fields[name]) for name in chosen}

    def _value(self, choices: Any) -> Any:
        if callable(choices):
            return choices()
        return self.dice.choice(choices) if isinstance(choices, tuple) else choices

    def odd_value(self, depth: int = 3) -> Any:
        """Any JSON at all."""
        kind = self.dice.randrange(8 if depth else 5)
        if kind < 5:
            return (None, self.chance(0.5), self.one(*BIG), self.one(*ONES, *SMALL), self.one(*WORDS))[kind]
        if kind == 5:
            return [self.odd_value(depth - 1) for _ in range(self.dice.randrange(4))]
        if kind == 6:
            return {self.text(): self.odd_value(depth - 1) for _ in range(self.dice.randrange(4))}
        return Spelled("[" * 60 + "]" * 60)

    def unknown(self) -> Fields:
        """Fields that nobody knows."""
        names = (
            "x",
            "Model",
            "mod\u00e8l",
            "stream ",
            "STREAM",
            "x-y.z",
            "",
            "\u00e9tat",
            "messages2",
            "_",
            "a/b",
        )
        chosen = self.dice.sample(names, self.dice.choice((0, 0, 1, 1, 2, 3)))
        fields: Fields = {name: self.odd_value() for name in chosen}
        if self.chance(0.04):
            fields["long"] = self.text() * (LARGE // 10)
        return fields


# Operations -------------------------------------------------------------------------------------------------


def _sampling(dice: Dice) -> Fields:
    return {
        "temperature": dice.one(*ZEROS),
        "seed": dice.one(0, 7, 4294967295),
        **dice.some(
            top_p=(*ONES, None),
            top_k=(1, 40, None, Spelled("4e1")),
            min_p=SMALL[:3],
            presence_penalty=(*SMALL, None),
            frequency_penalty=(*SMALL, None),
            logit_bias=({"100": Spelled("-1.5e0")}, [[100, -1]], {}, None),
            stop=("!", ["\n\n", "END"], [], None, "世"),
            user=("u-1", None, "\u00fc"),
            n=(1, None),
            t_max_predict_ms=60_000,
            ignore_eos=(True, False),
        ),
    }


def _content(dice: Dice) -> Any:
    if dice.chance(0.2):
        return [{"type": "text", "text": dice.text()} for _ in range(dice.one(1, 2))]
    return dice.text()


def _messages(dice: Dice) -> list[Fields]:
    messages: list[Fields] = []
    if dice.chance(0.85):  # else the model's own, which is longer
        messages.append({"role": "system", "content": dice.one("Be brief.", "Répondez.")})
    if dice.chance(0.15):
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        messages += [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
    if dice.chance(0.2):
        messages += [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    return [*messages, {"role": "user", "content": _content(dice), **dice.some(name="Zoë", x=None)}]


def _streamed(dice: Dice, stream: bool) -> Fields:
    if not stream:
        return dice.some(stream=(False, None), stream_options=None)
    options: tuple[Fields | None, ...] = (
        None,
        {},
        {"include_usage": True},
        {"include_usage": False},
        {"include_usage": None, "x": BIG[0]},
    )
    return {"stream": True, **({"stream_options": dice.one(*options)} if dice.chance(0.5) else {})}


def _chat(dice: Dice, stream: bool) -> Fields:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    fields = {
        "messages": _messages(dice),
        dice.one("max_tokens", "max_completion_tokens"): dice.tokens(),
        **_sampling(dice),
        **_streamed(dice, stream),
        **dice.some(
            response_format=(form, {"type": "json_object"}, {"type": "text"}, None),
            cache_prompt=False,
            parallel_tool_calls=(True, None),
            timings_per_token=(True, False),
            reasoning_format="none",
            prompt_cache_key=("k", None),
            metadata={"a": "b"},
        ),
    }
    if "response_format" not in fields and dice.chance(0.2):
        fields |= {"tools": [TOOL], **dice.some(tool_choice=("auto", "none", "required"))}
    if dice.chance(0.25):
        fields |= {"logprobs": True, **dice.some(top_logprobs=(0, 1, 2, 5))}
    if stream and dice.chance(0.1):
        fields["return_progress"] = True
    return fields


def _completions(dice: Dice, stream: bool) -> Fields:
    prompts = (dice.text(), [504, 9034, 354], ["Once", "Long ago"], [[504, 9034], [354]], ["Once"])
    return {
        "prompt": dice.one(*prompts),
        "max_tokens": dice.tokens(),
        **_sampling(dice),
        **_streamed(dice, stream),
        **dice.some(
            logprobs=(None, 1, 3),
            echo=(False, None),
            best_of=(1, None),
            suffix=(None, "end"),
            grammar=('root ::= "yes" | "no"', 'root ::= [a-z\\u00e9]+ "."'),
            cache_prompt=False,
            n_probs=(0, 2),
        ),
    }


def _choices(dice: Dice, stream: bool) -> Fields:
    return {**_chat(dice, stream), "n": 2}


def _responses(dice: Dice, stream: bool) -> Fields:
    parts = [{"role": "user", "content": [{"type": "input_text", "text": dice.text()}]}]
    form = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}}
    fields: Fields = {
        "input": dice.one(dice.text(), parts, [{"type": "message", "role": "user", "content": dice.text()}]),
        "max_output_tokens": dice.tokens(),
        "temperature": dice.one(*ZEROS),
        "seed": 7,
        **({"stream": True} if stream else dice.some(stream=(False, None))),
        **({"instructions": "Be brief."} if dice.chance(0.8) else dice.some(instructions=None)),
        **dice.some(
            text=form,
            store=(False, None),
            metadata=({"k": "v"}, None),
            top_p=ONES,
            user=("u", None),
            previous_response_id=None,
        ),
    }
    if dice.chance(0.2):
        fields["tools"] = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]
    return fields


def _anthropic_messages(dice: Dice) -> list[Fields]:
    return [{"role": "user", "content": _content(dice)}]


def _anthropic(dice: Dice, stream: bool) -> Fields:
    systems = ("Be brief.", [{"type": "text", "text": "Be brief."}])
    return {
        "messages": _anthropic_messages(dice),
        "max_tokens": dice.tokens(),
        "temperature": dice.one(*ZEROS),
        **({"stream": True} if stream else dice.some(stream=(False, None))),
        **({"system": dice.one(*systems)} if dice.chance(0.8) else {}),
        **dice.some(
            stop_sequences=(["!"], []),
            top_k=(1, 40),
            top_p=ONES,
            metadata={"user_id": "u"},
            tools=[{"name": "weather", "description": "Tells.", "input_schema": PARAMETERS}],
        ),
    }


def _count_tokens(dice: Dice, _: bool) -> Fields:
    return {"messages": _anthropic_messages(dice), **dice.some(system="Be brief.", max_tokens=8)}


def _tokenize(dice: Dice, _: bool) -> Fields:
    mixed = ["Hello", 504, dice.text()]
    options = dice.some(add_special=(True, False), parse_special=(True, False), with_pieces=(True, False))
    return {"content": dice.one(dice.text(), dice.text(), mixed, ""), **options}


def _detokenize(dice: Dice, _: bool) -> Fields:
    return {"tokens": [dice.dice.randrange(49_000) for _ in range(dice.dice.randrange(8))]}


def _embeddings(dice: Dice, _: bool) -> Fields:
    return {
        "input": dice.one(dice.text(), ["a", dice.text()], [504, 9034], [[504], [9034, 354]]),
        **dice.some(encoding_format=("float", "base64", None), dimensions=8, user="u", stream=(False, None)),
    }


Making = Callable[[Dice, bool], Fields]

PLAN: Final[tuple[tuple[str, str, Making, bool], ...]] = (
    ("chat", "/v1/chat/completions", _chat, True),
    ("chat", "/v1/chat/completions", _chat, False),
    ("completions", "/v1/completions", _completions, True),
    ("completions", "/v1/completions", _completions, False),
    ("responses", "/v1/responses", _responses, True),
    ("responses", "/v1/responses", _responses, False),
    ("messages", "/v1/messages", _anthropic, True),
    ("messages", "/v1/messages", _anthropic, False),
    ("count_tokens", "/v1/messages/count_tokens", _count_tokens, False),
    ("tokenize", "/tokenize", _tokenize, False),
    ("detokenize", "/detokenize", _detokenize, False),
    ("embeddings", "/v1/embeddings", _embeddings, False),
    ("chat", "/v1/chat/completions", _chat, True),
    ("choices", "/v1/chat/completions", _choices, True),
    ("chat", "/v1/chat/completions", _chat, False),
    ("choices", "/v1/chat/completions", _choices, False),
)

# What each operation may be given that the engine, and not the gateway, refuses.
MISTAKES: Final[dict[str, tuple[Fields, ...]]] = {
    "chat": (
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "word " * 3000}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"temperature": "hot"},
        {"top_p": "wide"},
        {"seed": "x"},
        {"ignore_eos": "x"},
        {"response_format": {"type": "nope"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nöpe"}}}},
        {"grammar": "root ::= ("},
        {"tools": [{"type": "function"}]},
        {"tools": [TOOL], "tool_choice": "some\ttimes\n"},
        {"logprobs": None, "top_logprobs": 2},
    ),
    "completions": (
        {"prompt": "word " * 3000},
        {"prompt": [504, -1]},
        {"prompt": [10**9]},
        {"top_p": "wide"},
        {"grammar": "root ::= ("},
        {"n_probs": "x"},
        {"logprobs": "x"},
    ),
    "responses": (
        {"input": "word " * 3000},
        {"previous_response_id": "resp_1"},
        {"input": [{"role": "user", "content": 5}]},
        {"temperature": "hot"},
        {"tools": [{"type": "unheard of"}]},
    ),
    "messages": (
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "word " * 3000}]},
        {"temperature": "hot"},
        {"tools": 5},
    ),
    "count_tokens": ({"messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": 5}]}),
    "tokenize": ({"content": 5}, {"content": {"a": 1}}, {"content": "x", "add_special": "x"}),
    "detokenize": ({"tokens": "x"}, {"tokens": [10**9]}, {"tokens": ["x"]}),
    "embeddings": (
        {"input": ""},
        {"input": "x", "encoding_format": "zzz"},
        {"input": "word " * 3000},
        {"input": [-5]},
    ),
}


def make_request(seed: int, number: int) -> OddRequest:
    """Make the ``number``-th request of a seed; operations take turns, and all else is dice."""
    dice = Dice(f"{seed}/{number}")
    operation, path, make, stream = PLAN[number % len(PLAN)]
    fields = make(dice, stream)
    mistakes = MISTAKES.get(operation, ())
    name = f"{operation}{' stream' if stream else ''}"
    if mistakes and dice.chance(0.2):
        fields |= dice.one(*mistakes)
        name += ", mistaken"
    if operation == "embeddings" or dice.chance(0.9):
        fields |= {key: value for key, value in dice.unknown().items() if key not in fields}
    members = [("model", MODEL), *fields.items()]
    dice.dice.shuffle(members)
    text = OddWriter(dice.dice).write(dict(members))
    return OddRequest(f"{number} ({name})", path, text, 2 if operation == "choices" else 1)


def recorded_requests() -> list[OddRequest]:
    """Read what official SDKs and curl were seen to send."""
    lines = [json.loads(line) for line in RECORDED.read_text("utf-8").splitlines()]
    return [
        OddRequest(line["by"], line["path"], line["body"].replace('"smollm2"', f'"{MODEL}"', 1))
        for line in lines
    ]
