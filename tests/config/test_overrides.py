"""Variables and arguments that are laid over the file."""

from __future__ import annotations

from fractions import Fraction
from ipaddress import IPv4Network, IPv6Network

import pytest

from tests.config.reading import HASH, MODEL, TENANT, WORKER, complaints
from trio_gateway.config import Bind, parse_settings

FILE = "[limits]\nconnections = 1\nbody_bytes = 10\n" + WORKER + "slots = 1\n" + MODEL


def test_arguments_win_over_variables_and_variables_over_the_file() -> None:
    variable = {"TRIO_GATEWAY__LIMITS__CONNECTIONS": "2"}
    assert parse_settings(FILE).limits.connections == 1
    assert parse_settings(FILE, variable).limits.connections == 2
    assert parse_settings(FILE, variable, ["limits.connections=3"]).limits.connections == 3
    assert parse_settings(FILE, {}, ["limits.connections=3", "limits.connections=4"]).limits.connections == 4


def test_what_is_not_overridden_stays() -> None:
    limits = parse_settings(FILE, {}, ["limits.connections=3"]).limits
    assert (limits.connections, limits.body_bytes, limits.head_count) == (3, 10, 100)


def test_other_variables_are_ignored() -> None:
    others = {"TRIO_GATEWAY_LIMITS__CONNECTIONS": "x", "XTRIO_GATEWAY__A__B": "x", "PATH": "x"}
    assert parse_settings(FILE, others) == parse_settings(FILE)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("log.level", "debug", "debug"),
        ("log.level", '"debug"', "debug"),
        ("limits.body_bytes", "4 MiB", 4_194_304),
        ("limits.body_bytes", "4194304", 4_194_304),
        ("limits.body_bytes", "4_194_304", 4_194_304),
        ("limits.keep_alive", "500ms", 0.5),
        ("limits.keep_alive", "0.5", 0.5),
        ("server.expose_worker", "true", True),
        ("fleet.share", "1/4", Fraction(1, 4)),
        ("fleet.share", '"2/4"', Fraction(1, 2)),
        ("internal.allowed_networks", "10.0.0.0/8", (IPv4Network("10.0.0.0/8"),)),
        (
            "internal.allowed_networks",
            '["10.0.0.0/8", "::1"]',
            (IPv4Network("10.0.0.0/8"), IPv6Network("::1/128")),
        ),
        ("server.bind", "127.0.0.1:1", (Bind("127.0.0.1", 1),)),
        ("server.bind", "[::1]:1", (Bind("::1", 1),)),
        ("server.bind", "unix:gw.sock", (Bind(socket_path="gw.sock"),)),
        ("server.bind", '["unix:a", "[::1]:1"]', (Bind(socket_path="a"), Bind("::1", 1))),
    ],
)
def test_a_value_is_toml_and_otherwise_a_string(key: str, text: str, value: object) -> None:
    section, name = key.split(".")
    by_variable = parse_settings("", {f"TRIO_GATEWAY__{section}__{name}".upper(): text})
    by_argument = parse_settings("", {}, [f"{key}={text}"])
    by_spaced_argument = parse_settings("", {}, [f" {section} . {name} = {text} "])
    assert getattr(getattr(by_variable, section), name) == value
    assert by_variable == by_argument == by_spaced_argument


def test_a_value_cannot_smuggle_in_other_keys() -> None:
    (complaint,) = complaints("", {}, ["limits.connections=1\nhead_count = 2"])
    assert complaint == "--set: limits.connections: must be a whole number"


def test_an_entry_of_a_list_is_named_by_its_id() -> None:
    (worker,) = parse_settings(FILE, {}, ["workers.gpu-0.slots=4"]).workers
    assert (worker.slots, worker.url) == (4, "http://127.0.0.1:8000")
    models = parse_settings("[[models]]\nid = 'a.b'\n", {}, ['models."a.b".upstream=x']).models
    assert models[0].upstream == "x"
    (tenant,) = parse_settings(TENANT, {}, [f"tenants.acme.keys.k1.hash=sha256:{'cd' * 32}"]).tenants
    assert tenant.keys[0].digest == b"\xcd" * 32


def test_a_variable_names_an_entry_in_capitals_and_underscores() -> None:
    variable = {"TRIO_GATEWAY__WORKERS__GPU_0__SLOTS": "4"}
    assert parse_settings(FILE, variable).workers[0].slots == 4


def test_a_variable_that_could_mean_two_entries_means_none() -> None:
    text = WORKER + WORKER.replace("gpu-0", "GPU.0") + MODEL
    variable = {"TRIO_GATEWAY__WORKERS__GPU_0__SLOTS": "4"}
    assert complaints(text, variable) == [
        "TRIO_GATEWAY__WORKERS__GPU_0__SLOTS: workers.gpu_0.slots: "
        "'gpu_0' means 2 entries; name one with --set"
    ]


