"""The way to a collector: a URL that is one, and headers from a file that nobody is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from trio_gateway.config import ConfigurationError, explain, load_settings, parse_settings

SECRET = "0123-secret-4567"


def load(folder: Path, headers: bytes | None) -> Path:
    """Write a file that names one with these headers."""
    if headers is not None:
        (folder / "otlp.headers").write_bytes(headers)
    file = folder / "gateway.toml"
    lines = ("[telemetry]", 'otlp_endpoint = "http://127.0.0.1:4318"', 'otlp_headers_file = "otlp.headers"')
    file.write_text("\n".join(lines))
    return file


def test_headers_are_read_and_never_shown(tmp_path: Path) -> None:
    file = load(tmp_path, f"authorization: Bearer {SECRET}\n\nx-scope:acme\n".encode())
    settings = load_settings(file)
    headers = [(name, value.get_secret_value()) for name, value in settings.telemetry.otlp_headers]
    assert headers == [("authorization", f"Bearer {SECRET}"), ("x-scope", "acme")]
    shown = [repr(settings), str(settings), settings.model_dump_json(), explain(file)]
    assert not any(SECRET in text for text in shown)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"a: b\n" + SECRET.encode(), 'holds no header such as "name: value" in line 2'),
        (b"a b: c", 'holds no header such as "name: value" in line 1'),
        (b"a: \xff", 'holds no header such as "name: value" in line 1'),
        (b"a:", 'holds no header such as "name: value" in line 1'),
        (b"a: " + b"0" * 8192, "has more than 8192 bytes"),
    ],
)
def test_a_file_of_no_headers_is_told_and_not_repeated(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(load(tmp_path, content))
    assert f"gateway.toml:3: telemetry.otlp_headers_file: {complaint}" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:4318", "https://otlp.example/prefix/", "http://[::1]:4318"]
)
def test_a_collector_is_named_by_its_base_url(url: str) -> None:
    assert parse_settings(f'telemetry.otlp_endpoint = "{url}"').telemetry.otlp_endpoint == url


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("127.0.0.1:4318", "must be a URL"),
        ("grpc://127.0.0.1:4317", "must be a URL"),
        ("http://", "must be a URL"),
        ("http://a:99999", "must be a URL"),
        ("http://a:0", "must be a URL"),
        ("http://a b", "must be a URL"),
        ("http://\u00e9", "must be a URL"),
        ("http://me:secret@a", "must have no user info"),
        ("http://a?b=c", "must have no user info, query or fragment"),
        ("http://a#b", "must have no user info, query or fragment"),
    ],
)
def test_what_is_no_such_url_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        parse_settings(f'telemetry.otlp_endpoint = "{url}"')
