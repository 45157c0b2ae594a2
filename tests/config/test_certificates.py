"""The certificate of the public listener: what can be served, and what clients will think of it."""

from __future__ import annotations

import datetime
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.config.reading import NOTHING, complaints
from trio_gateway.config import ConfigurationError, explain, load_settings, parse_settings

RSA, ECDSA = trustme.KeyType.RSA, trustme.KeyType.ECDSA
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
TLS = '[server]\ntls = {certificate = "a.pem", key = "a.key"}\n'


def write(folder: Path, name: str, issuer: trustme.CA | None = None, **options: Any) -> Path:
    """Write a certificate with its chain as ``<name>.pem``, and its key beside it."""
    leaf = (issuer or trustme.CA()).issue_cert("gateway.test", **options)
    leaf.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    path = folder / f"{name}.pem"
    path.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    return path


def problems_in(folder: Path, text: str = TLS) -> list[str]:
    """What is wrong with a file in this folder; keys and messages, without the hint at the folder."""
    file = folder / "gateway.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(file)
    hint = f" (relative paths count from {folder})"
    assert all(problem.message.endswith(hint) for problem in caught.value.problems)
    return [f"{problem.key}: {problem.message.removesuffix(hint)}" for problem in caught.value.problems]


def notes_in(folder: Path) -> list[str]:
    """What `check-config` remarks about the certificate."""
    file = folder / "gateway.toml"
    file.write_text(TLS)
    return [line for line in explain(file).splitlines() if line.startswith("# Note: clients")]


@pytest.mark.parametrize("key_type", [RSA, ECDSA])
def test_a_certificate_and_its_key_are_found_beside_the_configuration(
    tmp_path: Path, key_type: trustme.KeyType
) -> None:
    write(tmp_path, "a", key_type=key_type)
    (tmp_path / "gateway.toml").write_text(TLS)
    tls = load_settings(tmp_path / "gateway.toml").server.tls
    assert tls is not None
    assert (tls.certificate, tls.key) == (str(tmp_path / "a.pem"), str(tmp_path / "a.key"))


def test_both_may_stand_in_one_file(tmp_path: Path) -> None:
    write(tmp_path, "a")
    (tmp_path / "a.pem").write_text((tmp_path / "a.key").read_text() + (tmp_path / "a.pem").read_text())
    parse_settings(TLS.replace("a.key", "a.pem"), folder=tmp_path)


def test_relative_paths_count_from_everywhere_once_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a")
    (tmp_path / "gateway.toml").write_text(TLS)
    monkeypatch.chdir(tmp_path)
    tls = load_settings("gateway.toml").server.tls
    assert tls is not None
    assert (tls.certificate, tls.key) == (str(tmp_path / "a.pem"), str(tmp_path / "a.key"))


def test_both_can_be_named_by_overrides(tmp_path: Path) -> None:
    write(tmp_path, "a")
    settings = parse_settings(
        "",
        {"TRIO_GATEWAY__SERVER__TLS__CERTIFICATE": str(tmp_path / "a.pem")},
        [f"server.tls.key={tmp_path / 'a.key'}"],
    )
    assert settings.server.tls is not None


def test_missing_files_are_told_both_at_once(tmp_path: Path) -> None:
    assert problems_in(tmp_path) == [
        "server.tls.certificate: cannot be read: No such file or directory",
        "server.tls.key: cannot be read: No such file or directory",
    ]


def test_an_absolute_path_needs_no_hint() -> None:
    assert complaints('[server.tls]\ncertificate = "/nowhere/a.pem"\nkey = "/nowhere/a.key"\n') == [
        "t.toml:2: server.tls.certificate: cannot be read: No such file or directory",
        "t.toml:3: server.tls.key: cannot be read: No such file or directory",
    ]


def no_certificate(folder: Path) -> None:
    shutil.copy(folder / "a.key", folder / "a.pem")


def no_key(folder: Path) -> None:
    shutil.copy(folder / "a.pem", folder / "a.key")


def damaged_certificate(folder: Path) -> None:
    text = (folder / "a.pem").read_text()
    (folder / "a.pem").write_text(text[:80] + text[100:])


def damaged_key(folder: Path) -> None:
    text = (folder / "a.key").read_text()
    (folder / "a.key").write_text(text[:60] + text[80:])


def empty_certificate(folder: Path) -> None:
    (folder / "a.pem").write_bytes(b"")


def binary_certificate(folder: Path) -> None:
    (folder / "a.pem").write_bytes(ssl.PEM_cert_to_DER_cert((folder / "a.pem").read_text()))


