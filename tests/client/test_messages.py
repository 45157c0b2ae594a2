"""Reading what the gateway says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trio_gateway.client._messages import (
    Cancelled,
    Delivery,
    Delta,
    Done,
    Failed,
    GoingAway,
    Queued,
    UnreadableMessage,
    read_gateway_message,
)
from trio_gateway.wire import DeltaWriter, write_token_message


def test_what_the_gateway_writes_is_read() -> None:
    none = {"generated": 3, "delivered": 2, "acknowledged": None}
    delivery = Delivery(3, 2, None)
    for written, read in (
        (
            write_token_message("queued", "s", request_id="r", position=2, eta_ms=None),
            Queued("s", "r", 2, None),
        ),
        (DeltaWriter("s").write(4, b'{"a":1}', 5, 60), Delta("s", 4, {"a": 1}, 5, 60)),
        (
            write_token_message(
                "done", "s", request_id="r", finish_reasons=["stop", None], usage=None, delivery=none
            ),
            Done("s", "r", ["stop", None], None, delivery),
        ),
        (
            write_token_message("error", "s", request_id="r", error={"code": "c"}, delivery=none),
            Failed({"code": "c"}, "s", "r", None, delivery),
        ),
        (write_token_message("error", error={"code": "c"}), Failed({"code": "c"})),
        (
            write_token_message("cancelled", "s", request_id="r", delivery=none),
            Cancelled("s", "r", delivery),
        ),
        (write_token_message("going_away", deadline_ms=30000), GoingAway(30000)),
    ):
        assert read_gateway_message(written) == read


def test_later_versions_may_say_more() -> None:
    assert read_gateway_message('{"type":"weather","sun":true}') is None
    assert read_gateway_message('{"type":"going_away","deadline_ms":1,"why":"x"}') == GoingAway(1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"type":7}',
        '{"type":"delta"}',
        '{"type":"delta","stream_id":"s","seq":0,"chunk":{}}',
        '{"type":"delta","stream_id":"s","seq":1,"chunk":[]}',
        '{"type":"going_away"}',
        '{"type":"going_away","deadline_ms":1' + "0" * 400 + "}",
        '{"type":"error","error":{},"retry_after_ms":1' + "0" * 400 + "}",
        "[" * 60_000,
    ],
)
def test_what_is_no_message_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UnreadableMessage):
        read_gateway_message(text)


@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        ({"choices": [{"delta": {"content": "a"}}]}, "a"),
        ({"choices": [{"text": "b"}]}, "b"),
        ({"choices": [{"delta": {"role": "assistant"}}]}, ""),
        ({"choices": [{"delta": {"content": None}}]}, ""),
        ({"choices": []}, ""),
        ({"choices": None}, ""),
        ({"choices": [7]}, ""),
        ({"type": "response.created"}, ""),
    ],
)
def test_the_text_of_a_delta_is_that_of_its_first_choice(chunk: dict[str, Any], text: str) -> None:
    message = read_gateway_message(json.dumps({"type": "delta", "stream_id": "s", "seq": 1, "chunk": chunk}))
    assert isinstance(message, Delta)
    assert message.text == text
