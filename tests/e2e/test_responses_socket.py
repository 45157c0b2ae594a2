"""OpenAI's Responses over WebSocket: lanes, their order and bounds, failures, and every end of a socket."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import trio

from tests.e2e.lanes import Lanes, Message, lanes, text_of, types_of
from tests.e2e.serving import Serving, error_code, serving, tenant
from tests.e2e.tls import issue
from tests.e2e.voices import TEXT, speak, voice_of
from trio_gateway.testing import (
    CloseFin,
    EngineRequest,
    Hold,
    Json,
    Script,
    WaitFor,
    http_request,
    open_engine,
)

MODELS: Final = [{"id": "m1", "upstream": "engine-name"}]
KEYED: Final = [tenant("acme", "key-a")]
UPGRADE: Final = (
    ("connection", "upgrade"),
    ("upgrade", "websocket"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
)


def input_of(request: EngineRequest) -> str:
    return str(request.json()["input"])


class Gates:
    """An engine whose answers wait, each behind its first word, for the gate that its input names."""

    def __init__(self, *names: str) -> None:
        self.gates: Final = {name: trio.Event() for name in names}
        self.asked: Final[list[str]] = []

    def __call__(self, request: EngineRequest) -> Script:
        name = input_of(request)
        self.asked.append(name)
        voice = voice_of(request)
        return (*voice.begun, WaitFor(self.gates[name]), *voice.rest)

    def open(self, *names: str) -> None:
        for name in names:
            self.gates[name].set()


# Events -----------------------------------------------------------------------------------------------------


async def test_events_are_those_of_http_and_each_has_the_name_of_its_lane() -> None:
    body = {"model": "m1", "input": "hi"}
    async with open_engine(speak) as engine, serving(engine, models=MODELS) as gateway:
        async with lanes(gateway) as client:
            await client.create()
            await client.until_terminal()
            await client.create("a.b-c_1")
            await client.until_terminal()
        answer = await gateway.ask(
            http_request("POST", "/v1/responses", body=json.dumps({**body, "stream": True}).encode())
        )
        assert answer.events is not None
        over_http = [json.loads(event.data) for event in answer.events.events]
        count = len(over_http)
        assert client.messages[:count] == over_http
        assert client.messages[count:] == [{**event, "stream_id": "a.b-c_1"} for event in over_http]
        assert [message["sequence_number"] for message in over_http] == list(range(count))
        assert text_of(client.messages) == 2 * TEXT
        await gateway.settled(3)
        assert {record.outcome for record in gateway.records} == {"completed"}
        assert [record.tokens_delivered for record in gateway.records] == [2] * 3
        assert all(0 < record.events_delivered <= count for record in gateway.records)


async def test_the_engine_gets_the_fields_of_a_request_and_no_others() -> None:
    async with open_engine(speak) as engine, serving(engine, models=MODELS) as gateway:
        async with lanes(gateway) as client:
            await client.create("a", temperature=1, metadata={"x": [1, None]}, stream=False, background=False)
            await client.until_terminal()
            await client.send(
                '{"type":"response.create","model":"m1","previous_response_id":"r9","seed":1e0}'
            )
            await client.until_terminal()
        sent = [(await engine.request(number)).json() for number in (1, 2)]
        assert sent[0] == {
            "model": "engine-name", "input": "hi", "temperature": 1, "metadata": {"x": [1, None]},
            "stream": True, "background": False,
        }  # fmt: skip
        assert sent[1] == {"model": "engine-name", "previous_response_id": "r9", "seed": 1.0, "stream": True}
        assert b'"seed":1e0' in (await engine.request(2)).body


async def test_what_the_handshake_says_holds_for_all_its_requests() -> None:
    headers = [(b"x-gateway-priority", b"batch"), (b"x-client-request-id", b"mine")]
    async with open_engine(speak) as engine, serving(engine) as gateway:
        async with lanes(gateway, headers=headers) as client:
            for _ in range(2):
                await client.create()
                await client.until_terminal()
        assert [(record.tier, record.client_request_id) for record in gateway.records] == 2 * [
            ("batch", "mine")
        ]


# Lanes ------------------------------------------------------------------------------------------------------


async def test_a_lane_has_one_response_after_the_other_and_lanes_do_not_wait_for_each_other() -> None:
    gates = Gates("a1", "a2", "b1", "none")
    async with open_engine(gates) as engine, serving(engine) as gateway, lanes(gateway) as client:
        await client.create("a", input="a1")
        await client.create("a", input="a2")
        await client.until(lambda message: message["type"] == "response.output_text.delta")
        await client.create("b", input="b1")
        await client.create(input="none")
        gates.open("b1", "none")
        await client.until_terminal(2)
        assert text_of(client.of("b")) == TEXT
        assert sorted(gates.asked) == ["a1", "b1", "none"]
        assert "response.completed" not in types_of(client.of("a"))
        gates.open("a1")
        await client.until_terminal()
        gates.open("a2")
        await client.until_terminal()
        assert gates.asked[-1] == "a2"
        assert text_of(client.of("a")) == 2 * TEXT
        numbers = [message["sequence_number"] for message in client.of("a")]
        assert numbers == 2 * list(range(len(numbers) // 2))


async def test_a_response_that_fails_ends_its_turn_and_no_other() -> None:
    def play(request: EngineRequest) -> Script:
        voice = voice_of(request)
        return (*voice.begun, CloseFin()) if input_of(request) == "cut" else voice.good

    async with open_engine(play) as engine, serving(engine) as gateway, lanes(gateway) as client:
        for text in ("cut", "fine"):
            await client.create("a", input=text)
        failed, done = await client.until_terminal(2)
        assert (failed["type"], done["type"]) == ("error", "response.completed")
        assert (failed["status"], failed["stream_id"]) == (502, "a")
        assert (failed["error"]["code"], failed["error"]["type"]) == ("engine_failed", "upstream_error")
        number = client.messages.index(failed)
        assert failed["sequence_number"] == client.messages[number - 1]["sequence_number"] + 1
        record = gateway.records[0]
        assert failed["error"]["headers"]["x-request-id"] == record.exchange_id
        assert failed["error"]["gateway"]["request_id"] == record.exchange_id
        assert (record.outcome, record.phase) == ("upstream_failed", "after_content")


async def test_lanes_at_work_are_bounded_and_the_socket_goes_on() -> None:
    gates = Gates("hi")
    async with (
        open_engine(gates) as engine,
        serving(engine, websocket={"max_streams": 2}) as gateway,
        lanes(gateway) as client,
    ):
        for lane in ("a", "b", "c"):
            await client.create(lane)
        refused = await client.until(lambda message: message["type"] == "error")
        assert (refused["stream_id"], refused["status"]) == ("c", 400)
        assert refused["error"]["code"] == "websocket_stream_limit_reached"
        gates.open("hi")
        await client.until_terminal(2)
        await client.create("c")
        (done,) = await client.until_terminal()
        assert (done["type"], done["stream_id"]) == ("response.completed", "c")
        assert gateway.turned_away() == {"websocket_stream_limit_reached": 1}


async def test_a_lane_is_free_as_soon_as_its_client_has_the_last_event() -> None:
    def play(request: EngineRequest) -> Script:
        voice = voice_of(request)
        return (*voice.begun, *voice.last, Hold())  # the engine's message does not end

    async with (
        open_engine(play) as engine,
        serving(engine, websocket={"max_streams": 1}) as gateway,
        lanes(gateway) as client,
    ):
        for number in range(10):
            await client.create(f"lane-{number}")
            assert types_of(await client.until_terminal()) == ["response.completed"]
        await gateway.settled(10)
        assert {record.outcome for record in gateway.records} == {"completed"}


async def test_requests_that_wait_behind_others_are_bounded_too() -> None:
    gates = Gates("hi")
    async with (
        open_engine(gates) as engine,
        serving(engine, websocket={"max_streams": 2}) as gateway,
        lanes(gateway) as client,
    ):
        for _ in range(4):
            await client.create("a")
        refused = await client.until(lambda message: message["type"] == "error")
        assert (refused["status"], refused["error"]["code"]) == (429, "queue_full")
        assert refused["error"]["headers"]["retry-after"] == "1"
        gates.open("hi")
        assert types_of(await client.until_terminal(3)) == ["response.completed"] * 3


async def test_bodies_that_wait_in_lanes_count_as_unplaced() -> None:
    gates = Gates("hi")
    async with (
        open_engine(gates) as engine,
        serving(engine, limits={"unplaced_bytes": 3000, "body_bytes": 2500}) as gateway,
        lanes(gateway) as client,
    ):
        await client.create("a")
        await client.until(lambda message: message["type"] == "response.output_text.delta")
        for text in ("x" * 2000, "y" * 2000):
            await client.create("a", input="hi", metadata={"text": text})
        await gateway.until(lambda: gateway.gateway.server.room.used > 2000)
        gates.open("hi")
        first, second, third = await client.until_terminal(3)
        assert types_of([first, second]) == ["response.completed"] * 2
        assert (third["status"], third["error"]["code"]) == (429, "queue_full")  # told when its turn came


async def test_a_deadline_does_not_wait_for_a_turn() -> None:
    gates = Gates("one", "two")
    async with (
        open_engine(gates) as engine,
        serving(engine) as gateway,
        lanes(gateway, headers=[(b"x-gateway-timeout-ms", b"400")]) as client,
    ):
        await client.create("a", input="one")
        await client.create("a", input="two")
        ends = await client.until_terminal(2)
        assert [end["error"]["code"] for end in ends] == ["deadline_exceeded"] * 2
        assert gates.asked == ["one"]


# Messages that ask for nothing, or for what can not be -----------------------------------------------------

NOT_POSSIBLE: Final[list[tuple[str, dict[str, Any] | str, str, str | None]]] = [
    ("no JSON", "{", "invalid_json", None),
    ("no object", "[]", "invalid_json", None),
    ("deep", "[" * 5000, "invalid_json", None),
    ("no type", '{"model":"m1","input":"hi"}', "invalid_value", "type"),
    ("another type", {"type": "response.steer", "input": "hi"}, "invalid_value", "type"),
    ("type is no text", {"type": {"a": 1}}, "invalid_value", "type"),
    ("lane is no text", {"type": "response.create", "stream_id": 1}, "invalid_value", "stream_id"),
    ("lane is empty", {"type": "response.create", "stream_id": ""}, "invalid_value", "stream_id"),
    ("lane is long", {"type": "response.create", "stream_id": "x" * 257}, "invalid_value", "stream_id"),
    ("lane has a blank", {"type": "response.create", "stream_id": "a b"}, "invalid_value", "stream_id"),
    ("lane ends a line", {"type": "response.create", "stream_id": "a\n"}, "invalid_value", "stream_id"),
    ("in the background", {"background": True}, "invalid_value", "background"),
    ("without output", {"generate": False}, "invalid_value", "generate"),
    ("no input", {"input": None}, "missing_field", "input"),
    ("no model", {"model": None}, "missing_field", "model"),
    ("unknown model", {"model": "other"}, "model_not_found", "model"),
    ("a field of the engine's", {"kv_transfer_params": {}}, "field_not_allowed", "kv_transfer_params"),
    ("twice", '{"type":"response.create","model":"m1","input":"a","input":"b"}', "invalid_json", None),
    (
        "two lanes",
        '{"type":"response.create","stream_id":"a","model":"m1","input":"a","stream_id":"b"}',
        "invalid_json",
        None,
    ),
    ("a lone surrogate", '{"type":"response.create","model":"m1","input":"\\ud800"}', "invalid_json", None),
]


@pytest.mark.parametrize(("message", "code", "param"), [row[1:] for row in NOT_POSSIBLE],
                         ids=[row[0] for row in NOT_POSSIBLE])  # fmt: skip
async def test_what_can_not_be_is_told_and_the_socket_goes_on(
    message: dict[str, Any] | str, code: str, param: str | None
) -> None:
    async with (
        open_engine(speak) as engine,
        serving(engine, worker={"kind": "vllm"}) as gateway,
        lanes(gateway) as client,
    ):
        if isinstance(message, str):
            await client.send(message)
        elif "type" in message:
            await client.send(json.dumps(message))
        else:
            await client.create("a", **message)
        told = await client.receive()
        assert (told["type"], told["error"]["code"], told["error"].get("param")) == ("error", code, param)
        assert told["status"] == (404 if code == "model_not_found" else 400)
        assert told["error"]["headers"]["x-should-retry"] == "false"
        assert len(engine.requests) == 0
        await client.create("a")
        assert types_of(await client.until_terminal()) == ["response.completed"]


async def test_what_can_not_be_is_told_when_its_turn_comes() -> None:
    gates = Gates("hi")
    async with open_engine(gates) as engine, serving(engine) as gateway, lanes(gateway) as client:
        await client.create("a")
        await client.create("a", background=True)
        await client.create("a", model="other")
        await client.until(lambda message: message["type"] == "response.output_text.delta")
        gates.open("hi")
        first, *others = await client.until_terminal(3)
        assert first["type"] == "response.completed"
        assert [other["error"]["code"] for other in others] == ["invalid_value", "model_not_found"]
        assert gateway.turned_away() == {"invalid_value": 1, "model_not_found": 1}


async def test_an_engines_refusal_is_passed_on_in_its_own_words() -> None:
    body = {"error": {"message": "Response with id 'r1' not found.", "type": "invalid_request_error",
                      "param": "response_id", "code": 404}}  # fmt: skip
    async with (
        open_engine((Json(body, 404),)) as engine,
        serving(engine, worker={"kind": "vllm"}) as gateway,
        lanes(gateway) as client,
    ):
        await client.create("a", previous_response_id="r1")
        (told,) = await client.until_terminal()
        assert (told["status"], told["error"]["message"]) == (404, "Response with id 'r1' not found.")
        engine.rescript(speak)
        await client.create("a")
        assert types_of(await client.until_terminal()) == ["response.completed"]


async def test_turns_of_a_socket_prefer_the_worker_that_had_the_first() -> None:
    async with (
        open_engine(speak) as one,
        open_engine(speak) as two,
        open_engine(speak) as three,
        serving(one, two, three) as gateway,
    ):
        for _ in range(4):
            async with lanes(gateway) as client:
                for turn in range(4):
                    await client.create(previous_response_id="r1" if turn else None)
                    await client.until_terminal()
        workers = [record.worker for record in gateway.records]
        assert [len(set(workers[at : at + 4])) for at in range(0, 16, 4)] == [1] * 4


# How a socket begins ----------------------------------------------------------------------------------------


async def test_a_plain_get_has_to_upgrade_and_other_methods_are_named() -> None:
    async with open_engine(speak) as engine, serving(engine, tenants=KEYED) as gateway:
        plain = await gateway.get("/v1/responses")
        assert (plain.status, plain.header("upgrade")) == (426, "websocket")
        assert error_code(plain) == "upgrade_required"
        head = await gateway.fetch("DELETE", "/v1/responses")
        assert (head.status, head.header("allow")) == (405, "POST, GET")
        old = [(name, "12" if name.endswith("version") else value) for name, value in UPGRADE]
        answer = await gateway.fetch("GET", "/v1/responses", headers=tuple(old))
        assert (answer.status, answer.header("sec-websocket-version")) == (426, "13")


async def test_without_a_good_key_there_is_no_socket() -> None:
    async with open_engine(speak) as engine, serving(engine, tenants=KEYED) as gateway:
        for key in ((), (("authorization", "Bearer wrong"),)):
            answer = await gateway.fetch("GET", "/v1/responses", headers=(*UPGRADE, *key))
            assert (answer.status, error_code(answer)) == (401, "invalid_api_key")
        async with lanes(gateway) as client:
            await client.create()
            await client.until_terminal()
        assert gateway.records[0].tenant == "acme"


# How it ends ------------------------------------------------------------------------------------------------


async def open_three(gateway: Serving, client: Lanes) -> None:
    """Have one response run, one wait in its lane, and one in the queue."""
    await client.create("a", input="one")
    await client.until(lambda message: message["type"] == "response.output_text.delta")
    await client.create("a", input="two")
    await client.create("b", input="three")
    await gateway.queued(1)
    await gateway.until(lambda: gateway.gateway.books.reading == 1)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_leaving_ends_what_runs_and_what_waits(how: str) -> None:
    gates = Gates("one", "two", "three")
    async with (
        open_engine(gates) as engine,
        serving(engine, worker={"slots": 1}) as gateway,
        lanes(gateway) as client,
    ):
        await open_three(gateway, client)
        if how == "close":
            await client.socket.aclose(1000)
        else:
            await client.socket._stream.aclose()
        await gateway.settled(2)
        assert {record.outcome for record in gateway.records} == {"client_gone"}
        await gateway.until(lambda: gateway.turned_away() == {"client_gone": 1})
        assert gates.asked == ["one"]


async def test_shutting_down_refuses_what_waits_and_lets_finish_what_runs() -> None:
    gates = Gates("one", "two", "three")
    shutdown = {"readiness_delay": 0, "grace": 10}
    async with (
        open_engine(gates) as engine,
        serving(engine, worker={"slots": 1}, shutdown=shutdown) as gateway,
        lanes(gateway) as client,
        trio.open_nursery() as nursery,
    ):
        await open_three(gateway, client)
        nursery.start_soon(gateway.gateway.shut_down, trio.Event())
        waited = await client.until(lambda message: message["type"] == "error")
        assert (waited["stream_id"], waited["error"]["code"]) == ("b", "gateway_draining")
        await client.create("c", input="four")
        late = await client.until(lambda message: message["type"] == "error")
        assert (late["stream_id"], late["status"], late["error"]["code"]) == ("c", 503, "gateway_draining")
        gates.open("one")
        assert await client.close_code() == 1001
        mine = [
            message["type"]
            for message in client.of("a")
            if message["type"] in ("response.completed", "error")
        ]
        assert sorted(mine) == ["error", "response.completed"]
        assert text_of(client.of("a")) == TEXT


async def test_what_outlives_the_grace_is_told_so_before_the_socket_closes() -> None:
    gates = Gates("hi")
    async with (
        open_engine(gates) as engine,
        serving(engine, shutdown={"readiness_delay": 0, "grace": 0.1}) as gateway,
        lanes(gateway) as client,
    ):
        await client.create("a")
        await client.until(lambda message: message["type"] == "response.output_text.delta")
        await gateway.gateway.shut_down(trio.Event())
        assert await client.close_code() == 1001
        assert client.messages[-1]["error"]["code"] == "gateway_draining"


async def test_a_reader_that_takes_nothing_is_ended_with_its_socket() -> None:
    def flood(request: EngineRequest) -> Script:
        voice = voice_of(request)
        return (*voice.begun, *(10_000 * voice.words), Hold())

    async with (
        open_engine(flood) as engine,
        serving(engine, delivery={"stall_timeout": 0.5, "buffer_bytes": 64 * 1024}) as gateway,
        lanes(gateway, unread=1) as client,
    ):
        await client.create("a")
        await client.create("b")
        records = [await gateway.settled(number) for number in (1, 2)]
        assert {record.outcome for record in records} <= {"client_stalled", "client_gone"}
        await gateway.until(lambda: gateway.gateway.server.open == 0)
        await client.close_code()
        assert not {"response.completed", "response.incomplete"} & {*types_of(client.messages)}


async def test_an_owner_can_cancel_a_response_by_its_id() -> None:
    gates = Gates("hi")
    async with open_engine(gates) as engine, serving(engine) as gateway, lanes(gateway) as client:
        await client.create("a")
        await client.until(lambda message: message["type"] == "response.output_text.delta")
        (exchange,) = gateway.gateway.live
        assert (await gateway.fetch("DELETE", f"/v1/requests/{exchange.request.exchange_id}")).status == 200
        (told,) = await client.until_terminal()
        assert told["error"]["code"] == "request_cancelled"
        assert gateway.records[0].outcome == "client_cancelled"


def play_by_lot(request: EngineRequest) -> Script:
    voice = voice_of(request)
    many = (*voice.begun, *(20 * voice.words))
    return {
        "good": voice.good,
        "long": (*many, *voice.rest),
        "cut": (*many, CloseFin()),
        "refused": (Json({"error": {"message": "no", "code": 400}}, 400),),
        "hanging": (*voice.begun, Hold()),
    }[input_of(request)]


async def use_by_lot(gateway: Serving, dice: Random) -> list[Message]:
    """Ask for some responses in some lanes, read some messages, and leave in some way."""
    async with lanes(gateway) as client:
        count = dice.randrange(1, 7)
        kinds = [
            dice.choice(["good", "long", "good", "long", "cut", "refused", "hanging"]) for _ in range(count)
        ]
        for kind in kinds:
            await client.create(dice.choice(["a", "b", "c"]), input=kind)
        if "hanging" in kinds or dice.random() < 0.4:
            for _ in range(dice.randrange(20)):
                with trio.move_on_after(0.05):
                    await client.receive()
            if dice.random() < 0.5:
                await trio.aclose_forcefully(client.socket._stream)
        else:
            await client.until_terminal(count)
        return client.messages


async def test_whatever_happens_nothing_is_left_and_nothing_looks_finished_that_is_not() -> None:
    heard: list[Message] = []
    async with (
        open_engine(play_by_lot) as engine,
        serving(
            engine,
            worker={"slots": 6},
            admission={"max_wait": 0.5},
            breaker={"consecutive_faults": 100_000, "fault_ratio": 1.0},
        ) as gateway,
    ):

        async def one(seed: int) -> None:
            heard.extend(await use_by_lot(gateway, Random(seed)))

        for start in range(0, 60, 10):
            async with trio.open_nursery() as nursery:
                for seed in range(start, start + 10):
                    nursery.start_soon(one, seed)
        await gateway.until(lambda: len(gateway.gateway.live) == 0)
        records = gateway.records
    ids = {record.exchange_id for record in records if record.outcome == "completed"}
    failed = [message["error"] for message in heard if message["type"] == "error"]
    assert not ids & {error["headers"]["x-request-id"] for error in failed}
    finished = types_of(heard).count("response.completed")
    assert 0 < finished <= len(ids)
    assert len({record.outcome for record in records}) >= 4


async def test_it_goes_the_same_way_over_tls(tmp_path: Path) -> None:
    issued = issue(tmp_path)
    trust: ssl.SSLContext = issued.trust()
    async with (
        open_engine(speak) as engine,
        serving(engine, server=issued.server) as gateway,
        lanes(gateway, trust=trust) as client,
    ):
        for lane in ("a", "b"):
            await client.create(lane)
        await client.until_terminal(2)
        assert (text_of(client.of("a")), text_of(client.of("b"))) == (TEXT, TEXT)