def folder_in_place_of_the_key(folder: Path) -> None:
    (folder / "a.key").unlink()
    (folder / "a.key").mkdir()


def enormous_key(folder: Path) -> None:
    with (folder / "a.key").open("wb") as sparse:
        sparse.truncate(1 << 40)


def key_of_another(folder: Path) -> None:
    write(folder, "b", key_type=ECDSA)
    shutil.copy(folder / "b.key", folder / "a.key")


def key_of_another_type(folder: Path) -> None:
    write(folder, "b", key_type=RSA)
    shutil.copy(folder / "b.key", folder / "a.key")


def encrypted_key(folder: Path) -> None:
    key = load_pem_private_key((folder / "a.key").read_bytes(), None)
    (folder / "a.key").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (no_certificate, "certificate: holds no PEM certificate"),
        (empty_certificate, "certificate: holds no PEM certificate"),
        (binary_certificate, "certificate: holds no PEM certificate"),
        (damaged_certificate, "certificate: holds no PEM certificate"),
        (no_key, "key: holds no PEM private key"),
        (damaged_key, "key: holds no PEM private key"),
        (folder_in_place_of_the_key, "key: cannot be read: Is a directory"),
        (enormous_key, "key: has more than 1048576 bytes"),
        (key_of_another, "key: does not belong to the certificate"),
        (key_of_another_type, "key: does not belong to the certificate"),
        (encrypted_key, "key: is encrypted, and nobody is there to be asked for the password"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_cannot_be_served_is_told(spoil: Callable[[Path], None], complaint: str, tmp_path: Path) -> None:
    write(tmp_path, "a", key_type=ECDSA)
    spoil(tmp_path)
    assert problems_in(tmp_path) == [f"server.tls.{complaint}"]


def test_a_certificate_has_no_use_where_all_addresses_are_unix_sockets(tmp_path: Path) -> None:
    write(tmp_path, "a")
    text = TLS + 'bind = ["unix:gw.sock"]\n'
    also_tcp = TLS + 'bind = ["unix:gw.sock", "127.0.0.1:8080"]\n'
    assert parse_settings(also_tcp, folder=tmp_path).server.tls is not None
    with pytest.raises(ConfigurationError, match=r"server\.tls: has no use: server\.bind has only unix sock"):
        parse_settings(text, folder=tmp_path)


def test_half_of_the_table_is_told() -> None:
    assert complaints('[server.tls]\ncertifcate = "a.pem"\n') == [
        "t.toml:1: server.tls.certificate: must be given",
        "t.toml:1: server.tls.key: must be given",
        't.toml:2: server.tls.certifcate: unknown key; did you mean "certificate"?',
    ]


# What clients will think of it ------------------------------------------------------------------------------


def test_a_good_certificate_is_not_remarked_on(tmp_path: Path) -> None:
    authority = trustme.CA()
    write(tmp_path, "a", authority)
    assert notes_in(tmp_path) == []
    write(tmp_path, "a", authority.create_child_ca())
    assert (tmp_path / "a.pem").read_text().count("BEGIN") == 2
    assert notes_in(tmp_path) == []


@pytest.mark.parametrize(
    ("begin", "end", "complaint"),
    [
        (NOW - 9 * DAY, NOW - DAY, "certificate has expired"),
        (NOW + DAY, NOW + 9 * DAY, "certificate is not yet valid"),
    ],
)
def test_a_certificate_of_another_time_is_remarked_on_and_served(
    tmp_path: Path, begin: datetime.datetime, end: datetime.datetime, complaint: str
) -> None:
    write(tmp_path, "a", not_before=begin, not_after=end)
    assert notes_in(tmp_path) == [f"# Note: clients will refuse the certificate of server.tls: {complaint}."]


def test_a_chain_that_does_not_hold_together_is_remarked_on(tmp_path: Path) -> None:
    write(tmp_path, "a")
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "a.pem"), append=True)
    (note,) = notes_in(tmp_path)
    assert note.endswith("certificate of server.tls: unable to get local issuer certificate.")


def test_the_table_is_explained_with_the_place_that_it_comes_from(tmp_path: Path) -> None:
    write(tmp_path, "a")
    file = tmp_path / "gateway.toml"
    file.write_text(TLS)
    told = explain(file, NOTHING)
    pair = f'tls = {{certificate = "{tmp_path / "a.pem"}", key = "{tmp_path / "a.key"}"}}'
    (line,) = [line for line in told.splitlines() if line.startswith("tls = ")]
    assert line == f"{pair} # gateway.toml:2"
    again = tmp_path / "again.toml"
    again.write_text(told)
    assert load_settings(again) == load_settings(file)
    assert "PRIVATE KEY" not in told


