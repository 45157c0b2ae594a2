"""The adapter writes configurations that the gateway accepts, and says its state in the runner's words."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.test_conformance import RUNNER
from trio_gateway.config import parse_settings
from trio_gateway.fleet.cores import BreakerState

pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif(not RUNNER.is_file(), reason="no conformance runner"),
]

STATISTICS: dict[str, Any] = {
    "accepted": 4,
    "waiting": 1,
    "running": 1,
    "outcomes": {"completed": 1, "client_gone": 1},
    "leases": {"granted": 4, "held": 1, "draining": 2, "returned": 1},
    "conservation": {"ok": False, "errors": ["leases"]},
    "workers": [
        {"id": "u1", "attempts": 3, "faults": 1, "ready": True, "breakers": {"a": "closed", "b": "trying"}},
        {"id": "u2", "attempts": 0, "faults": 0, "ready": True, "breakers": {}},
    ],
    "recent": [
        {
            "outcome": "client_gone",
            "tokens_prompt": 3,
            "tokens_generated": 4,
            "events_delivered": 2,
        }
    ],
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter, loaded as the runner loads it."""
    monkeypatch.syspath_prepend(str(RUNNER.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location("adapter_adapter", Path(__file__).with_name("adapter.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("adapter", None)  # the runner's


def written(module: Any, folder: Path, config: dict[str, Any]) -> str:
    adapter = module.Adapter(str(folder))
    adapter.port, adapter.admin_port = 18080, 19090
    names = config.get("upstreams", ["u1"])
    text: str = adapter._toml(config, {name: f"127.0.0.1:{7000 + i}" for i, name in enumerate(names)})
    return text


def test_cases_share_a_gateway_where_they_do_not_see_each_other(module: Any, tmp_path: Path) -> None:
    key = module.Adapter(str(tmp_path)).config_key
    assert key({"max_in_flight": 2}) == key({"max_in_flight": 2})
    assert key({"max_in_flight": 2}) != key({"max_in_flight": 3})
    for dialect in ("ollama", "ndjson-worker"):
        assert key({"dialect": dialect}) == key({"dialect": dialect}) != key({})
    two = {"upstreams": ["u1", "u2"], "retries": 1}
    assert key(two) != key(two)  # a fault of the first case would lead the second to the other worker


def test_every_setting_that_it_offers_is_one_that_the_gateway_knows(module: Any, tmp_path: Path) -> None:
    config: dict[str, Any] = {key: 2000 for key, *_ in module.SETTINGS}
    config |= {"retry_budget_ratio": 0.25, "max_body_bytes": 5000, "retries": 2, "max_in_flight": 3}
    config |= {"first_byte_timeout_ms": 700, "first_token_timeout_ms": 500, "upstream_key": "k" * 20}
    config |= {"upstreams": ["u1", "u2"], "models": {"a": "u1", "b": {"upstream": "u2", "as": "c"}}}
    config |= {"breaker_threshold": 4, "health_fail_k": 2}
    settings = parse_settings(written(module, tmp_path, config))
    assert (settings.retry.max_attempts, settings.retry.budget_ratio) == (3, 0.25)
    assert (settings.deadlines.first_token, settings.deadlines.default) == (0.5, 2)
    assert (settings.admission.max_queued, settings.tenants[0].max_queued) == (2000, 2000)
    assert (settings.shutdown.readiness_delay, settings.shutdown.grace) == (0, 2)
    assert (settings.breaker.consecutive_faults, settings.breaker.cooldown) == (4, 2)
    assert (settings.probes.interval, settings.probes.timeout, settings.probes.failures) == (2, 2, 2)
    assert [(worker.id, worker.slots) for worker in settings.workers] == [("u1", 3), ("u2", 3)]
    assert settings.workers[0].api_key is not None
    assert [(model.id, model.upstream, model.workers) for model in settings.models] == [
        ("a", "a", ("u1",)),
        ("b", "c", ("u2",)),
    ]


def test_a_case_that_says_nothing_turns_retries_off_and_gives_slots_for_all(
    module: Any, tmp_path: Path
) -> None:
    document = tomllib.loads(written(module, tmp_path, {}))
    assert document["retry"]["max_attempts"] == 1
    assert [worker["slots"] for worker in document["workers"]] == [module.SLOTS_FOR_ALL]
    assert [tenant["id"] for tenant in document["tenants"]] == list(module.TENANTS)


def test_faults_of_one_case_do_not_spare_its_worker_in_the_next(module: Any, tmp_path: Path) -> None:
    settings = parse_settings(written(module, tmp_path, {}))
    assert settings.breaker.consecutive_faults > 1000
    assert settings.breaker.window < settings.breaker.cooldown / 1000
    assert settings.probes.interval < 1  # so that one that was suspect is told well again soon


def test_workers_that_speak_the_worker_protocol_get_a_secret(module: Any, tmp_path: Path) -> None:
    (worker,) = parse_settings(written(module, tmp_path, {"dialect": "ndjson-worker"})).workers
    assert worker.kind == "agent"
    assert worker.api_key is not None


@pytest.mark.parametrize(
    ("config", "url"),
    [
        ({"upstream_host": "[::1]"}, "http://[::1]:7000"),
        ({"upstream_scheme": "https"}, "https://127.0.0.1:7000"),
        ({"upstream_base": "/base/v1"}, "http://127.0.0.1:7000/base/v1"),
        ({"upstream_socket": "/run/a b.sock"}, "http+unix:///run/a%20b.sock"),
    ],
)
def test_the_way_to_an_engine_is_written_as_its_url(
    module: Any, tmp_path: Path, config: dict[str, Any], url: str
) -> None:
    assert parse_settings(written(module, tmp_path, config)).workers[0].url == url


def test_a_gateway_without_workers_is_written_without_models(module: Any, tmp_path: Path) -> None:
    settings = parse_settings(written(module, tmp_path, {"upstreams": []}))
    assert not settings.workers
    assert not settings.models
    assert settings.internal.bind  # where those that a case registers come in
    assert settings.internal.join_token is not None


def test_the_state_is_told_in_the_runners_words(module: Any) -> None:
    state = module.translate(STATISTICS)
    assert (state["in_flight"], state["queued"], state["leases"], state["workers"]) == (1, 1, 3, 2)
    assert state["failures"] == {"u1": 1, "u2": 0}
    assert state["attempts"] == {"u1": 3, "u2": 0}
    assert state["breaker"] == {"u1": "half-open", "u2": "closed"}
    assert state["client_outcomes"]["success"] == 1
    assert state["client_outcomes"]["client_abort"] == 1
    assert state["client_outcomes"]["upstream_error"] == 0
    assert state["usage_records"] == 2
    assert state["usage_last"] == {"total_tokens": 7, "outcome": "client_abort", "chunks": 2}
    assert state["never_negative"] == (False, "leases")


def test_usage_that_nobody_knows_is_not_made_up(module: Any) -> None:
    record = {**STATISTICS["recent"][0], "tokens_prompt": None}
    assert module.translate({**STATISTICS, "recent": [record]})["usage_last"]["total_tokens"] is None
    assert "usage_last" not in module.translate({**STATISTICS, "recent": []})


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([], "closed"),
        (["closed", "closed"], "closed"),
        (["closed", "half_open"], "half-open"),
        (["trying"], "half-open"),
        (["trying", "open"], "open"),
        (["closed", "probing"], "open"),
        (["forced"], "open"),
    ],
)
def test_the_breaker_of_a_worker_is_the_one_that_lets_least_through(
    module: Any, states: list[str], told: str
) -> None:
    worker = {**STATISTICS["workers"][0], "breakers": dict(enumerate(states))}
    assert module.translate({**STATISTICS, "workers": [worker]})["breaker"] == {"u1": told}


def test_the_states_of_breakers_are_those_that_the_adapter_knows(module: Any) -> None:
    for state in BreakerState:
        worker = {**STATISTICS["workers"][0], "breakers": {"a": state.value}}
        told = module.translate({**STATISTICS, "workers": [worker]})["breaker"]["u1"]
        assert (told == "closed") is (state is BreakerState.CLOSED)
