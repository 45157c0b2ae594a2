"""The pages and examples say what the code does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from trio_gateway.config import (
    ConfigurationError,
    Settings,
    load_settings,
    parse_settings,
    reference_page,
)
from trio_gateway.config._fields import Applies
from trio_gateway.config._validate import known_keys

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
GUIDE = ROOT / "docs" / "how-to" / "configure.md"


INNER = {"tokens": "admin.tokens", "keys": "tenants.keys", "tls": "server.tls", "tiers": "admission.tiers"}


def rows() -> dict[str, list[str]]:
    """The reference's rows, by section and key."""
    found = {}
    section = ""
    for line in reference_page().splitlines():
        if heading := re.match(r"## `\[+(\w+)\]+`|## `(keys|tls|tiers|tokens)\b", line):
            section = heading[1] or INNER[heading[2]]
            if heading[0].endswith("`tls") and "internal" in line:
                section = "internal.tls"
        elif line.startswith("| `") and section and line.count("|") > 3:
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found[f"{section}.{cells[0].strip('` ')}"] = cells
    return found


def test_the_reference_in_the_documentation_is_the_one_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text("utf-8")
    assert page == reference_page(), "run: python -m trio_gateway.config > docs/reference/settings.md"


def test_the_module_prints_the_reference() -> None:
    command = [sys.executable, "-m", "trio_gateway.config"]
    assert (
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout.decode() == reference_page()
    )


def test_the_reference_describes_every_key() -> None:
    expected = {f"{section}.{key}" for section in Settings.model_fields for key in known_keys((section,))}
    inner = {f"tenants.keys.{key}" for key in known_keys(("tenants", "keys"))}
    inner |= {f"admin.tokens.{key}" for key in known_keys(("admin", "tokens"))}
    inner |= {"server.tls.certificate", "server.tls.key", "admission.tiers.max_share"}
    inner |= {f"internal.tls.{key}" for key in ("certificate", "key", "ca")}
    assert rows().keys() == expected | inner


def test_every_setting_says_its_unit_its_default_when_it_applies_and_what_it_means() -> None:
    for key, (_, unit, default, _bounds, applies, meaning) in rows().items():
        assert unit, key
        assert default, key
        assert applies in typing.get_args(Applies), key
        assert re.fullmatch(r"[A-Z\"].+\.", meaning), f"{key}: one sentence with a full stop"
        assert ". " not in meaning, f"{key}: one sentence"


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("limits.body_bytes", ["bytes", '`"20 MiB"`', "at least 1 B, at most 4 GiB", "new requests"]),
        ("limits.head_timeout", ["seconds", "`10`", "more than 0", "new requests"]),
        ("stream.heartbeat_after", ["seconds", "`10`", "at least 0", "new requests"]),
        ("server.bind", ["addresses", '`["127.0.0.1:8080"]`', "not empty", "restart"]),
        ("server.expose_worker", ["true or false", "`false`", "", "new requests"]),
        ("server.cors_origins", ["origins", "`[]`", "", "restart"]),
        ("models.defaults", ["table", "`{}`", "", "new requests"]),
        ("models.max_output_tokens", ["tokens", "none", "at least 1, at most 2,147,483,647", "new requests"]),
        ("log.format", ["word", '`"json"`', "`json`, `console`", "restart"]),
        ("workers.url", ["URL", "must be given", "", "now"]),
        ("models.upstream", ["name", "the `id`", "", "new requests"]),
        ("models.workers", ["names", "every worker that reports it", "not empty", "new requests"]),
        (
            "workers.slots",
            ["requests", "what the engine tells, else 64", "at least 1, at most 100,000", "now"],
        ),
        ("models.fallbacks", ["names", "`[]`", "", "new requests"]),
        ("internal.bind", ["addresses", "`[]`", "", "restart"]),
        ("internal.allowed_networks", ["networks", '`["127.0.0.0/8", "::1/128"]`', "not empty", "restart"]),
        ("breaker.fault_ratio", ["faults per request", "`0.5`", "more than 0, at most 1", "restart"]),
        ("fleet.share", ["fraction", '`"1/1"`', "", "restart"]),
        ("fleet.affinity", ["word", '`"prefix"`', "`prefix`, `session`, `none`", "restart"]),
        ("fleet.heartbeat_interval", ["seconds", "`1`", "more than 0, at most 3,600", "restart"]),
        ("tenants.max_concurrency", ["requests", "none", "at least 1, at most 1,000,000", "now"]),
    ],
)
def test_a_row_tells_unit_default_bounds_and_when_it_applies(key: str, cells: list[str]) -> None:
    assert rows()[key][1:5] == cells


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_can_be_used_as_it_stands(example: Path, tmp_path: Path) -> None:
    shutil.copy(example, tmp_path)
    (tmp_path / "hosted.key").write_text("sk-of-the-hosted-service\n")
    settings = load_settings(tmp_path / example.name)
    assert settings.workers
    assert all(settings.workers_of(model) for model in settings.models)


def test_there_are_examples() -> None:
    assert [path.name for path in EXAMPLES] == ["laptop.toml", "sidecar.toml", "team.toml"]


def snippets() -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_every_snippet_of_the_guide_can_be_used(tmp_path: Path) -> None:
    for name in ("hosted.key", "gpu-3.secret", "join.token"):
        (tmp_path / name).write_text("sk-of-the-hosted-service\n")
    assert snippets()
    for snippet in snippets():
        parse_settings(snippet, folder=tmp_path)


def test_the_guide_shows_errors_as_they_are() -> None:
    """The guide has one wrong file and, under it, what `check-config` says about it."""
    text = GUIDE.read_text("utf-8")
    wrong, told = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    with pytest.raises(ConfigurationError) as caught:
        parse_settings(wrong, name="gateway.toml")
    assert str(caught.value) + "\n" == told
