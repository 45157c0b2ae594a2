"""Deltas as engines write them, and what a client has read of them: for tests of what joins them."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from hypothesis import strategies as st

GROWS = {"content", "reasoning", "reasoning_content", "refusal", "arguments", "text", "token_ids"}
LISTS = ("content", "refusal", "tokens")
TEXTS = st.one_of(
    st.sampled_from(["", "a", '"', "\\", "\\n", "\n\n", '"}],', "\U0001f600", "\u2028", "data: {"]),
    st.text(max_size=6),
)
HALVES = st.sampled_from(["\ud83d", "\ude00"])  # of one character
NUMBERS = st.sampled_from([0, 1, -0.5, 12345678901234567890123])


@st.composite
def runs(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[dict[str, Any]]:
    """Some events of an engine that are of one kind: plain mostly, and one of them perhaps is not."""
    index = draw(st.integers(0, 1))
    kind = draw(st.sampled_from(["content", "reasoning", "reasoning_content", "both", "tool", "text"]))
    role = draw(st.sampled_from([{}, {}, {"role": "assistant"}]))
    ids: dict[str, Any] = draw(st.sampled_from([{}, {"id": None}, {"id": "c"}]))
    call: dict[str, Any] = {"index": draw(st.integers(0, 1)), **ids}
    name: dict[str, Any] = draw(st.sampled_from([{}, {"name": None}, {"name": "f"}]))
    kept = draw(st.sets(st.sampled_from(LISTS)))
    has_logprobs, has_ids = draw(st.integers(0, 2)) == 0, draw(st.integers(0, 3)) == 0
    items = st.lists(st.fixed_dictionaries({"token": texts, "logprob": NUMBERS}), max_size=2)
    others: list[dict[str, Any]] = [{"usage": {"n": 1}}, {"x": 1}, {"x": [1]}, {"created": 2}]
    beside = draw(st.sampled_from([{}] * 8 + others))
    events = []
    for _ in range(draw(st.integers(1, 6))):
        choice: dict[str, Any] = {"index": index}
        if kind == "text":
            choice["text"] = draw(texts)
        elif kind == "tool":
            choice["delta"] = {"tool_calls": [{**call, "function": {**name, "arguments": draw(texts)}}]}
        else:
            names = ["content", "reasoning"] if kind == "both" else [kind]
            choice["delta"] = {**role, **{name: draw(texts) for name in names}}
        if has_logprobs:
            choice["logprobs"] = {name: draw(items) if name in kept else None for name in LISTS}
        if has_ids:
            choice["token_ids"] = draw(st.lists(NUMBERS, max_size=3))
        choice["finish_reason"] = draw(st.sampled_from([None] * 9 + ["stop"]))
        events.append({"id": "x", **beside, "choices": [choice]})
    return events


@st.composite
def spelt(draw: st.DrawFn, value: dict[str, Any], compact: bool) -> bytes:
    """An event as some engine writes it."""
    separators = (",", ":") if compact else draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : ")]))
    text = json.dumps(value, separators=separators, ensure_ascii=not compact or draw(st.booleans()))
    return b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n"


@st.composite
def streams(draw: st.DrawFn, *, halves: bool = True) -> list[bytes]:
    """The events of an answer, perhaps with texts that are half a character."""
    compact = draw(st.booleans())
    values = draw(st.lists(runs(TEXTS | HALVES if halves else TEXTS), min_size=1, max_size=6))
    return [draw(spelt(value, compact)) for run in values for value in run]


def read(events: list[bytes]) -> tuple[dict[Any, Any], list[Any]]:
    """What a client has read: all that grows, by its place, and the order of all else."""
    grown: dict[Any, Any] = defaultdict(list)
    order: list[Any] = []
    for data in events:
        text = data.removeprefix(b"data: ").decode("utf-8", "surrogatepass")
        value = json.loads(text, parse_int=lambda n: f"#{n}", parse_float=lambda n: f"#{n}")
        place = str(value["choices"][0]["index"])
        rest = empty_of_what_grows(value, place, grown)
        if not order or order[-1] != rest:
            order.append(rest)
    return grown, order


def empty_of_what_grows(value: Any, place: str, grown: dict[Any, Any]) -> Any:
    if isinstance(value, list):
        return [empty_of_what_grows(item, f"{place}[]", grown) for item in value]
    if not isinstance(value, dict):
        return value
    rest = {}
    for key, inner in value.items():
        path = f"{place}.{key}"
        if isinstance(inner, str) and key in GROWS:
            # By code units: the two halves of a character may come in two events.
            grown[path] += list(inner.encode("utf-16-le", "surrogatepass"))
            rest[key] = "grows"
        elif isinstance(inner, list) and (key in GROWS or ".logprobs" in place):
            grown[path] += inner
            rest[key] = "grows"
        else:
            rest[key] = empty_of_what_grows(inner, path, grown)
    return rest
