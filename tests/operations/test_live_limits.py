"""Limits that are changed while the gateway runs: each that says so reaches the part that it is about."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.e2e.serving import Serving, configuration, error_code, serving, tenant
from trio_gateway.admin import Actor, ActResult
from trio_gateway.config import ConfigurationError, Settings, Source
from trio_gateway.errors import Problem, Refused
from trio_gateway.gateway import Gateway
from trio_gateway.operations._changes import RESTART, limit_names
from trio_gateway.testing import WaitFor, chat_request, good_answer, open_engine

ME = Actor("me", "operator", "r1")
URL = "http://127.0.0.1:1"


async def act(gateway: Serving, action: Any, target: str | None = None, **arguments: Any) -> ActResult:
    return await gateway.gateway.operations.act(ME, action, target, arguments)


async def refused(gateway: Serving, action: Any, target: str | None = None, **arguments: Any) -> Problem:
    with pytest.raises(Refused) as caught:
        await act(gateway, action, target, **arguments)
    return caught.value.problem


def parts_of(gateway: Gateway) -> dict[str, Any]:
    """What the parts of a gateway go by, which no setting can reach without showing here."""
    parts, house = gateway.generator._parts, gateway.house
    assert gateway.sockets._streams._parts is parts is house.parts
    (book,) = gateway.fleet.books.values()
    return {
        "admission": gateway.admission.limits,
        "promotion": gateway.admission._queue._promote_after,
        "shares": dict(gateway.admission._shares),
        "rates": gateway.rates.standings("acme", None),
        "tenants": gateway.keyring.tenants,
        "generator": (gateway.generator._settings, gateway.generator.kept.window),
        "sockets": (gateway.sockets._settings, gateway.sockets.kept.window),
        "server": gateway.server._limits,
        "room": gateway.room._limit,
        "buffers": gateway.buffers.total,
        "exchanges": parts.limits,
        "attempts": parts.attempts.limits,
        "upstream": house.engine._limits if parts.attempts.engine is house.engine else None,
        "budget": parts.budget._ratio,
        "pause": gateway.fleet.settings.first_pause,
        "worker": (book.slots, book.worker.weight, book.worker.cancel_grace),
        "shutdown": gateway.settings.shutdown,
        "log": house.log.level,
    }


def other(name: str, value: Any, source: Source) -> Any:
    """Another value that the configuration takes for a limit."""
    candidates: list[Any] = [3, 30.0, 0.5, 2]
    if isinstance(value, bool):
        candidates = [not value]
    elif isinstance(value, str):
        candidates = ["finish_reason", "debug", "prefix"]
    elif isinstance(value, int | float):
        candidates = [value + 1, value - 1, value * 0.9, value / 2]
    for candidate in candidates:
        try:
            source.with_live({name: candidate})
        except ConfigurationError:
            continue
        return candidate
    raise AssertionError(f"no other value for {name}")


def settable(settings: Settings) -> list[str]:
    return [name for name, (_, when) in limit_names(settings).items() if when != RESTART]


SECTIONS: dict[str, Any] = {"tenants": [tenant("acme", "k", max_timeout=600, default_timeout=60)]}
NAMES = settable(Source.of_text(configuration(URL, **SECTIONS)).settings)


async def test_every_limit_that_can_be_set_reaches_a_part_and_goes_back() -> None:
    source = Source.of_text(configuration(URL, **SECTIONS))
    assert len(NAMES) > 40
    async with serving(URL, **SECTIONS) as gateway:
        before, values = parts_of(gateway.gateway), limit_names(source.settings)
        for name in NAMES:
            wanted = other(name, values[name][0], source)
            result = await act(gateway, "limits.set", set={name: wanted})
            assert (result.done, list(result.after)) == (True, [name])
            now = parts_of(gateway.gateway)
            assert now != before, name
            shown = (await gateway.gateway.operations.limits())["limits"][name]
            assert (shown["value"], shown["source"]) == (wanted, "live"), name
            again = await act(gateway, "limits.set", set={name: wanted})
            assert not again.done
            back = await act(gateway, "limits.set", set={name: None})
            assert (back.done, back.after) == (True, result.before)
            assert parts_of(gateway.gateway) == before, name


async def test_a_limit_that_needs_a_restart_and_what_is_none_are_refused() -> None:
    async with serving(URL) as gateway:
        for name, code in (
            ("probes.interval", "not_possible"),
            ("limits.connections", "not_possible"),
            ("server.bind", "invalid_value"),
            ("nothing.at.all", "invalid_value"),
        ):
            problem = await refused(gateway, "limits.set", set={"admission.max_queued": 3, name: 1})
            assert (problem.code, problem.param) == (code, name)
        problem = await refused(gateway, "limits.set", set={"admission.max_queued": "many"})
        assert (problem.code, problem.param) == ("invalid_value", "admission.max_queued")
        assert gateway.gateway.admission.limits.max_queued == 1024


async def test_without_a_file_nothing_can_be_changed_but_the_log_level() -> None:
    async with serving(URL) as gateway:
        configured = gateway.gateway.operations.configured
        configured._source = configured._written = None
        assert (await refused(gateway, "limits.set", set={})).code == "not_possible"
        assert (await refused(gateway, "reload")).code == "not_possible"
        result = await act(gateway, "log_level.set", level="error")
        assert (result.done, result.before) == (True, {"log.level": "info"})
        assert not (await act(gateway, "log_level.set", level="error")).done
        assert (await gateway.gateway.operations.limits())["limits"]["log.level"]["source"] == "default"


async def test_the_log_level_is_a_limit_like_others() -> None:
    async with serving(URL) as gateway:
        assert (await act(gateway, "log_level.set", level="error")).after == {"log.level": "error"}
        assert gateway.gateway.house.log.level == "error"
        assert (await gateway.gateway.operations.limits())["limits"]["log.level"]["source"] == "live"


async def test_streams_go_on_under_what_they_began_with() -> None:
    go = trio.Event()
    async with (
        open_engine(lambda request: (WaitFor(go), *good_answer(request))) as engine,
        serving(engine) as gateway,
        trio.open_nursery() as nursery,
    ):

        async def call() -> None:
            assert (await gateway.ask(chat_request())).status == 200

        nursery.start_soon(call)
        await gateway.until(lambda: gateway.held == 1)
        (exchange,) = gateway.gateway.live
        began = exchange._parts.limits
        await act(gateway, "limits.set", set={"retry.max_attempts": 1, "workers.w1.slots": 1})
        assert exchange._parts.limits is began
        assert gateway.gateway.house.parts.limits.max_attempts == 1
        assert gateway.gateway.fleet.books["w1"].slots == 1
        go.set()


# Reading the file again -------------------------------------------------------------------------------------


def rewrite(file: Path, *engines: Any, **sections: Any) -> None:
    file.write_text(configuration(*engines, **sections), encoding="utf-8")


async def test_workers_models_and_tenants_come_change_and_go(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    async with open_engine() as one, open_engine() as two:
        first = [tenant("a", "key-a"), tenant("b", "key-b")]
        async with serving(one, file=file, tenants=first) as gateway:
            rewrite(
                file,
                two,
                one,
                models=[{"id": "m1"}, {"id": "m2", "upstream": "m1"}],
                tenants=[tenant("a", "key-a2"), tenant("c", "key-c", max_concurrency=3)],
            )
            result = await act(gateway, "reload")
            assert result.after["new_requests"] == ["models.m2", "tenants.a.keys"]
            assert result.after["applied"] == ["workers.w1.url", "workers.w2", "tenants.b", "tenants.c"]
            fleet = gateway.gateway.fleet
            assert [book.worker.url for book in fleet.books.values()] == [two.url, one.url]
            for key, status in (("key-a", 401), ("key-b", 401), ("key-a2", 200), ("key-c", 200)):
                assert (await gateway.ask(chat_request(key=key, model="m2"))).status == status
            rewrite(file, two, models=[{"id": "m1"}], tenants=first)
            await act(gateway, "reload")
            assert list(fleet.books) == ["w1"]
            assert error_code(await gateway.ask(chat_request(key="key-a", model="m2"))) == "model_not_found"
            assert (await gateway.ask(chat_request(key="key-b"))).status == 200


async def test_a_worker_that_is_described_anew_keeps_its_streams_and_its_count(tmp_path: Path) -> None:
    file, go = tmp_path / "gateway.toml", trio.Event()
    async with (
        open_engine(lambda request: (WaitFor(go), *good_answer(request))) as engine,
        serving(engine, file=file) as gateway,
        trio.open_nursery() as nursery,
    ):

        async def call() -> None:
            assert (await gateway.ask(chat_request())).status == 200

        nursery.start_soon(call)
        await gateway.until(lambda: gateway.held == 1)
        rewrite(file, engine, worker={"slots": 1, "weight": 2.0})
        result = await act(gateway, "reload")
        assert result.after["applied"] == ["workers.w1.slots", "workers.w1.weight"]
        book = gateway.gateway.fleet.books["w1"]
        assert (book.held, book.slots, book.free) == (1, 1, 0)
        nursery.start_soon(call)
        await gateway.queued(1)
        go.set()


async def test_a_live_value_stays_unless_the_file_says_otherwise_than_before(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    async with serving(URL, file=file, admission={"max_queued": 9}) as gateway:
        live = {"admission.max_queued": 3, "admission.max_wait": 5.0, "workers.w1.slots": 2}
        await act(gateway, "limits.set", set=live)
        result = await act(gateway, "reload")
        assert (result.done, result.after["live_values_dropped"]) == (False, [])
        rewrite(file, admission={"max_queued": 7})
        result = await act(gateway, "reload")
        assert result.after["live_values_dropped"] == ["admission.max_queued", "workers.w1.slots"]
        limits = gateway.gateway.admission.limits
        assert (limits.max_queued, limits.max_wait) == (7, 5.0)


async def test_a_signal_reads_the_file_again_and_tells_the_log(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    async with serving(URL, file=file) as gateway:
        trail = gateway.gateway.operations.trail
        file.write_text("[admission]\nmax_queue = 3\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await gateway.until(lambda: len(trail) == 1)
        rewrite(file, URL, admission={"max_queued": 3})
        os.kill(os.getpid(), signal.SIGHUP)
        await gateway.until(lambda: len(trail) == 2)
        assert gateway.gateway.admission.limits.max_queued == 3
    (line,) = gateway.logged("reload_refused")
    assert "gateway.toml:2: admission.max_queue" in line["reason"]
    (line,) = gateway.logged("reloaded")
    assert (line["applied"], line["restart"], line["dropped"]) == (["admission.max_queued"], [], [])
    assert [each["outcome"] for each in gateway.logged("operator_action")] == ["refused", "done"]
