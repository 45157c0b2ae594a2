"""What differs between two configurations, when it counts, and what is in force at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from trio_gateway.config import Settings, parse_settings
from trio_gateway.operations._changes import (
    HIDDEN,
    NEW_REQUESTS,
    NOW,
    RESTART,
    as_json,
    changes,
    in_force,
    is_another,
    limit_names,
    with_secrets_of,
)

HASH = "sha256:" + "1" * 64
WORKER = '[[workers]]\nid = "w1"\nurl = "http://127.0.0.1:1"\nkind = "openai"\n'
TENANT = f'[[tenants]]\nid = "a.b"\nkeys = [{{id = "k1", hash = "{HASH}"}}]\n'


def read(*text: str, folder: Path = Path()) -> Settings:
    return parse_settings("\n".join(text), folder=folder)


def told(old: Settings, new: Settings) -> list[tuple[str, Any, Any, str]]:
    return [(each.name, each.before, each.after, each.applies) for each in changes(old, new)]


def test_what_is_the_same_is_no_change() -> None:
    settings = read(WORKER, TENANT)
    assert told(settings, read(WORKER, TENANT)) == []
    assert in_force(settings, read(WORKER, TENANT)) == settings


@pytest.mark.parametrize(
    ("new", "change"),
    [
        ("[admission]\nmax_queued = 5", ("admission.max_queued", 1024, 5, NOW)),
        ("[admission]\nmax_wait = 5", ("admission.max_wait", 60.0, 5, NEW_REQUESTS)),
        ("[probes]\ninterval = 7", ("probes.interval", 5.0, 7, RESTART)),
        (
            "[admission]\ntiers = {batch = {max_share = 0.5}}",
            ("admission.tiers.batch.max_share", 0.8, 0.5, NOW),
        ),
        ('[fleet]\nshare = "1/4"', ("fleet.share", "1", "1/4", RESTART)),
        ('[log]\nlevel = "debug"', ("log.level", "info", "debug", NOW)),
        (
            '[server]\nbind = ["127.0.0.1:1"]',
            ("server.bind", ["127.0.0.1:8080"], ["127.0.0.1:1"], RESTART),
        ),
    ],
)
def test_a_setting_that_differs_is_named_with_when_it_counts(new: str, change: tuple[Any, ...]) -> None:
    old, wanted = read(WORKER), read(WORKER, new)
    assert told(old, wanted) == [change]
    if change[3] == RESTART:
        assert in_force(old, wanted) == old
    else:
        assert in_force(old, wanted) == wanted


def test_of_a_table_entries_come_go_and_change() -> None:
    other = WORKER.replace("w1", "w2")
    assert told(read(WORKER), read(WORKER, other))[0][::3] == ("workers.w2", NOW)
    assert told(read(WORKER, other), read(WORKER))[0][2] is None
    changed = read(WORKER + "slots = 3\n")
    assert told(read(WORKER), changed) == [("workers.w1.slots", None, 3, NOW)]
    assert in_force(read(WORKER), changed) == changed
    models = '[[models]]\nid = "m1"\n'
    assert told(read(WORKER), read(WORKER, models))[0][::3] == ("models.m1", NEW_REQUESTS)


def test_keys_are_shown_without_what_they_are_known_by() -> None:
    (name, before, after, when) = told(read(TENANT), read(TENANT.replace("k1", "k2")))[0]
    assert (name, when) == ('tenants."a.b".keys', NEW_REQUESTS)
    assert [each[0]["id"] for each in (before, after)] == ["k1", "k2"]
    assert HASH not in str((before, after, as_json(read(TENANT))))
    assert as_json(read(TENANT))["tenants"][0]["keys"][0]["hash"] == HIDDEN


def test_a_worker_behind_a_name_needs_a_restart_in_whatever_way_it_changes() -> None:
    named = WORKER.replace("127.0.0.1", "localhost") + "dns = true\n"
    plain = WORKER.replace("127.0.0.1", "localhost")
    more = named + "slots = 3\n"
    other = named.replace("w1", "w2")
    for old, new in ((named, plain), (plain, named), (named, more), (named, ""), ("", named)):
        found = changes(read(old), read(new))
        assert found
        assert {change.applies for change in found} == {RESTART}
        assert in_force(read(old), read(new)).workers == read(old).workers
    assert [worker.id for worker in in_force(read(named), read(other)).workers] == ["w1"]


def test_tokens_that_were_meant_for_another_address_wait_for_it() -> None:
    tokens = f'tokens = [{{id = "ops", hash = "{HASH}", role = "viewer"}}]'
    guarded = read('[admin]\nbind = ["0.0.0.0:1"]\n' + tokens)
    open_ = read('[admin]\nbind = ["127.0.0.1:1"]')
    assert {each[0]: each[3] for each in told(guarded, open_)} == {
        "admin.bind": RESTART,
        "admin.tokens": RESTART,
    }
    assert in_force(guarded, open_).admin == guarded.admin
    same = read('[admin]\nbind = ["0.0.0.0:1"]\n' + tokens.replace("viewer", "operator"))
    assert told(guarded, same)[0][::3] == ("admin.tokens", NOW)
    assert in_force(guarded, same).admin == same.admin


def test_what_stands_in_a_file_is_compared_and_never_shown(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first-secret")
    text = WORKER + f'api_key_file = "{key}"\n'
    old = read(text)
    key.write_text("other-secret")
    new = read(text)
    assert told(old, new) == [("workers.w1.api_key_file", HIDDEN, HIDDEN, NOW)]
    assert "-secret" not in str(as_json(new))
    assert with_secrets_of(old, new).workers[0].api_key == SecretStr("first-secret")
    two = read(text, WORKER.replace("w1", "w2"))
    assert with_secrets_of(read(text), two).workers == two.workers


def test_another_address_or_engine_is_another_worker() -> None:
    def worker(text: str) -> Any:
        return read(text).workers[0]

    assert not is_another(worker(WORKER), worker(WORKER + "slots = 3\n"))
    assert is_another(worker(WORKER), worker(WORKER.replace(":1", ":2")))
    assert is_another(worker(WORKER), worker(WORKER.replace("openai", "vllm")))


def test_limits_have_their_values_by_dotted_name() -> None:
    limits = limit_names(read(WORKER + "slots = 3\n", TENANT + "weight = 2.5\n"))
    assert limits["workers.w1.slots"] == (3, NOW)
    assert limits['tenants."a.b".weight'] == (2.5, NOW)
    assert limits["admission.tiers.batch.max_share"] == (0.8, NOW)
    assert limits["log.level"] == ("info", NOW)
    assert "log.format" not in limits
    assert "workers.w1.url" not in limits
    named = limit_names(read(WORKER.replace("127.0.0.1", "localhost") + "dns = true\n"))
    assert named["workers.w1.slots"] == (None, RESTART)


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "admission": st.fixed_dictionaries({"max_queued": st.integers(0, 9), "max_wait": st.integers(1, 9)}),
        "probes": st.fixed_dictionaries({"failures": st.integers(1, 9)}),
        "retry": st.fixed_dictionaries({"max_attempts": st.integers(1, 9)}),
        "log": st.fixed_dictionaries({"level": st.sampled_from(["info", "debug"])}),
    },
)


def text_of(values: dict[str, dict[str, Any]]) -> str:
    def written(value: Any) -> str:
        return f'"{value}"' if isinstance(value, str) else str(value)

    return "\n".join(
        "\n".join([f"[{name}]", *(f"{key} = {written(value)}" for key, value in table.items())])
        for name, table in values.items()
    )


@given(VALUES, VALUES)
def test_what_is_in_force_differs_from_what_was_by_what_needs_no_restart(old: Any, new: Any) -> None:
    before, wanted = read(text_of(old)), read(text_of(new))
    after = in_force(before, wanted)
    assert changes(before, after) == [each for each in changes(before, wanted) if each.applies != RESTART]
    assert changes(after, wanted) == [each for each in changes(before, wanted) if each.applies == RESTART]
    assert in_force(after, wanted) == after
