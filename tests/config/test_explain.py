"""What `check-config` tells of a configuration that can be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.config.reading import HASH, MODEL, TENANT, WORKER
from trio_gateway.config import ConfigurationError, explain, load_settings

JOIN_TOKEN = "join-0123456789abcdef"
SCOPES = 'expires = 2020-01-31T00:00:00+02:00, models = ["x"], tiers = ["standard"], tokens_per_minute = 9'
SCOPED = TENANT.replace(f'"{HASH}"', f'"{HASH}", {SCOPES}')
INTERNAL = "[internal]\nbind = ['127.0.0.1:0']\njoin_token_file = 'join'\n"


def explained(folder: Path, text: str, *overrides: str, **environ: str) -> str:
    file = folder / "gateway.toml"
    file.write_text(text)
    return explain(file, environ, overrides)


def test_each_value_is_told_with_the_place_that_it_comes_from(tmp_path: Path) -> None:
    told = explained(
        tmp_path,
        WORKER + MODEL + '[log]\nlevel = "error"\n[limits]\nbody_bytes = 1048576\n',
        "limits.connections=7",
        TRIO_GATEWAY__WORKERS__GPU_0__SLOTS="3",
    )
    values = dict(re.findall(r"^(\S+ = .*?) +# (.*)$", told, re.MULTILINE))
    assert values['id = "gpu-0"'] == "gateway.toml:2"
    assert values['url = "http://127.0.0.1:8000"'] == "gateway.toml:3"
    assert values["slots = 3"] == "TRIO_GATEWAY__WORKERS__GPU_0__SLOTS"
    assert values["cancel_grace = 0.5"] == "default"
    assert values['level = "error"'] == "gateway.toml:8"
    assert values['format = "json"'] == "default"
    assert values['body_bytes = "1 MiB"'] == "gateway.toml:10"
    assert values["connections = 7"] == "--set"
    assert values["heartbeat_while_queued = false"] == "default"


def test_the_first_lines_tell_the_totals_and_what_may_surprise(tmp_path: Path) -> None:
    second = WORKER.replace("gpu-0", "gpu-1")
    lonely = "[[tenants]]\nid = 'locked'\nkeys = []\n"
    told = explained(tmp_path, WORKER + second + MODEL + 'workers = ["gpu-1"]\n' + TENANT + lonely)
    assert told.splitlines()[:5] == [
        f"# {tmp_path / 'gateway.toml'}: no problems. 2 workers with 128 slots, 1 model, 2 tenants.",
        "# Note: 2 workers name no slots; 64 count until the engine tells.",
        "# Note: worker gpu-0 serves no model.",
        "# Note: tenant locked has no key; nobody can use it.",
        "",
    ]
    told = explained(tmp_path, "")
    assert told.splitlines()[1:3] == [
        "# Note: no worker is configured; /readyz answers 503.",
        "# Note: no model is configured; every name that a worker reports is served.",
    ]
    assert told.splitlines()[3:5] == [
        "# Note: no tenant is configured; every caller is served, and keys are ignored.",
        "",
    ]


def test_with_a_database_tenants_and_keys_may_stand_there(tmp_path: Path) -> None:
    database = '[database]\nurl = "sqlite:///gateway.db"\n'
    every = "no tenant is configured; every caller is served until there is one in the database."
    assert every in notes(explained(tmp_path, database))
    told = notes(explained(tmp_path, f'{database}[server]\nbind = ["0.0.0.0:80"]\n'))
    assert not [note for note in told if "tenant" in note.partition(";")[0] and "caller" in note]
    told = notes(explained(tmp_path, f"{database}[[tenants]]\nid = 'acme'\nkeys = []\n"))
    assert not [note for note in told if "nobody" in note]


def notes(told: str) -> list[str]:
    """Answer the first line without the file's name, and the notes under it."""
    first, *rest = told.partition("\n\n")[0].splitlines()
    return [first.partition(": no problems. ")[2], *(line.removeprefix("# Note: ") for line in rest)]


def test_a_gateway_whose_workers_register_is_told_who_can(tmp_path: Path) -> None:
    (tmp_path / "join").write_text(JOIN_TOKEN)
    told = explained(tmp_path, INTERNAL + MODEL + "workers = ['later']\n" + TENANT)
    assert notes(told) == [
        "0 workers with 0 slots, 1 model, 1 tenant.",
        "no worker is configured; /readyz answers 503 until one registers.",
        "internal.allowed_networks has only loopback addresses; no other machine's worker can register.",
        "model m names later, which no worker of this file is; one may register.",
    ]
    wide = INTERNAL + "allowed_networks = ['127.0.0.0/8', '10.0.0.0/8']\n"
    told = explained(tmp_path, wide + WORKER + "slots = 64\n" + MODEL + "workers = ['gpu-0']\n" + TENANT)
    assert notes(told) == ["1 worker with 64 slots, 1 model, 1 tenant."]


