"""Signals end the real process in order: readiness, waiting, running, and at last whatever hangs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import trio

from tests.e2e.process import process_serving
from tests.e2e.serving import error_code
from trio_gateway.testing import (
    Event,
    Hold,
    Repeat,
    WaitFor,
    chat_request,
    chat_stream,
    open_engine,
)

BEGUN = chat_stream("one", finish=None, done=False, end=False)


@pytest.mark.parametrize("what", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_fails_readiness_first_and_ends_an_idle_process_with_status_0(
    what: signal.Signals, tmp_path: Path
) -> None:
    limits = {"readiness_delay": 1, "grace": 10}
    async with open_engine() as engine, process_serving(engine, folder=tmp_path, shutdown=limits) as gateway:
        with trio.fail_after(20):
            assert await gateway.status_of("/readyz") == 200
            gateway.send(what)
            await gateway.logged("shutting_down")
            assert await gateway.status_of("/readyz") == 503
            assert await gateway.status_of("/livez") == 200
            with await gateway.connect() as client:
                await client.send(chat_request())
                assert (await client.read_to_end()).chat().text == "ok"
            assert await gateway.exit_code() == 0
    assert [line["event"] for line in gateway.lines] == ["listening", "shutting_down", "exchange", "stopped"]


async def test_running_requests_finish_and_queued_ones_are_refused(tmp_path: Path) -> None:
    go = trio.Event()
    stream = chat_stream("one", "two")
    async with (
        open_engine((*stream[:3], WaitFor(go), *stream[3:])) as engine,
        process_serving(
            engine, folder=tmp_path, worker={"slots": 1}, shutdown={"readiness_delay": 0, "grace": 20}
        ) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect() as running, await gateway.connect() as waiting:
            await running.send(chat_request())
            await running.read_events(2)
            await waiting.send(chat_request())
            with await gateway.connect() as other:  # answered behind the one that waits
                await other.request("GET", "/livez")
                await other.read_to_end()
            gateway.send(signal.SIGTERM)
            refused = await waiting.read_to_end()
            assert (refused.status, error_code(refused)) == (503, "gateway_draining")
            assert (refused.header("connection"), refused.header("retry-after")) == ("close", "1")
            assert await gateway.status_of("/livez") == 200
            go.set()
            answer = await running.read_to_end()
            assert (answer.chat().text, answer.chat().done) == ("onetwo", 1)
            assert await gateway.exit_code() == 0
    outcomes = [line["outcome"] for line in gateway.lines if line["event"] == "exchange"]
    assert outcomes == ["gateway_shutdown", "completed"]


async def test_after_the_grace_what_runs_is_ended_with_the_reason(tmp_path: Path) -> None:
    async with (
        open_engine((*BEGUN, Hold())) as engine,
        process_serving(engine, folder=tmp_path, shutdown={"readiness_delay": 0, "grace": 0.2}) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_events(2)
            gateway.send(signal.SIGTERM)
            answer = await client.read_to_end()
            assert answer.ended == "complete"
            assert [error["code"] for error in answer.chat().errors] == ["gateway_draining"]
            assert await gateway.exit_code() == 0
            await engine.requests[0].closed.wait()
    assert gateway.lines[-1]["event"] == "stopped"


async def test_a_second_signal_skips_delay_and_grace(tmp_path: Path) -> None:
    limits = {"readiness_delay": 60, "grace": 60, "hard_limit": 200}
    async with (
        open_engine((*BEGUN, Hold())) as engine,
        process_serving(engine, folder=tmp_path, shutdown=limits) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect() as client:
            await client.send(chat_request())
            await client.read_events(2)
            gateway.send(signal.SIGTERM)
            await gateway.logged("shutting_down")
            gateway.send(signal.SIGTERM)
            reading = (await client.read_to_end()).chat()
            assert ([error["code"] for error in reading.errors], reading.done) == (["gateway_draining"], 0)
            assert await gateway.exit_code() == 0


async def test_further_signals_of_any_kind_change_nothing_and_the_status_is_0(tmp_path: Path) -> None:
    limits = {"readiness_delay": 0.3, "grace": 10}
    async with open_engine() as engine, process_serving(engine, folder=tmp_path, shutdown=limits) as gateway:

        async def send_on() -> None:
            while True:
                for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    gateway.send(each)
                    await trio.sleep(0.0005)

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_on)
                assert await gateway.exit_code() == 0
                nursery.cancel_scope.cancel()


async def test_a_client_that_never_reads_does_not_hold_the_process_beyond_its_hard_limit(
    tmp_path: Path,
) -> None:
    big = Event({"choices": [{"index": 0, "delta": {"content": "x" * 4000}, "finish_reason": None}]})
    limits = {"readiness_delay": 0, "grace": 0.2, "hard_limit": 1}
    async with (
        open_engine((*BEGUN, Repeat((big,))), send_buffer=16 * 1024) as engine,
        process_serving(engine, folder=tmp_path, shutdown=limits) as gateway,
    ):
        with trio.fail_after(20), await gateway.connect(receive_buffer=4096) as client:
            await client.send(chat_request())
            request = await engine.request()
            await request.stalled.wait()
            gateway.send(signal.SIGTERM)
            assert await gateway.exit_code() == 0
            await request.closed.wait()


async def test_what_the_log_says_of_a_request_is_its_record(tmp_path: Path) -> None:
    async with open_engine() as engine, process_serving(engine, folder=tmp_path) as gateway:
        with trio.fail_after(20), await gateway.connect() as client:
            await client.send(chat_request(headers=(("x-client-request-id", "mine"),)))
            answer = await client.read_to_end()
            line = await gateway.logged("exchange")
    assert line["exchange_id"] == answer.header("x-request-id")
    assert (line["client_request_id"], line["outcome"], line["model"]) == ("mine", "completed", "m1")
