"""The store of a cluster: what is taken for its address, what does not fit, and what is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.reading import complaints
from trio_gateway.config import StoreUrl, explain, load_settings, parse_settings, parse_store_url

SECRET = "rediss://gate:s3cr%40t@redis.internal:6380/2"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("redis://h", StoreUrl("h")),
        ("redis://h:7000/3", StoreUrl("h", 7000, 3)),
        ("redis://[::1]:6379", StoreUrl("::1")),
        ("redis://:word@h", StoreUrl("h", password="word")),
        (SECRET, StoreUrl("redis.internal", 6380, 2, "gate", "s3cr@t", tls=True)),
    ],
)
def test_urls_of_redis_are_taken_apart(text: str, url: StoreUrl) -> None:
    assert parse_store_url(text) == url


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("http://secret@h", "must be a URL such as"),
        ("redis://", "must be a URL such as"),
        ("redis://h:0", "must be a URL such as"),
        ("redis://h:port", "must be a URL such as"),
        ("redis://h?password=secret", "must be a URL such as"),
        ("redis://h/secret", "or with the number of a database"),
        ("redis://secret@h", "names a user without a password"),
    ],
)
def test_other_texts_are_refused_without_being_repeated(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        parse_store_url(text)
    assert "secret" not in str(refused.value)


def test_the_password_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'[cluster]\nurl = "{SECRET}"\nca = "ca.pem"\n')
    settings = load_settings(file)
    assert settings.cluster.ca == str(tmp_path / "ca.pem")
    for shown in (explain(file), repr(settings), str(settings.cluster.url)):
        assert "s3cr" not in shown
    assert 'url = "rediss://gate:***@redis.internal:6380/2"' in explain(file)


def test_without_the_extra_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"install trio-gateway\[cluster\]"):
        parse_store_url("redis://h")


def test_what_does_not_fit_together_is_refused() -> None:
    found = complaints(
        '[cluster]\nurl = "redis://h"\nlease = 1\npatience = 2\nprefix = "{a}"\n'
        "[admission]\nmax_queued = 0\n"
        '[[tenants]]\nid = "a"\nkeys = []\nmax_queued = 0\n'
    )
    assert [line.partition(": ")[2].partition(": ")[0] for line in found] == [
        "cluster.patience",
        "cluster.prefix",
        "admission.max_queued",
        "tenants.a.max_queued",
    ]
    assert complaints("[cluster]\nurl = 1\n") == ["t.toml:2: cluster.url: must be a string, in quotes"]


def test_without_a_store_a_queue_may_be_nothing() -> None:
    assert parse_settings("[admission]\nmax_queued = 0\n").cluster.url is None
