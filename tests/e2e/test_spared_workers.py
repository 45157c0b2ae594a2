"""A worker that keeps failing is spared, its callers are told so at once, and one trial brings it back."""

from __future__ import annotations

from typing import Any, Final

import trio

from tests.e2e.serving import Serving, error_code, serving
from trio_gateway.testing import (
    Hold,
    Script,
    chat_answer,
    chat_request,
    chat_stream,
    error_answer,
    open_engine,
)

FAILS: Final[Script] = error_answer(500)
ONCE: Final = {"max_attempts": 1}
SOON: Final = 0.2  # seconds of a cooldown that a test waits for


def breakers(gateway: Serving, worker: str = "w1") -> dict[str, str]:
    """The states that operators see."""
    (figures,) = [each for each in gateway.gateway.statistics()["workers"] if each["id"] == worker]
    states: dict[str, str] = figures["breakers"]
    return states


def spares(**settings: Any) -> dict[str, Any]:
    return {"consecutive_faults": 2, **settings}


async def fail_twice(gateway: Serving) -> None:
    for _ in range(2):
        assert (await gateway.ask(chat_request())).status == 502


async def test_when_all_workers_of_a_model_are_spared_callers_are_told_for_how_long() -> None:
    async with open_engine(FAILS) as engine, serving(engine, breaker=spares(), retry=ONCE) as gateway:
        await fail_twice(gateway)
        answer = await gateway.ask(chat_request())
        assert (answer.status, error_code(answer)) == (503, "engine_unavailable")
        assert 1 <= int(answer.header("retry-after") or "") <= 10  # the rest of the cooldown
        assert answer.header("x-should-retry") is None
        assert engine.statistics().requests == 2
        assert breakers(gateway) == {"m1": "open"}
        assert (await gateway.get("/readyz")).status == 503
        assert gateway.turned_away() == {"engine_unavailable": 1}


async def test_a_spared_worker_leaves_its_share_to_the_others() -> None:
    async with (
        open_engine(FAILS) as bad,
        open_engine(chat_answer()) as good,
        serving(bad, good, breaker=spares()) as gateway,
    ):
        answers = [await gateway.ask(chat_request(stream=False)) for _ in range(6)]
        assert [answer.status for answer in answers] == [200] * 6
        # Suspect from its first fault on, it is asked only where nothing else is left.
        assert bad.statistics().requests == 1
        assert (await gateway.get("/readyz")).status == 200


async def test_after_the_cooldown_a_probe_and_then_a_single_request_try() -> None:
    scripts = (FAILS, FAILS, (Hold(),))
    async with (
        open_engine(*scripts) as engine,
        serving(engine, breaker=spares(cooldown=SOON), retry=ONCE, probes={"interval": 60}) as gateway,
        trio.open_nursery() as nursery,
    ):
        await fail_twice(gateway)
        await gateway.until(lambda: breakers(gateway) == {"m1": "half_open"})
        for _ in range(3):
            nursery.start_soon(gateway.ask, chat_request(headers=(("x-gateway-timeout-ms", "700"),)))
        await gateway.queued(2)
        assert breakers(gateway) == {"m1": "trying"}
        assert engine.statistics().requests == 3


async def test_the_first_output_of_the_trial_closes_the_breaker() -> None:
    scripts = (FAILS, FAILS, chat_stream("a"))
    async with (
        open_engine(*scripts) as engine,
        serving(engine, breaker=spares(cooldown=SOON), retry=ONCE) as gateway,
    ):
        await fail_twice(gateway)
        await gateway.until(lambda: breakers(gateway) == {"m1": "half_open"})
        assert (await gateway.ask(chat_request())).status == 200
        assert breakers(gateway) == {"m1": "closed"}


async def test_a_trial_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    scripts = (FAILS, FAILS, (Hold(),), chat_stream("a"))
    async with (
        open_engine(*scripts) as engine,
        serving(engine, breaker=spares(cooldown=SOON), retry=ONCE) as gateway,
    ):
        await fail_twice(gateway)
        await gateway.until(lambda: breakers(gateway) == {"m1": "half_open"})
        trial = await gateway.ask(chat_request(headers=(("x-gateway-timeout-ms", "50"),)))
        assert trial.status == 504
        assert breakers(gateway) == {"m1": "half_open"}
        assert (await gateway.ask(chat_request())).status == 200
        assert breakers(gateway) == {"m1": "closed"}
