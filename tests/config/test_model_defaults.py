"""Fields that a model's configuration fills in: TOML in, JSON out, and what must not be among them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.config.reading import MODEL, WORKER, complaints
from trio_gateway.config import ModelSettings, parse_settings
from trio_gateway.contract import OPERATIONS
from trio_gateway.wire import Json, read_object

ACTED_ON = "cannot have a default: the gateway acts on what the caller says"
BOUNDED = "is bounded by max_output_tokens of the model: write that, beside defaults"
WRITTEN = "cannot have a default: the gateway writes it for each request anew"
INPUT = "cannot have a default: it is what the caller asks about"
NO_TIME = "is a date or a time, which JSON does not have: write it as a string, in quotes"
DEEP = "is nested over 100 levels, which no request may be"


def json_of(defaults: str) -> dict[str, bytes]:
    """Read a model whose defaults are an inline table."""
    (model,) = parse_settings(MODEL + f"defaults = {{{defaults}}}").models
    return model.default_fields


def as_a_body_is_read(fields: dict[str, bytes]) -> dict[str, Json]:
    """Read fields as strictly as a caller's body."""
    members = (json.dumps(name).encode() + b":" + value for name, value in fields.items())
    return read_object(b"{" + b",".join(members) + b"}", 10_000).value


@pytest.mark.parametrize(
    ("toml", "written"),
    [
        ("x = 0.7", b"0.7"),
        ("x = 1", b"1"),
        ("x = 1.0", b"1.0"),
        ("x = 1_000", b"1000"),
        ("x = 0xff", b"255"),
        ("x = -9223372036854775808", b"-9223372036854775808"),
        ("x = 9223372036854775807", b"9223372036854775807"),
        ("x = 1e300", b"1e+300"),
        ("x = true", b"true"),
        ("x = ''", b'""'),
        ('x = "a\\"\\n\\u00fc\\U0001F600"', b'"a\\"\\n\xc3\xbc\xf0\x9f\x98\x80"'),
        ("x = ['</s>', 1, {a = false}]", b'["</s>",1,{"a":false}]'),
        ("x = {}", b"{}"),
        ("x = {type = 'json_schema', 'a b' = []}", b'{"type":"json_schema","a b":[]}'),
        ("x.y.z = 1", b'{"y":{"z":1}}'),
    ],
)
def test_a_default_is_written_as_compact_json(toml: str, written: bytes) -> None:
    assert json_of(toml) == {"x": written}


def test_defaults_may_have_a_table_of_their_own_and_keep_their_order() -> None:
    text = MODEL + "[models.defaults]\ntop_p = 0.9\ntemperature = 0.7\n[models.defaults.extra]\na = 1\n"
    (model,) = parse_settings(text).models
    assert list(model.default_fields.items()) == [
        ("top_p", b"0.9"),
        ("temperature", b"0.7"),
        ("extra", b'{"a":1}'),
    ]


@pytest.mark.parametrize(
    "field", ["priority", "session_id", "id_slot", "keep_alive", "options", "logprobs", "tools", "system"]
)
def test_fields_that_only_engines_know_may_have_a_default(field: str) -> None:
    assert json_of(f"{field} = 1") == {field: b"1"}


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("model", ACTED_ON),
        ("stream", ACTED_ON),
        ("stream_options", ACTED_ON),
        ("n", ACTED_ON),
        ("user", ACTED_ON),
        ("prompt_cache_key", ACTED_ON),
        ("max_tokens", BOUNDED),
        ("max_completion_tokens", BOUNDED),
        ("max_output_tokens", BOUNDED),
        ("rid", WRITTEN),
        ("request_id", WRITTEN),
        ("cache_salt", WRITTEN),
        *((operation.input, INPUT) for operation in OPERATIONS),
        *((field, INPUT) for operation in OPERATIONS for field in operation.instead),
    ],
)
def test_a_field_that_is_the_gateways_or_the_callers_own_is_refused(field: str, why: str) -> None:
    text = MODEL + f"[models.defaults]\ntop_p = 1\n{field} = 1"
    assert complaints(text) == [f"t.toml:5: models.m.defaults.{field}: {why}"]


