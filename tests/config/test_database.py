"""The address of a database: what is taken for one, where its paths count from, and what is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.reading import complaints
from trio_gateway.config import DatabaseUrl, explain, load_settings, parse_database_url, parse_settings

POSTGRES = "postgresql+psycopg://"


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:///gateway.db",
        "sqlite:////var/lib/gateway.db",
        "sqlite:///gateway.db?timeout=5",
        f"{POSTGRES}db.internal/records",
        f"{POSTGRES}user:secret@[::1]:5432/records?sslmode=require",
        f"{POSTGRES}user@/records?host=/run/postgresql",
    ],
)
def test_urls_of_sqlalchemy_are_taken_as_they_are(text: str) -> None:
    assert parse_database_url(text).value == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gateway.db", "must begin with"),
        ("postgres://user:secret@h/d", "must begin with"),
        ("postgresql://h/d", "must begin with"),
        ("sqlite:///", "must name a file"),
        ("sqlite:///:memory:", "must name a file"),
        ("sqlite:///folder/", "must name a file"),
        (f"{POSTGRES}user:secret@h:port/d", "no host or a port that is no number"),
        (f"{POSTGRES}user:sec ret@h/d", "must be percent-encoded"),
    ],
)
def test_other_texts_are_refused_without_being_repeated(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        parse_database_url(text)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{POSTGRES}user:s3cr:t@h:1/d", f"{POSTGRES}user:***@h:1/d"),
        (f"{POSTGRES}user:s3cr@t@h/d", f"{POSTGRES}user:***@h/d"),
        (f"{POSTGRES}user@h/d?password=s3cret&x=1", f"{POSTGRES}user@h/d?password=***&x=1"),
        (f"{POSTGRES}user@h/d", f"{POSTGRES}user@h/d"),
        ("sqlite:///a.db", "sqlite:///a.db"),
    ],
)
def test_a_password_is_never_shown(text: str, shown: str) -> None:
    url = DatabaseUrl(text)
    assert str(url) == shown
    assert "s3cr" not in repr(url)


def test_check_config_shows_no_password(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(f'[database]\nurl = "{POSTGRES}user:s3cret@h/d"\n')
    page = explain(file)
    assert f'url = "{POSTGRES}user:***@h/d"' in page
    assert "s3cret" not in page
    assert "s3cret" not in repr(load_settings(file))


def test_relative_paths_count_from_the_folder_of_the_file(tmp_path: Path) -> None:
    text = '[database]\nurl = "sqlite:///gateway.db?timeout=5"\n'
    database = parse_settings(text, folder=tmp_path).database
    assert database.url is not None
    assert database.url.value == f"sqlite:///{tmp_path}/gateway.db?timeout=5"
    assert database.journal == str(tmp_path / "journal")
    text = '[database]\nurl = "sqlite:////data/gateway.db"\njournal = "/data/journal"\n'
    database = parse_settings(text, folder=tmp_path).database
    assert (str(database.url), database.journal) == ("sqlite:////data/gateway.db", "/data/journal")


def test_a_url_that_is_no_string_is_refused() -> None:
    assert complaints("[database]\nurl = 1\n") == ["t.toml:2: database.url: must be a string, in quotes"]


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert complaints(f'[database]\nurl = "{POSTGRES}h/d"\n') == [
        "t.toml:2: database.url: needs the package psycopg: install trio-gateway[postgres]"
    ]
