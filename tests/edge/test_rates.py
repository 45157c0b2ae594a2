"""Rates and keys at the door, on real sockets."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.e2e.serving import Serving, error_code, serving, tenant
from tests.tenancy.asking import asking
from trio_gateway.contract import RateStanding
from trio_gateway.edge._head import go_duration, rate_headers
from trio_gateway.tenancy import FAILURES_A_MINUTE
from trio_gateway.testing import (
    Answer,
    WaitFor,
    chat_answer,
    chat_request,
    chat_stream,
    error_answer,
    good_answer,
    http_request,
    json_request,
    open_engine,
)

BY_KEY = (("authorization", "Bearer k"),)


def rated(answer: Answer) -> dict[str, str]:
    """What an answer says of rates, without the words that all of them begin with."""
    prefix = "x-ratelimit-"
    return {name.removeprefix(prefix): value for name, value in answer.head.fields if name.startswith(prefix)}


def limited(**limits: Any) -> list[dict[str, object]]:
    return [tenant("acme", "k", **limits), tenant("zeta", "z")]


def of_key(**members: Any) -> list[dict[str, Any]]:
    """A tenant whose key has members of its own."""
    made: dict[str, Any] = tenant("acme", "k", tiers=["interactive", "standard"])
    made["keys"][0].update(members)
    return [made]


# What the headers say ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.02, "20ms"),
        (0.9999, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.9991, "1m0s"),
        (60, "1m0s"),
        (61.5, "1m1.5s"),
        (360, "6m0s"),
        (7199.5, "119m59.5s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


def test_each_limit_has_three_headers() -> None:
    assert rate_headers(
        [RateStanding("requests", 60, 59, 1.0), RateStanding("tokens", 150_000, 0, 360.0)]
    ) == (
        ("x-ratelimit-limit-requests", "60"),
        ("x-ratelimit-remaining-requests", "59"),
        ("x-ratelimit-reset-requests", "1s"),
        ("x-ratelimit-limit-tokens", "150000"),
        ("x-ratelimit-remaining-tokens", "0"),
        ("x-ratelimit-reset-tokens", "6m0s"),
    )


async def test_a_tenant_without_rates_is_told_none() -> None:
    async with open_engine(chat_answer()) as engine, serving(engine, tenants=limited()) as gateway:
        assert rated(await gateway.ask(chat_request(key="k", stream=False))) == {}


async def test_every_answer_says_what_is_left_and_only_accepted_requests_cost() -> None:
    tenants = limited(requests_per_minute=3)
    scripts = (chat_stream("a"), chat_answer(), error_answer(400))
    async with open_engine(*scripts) as engine, serving(engine, tenants=tenants) as gateway:
        story = [
            (http_request("GET", "/v1/models", headers=BY_KEY), 200, "3"),
            (chat_request(key="k"), 200, "2"),
            (json_request("/v1/chat/completions", {"model": "no", "messages": []}, headers=BY_KEY), 404, "2"),
            (chat_request(key="k", stream=False), 200, "1"),
            (http_request("GET", "/v1/requests/none", headers=BY_KEY), 404, "1"),
        ]
        for request, status, left in story:
            answer = await gateway.ask(request)
            assert answer.status == status
            told = rated(answer)
            assert (told["limit-requests"], told["remaining-requests"]) == ("3", left)
            assert re.fullmatch(r"0s|\d+ms|[\d.]+s|1m0s", told["reset-requests"])
            assert told.keys() == {"limit-requests", "remaining-requests", "reset-requests"}
        assert rated(await gateway.get("/livez", authorization="Bearer k")) == {}
        assert rated(await gateway.ask(chat_request(key="bad"))) == {}
        assert (
            rated(await gateway.ask(http_request("GET", "/v1/models", headers=(("x-api-key", "z"),)))) == {}
        )


async def test_what_an_engine_refused_costs_nothing() -> None:
    tenants = limited(requests_per_minute=3, tokens_per_minute=1000)
    async with open_engine(error_answer(400)) as engine, serving(engine, tenants=tenants) as gateway:
        assert (await gateway.ask(chat_request(key="k", max_tokens=10))).status == 400
        await gateway.settled()
        told = rated(await gateway.ask(http_request("GET", "/v1/models", headers=BY_KEY)))
        assert (told["remaining-requests"], told["remaining-tokens"]) == ("3", "1000")


async def test_tokens_are_reserved_at_once_and_settled_by_the_usage() -> None:
    tenants = limited(tokens_per_minute=600)
    script = chat_stream("a", "b", usage=(70, 30))
    async with open_engine(script) as engine, serving(engine, tenants=tenants) as gateway:
        reserved = rated(await gateway.ask(chat_request(key="k", max_tokens=400)))
        assert 100 <= int(reserved["remaining-tokens"]) < 200
        await gateway.settled()
        # What was used is coming back, by 10 a second.
        settled = rated(await gateway.ask(http_request("GET", "/v1/models", headers=BY_KEY)))
        assert 500 <= int(settled["remaining-tokens"]) <= 600


# Refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"requests_per_minute": 2}, {"tokens_per_minute": 120}])
@pytest.mark.parametrize("whose", ["tenant", "key"])
async def test_beyond_its_rate_a_caller_is_told_when_to_return(limits: dict[str, int], whose: str) -> None:
    tenants = limited(**limits) if whose == "tenant" else of_key(**limits)
    request = chat_request(key="k", max_tokens=40, stream=False)
    async with open_engine() as engine, serving(engine, tenants=tenants) as gateway:
        for _ in range(2):
            gateway.gateway.rates.charge(asking(key_id="acme-key", size=80, tokens=40))
        answer = await gateway.ask(request)
        assert (answer.status, error_code(answer)) == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.header("retry-after") or 0) <= 60
        assert f"the {whose}'s limit" in str(answer.error()["message"])
        assert rated(answer)["remaining-" + next(iter(limits)).partition("_")[0]] == "0"
        assert gateway.turned_away() == {"rate_limit_exceeded": 1}
        assert engine.statistics().requests == 0


async def test_a_full_queue_costs_nothing_of_the_rate(nursery: trio.Nursery) -> None:
    tenants = limited(requests_per_minute=5, max_concurrency=1, max_queued=0)
    go = trio.Event()
    async with (
        open_engine((WaitFor(go), *chat_stream("a"))) as engine,
        serving(engine, tenants=tenants) as gateway,
    ):
        nursery.start_soon(gateway.ask, chat_request(key="k"))
        await engine.wait_open(1)
        answer = await gateway.ask(chat_request(key="k"))
        assert (answer.status, error_code(answer)) == (429, "rate_limit_exceeded")
        assert rated(answer)["remaining-requests"] == "4"
        go.set()
        await gateway.settled()


# Keys -------------------------------------------------------------------------------------------------------


def ahead(**difference: float) -> datetime:
    return datetime.now(UTC) + timedelta(**difference)


async def test_a_key_opens_until_it_expires() -> None:
    for expires, status in ((ahead(hours=1), 200), (ahead(seconds=-1), 401)):
        async with open_engine() as engine, serving(engine, tenants=of_key(expires=expires)) as gateway:
            answer = await gateway.ask(http_request("GET", "/v1/models", headers=BY_KEY))
            assert answer.status == status
            if status == 401:
                assert answer.error()["message"] == "the API key has expired"
                assert error_code(answer) == "invalid_api_key"


async def test_a_key_may_use_fewer_models_than_its_tenant() -> None:
    models = [{"id": "m1"}, {"id": "m2"}]
    async with (
        open_engine(good_answer) as engine,
        serving(engine, tenants=of_key(models=["m2"]), models=models) as gateway,
    ):
        listed = await gateway.ask(http_request("GET", "/v1/models", headers=BY_KEY))
        data = listed.json()["data"]
        assert isinstance(data, list)
        assert [model["id"] for model in data] == ["m2"]
        answer = await gateway.ask(chat_request(key="k", model="m1"))
        assert (answer.status, error_code(answer)) == (403, "model_not_allowed")
        assert (await gateway.ask(chat_request(key="k", model="m2"))).status == 200


async def test_a_key_may_ask_for_fewer_tiers_than_its_tenant() -> None:
    tenants = of_key(tiers=["interactive"])
    async with open_engine(good_answer) as engine, serving(engine, tenants=tenants) as gateway:
        tier = (("x-gateway-priority", "standard"),)
        answer = await gateway.ask(chat_request(key="k", headers=tier))
        assert (answer.status, error_code(answer)) == (403, "priority_not_allowed")
        assert (await gateway.ask(chat_request(key="k"))).status == 200
        assert (await gateway.settled()).tier == "interactive"


# Bad keys ---------------------------------------------------------------------------------------------------


async def ask_with(gateway: Serving, key: str, *headers: tuple[str, str]) -> int:
    shown = (("authorization", f"Bearer {key}"), *headers)
    return (await gateway.ask(http_request("GET", "/v1/models", headers=shown))).status


async def slow_down(ask: Callable[[], Awaitable[int]]) -> int:
    """Show bad keys until the address is slowed; answers how many got a plain answer.

    That are more than there are in a minute where the machine takes its time: some come back meanwhile.
    """
    for plain in range(3 * FAILURES_A_MINUTE):
        if (status := await ask()) != 401:
            assert status == 429
            return plain
    raise AssertionError("never slowed")


async def test_an_address_that_shows_bad_keys_again_and_again_is_slowed_and_its_good_keys_are_not() -> None:
    answers: list[Answer] = []
    async with open_engine() as engine, serving(engine, tenants=limited()) as gateway:

        async def ask() -> int:
            answers.append(await gateway.ask(chat_request(key=f"bad-{len(answers)}")))
            return answers[-1].status

        plain = await slow_down(ask)
        assert plain >= FAILURES_A_MINUTE
        assert error_code(answers[-1]) == "rate_limit_exceeded"
        assert answers[-1].header("retry-after") is not None
        assert await ask_with(gateway, "k") == 200
        assert gateway.turned_away() == {"invalid_api_key": plain, "rate_limit_exceeded": 1}


@pytest.mark.parametrize(("trusted", "others"), [(["127.0.0.0/8"], 401), ([], 429)])
async def test_behind_a_trusted_proxy_each_client_is_judged_alone(trusted: list[str], others: int) -> None:
    server = {"bind": ["127.0.0.1:0"], "trusted_proxies": trusted}
    async with open_engine() as engine, serving(engine, tenants=limited(), server=server) as gateway:
        first, second = (("x-forwarded-for", f"203.0.113.{number}") for number in (1, 2))
        assert await slow_down(lambda: ask_with(gateway, "bad", first)) >= FAILURES_A_MINUTE
        assert await ask_with(gateway, "bad", second) == others


async def test_clients_of_a_unix_socket_are_one(tmp_path: Path) -> None:
    server = {"bind": [f"unix:{tmp_path}/gateway.sock"]}
    async with open_engine() as engine, serving(engine, tenants=limited(), server=server) as gateway:
        assert await slow_down(lambda: ask_with(gateway, "bad")) >= FAILURES_A_MINUTE