def test_a_share_is_told_beside_the_slots(tmp_path: Path) -> None:
    told = explained(tmp_path, WORKER + MODEL + TENANT + "[fleet]\nshare = '2/8'\n")
    assert notes(told)[:1] == [
        "1 worker with 64 slots (1/4 of each worker's for this process), 1 model, 1 tenant."
    ]
    assert 'share = "1/4"' in told


def test_a_worker_without_models_is_nothing_strange_if_none_is_configured(tmp_path: Path) -> None:
    assert notes(explained(tmp_path, WORKER + "slots = 1\n" + TENANT))[1:] == [
        "no model is configured; every name that a worker reports is served."
    ]


def test_what_only_the_engine_or_the_resolver_knows_is_said_to_be_open(tmp_path: Path) -> None:
    second = WORKER.replace("gpu-0", "pods").replace("127.0.0.1", "Pods.internal") + "dns = true\nslots = 3\n"
    assert notes(explained(tmp_path, WORKER + second + MODEL + TENANT)) == [
        "2 workers with 67 slots, 1 model, 1 tenant.",
        "1 worker names no slots; 64 count until the engine tells.",
        "worker pods is as many workers as pods.internal has addresses.",
    ]


def test_hashes_of_keys_are_hidden(tmp_path: Path) -> None:
    told = explained(tmp_path, TENANT)
    assert 'keys = [{id = "k1", hash = "(hidden)"}]' in told
    assert HASH not in told
    assert "abab" not in told


def test_what_a_key_may_do_is_told_as_far_as_it_was_said(tmp_path: Path) -> None:
    told = explained(tmp_path, SCOPED)
    assert (
        'keys = [{id = "k1", hash = "(hidden)", expires = 2020-01-30T22:00:00Z, models = ["x"], '
        'tiers = ["standard"], tokens_per_minute = 9}]'
    ) in told
    assert "# Note: key k1 of tenant acme has expired." in told
    assert "has expired" not in explained(tmp_path, SCOPED.replace("2020", "9000"))


def test_what_is_told_is_a_configuration_that_means_the_same(tmp_path: Path) -> None:
    text = (
        '[server]\nbind = ["[::1]:1", "unix:a\\"b.sock"]\ntrusted_proxies = "10.0.0.0/8"\n'
        + 'cors_origins = ["https://a.b", "http://[::1]:3"]\n'
        + INTERNAL
        + 'allowed_networks = ["fd00::/8", "10.1.2.3"]\n[fleet]\nshare = "3/9"\naffinity = "none"\n'
        + WORKER
        + 'labels = ["a", "b"]\nweight = 0.1\n'
        + WORKER.replace("gpu-0", "pods").replace("127.0.0.1", "pods.internal").replace("vllm", "agent")
        + 'dns = true\napi_key_file = "join"\n'
        + '[[models]]\nid = "org/a\\u00e9"\nupstream = "b"\nworkers = ["a"]\naliases = ["c:d"]\n'
        + "fallbacks = ['x']\n"
        + "max_output_tokens = 9\ndefaults = {a = 1.0, b = [1, 1e22, 1e-7, true, {'c d' = '\"'}], '' = {}}\n"
        + '[[models]]\nid = "x"\n'
        + SCOPED
        + "default_timeout = '1500 ms'\nmax_concurrency = 3\n"
        + "[limits]\nhead_bytes = 1000\nkeep_alive = 0.1\n[retry]\nbudget_ratio = 0.3333333\n"
    )
    (tmp_path / "join").write_text(JOIN_TOKEN)
    told = explained(tmp_path, text).replace("(hidden)", HASH)
    assert JOIN_TOKEN not in told
    before = load_settings(tmp_path / "gateway.toml")
    again = tmp_path / "again.toml"
    again.write_text(told)
    after = load_settings(again)
    assert after == before
    assert after.models[0].default_fields == before.models[0].default_fields, "1.0 is not 1"


def test_what_cannot_be_used_is_raised_with_every_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        explained(tmp_path, "[limits]\nconnections = 0\nhead_count = 0\n")
    assert [problem.line for problem in caught.value.problems] == [2, 3]
