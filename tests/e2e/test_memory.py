"""What requests leave behind in memory: nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import trio

from tests.e2e.serving import serving
from trio_gateway.contract import InternalRequest
from trio_gateway.testing import (
    Hold,
    Script,
    chat_answer,
    chat_request,
    chat_stream,
    error_answer,
    open_engine,
    until,
)


@pytest.fixture
def by_references_alone() -> Iterator[None]:
    """Keep the collector of circles away, which would come sooner or later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def requests_in_memory() -> int:
    return sum(isinstance(each, InternalRequest) for each in gc.get_objects())


@pytest.mark.parametrize(
    ("script", "stream"),
    [
        (chat_stream("ok"), True),
        (chat_stream("x" * 300_000, "ok"), True),
        (chat_answer(), False),
        (error_answer(400), False),
        (error_answer(500), True),
    ],
    ids=["stream", "stream that the socket does not take at once", "buffered", "refused", "failed"],
)
async def test_a_request_is_gone_from_memory_with_its_answer(
    script: Script, stream: bool, by_references_alone: None
) -> None:
    async with open_engine(script) as engine, serving(engine) as gateway:
        before = requests_in_memory()
        for count in (1, 2, 3):
            await gateway.ask(chat_request("x" * 1000, stream=stream))
            await gateway.settled(count)
        assert requests_in_memory() == before


async def test_a_request_whose_client_left_is_gone_from_memory(by_references_alone: None) -> None:
    worker = {"cancel_grace": 0.01}  # until then the lease knows it
    async with open_engine((Hold(),)) as engine, serving(engine, worker=worker) as gateway:
        before = requests_in_memory()
        with trio.fail_after(10), await gateway.connect() as client:
            await client.send(chat_request("x" * 1000))
            await engine.wait_open(1)
            client.leave_reset()
            await gateway.settled(1)
        await until(lambda: gateway.gateway.admission.statistics().draining == 0)
        assert requests_in_memory() == before
