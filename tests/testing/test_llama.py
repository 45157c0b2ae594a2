"""The local engine is a real one: it loads, answers, and is gone afterwards."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from trio_gateway.testing import (
    LocalEngine,
    LocalEngineError,
    RawClient,
    chat_request,
    json_request,
    missing_parts,
    read_announcement,
)

needs_engine = pytest.mark.skipif(missing_parts() is not None, reason=str(missing_parts()))


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(slots=2, context=512) as engine:
        yield engine


def address_of(engine: LocalEngine) -> tuple[str, int]:
    host, _, port = engine.url.removeprefix("http://").partition(":")
    return host, int(port)


@pytest.mark.engine
@needs_engine
def test_it_serves_its_model_with_its_slots(engine: LocalEngine) -> None:
    with urllib.request.urlopen(f"{engine.url}/v1/models", timeout=10) as answer:
        listed = json.load(answer)
    with urllib.request.urlopen(f"{engine.url}/slots", timeout=10) as answer:
        slots = json.load(answer)
    assert [model["id"] for model in listed["data"]] == [engine.model]
    assert [slot["n_ctx"] for slot in slots] == [512, 512]


@pytest.mark.engine
@needs_engine
async def test_it_streams_tokens_of_its_own(engine: LocalEngine) -> None:
    with await RawClient.connect(address_of(engine)) as client:
        await client.send(chat_request("Say hello.", model=engine.model, max_tokens=8))
        reading = (await client.read_to_end()).chat()
    assert reading.text
    assert (reading.done, list(reading.finishes)) == (1, [0])


@pytest.mark.engine
@needs_engine
async def test_it_tells_how_many_slots_are_busy(engine: LocalEngine) -> None:
    endless = chat_request("Count.", model=engine.model, max_tokens=-1, ignore_eos=True)
    with await RawClient.connect(address_of(engine)) as client:
        await client.send(endless)
        await client.read_events(3)
        assert await trio.to_thread.run_sync(engine.busy_slots) == 1
        client.leave_reset()
    while await trio.to_thread.run_sync(engine.busy_slots):
        pass  # the engine tells nobody when it lets go: it must be asked


@pytest.mark.engine
@needs_engine
async def test_it_makes_vectors_and_reads_every_prompt_anew_where_that_is_asked_for() -> None:
    with (
        LocalEngine(slots=1, context=256, cache=False, embeddings=True) as engine,
        await RawClient.connect(address_of(engine)) as client,
    ):
        await client.send(json_request("/v1/embeddings", {"model": engine.model, "input": "hi"}))
        vectors = (await client.read_to_end()).json()["data"]
        assert isinstance(vectors, list)
        assert len(vectors[0]["embedding"]) > 100
        for _ in range(2):
            await client.send(chat_request(model=engine.model, stream=False, max_tokens=1))
            usage = (await client.read_to_end()).json()["usage"]
            assert isinstance(usage, dict)
            assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.engine
@needs_engine
def test_leaving_the_block_ends_the_process() -> None:
    with LocalEngine(slots=1, context=256) as engine:
        pid = engine.pid
        os.kill(pid, 0)
    assert engine.pid == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.engine
@needs_engine
def test_an_engine_that_cannot_load_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    engine = LocalEngine(slots=1, context=256, model=broken)
    with pytest.raises(LocalEngineError, match=r"did not start(.|\n)*broken\.gguf"), engine:
        pass
    assert engine.pid == 0


@pytest.mark.parametrize("line", [b"", b"loading\n", b"{}\n", b"[1]\n", b"\xff\n"])
def test_a_line_that_is_no_announcement_is_an_error(line: bytes) -> None:
    with pytest.raises(LocalEngineError):
        read_announcement(line)