# Between the gateway and workers --------------------------------------------------------------------------


SHOWN = """\
[[workers]]
id = "w"
url = "https://h:1"
kind = "vllm"
certificate = "a.pem"
key = "a.key"
"""


def internal(folder: Path, **changed: str) -> str:
    """The internal listener with TLS, whose files are all good; `changed` names others."""
    (folder / "token").write_text("a-long-enough-token")
    files = {"certificate": "a.pem", "key": "a.key", "ca": "ca.pem", **changed}
    listed = ", ".join(f'{name} = "{file}"' for name, file in files.items())
    return f'[internal]\nbind = ["127.0.0.1:9091"]\njoin_token_file = "token"\ntls = {{{listed}}}\n'


def write_authority(folder: Path, authority: trustme.CA) -> None:
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))


def test_what_gateway_and_agents_show_each_other_is_found_beside_the_configuration(tmp_path: Path) -> None:
    authority = trustme.CA()
    write(tmp_path, "a", authority)
    write_authority(tmp_path, authority)
    worker = SHOWN + 'ca = "ca.pem"'
    (tmp_path / "gateway.toml").write_text(internal(tmp_path) + worker)
    settings = load_settings(tmp_path / "gateway.toml")
    tls = settings.internal.tls
    assert tls is not None
    assert (tls.certificate, tls.key, tls.ca) == tuple(
        str(tmp_path / name) for name in ("a.pem", "a.key", "ca.pem")
    )
    (found,) = settings.workers
    assert (found.certificate, found.key, found.ca) == (tls.certificate, tls.key, tls.ca)
    shown = explain(tmp_path / "gateway.toml")
    assert f'tls = {{certificate = "{tls.certificate}", key = "{tls.key}", ca = "{tls.ca}"}}' in shown
    assert "will refuse the certificate" not in shown


def test_what_is_wrong_with_the_files_of_the_internal_listener_is_told(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b")
    (tmp_path / "ca.pem").write_text("nothing")
    assert problems_in(tmp_path, internal(tmp_path)) == ["internal.tls.ca: holds no PEM certificate"]
    write_authority(tmp_path, trustme.CA())
    assert problems_in(tmp_path, internal(tmp_path, key="b.key")) == [
        "internal.tls.key: does not belong to the certificate"
    ]
    assert problems_in(tmp_path, internal(tmp_path, certificate="c.pem")) == [
        "internal.tls.certificate: cannot be read: No such file or directory"
    ]


def test_a_certificate_that_workers_will_refuse_is_remarked_on(tmp_path: Path) -> None:
    authority = trustme.CA()
    write(tmp_path, "a", authority, not_after=NOW - DAY)
    write_authority(tmp_path, authority)
    (tmp_path / "gateway.toml").write_text(internal(tmp_path) + SHOWN)
    notes = [line for line in explain(tmp_path / "gateway.toml").splitlines() if "will refuse" in line]
    assert notes == [
        "# Note: workers will refuse the certificate of worker w: certificate has expired.",
        "# Note: workers will refuse the certificate of internal.tls: certificate has expired.",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            '[[workers]]\nid = "w"\nurl = "http://h"\nkind = "vllm"\nkey = "k"\ncertificate = "c"',
            "6: workers.w.certificate: has no use: the url is not https",
        ),
        (
            '[[workers]]\nid = "w"\nurl = "https://h"\nkind = "vllm"\ncertificate = "c"',
            "5: workers.w.certificate: needs key beside it",
        ),
        (
            '[[workers]]\nid = "w"\nurl = "https://h"\nkind = "vllm"\nkey = "k"',
            "5: workers.w.key: needs certificate beside it",
        ),
        (
            '[internal]\ntls = {certificate = "c", key = "k", ca = "a"}',
            "2: internal.tls: has no use: without internal.bind no worker can register",
        ),
        (
            '[internal]\nbind = "unix:a"\ntls = {certificate = "c", key = "k", ca = "a"}',
            "3: internal.tls: has no use: internal.bind has only unix sockets, which never speak TLS",
        ),
        ('[internal]\ntls = {certificate = "c", key = "k"}', "2: internal.tls.ca: must be given"),
    ],
)
def test_certificates_that_nobody_would_look_at_are_told(text: str, complaint: str) -> None:
    found = complaints(text)
    assert any(line.startswith(f"t.toml:{complaint}") for line in found), found
