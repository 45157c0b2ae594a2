"""Which worker a request comes to, as far as its caller can say: sessions, beginnings, fallbacks."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.e2e.serving import Serving, error_code, serving, tenant
from trio_gateway.testing import ScriptedEngine, chat_answer, chat_request, error_answer, open_engine

TELLING: Final = {"bind": ["127.0.0.1:0"], "expose_worker": True}
SHORT: Final = "Hello"
LONG: Final = "You are a helpful assistant. " * 100  # 2.9 KB
NAMES: Final = tuple(f"session-{number}" for number in range(8))


def session(name: str) -> tuple[tuple[str, str], ...]:
    return (("x-gateway-session", name),)


async def worker_of(gateway: Serving, **request: Any) -> str:
    """Ask, one request after the other, and answer which worker it was."""
    answer = await gateway.ask(chat_request(stream=False, **request))
    assert answer.status == 200
    return answer.header("x-gateway-worker") or ""


async def test_requests_of_a_session_meet_the_same_worker() -> None:
    async with (
        open_engine(chat_answer()) as one,
        open_engine(chat_answer()) as two,
        serving(one, two, server=TELLING) as gateway,
    ):
        homes = {name: await worker_of(gateway, headers=session(name)) for name in NAMES}
        assert set(homes.values()) == {"w1", "w2"}
        for name in reversed(NAMES):
            assert await worker_of(gateway, headers=session(name)) == homes[name]
            assert await worker_of(gateway, prompt_cache_key=name) == homes[name]
            assert await worker_of(gateway, headers=session(name), prompt_cache_key="x") == homes[name]


async def test_sessions_of_two_tenants_have_nothing_in_common() -> None:
    tenants = [tenant("t1", "k1"), tenant("t2", "k2")]
    async with (
        open_engine(chat_answer()) as one,
        open_engine(chat_answer()) as two,
        serving(one, two, server=TELLING, tenants=tenants) as gateway,
    ):
        homes = [
            [await worker_of(gateway, key=key, headers=session(name)) for name in NAMES]
            for key in ("k1", "k2")
        ]
    assert homes[0] != homes[1]


async def test_long_requests_that_begin_alike_meet_and_short_ones_keep_the_order_of_the_file() -> None:
    async with (
        open_engine(chat_answer()) as one,
        open_engine(chat_answer()) as two,
        serving(one, two, server=TELLING) as gateway,
    ):
        seen: set[str] = set()
        for number in range(8):
            begins = [{"role": "system", "content": f"{number} {LONG}"}]
            home = await worker_of(gateway, messages=begins)
            again = [*begins, {"role": "user", "content": f"and {number}?"}]
            assert await worker_of(gateway, messages=again) == home
            short = [{"role": "user", "content": f"{SHORT} {number}"}]
            assert await worker_of(gateway, messages=short) == "w1"
            seen.add(home)
        assert seen == {"w1", "w2"}


@pytest.mark.parametrize("affinity", ["session", "none"])
async def test_a_gateway_can_be_told_to_look_at_no_text_or_at_nothing(affinity: str) -> None:
    async with (
        open_engine(chat_answer()) as one,
        open_engine(chat_answer()) as two,
        serving(one, two, server=TELLING, fleet={"affinity": affinity}) as gateway,
    ):
        texts = [[{"role": "system", "content": f"{number} {LONG}"}] for number in range(8)]
        assert {await worker_of(gateway, messages=text) for text in texts} == {"w1"}
        homes = {await worker_of(gateway, headers=session(name)) for name in NAMES}
        assert homes == ({"w1", "w2"} if affinity == "session" else {"w1"})


# Fallbacks ------------------------------------------------------------------------------------------------

MODELS: Final = [
    {"id": "large", "workers": ["w1"], "fallbacks": ["small"]},
    {"id": "small", "workers": ["w2"]},
]
SPARED_AT_ONCE: Final[dict[str, Any]] = {"breaker": {"consecutive_faults": 1}, "retry": {"max_attempts": 1}}


async def fail_once(gateway: Serving, key: str | None = None) -> None:
    assert (await gateway.ask(chat_request(model="large", key=key))).status == 502


def requests(*engines: ScriptedEngine) -> list[int]:
    return [engine.statistics().requests for engine in engines]


async def test_a_model_without_a_worker_that_can_be_asked_falls_back_to_the_next() -> None:
    async with (
        open_engine(error_answer(500), models=["large"]) as large,
        open_engine(chat_answer(model="small"), models=["small"]) as small,
        serving(large, small, models=MODELS, **SPARED_AT_ONCE) as gateway,
    ):
        await fail_once(gateway)  # its failure is its own: nothing falls back in the middle
        answer = await gateway.ask(chat_request(model="large", stream=False))
        assert (answer.status, answer.json()["model"]) == (200, "small")
        assert [(await gateway.settled(number)).model for number in (1, 2)] == ["large", "small"]
        assert requests(large, small) == [1, 1]


async def test_a_tenant_that_may_not_use_the_fallback_is_told_about_the_model_itself() -> None:
    async with (
        open_engine(error_answer(500)) as large,
        open_engine() as small,
        serving(
            large, small, models=MODELS, tenants=[tenant("t1", "k", models=["large"])], **SPARED_AT_ONCE
        ) as gateway,
    ):
        await fail_once(gateway, "k")
        answer = await gateway.ask(chat_request(model="large", key="k"))
        assert (answer.status, error_code(answer)) == (503, "engine_unavailable")
        assert requests(large, small) == [1, 0]