def test_a_whole_list_can_be_replaced() -> None:
    text = '[{id = "a", url = "http://h", kind = "vllm"}]'
    settings = parse_settings(FILE, {"TRIO_GATEWAY__WORKERS": text})
    assert [worker.id for worker in settings.workers] == ["a"]
    assert parse_settings(FILE, {}, [f"workers={text}", "workers.a.slots=7"]).workers[0].slots == 7


def test_variables_are_laid_over_each_other_from_the_whole_to_its_parts() -> None:
    text = '[{id = "a", url = "http://h", kind = "vllm"}]'
    environ = {"TRIO_GATEWAY__WORKERS__A__SLOTS": "7", "TRIO_GATEWAY__WORKERS": text}
    assert parse_settings(FILE, environ).workers[0].slots == 7


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["limits.conections=1"], '--set: limits.conections: unknown key; did you mean "connections"?'),
        (["limit.connections=1"], '--set: limit: unknown key; did you mean "limits"?'),
        (["limits.connections=0"], "--set: limits.connections: must be greater than or equal to 1, not 0"),
        (["limits.connections="], "--set: limits.connections: must be a whole number"),
        (["limits.connections"], "--set: needs section.key=value"),
        (["=1"], "--set: needs section.key=value"),
        ([""], "--set: needs section.key=value"),
        (["limits=1"], "--set: limits: names no key in a section: needs section.key=value"),
        (
            ["limits.connections.x=1"],
            "--set: limits.connections.x: x cannot be set inside of what is no table",
        ),
        (["log.level.x.y=1"], "--set: log.level: must be"),
        (["admin.tokens=3"], "--set: admin.tokens: must be a list"),
        (["server.tls={}"], "--set: server.tls.certificate: must be given"),
        (["workers.gpu-1.slots=1"], '--set: workers.gpu-1.slots: no entry of the file has the id "gpu-1"; '),
        (["workers.gpu-0=1"], "--set: workers.gpu-0: names a whole entry; add the key that is to be set"),
        (["workers.gpu-0.slots=0"], "--set: workers.gpu-0.slots: must be greater than or equal to 1, not 0"),
        (['workers=[{id = "a"}]'], "--set: workers.a.url: must be given"),
        (["workers=3"], "--set: workers: must be a list of tables: write [[workers]], with double brackets"),
        (["workers=3", "workers.gpu-0.slots=1"], "--set: workers.gpu-0.slots: gpu-0 cannot be set inside of"),
    ],
)
def test_a_wrong_argument_is_told_as_one(arguments: list[str], complaint: str) -> None:
    found = complaints(FILE, {}, arguments)
    assert any(line.startswith(complaint) for line in found), found


@pytest.mark.parametrize(
    ("variable", "complaint"),
    [
        ("TRIO_GATEWAY__", "must be named TRIO_GATEWAY__SECTION__KEY"),
        ("TRIO_GATEWAY__LIMITS", "must be named TRIO_GATEWAY__SECTION__KEY"),
        ("TRIO_GATEWAY__LIMITS__", "must be named TRIO_GATEWAY__SECTION__KEY"),
        ("TRIO_GATEWAY____CONNECTIONS", "must be named TRIO_GATEWAY__SECTION__KEY"),
        ("TRIO_GATEWAY__LIMITS__CONECTIONS", 'limits.conections: unknown key; did you mean "connections"?'),
        ("TRIO_GATEWAY__LIMITS__CONNECTIONS", "limits.connections: must be a whole number"),
        ("TRIO_GATEWAY__DATABASE__URL", "database.url: must begin with"),
    ],
)
def test_a_wrong_variable_is_told_by_its_name(variable: str, complaint: str) -> None:
    (found,) = complaints(FILE, {variable: "a secret word"})
    assert found.startswith(f"{variable}: {complaint}")
    assert "secret" not in found


def test_a_contradiction_is_told_where_it_was_laid_over_the_file() -> None:
    assert complaints("[deadlines]\nmaximum = 700\n", {}, ["deadlines.default=800"]) == [
        "--set: deadlines.default: must be at most deadlines.maximum (700): "
        "the default could never be reached"
    ]


def test_a_replaced_entry_does_not_answer_with_lines_of_the_old_one() -> None:
    (complaint,) = complaints(FILE, {}, ['workers=[{id = "gpu-0", url = "x", kind = "vllm"}]'])
    assert complaint.startswith("--set: workers.gpu-0.url: must begin with")


def test_a_key_that_is_set_in_a_table_of_its_own_is_laid_over_it() -> None:
    text = f'[[tenants]]\nid = "a"\n[[tenants.keys]]\nid = "k"\nhash = "{HASH}"\n'
    assert complaints(text, {}, ["tenants.a.keys.k.hash=x"])[0].startswith(
        "--set: tenants.a.keys.k.hash: must be"
    )
