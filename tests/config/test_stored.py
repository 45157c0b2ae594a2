"""Tenants of a database beside those of the file: the file counts, and nothing there breaks it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.config import (
    ConfigurationError,
    Settings,
    TenantMerger,
    TenantSettings,
    judge_tenant,
    key_table,
    names_database,
    parse_settings,
)

HASHES = ["sha256:" + 64 * digit for digit in "abcdef"]
FILE = parse_settings(
    f'[[tenants]]\nid = "filed"\ntiers = ["standard"]\nkeys = [{{id = "k1", hash = "{HASHES[0]}"}}]'
).tenants


def key(id_: str, number: int, **members: Any) -> dict[str, Any]:
    return {"id": id_, "hash": HASHES[number], **members}


def test_tenants_of_the_database_stand_beside_those_of_the_file() -> None:
    merged = TenantMerger(FILE).merge(
        [{"id": "acme", "weight": 2.0, "tiers": ["batch"]}],
        [
            ("acme", key("k2", 1, expires=datetime(2027, 1, 31, tzinfo=UTC), models=["m1"])),
            ("filed", key("k3", 2)),
        ],
    )
    filed, acme = merged.tenants
    assert [each.id for each in filed.keys] == ["k1", "k3"]
    assert (acme.id, acme.weight, acme.tiers, acme.max_queued) == ("acme", 2.0, ("batch",), 64)
    assert [(each.id, each.models, each.expires) for each in acme.keys] == [
        ("k2", ("m1",), datetime(2027, 1, 31, tzinfo=UTC))
    ]
    assert merged.ignored == ()


@pytest.mark.parametrize(
    ("tenants", "keys", "reason"),
    [
        ([{"id": "filed", "weight": 9.0}], [], "tenant filed: the configuration file has one of that name"),
        ([], [("filed", key("k1", 1))], "key k1: the configuration file has it, or another one of that name"),
        ([], [("filed", key("k9", 0))], "key k9: the configuration file has it, or another one of that name"),
        ([], [("gone", key("k9", 1))], "key k9: there is no tenant gone"),
        ([], [("filed", key("k9", 1, tiers=["batch"]))], "key k9: its tenant may ask for none of its tiers"),
        ([{"id": "acme", "weight": 0.0}], [], "tenant acme: weight: must be greater than 0, not 0"),
        ([{"id": "acme", "color": 1}], [], "tenant acme: color: unknown key; known here: id,"),
        ([], [("filed", key("k9", 1, expires="soon"))], "key k9: expires: must be a date and time"),
        ([], [("filed", {"id": "k9", "hash": "md5:1"})], 'key k9: hash: must be "sha256:"'),
        ([], [("filed", key("k9", 1, tiers=[]))], "key k9: tiers: must not be empty"),
    ],
)
def test_what_does_not_count_is_said_and_leaves_the_rest_as_it_is(
    tenants: list[dict[str, Any]], keys: list[tuple[str, dict[str, Any]]], reason: str
) -> None:
    good = ("filed", key("k2", 5))
    merged = TenantMerger(FILE).merge(tenants, [*keys, good])
    assert [text[: len(reason)] for text in merged.ignored] == [reason]
    assert [(each.id, each.weight, [one.id for one in each.keys]) for each in merged.tenants] == [
        ("filed", 1.0, ["k1", "k2"])
    ]


values = st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.lists(st.text(max_size=3))
members = st.dictionaries(st.sampled_from([*TenantSettings.model_fields, "expires", "hash", "x"]), values)
ids = st.sampled_from(["filed", "acme", "other", "", "a b"])


@given(
    st.lists(st.tuples(ids, members)),
    st.lists(st.tuples(ids, st.sampled_from(["k1", "k2", ""]), st.sampled_from(HASHES), members)),
)
def test_whatever_stands_in_the_database_the_file_stays_what_it_is(
    tenants: list[tuple[str, dict[str, Any]]], keys: list[tuple[str, str, str, dict[str, Any]]]
) -> None:
    merged = TenantMerger(FILE).merge(
        [{**rest, "id": id_} for id_, rest in tenants],
        [(owner, {**rest, "id": id_, "hash": hash_}) for owner, id_, hash_, rest in keys],
    )
    filed = merged.tenants[0]
    assert filed.model_copy(update={"keys": filed.keys[:1]}) == FILE[0]
    assert all(set(one.tiers) & set(each.tiers) for each in merged.tenants[1:] for one in each.keys)
    assert {each.id for each in merged.tenants} <= {"filed", "acme", "other"}
    assert not [one for each in merged.tenants for one in each.keys[each.id == "filed" :] if one.id == "k1"]


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from(["acme", "filed", "other"]), members),
            st.dictionaries(st.sampled_from(["k2", "k3"]), st.tuples(ids, members)),
        ),
        min_size=1,
    )
)
def test_who_merges_again_answers_as_one_who_does_so_for_the_first_time(
    story: list[tuple[dict[str, dict[str, Any]], dict[str, tuple[str, dict[str, Any]]]]],
) -> None:
    merger = TenantMerger(FILE)
    for tenants, keys in story:
        entries = [{**rest, "id": id_} for id_, rest in tenants.items()]
        owned = [(owner, {**rest, "hash": HASHES[1], "id": id_}) for id_, (owner, rest) in keys.items()]
        assert merger.merge(entries, owned) == TenantMerger(FILE).merge(entries, owned)


# Judging before storing -------------------------------------------------------------------------------------


def test_a_tenant_is_read_by_the_rules_of_the_file() -> None:
    settings = parse_settings("[deadlines]\nmaximum = 7200")
    judged = judge_tenant("acme", {"max_timeout": "90m", "tiers": ("batch",)}, settings.deadlines)
    assert judged == TenantSettings(id="acme", max_timeout=5400.0, tiers=("batch",), keys=())
    assert judge_tenant("acme", {"weight": 2, "engine_fields": True}, settings.deadlines).engine_fields


@pytest.mark.parametrize(
    ("id_", "members", "complaint"),
    [
        ("a b", {}, "must have 1 to 64 letters"),
        ("acme", {"weight": -1.0}, "must be greater than 0"),
        ("acme", {"weight": float("nan")}, "weight"),
        ("acme", {"tiers": ("fast",)}, 'must be "interactive"'),
        ("acme", {"max_timeout": "2h"}, "must be at most deadlines.maximum (3600)"),
        ("acme", {"default_timeout": 60.0, "max_timeout": 30.0}, "must be at most max_timeout (30)"),
        ("acme", {"default_timeout": "soon"}, "default_timeout"),
    ],
)
def test_a_tenant_that_the_file_would_not_take_is_refused(
    id_: str, members: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        judge_tenant(id_, members, Settings().deadlines)
    assert complaint in str(refused.value)


def test_a_key_can_be_given_no_more_than_its_tenant_has() -> None:
    owner = TenantSettings(id="acme", tiers=("batch",), models=("m1", "m2"), keys=())
    given = {"id": "k1", "hash": HASHES[0], "tiers": ("batch",), "models": ("m2",)}
    assert 'models = ["m2"]' in key_table("acme", given, owner)
    for more, complaint in (
        ({"tiers": ("standard",)}, 'may not ask for "standard"'),
        ({"models": ("m3",)}, 'may not use "m3"'),
    ):
        with pytest.raises(ConfigurationError) as refused:
            key_table("acme", {**given, **more}, owner)
        assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("text", "environ", "overrides", "names"),
    [
        ("", {}, (), False),
        ('[database]\nurl = "sqlite:///x.db"', {}, (), True),
        ('[database]\nurl = 5\n[server]\nbind = "what"', {}, (), True),
        ("[database]\nretention_days = 1", {}, (), False),
        ("database = 1", {}, (), False),
        ("", {"TRIO_GATEWAY__DATABASE__URL": "sqlite:///x.db"}, (), True),
        ("", {}, ('database.url="sqlite:///x.db"',), True),
        ("", {}, ("nonsense",), False),
    ],
)
def test_whether_a_file_names_a_database_is_seen_whatever_else_is_wrong_with_it(
    text: str, environ: dict[str, str], overrides: tuple[str, ...], names: bool, tmp_path: Any
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    assert names_database(file, environ, overrides) is names


def test_a_file_that_is_none_is_an_error_when_it_is_asked_for_its_database(tmp_path: Any) -> None:
    (tmp_path / "gateway.toml").write_text("[")
    for name in ("gateway.toml", "nowhere.toml"):
        with pytest.raises(ConfigurationError, match=name):
            names_database(tmp_path / name, {})


def test_a_gateway_that_others_can_reach_is_never_anonymous_for_want_of_tenants() -> None:
    database = '[database]\nurl = "sqlite:///x.db"\n'
    public = '[server]\nbind = ["0.0.0.0:80"]\n'
    assert parse_settings(database).serves_anonymous()
    assert not parse_settings(public + database).serves_anonymous()
    assert parse_settings(f"{public}allow_anonymous = true\n{database}").serves_anonymous()
