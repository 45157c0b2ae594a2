"""The commands for keys and tenants: what they store, what they list, and what they refuse in words."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trio_gateway.cli import app
from trio_gateway.tenancy import Stored, open_roster

CONFIGURATION = """
[database]
url = "sqlite:///gateway.db"
[[models]]
id = "m1"
[[tenants]]
id = "filed"
tiers = ["standard"]
keys = [{id = "of-file", hash = "sha256:%s", expires = 2020-01-01T00:00:00Z}]
""" % (64 * "a")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a configuration under the usual name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trio-gateway.toml").write_text(CONFIGURATION)
    return tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, result.stderr


def good(*arguments: str) -> str:
    """Run what must succeed; answers its output."""
    code, out, err = run(*arguments)
    assert code == 0, err
    return out


def stored(folder: Path) -> Stored:
    roster = open_roster(f"sqlite:///{folder / 'gateway.db'}")
    try:
        return roster.read()
    finally:
        roster.close()


def listed(*arguments: str) -> dict[str, dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(good(*arguments, "--json"))
    return {row["id"]: row for row in rows}


def test_a_tenant_and_its_key_are_stored_and_the_key_is_shown_alone_and_once(folder: Path) -> None:
    good("tenants", "create", "acme", "--weight", "2", "--max-timeout", "10m", "--models", "m1,m2")
    code, out, err = run("keys", "create", "--tenant", "acme", "--id", "k1", "--expires", "2099-01-31")
    (key,) = out.splitlines()
    assert (code, key[:6]) == (0, "tg_k1_")
    assert key not in err
    assert "k1 of tenant acme" in err
    everything = stored(folder)
    (tenant,), (one,) = everything.tenants, everything.keys
    assert (tenant.id, tenant.members) == (
        "acme",
        {"weight": 2.0, "max_timeout": 600.0, "models": ["m1", "m2"]},
    )
    assert one.hash == "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    assert (one.tenant, one.members["expires"].isoformat()) == ("acme", "2099-01-31T00:00:00+00:00")
    assert key.removeprefix("tg_k1_").encode() not in (folder / "gateway.db").read_bytes()


def test_a_key_may_belong_to_a_tenant_of_the_file(folder: Path) -> None:
    good("keys", "create", "trio-gateway.toml", "--tenant", "filed", "--id", "k1", "--tokens-per-minute", "9")
    assert listed("tenants", "list")["filed"]["keys"] == 2
    assert stored(folder).keys[0].members == {"tokens_per_minute": 9}


def test_keys_are_listed_wherever_they_stand() -> None:
    good("tenants", "create", "acme")
    for id_ in ("k1", "k2"):
        good("keys", "create", "--tenant", "acme", "--id", id_, "--models", "m1", "--expires", "90d")
    good("keys", "revoke", "k2")
    rows = listed("keys", "list", "--revoked")
    assert {id_: (row["tenant"], row["state"], row["source"]) for id_, row in rows.items()} == {
        "of-file": ("filed", "expired", "file"),
        "k1": ("acme", "good", "database"),
        "k2": ("acme", "revoked", "database"),
    }
    assert (rows["k1"]["models"], rows["k1"]["tiers"], rows["k1"]["revoked"]) == (["m1"], None, None)
    assert rows["k2"]["created"] <= rows["k2"]["revoked"]
    assert set(listed("keys", "list", "--tenant", "acme")) == {"k1"}
    head, *lines = good("keys", "list").splitlines()
    assert head.split()[:4] == ["id", "tenant", "state", "expires"]
    assert [line.split()[:3] for line in lines] == [["of-file", "filed", "expired"], ["k1", "acme", "good"]]
    assert "sha256" not in good("keys", "list", "--json")


def test_tenants_are_listed_with_what_they_have_in_the_end() -> None:
    good("tenants", "create", "acme", "--max-queued", "0", "--engine-fields", "--default-timeout", "30")
    rows = listed("tenants", "list")
    assert list(rows) == ["filed", "acme"]
    assert rows["filed"]["source"] == "file"
    acme = rows["acme"]
    assert (acme["source"], acme["keys"], acme["weight"], acme["max_queued"]) == ("database", 0, 1.0, 0)
    assert (acme["engine_fields"], acme["default_timeout"], acme["models"]) == (True, 30.0, ["*"])
    lines = good("tenants", "list").splitlines()
    assert [line.split()[0] for line in lines] == ["id", "filed", "acme"]


def test_a_tenant_changes_in_what_is_named_and_nothing_else(folder: Path) -> None:
    good("tenants", "create", "acme", "--weight", "2", "--max-queued", "5", "--tiers", "batch,standard")
    good("tenants", "set", "acme", "--weight", "3", "--no-engine-fields", "--unset", "max-queued")
    (tenant,) = stored(folder).tenants
    assert tenant.members == {"weight": 3.0, "engine_fields": False, "tiers": ["batch", "standard"]}


def test_a_removed_tenant_and_its_keys_are_gone(folder: Path) -> None:
    good("tenants", "create", "acme")
    good("keys", "create", "--tenant", "acme", "--id", "k1")
    code, _, err = run("tenants", "remove", "acme")
    assert (code, err) == (0, "Tenant acme is removed, and 1 of its keys revoked.\n")
    assert (stored(folder).tenants, stored(folder).keys[0].revoked_at is None) == ((), False)
    assert set(listed("keys", "list")) == {"of-file"}


def test_revoking_twice_says_so_and_does_no_harm() -> None:
    good("keys", "create", "--tenant", "filed", "--id", "k1")
    assert run("keys", "revoke", "k1")[::2] == (0, "Key k1 is revoked.\n")
    assert run("keys", "revoke", "k1")[::2] == (0, "Key k1 was revoked before.\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("tenants create acme", "there is a tenant acme already"),
        ("tenants create filed", "the configuration file has a tenant filed"),
        ("tenants create x --weight 0", "tenants.x.weight: must be greater than 0"),
        ("tenants create x --max-timeout 2h", "must be at most deadlines.maximum"),
        ("tenants create x --default-timeout soon", "tenants.x.default_timeout"),
        ("tenants create a/b", "must have 1 to 64 letters"),
        ("tenants set acme", "there is nothing to change"),
        ("tenants set acme --unset colour", "--unset colour: a tenant has no such option"),
        ("tenants set acme --unset keys", "--unset keys: a tenant has no such option"),
        ("tenants set acme --unset weight --weight 2", "--unset weight: it is set by another option"),
        ("tenants set acme --tiers standard", "key k1: its tenant may ask for none of its tiers"),
        ("tenants set acme --tiers fast", 'must be "interactive"'),
        ("tenants set nobody --weight 1", "there is no tenant nobody in the database"),
        ("tenants set filed --weight 1", "tenant filed stands in the configuration file"),
        ("tenants remove nobody", "there is no tenant nobody in the database"),
        ("tenants remove filed", "tenant filed stands in the configuration file"),
        ("keys create --tenant nobody", "there is no tenant nobody"),
        ("keys create --tenant acme --id k1", "there is or was a key k1 already"),
        ("keys create --tenant acme --id of-file", "key of-file: the configuration file has it"),
        ("keys create --tenant filed --tiers batch", 'its tenant may not ask for "batch"'),
        ("keys create --tenant acme --expires yesterday", "--expires must be days"),
        ("keys create --tenant acme --requests-per-minute 0", "requests_per_minute: must be greater than"),
        ("keys revoke k1 nokey", "there is no key nokey in the database"),
        ("keys revoke of-file", "key of-file stands in the configuration file"),
    ],
)
def test_what_does_not_go_is_said_in_a_line_and_changes_nothing(
    arguments: str, complaint: str, folder: Path
) -> None:
    good("tenants", "create", "acme", "--tiers", "batch,standard")
    good("keys", "create", "--tenant", "acme", "--id", "k1", "--tiers", "batch")
    before = stored(folder)
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert complaint in err
    assert stored(folder) == before


def test_the_first_tenant_is_a_moment_to_say_that_keys_are_needed_from_now_on(folder: Path) -> None:
    (folder / "trio-gateway.toml").write_text('[database]\nurl = "sqlite:///gateway.db"\n')
    assert "nobody without a key" in run("tenants", "create", "acme")[2]
    assert "nobody without a key" not in run("tenants", "create", "other")[2]


def test_a_model_that_the_file_does_not_name_is_noted_and_stored() -> None:
    code, _, err = run("tenants", "create", "acme", "--models", "m1,m2")
    assert code == 0
    assert "note: the configuration file has no model m2" in err
    assert "m1" not in err


def test_entries_that_do_not_count_are_noted_where_they_are_listed(folder: Path) -> None:
    good("tenants", "create", "acme")
    file = folder / "trio-gateway.toml"
    file.write_text(f'{CONFIGURATION}\n[[tenants]]\nid = "acme"\nkeys = []\n')
    for command in ("keys", "tenants"):
        code, _, err = run(command, "list")
        assert (code, err) == (
            0,
            "note: tenant acme: the configuration file has one of that name; it does not count\n",
        )


def test_without_a_database_there_are_the_keys_of_the_file_and_nothing_to_change(folder: Path) -> None:
    file = folder / "trio-gateway.toml"
    file.write_text(CONFIGURATION.replace('[database]\nurl = "sqlite:///gateway.db"', ""))
    assert set(listed("keys", "list")) == {"of-file"}
    assert set(listed("tenants", "list")) == {"filed"}
    for words in ("keys revoke of-file", "tenants create x", "tenants set filed", "tenants remove filed"):
        code, _, err = run(*words.split())
        assert (code, "names no database.url" in err) == (2, True)
    assert len(good("keys", "create", "--tenant", "filed").splitlines()) == 2


@pytest.mark.parametrize(
    "text", ['[server]\nbind = ["0.0.0.0:80"]\n', None], ids=["not finished", "not there"]
)
def test_a_key_for_a_file_without_a_database_is_made_before_the_file_is_good(
    text: str | None, folder: Path
) -> None:
    file = folder / "trio-gateway.toml"
    file.unlink() if text is None else file.write_text(text)
    assert len(good("keys", "create", "--tenant", "acme").splitlines()) == 2


def test_a_key_is_not_made_for_a_file_that_can_not_be_read(folder: Path) -> None:
    assert run("keys", "create", "nowhere.toml", "--tenant", "acme")[::2] == (
        2,
        "nowhere.toml: cannot be read: No such file or directory\n",
    )
    (folder / "trio-gateway.toml").write_text('[database]\nurl = "sqlite:///gateway.db"\nurls = 1')
    code, out, err = run("keys", "create", "--tenant", "acme")
    assert (code, out) == (2, "")
    assert "urls" in err


@pytest.mark.parametrize("command", ["keys list", "tenants list", "tenants create x", "keys revoke k1"])
def test_a_database_that_is_away_is_status_1_and_a_line(command: str, folder: Path) -> None:
    file = folder / "trio-gateway.toml"
    file.write_text('[database]\nurl = "sqlite:///later/gateway.db"\n')
    code, out, err = run(*command.split())
    assert (code, out) == (1, "")
    assert err.startswith("trio-gateway: OperationalError: unable to open")
