"""Messages of OpenAI's Responses over WebSocket: what is read of them, and what is written around events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.wire import LaneRequest, LaneWriter, NoRequest, read_lane_request

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
LANES = st.text("abcXYZ019_.-", min_size=1, max_size=256)


def message(**fields: Any) -> bytes:
    return json.dumps({"type": "response.create", **fields}).encode()


@given(lane=st.none() | LANES, fields=st.dictionaries(st.text(min_size=12, max_size=14), VALUES, max_size=3))
def test_a_request_names_its_lane_and_no_other_field_matters(
    lane: str | None, fields: dict[str, Any]
) -> None:
    named = {} if lane is None else {"stream_id": lane}
    assert read_lane_request(message(**named, **fields)) == LaneRequest(lane)


@pytest.mark.parametrize("field", ["background", "generate"])
@pytest.mark.parametrize("value", [None, True, False, 1, "no"])
def test_a_request_for_what_can_not_be_has_its_lane_and_a_problem(field: str, value: object) -> None:
    request = read_lane_request(message(stream_id="a", **{field: value}))
    fine = value is None or value is (field == "generate")
    assert request.lane == "a"
    assert (None if request.problem is None else request.problem.param) == (None if fine else field)


@pytest.mark.parametrize(
    ("text", "code", "param", "lane"),
    [
        (b"", "invalid_json", None, None),
        (b"null", "invalid_json", None, None),
        (b'"response.create"', "invalid_json", None, None),
        (b"[" * 100_000, "invalid_json", None, None),
        (b'{"type":"response.create"', "invalid_json", None, None),
        (b"{}", "invalid_value", "type", None),
        (b'{"type":"response.cancel","stream_id":"a"}', "invalid_value", "type", "a"),
        (b'{"type":"response.cancel","stream_id":"a b"}', "invalid_value", "type", None),
        (b'{"type":["response.create"]}', "invalid_value", "type", None),
        (message(stream_id=""), "invalid_value", "stream_id", None),
        (message(stream_id="x" * 257), "invalid_value", "stream_id", None),
        (message(stream_id="\u00e9"), "invalid_value", "stream_id", None),
        (message(stream_id="a\n"), "invalid_value", "stream_id", None),
        (message(stream_id=["a"]), "invalid_value", "stream_id", None),
    ],
)
def test_what_asks_for_nothing_is_told_why(
    text: bytes, code: str, param: str | None, lane: str | None
) -> None:
    with pytest.raises(NoRequest) as caught:
        read_lane_request(text)
    assert (caught.value.problem.code, caught.value.problem.param, caught.value.lane) == (code, param, lane)


@given(
    lane=LANES,
    event=st.dictionaries(st.text(max_size=5), VALUES, max_size=4),
    blank=st.sampled_from(["", " "]),
)
def test_an_event_has_its_lane_in_front_and_keeps_its_bytes(
    lane: str, event: dict[str, Any], blank: str
) -> None:
    data = ("{" + blank + json.dumps(event)[1:]).encode()
    assert LaneWriter(None).event(data) == data
    written = LaneWriter(lane).event(data)
    assert json.loads(written) == {"stream_id": lane, **event}
    assert written.endswith(data[1:].lstrip())


@pytest.mark.parametrize("lane", [None, "a"])
@pytest.mark.parametrize("sequence", [None, 0, 7])
def test_an_error_says_status_lane_number_and_headers(lane: str | None, sequence: int | None) -> None:
    error = {"type": "t", "code": "c", "message": "m", "param": None}
    written = json.loads(LaneWriter(lane).error(400, error, [("retry-after", "1")], sequence))
    assert written == {
        "type": "error",
        "status": 400,
        **({} if lane is None else {"stream_id": lane}),
        **({} if sequence is None else {"sequence_number": sequence}),
        "error": {**error, "headers": {"retry-after": "1"}},
    }
