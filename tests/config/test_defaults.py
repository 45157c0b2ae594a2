"""Every default, every key: the contract's list beside what is built."""

from __future__ import annotations

import typing
from fractions import Fraction
from ipaddress import IPv4Network, IPv6Network
from typing import Any

import pytest
from pydantic import ValidationError

from tests.config.reading import HASH, WORKER
from trio_gateway.config import (
    CANCEL_GRACE,
    Bind,
    FleetSettings,
    InternalSettings,
    KeySettings,
    ModelSettings,
    Settings,
    TenantSettings,
    WorkerSettings,
    parse_settings,
)
from trio_gateway.config._sections import TierSettings, TiersSettings
from trio_gateway.fleet import DIALECTS

KIBI = 1024
MEBI = 1024 * 1024

DEFAULTS: dict[str, dict[str, object]] = {
    "server": {
        "bind": (Bind("127.0.0.1", 8080),),
        "tls": None,
        "trusted_proxies": (),
        "allow_anonymous": False,
        "processes": 1,
        "capacity": "shared",
        "hang_limit": 10.0,
        "expose_worker": False,
        "cors_origins": (),
    },
    "admin": {"bind": (Bind("127.0.0.1", 9090),), "tokens": (), "hosts": ()},
    "internal": {
        "bind": (),
        "tls": None,
        "join_token_file": None,
        "allowed_networks": (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128")),
        "join_token": None,
    },
    "limits": {
        "connections": 4096,
        "head_bytes": 64 * KIBI,
        "head_count": 100,
        "head_timeout": 10.0,
        "body_bytes": 20 * MEBI,
        "body_timeout": 30.0,
        "keep_alive": 75.0,
        "unplaced_bytes": 256 * MEBI,
        "json_values": 200_000,
        "event_bytes": 4 * MEBI,
        "answer_bytes": 64 * MEBI,
        "gone_probe_interval": 10.0,
    },
    "admission": {
        "max_queued": 1024,
        "max_queued_bytes": 128 * MEBI,
        "max_wait": 60.0,
        "promote_after": 30.0,
        "tiers": TiersSettings(
            interactive=TierSettings(max_share=1.0),
            standard=TierSettings(max_share=1.0),
            batch=TierSettings(max_share=0.8),
        ),
    },
    "deadlines": {
        "default": 600.0,
        "maximum": 3600.0,
        "connect": 5.0,
        "first_token": 300.0,
        "between_events": 120.0,
    },
    "retry": {"max_attempts": 3, "budget_ratio": 0.2, "backoff": 1.0},
    "breaker": {"consecutive_faults": 5, "fault_ratio": 0.5, "window": 30.0, "cooldown": 10.0},
    "probes": {"interval": 5.0, "timeout": 2.0, "failures": 3, "successes": 1},
    "fleet": {
        "share": Fraction(1),
        "affinity": "prefix",
        "heartbeat_interval": 1.0,
        "ttl": 5.0,
        "dns_interval": 10.0,
    },
    "kubernetes": {
        "api": "https://kubernetes.default.svc",
        "namespace": None,
        "token_file": "/var/run/secrets/kubernetes.io/serviceaccount/token",
        "ca": "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt",
        "slots_key": "trio-gateway/slots",
    },
    "cluster": {
        "url": None,
        "prefix": "trio-gateway",
        "ca": None,
        "lease": 5.0,
        "patience": 0.8,
        "on_loss": "split",
    },
    "delivery": {
        "buffer_bytes": 256 * KIBI,
        "total_buffer_bytes": 256 * MEBI,
        "upstream_receive_buffer": 16 * KIBI,
        "stall_timeout": 30.0,
        "max_lag": 120.0,
        "merge_deltas": False,
        "resume_window": 30.0,
    },
    "stream": {
        "heartbeat_after": 10.0,
        "heartbeat_while_queued": False,
        "error_style": "event",
        "receipt": False,
    },
    "websocket": {
        "max_message_bytes": 4 * MEBI,
        "ping_interval": 20.0,
        "ping_timeout": 20.0,
        "auth_timeout": 10.0,
        "max_streams": 32,
    },
    "shutdown": {"readiness_delay": 5.0, "grace": 30.0, "hard_limit": 60.0},
    "database": {
        "url": None,
        "journal": "journal",
        "journal_bytes": 2**30,
        "sync_interval": 1.0,
        "retention_days": 0,
        "gateway_id": None,
    },
    "log": {"level": "info", "format": "json"},
    "telemetry": {
        "otlp_endpoint": None,
        "otlp_headers_file": None,
        "sample_ratio": 1.0,
        "export_interval": 15.0,
        "service_name": "trio-gateway",
        "stall_limit": 0.25,
        "flights": 256,
        "otlp_headers": (),
    },
}

# Every key that the contract names, in its order.
CONTRACT = {
    "server": "bind tls trusted_proxies cors_origins expose_worker allow_anonymous",
    "admin": "bind tokens",
    "internal": "bind join_token_file allowed_networks",
    "workers": "id url kind slots ca api_key_file weight labels cancel_grace",
    "models": "id upstream workers aliases defaults max_output_tokens fallbacks",
    "tenants": "id weight tiers max_concurrency max_queued requests_per_minute tokens_per_minute models keys "
    "default_timeout max_timeout engine_fields",
    "limits": "connections head_bytes head_count head_timeout body_bytes body_timeout keep_alive "
    "unplaced_bytes json_values event_bytes answer_bytes",
    "admission": "max_queued max_queued_bytes max_wait promote_after tiers",
    "deadlines": "default maximum connect first_token between_events",
    "retry": "max_attempts budget_ratio",
    "breaker": "consecutive_faults cooldown fault_ratio window",
    "probes": "interval timeout failures successes",
    "delivery": "buffer_bytes total_buffer_bytes stall_timeout max_lag resume_window",
    "stream": "heartbeat_after heartbeat_while_queued error_style receipt",
    "websocket": "max_message_bytes ping_interval ping_timeout auth_timeout max_streams",
    "shutdown": "readiness_delay grace hard_limit",
    "database": "url journal",
    "log": "level format",
}
CONTRACT_KEYS = {f"{section}.{key}" for section, keys in CONTRACT.items() for key in keys.split()}

# Not written in the contract's list of keys, but bracketed or named in its text: "each is a setting".
FURTHER_KEYS = {
    "server.processes",
    "server.capacity",
    "server.hang_limit",
    "admin.hosts",
    "limits.gone_probe_interval",
    "retry.backoff",
    "delivery.upstream_receive_buffer",
    "delivery.merge_deltas",
    "workers.dns",
    "workers.pods",
    "workers.certificate",
    "workers.key",
    "internal.tls",
    "kubernetes.api",
    "kubernetes.namespace",
    "kubernetes.token_file",
    "kubernetes.ca",
    "kubernetes.slots_key",
    "cluster.url",
    "cluster.on_loss",
    "cluster.prefix",
    "cluster.ca",
    "cluster.lease",
    "cluster.patience",
    "models.full_timeout",
    "fleet.share",
    "fleet.affinity",
    "fleet.heartbeat_interval",
    "fleet.ttl",
    "fleet.dns_interval",
    "database.journal_bytes",
    "database.sync_interval",
    "database.retention_days",
    "database.gateway_id",
    "telemetry.otlp_endpoint",
    "telemetry.otlp_headers_file",
    "telemetry.sample_ratio",
    "telemetry.export_interval",
    "telemetry.service_name",
    "telemetry.stall_limit",
    "telemetry.flights",
}


def built_keys() -> set[str]:
    """Every key that a file may have, as the models say it."""
    keys = set()
    for section, known in Settings.model_fields.items():
        owner = (typing.get_args(known.annotation) or (known.annotation,))[0]
        fields = owner.model_fields.items()
        keys |= {f"{section}.{key}" for key, field in fields if field.json_schema_extra is not None}
    return keys


def test_an_empty_file_means_the_contracts_defaults() -> None:
    settings = parse_settings("")
    assert settings == Settings()
    assert {name: dict(getattr(settings, name)) for name in DEFAULTS} == DEFAULTS
    assert (settings.workers, settings.models, settings.tenants) == ((), (), ())


def test_the_table_of_defaults_names_every_setting_that_has_one() -> None:
    sections = {name for name in Settings.model_fields if name not in ("workers", "models", "tenants")}
    assert DEFAULTS.keys() == sections


def test_every_key_of_the_contract_is_built() -> None:
    assert built_keys() == CONTRACT_KEYS | FURTHER_KEYS


def test_every_kind_of_the_contract_is_built() -> None:
    kinds = typing.get_args(WorkerSettings.model_fields["kind"].annotation)
    assert set(kinds) == {"vllm", "sglang", "llamacpp", "tgi", "ollama", "openai", "agent"}
    assert CANCEL_GRACE.keys() == set(kinds)


def test_every_kind_of_engine_has_a_dialect_and_the_same_grace_as_there() -> None:
    assert {kind: dialect.cancel_grace for kind, dialect in DIALECTS.items()} == CANCEL_GRACE


def test_a_worker_has_its_defaults() -> None:
    (worker,) = parse_settings(WORKER + '[[models]]\nid = "m"\n').workers
    assert dict(worker) == {
        "id": "gpu-0",
        "url": "http://127.0.0.1:8000",
        "kind": "vllm",
        "dns": False,
        "pods": None,
        "slots": None,
        "weight": 1.0,
        "labels": (),
        "ca": None,
        "certificate": None,
        "key": None,
        "api_key_file": None,
        "cancel_grace": 0.5,
        "api_key": None,
        "ca_pem": None,
    }


@pytest.mark.parametrize(
    ("kind", "grace"),
    [
        ("openai", 0.5),
        ("vllm", 0.5),
        ("tgi", 0.5),
        ("llamacpp", 1.5),
        ("ollama", 1.5),
        ("sglang", 4.0),
        ("agent", 5.0),
    ],
)
def test_the_grace_after_a_cancel_depends_on_the_engine(kind: Any, grace: float) -> None:
    assert WorkerSettings(id="w", url="http://h", kind=kind).cancel_grace == grace
    assert WorkerSettings(id="w", url="http://h", kind=kind, cancel_grace=0).cancel_grace == 0.0


def test_a_model_is_named_upstream_as_it_is_named_here() -> None:
    assert ModelSettings(id="org/m:7b").upstream == "org/m:7b"
    assert ModelSettings(id="m", upstream="org/m").upstream == "org/m"


def test_a_model_has_its_defaults() -> None:
    model = ModelSettings(id="m")
    assert dict(model) == {
        "id": "m",
        "upstream": "m",
        "workers": None,
        "fallbacks": (),
        "aliases": (),
        "defaults": {},
        "max_output_tokens": None,
        "full_timeout": None,
    }
    assert model.default_fields == {}


def test_a_tenant_has_its_defaults() -> None:
    tenant = TenantSettings(id="acme", keys=())
    assert {name: getattr(tenant, name) for name in TenantSettings.model_fields} == {
        "id": "acme",
        "keys": (),
        "weight": 1.0,
        "tiers": ("interactive", "standard"),
        "models": ("*",),
        "max_concurrency": None,
        "max_queued": 64,
        "requests_per_minute": None,
        "tokens_per_minute": None,
        "default_timeout": None,
        "max_timeout": None,
        "engine_fields": False,
    }


def test_a_key_gives_the_bytes_of_its_hash_and_does_not_print_them() -> None:
    key = KeySettings(id="k1", hash=HASH.upper().replace("SHA256", "sha256"))
    assert key.digest == b"\xab" * 32
    assert key.hash == HASH
    assert "abab" not in repr(key)


def test_without_tenants_one_without_keys_serves_everybody_and_may_fill_the_queue() -> None:
    (tenant,) = parse_settings("[admission]\nmax_queued = 7\n").serving_tenants()
    assert (tenant.id, tenant.keys, tenant.max_queued) == ("anonymous", (), 7)
    assert tenant.tiers == ("interactive", "standard", "batch")


def test_configured_tenants_are_the_only_ones() -> None:
    tenants = (TenantSettings(id="acme", keys=()),)
    assert Settings(tenants=tenants).serving_tenants() == tenants


def test_a_model_finds_its_workers_in_the_order_of_the_file() -> None:
    names = {"a": ("fast",), "b": (), "c": ("fast", "big")}
    workers = tuple(WorkerSettings(id=id_, url="http://h", kind="vllm", labels=names[id_]) for id_ in names)
    settings = Settings(workers=workers)

    def served(*by: str) -> list[str]:
        model = ModelSettings(id="m", workers=by or None)
        return [worker.id for worker in settings.workers_of(model)]

    assert served() == ["a", "b", "c"]
    assert served("b", "a") == ["a", "b"]
    assert served("fast") == ["a", "c"]
    assert served("big", "b") == ["b", "c"]


def test_sections_can_be_built_by_hand_from_the_values_that_they_hold() -> None:
    networks = (IPv4Network("10.0.0.0/8"), IPv6Network("fd00::/8"))
    assert InternalSettings(allowed_networks=networks).allowed_networks == networks
    assert FleetSettings(share=Fraction(1, 3)).share == Fraction(1, 3)


def test_settings_never_change() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.limits.connections = 1  # type: ignore[misc]