@pytest.mark.parametrize(
    ("toml", "complaint"),
    [
        ("x = 2020-01-01", f"4: models.m.defaults.x: {NO_TIME}"),
        ("x = 12:00:00", f"4: models.m.defaults.x: {NO_TIME}"),
        ("x = 2020-01-01T12:00:00", f"4: models.m.defaults.x: {NO_TIME}"),
        ("x = [1,\n[2020-01-01T12:00:00Z]]", f"5: models.m.defaults.x[1][0]: {NO_TIME}"),
        ("x.y = nan", "4: models.m.defaults.x.y: must be a finite number: JSON has no other"),
        ("x = {'a b' = -inf}", '4: models.m.defaults.x."a b": must be a finite number: JSON has no other'),
        ("x = 9223372036854775808", "4: models.m.defaults.x: must fit into 64 bits"),
        ("x = -9223372036854775809", "4: models.m.defaults.x: must fit into 64 bits"),
        # Python reads hexadecimal numbers of any length, and refuses to write one of more than 4,300 digits.
        ("x = 0x" + "f" * 5000, "4: models.m.defaults.x: must fit into 64 bits"),
        ("x = 1" + "0" * 400, "4: models.m.defaults.x: must fit into 64 bits"),
    ],
)
def test_what_json_cannot_say_is_told_with_its_place(toml: str, complaint: str) -> None:
    assert complaints(MODEL + "[models.defaults]\n" + toml) == [f"t.toml:{complaint}"]


def test_every_wrong_default_is_told_at_once_beside_other_mistakes() -> None:
    text = (
        WORKER + MODEL + "max_output_tokens = 0\n[models.defaults]\nn = 2\ntop_p = nan\nseed = 1\nx = [inf]"
    )
    assert [complaint.split(": ")[:2] for complaint in complaints(text)] == [
        ["t.toml:7", "models.m.max_output_tokens"],
        ["t.toml:9", "models.m.defaults.n"],
        ["t.toml:10", "models.m.defaults.top_p"],
        ["t.toml:12", "models.m.defaults.x[0]"],
    ]


def test_a_model_with_wrong_defaults_is_known_to_tenants_all_the_same() -> None:
    text = MODEL + "defaults = {n = 1}\n[[tenants]]\nid = 't'\nkeys = []\nmodels = ['m']"
    assert complaints(text) == [f"t.toml:3: models.m.defaults.n: {ACTED_ON}"]


def test_defaults_are_as_deep_as_a_body_may_be_and_no_deeper() -> None:
    for deepest, deeper in (("[" * 99 + "]" * 99, "[" * 100 + "]" * 100), (nested(98), nested(99))):
        written = json_of(f"x = {deepest}")
        assert as_a_body_is_read(written) == {"x": json.loads(written["x"])}
        assert complaints(MODEL + f"defaults.x = {deeper}") == [f"t.toml:3: models.m.defaults.x: {DEEP}"]


def nested(depth: int) -> str:
    """A table of one value, in as many tables and lists in turn as ``depth`` says."""
    value = "{a = 1}"
    for level in range(depth):
        value = f"{{a = {value}}}" if level % 2 else f"[{value}]"
    return value


def test_defaults_of_any_depth_end_in_a_complaint() -> None:
    key = ".".join("a" * 3000)
    assert complaints(MODEL + f"defaults.{key} = 1") == [f"t.toml:3: models.m.defaults.a: {DEEP}"]


def test_a_default_can_be_laid_over_the_file() -> None:
    text = MODEL + "defaults = {temperature = 0.7, top_p = 1}\n"
    variable = {"TRIO_GATEWAY__MODELS__M__DEFAULTS__TEMPERATURE": "0.5"}
    (model,) = parse_settings(text, variable).models
    assert model.default_fields == {"temperature": b"0.5", "top_p": b"1"}
    (model,) = parse_settings(text, variable, ["models.m.defaults.temperature=0"]).models
    assert model.default_fields == {"temperature": b"0", "top_p": b"1"}
    (model,) = parse_settings(text, {}, ["models.m.defaults={stop = 'x'}"]).models
    assert model.default_fields == {"stop": b'"x"'}
    (model,) = parse_settings(MODEL, {}, ["models.m.defaults.a.b=x"]).models
    assert model.default_fields == {"a": b'{"b":"x"}'}
    assert complaints(text, {}, ["models.m.defaults.n=2"]) == [f"--set: models.m.defaults.n: {ACTED_ON}"]


@pytest.mark.parametrize("value", ["\udcff", "'\udcff'", "['a', '\udcff']", "{'\udcff' = 1}"])
def test_a_variable_that_is_not_utf_8_gives_no_default(value: str) -> None:
    variable = "TRIO_GATEWAY__MODELS__M__DEFAULTS__STOP"
    (complaint,) = complaints(MODEL, {variable: value})
    assert complaint.startswith(f"{variable}: models.m.defaults.stop")
    assert complaint.endswith(": has a byte that is not valid UTF-8")


def test_defaults_that_are_built_by_hand_are_checked_too() -> None:
    with pytest.raises(ValidationError, match=ACTED_ON):
        ModelSettings(id="m", defaults={"stream": True})
    with pytest.raises(ValidationError, match="is no value that TOML has"):
        ModelSettings(id="m", defaults={"stop": None})


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(min_size=1).map("x{}".format), VALUES, max_size=4))
def test_an_engine_reads_the_defaults_that_were_configured(defaults: dict[str, Any]) -> None:
    written = ModelSettings(id="m", defaults=defaults).default_fields
    assert as_a_body_is_read(written) == defaults
