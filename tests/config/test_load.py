"""Files: the configuration itself, and the keys and certificates that it names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config.reading import MODEL, WORKER, complaints
from trio_gateway.config import (
    ConfigurationError,
    Problem,
    Settings,
    explain,
    load_settings,
    parse_settings,
)
from trio_gateway.config._problems import quoted, quoted_key
from trio_gateway.config._validate import known_keys

SECRET = "sk-4f1c-never-shown"
WITH_KEY = WORKER + 'api_key_file = "engine.key"\n' + MODEL

# A certificate that nobody trusts and nobody needs: CN=engine.test, made for this test.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBhDCCASmgAwIBAgIUfc+o+gniPN5mSmA/6v5VRmEs5zYwCgYIKoZIzj0EAwIw
FjEUMBIGA1UEAwwLZW5naW5lLnRlc3QwIBcNMjYxMTI5MjExOTUyWhgPMjEyNjEx
MDUyMTE5NTJaMBYxFDASBgNVBAMMC2VuZ2luZS50ZXN0MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEghUKkfTaWcBK1HALnynB/m0ySdWmJPOxvFDrajCCxic6qOrw
uA+X2ppWXUfTGnV4J920RX3DrQydZDDbJOXprKNTMFEwHQYDVR0OBBYEFH4UFwZO
vkJXv4eoSzYRucrnxY7kMB8GA1UdIwQYMBaAFH4UFwZOvkJXv4eoSzYRucrnxY7k
MA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDSQAwRgIhAJFR2PeDYDr74GRt
GkZrazEEq3f+9WcfABo5rVsZDClqAiEA2Cuf2Zehl64p+nUhbn2dGV73k1xT7+66
APT7n7CR1E0=
-----END CERTIFICATE-----
"""


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "gateway.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def complaint_about(file: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(file)
    (problem,) = caught.value.problems
    return str(problem).replace(str(file), "gateway.toml")


def test_a_file_is_read_with_its_overrides(tmp_path: Path) -> None:
    file = write(tmp_path, "[limits]\nconnections = 1\n")
    settings = load_settings(file, {"TRIO_GATEWAY__LOG__LEVEL": "debug"}, ["log.format=console"])
    assert settings.limits.connections == 1
    assert (settings.log.level, settings.log.format) == ("debug", "console")
    assert load_settings(str(file)).log.level == "info"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a = \n", "gateway.toml:1: not valid TOML: Invalid value"),
        ("[server]\nbind = [\n", "gateway.toml:3: not valid TOML: "),
        ("\n\n[server\n", "gateway.toml:3: not valid TOML: "),
        ("[a]\nb = 1\nb = 2\n", "gateway.toml:3: not valid TOML: "),
        ("[a]\n[a]\n", "gateway.toml:2: not valid TOML: "),
        (b"[server]\n# \xff\n", "gateway.toml:2: not valid UTF-8"),
        (
            b"\xef\xbb\xbf[server]\n",
            "gateway.toml:1: begins with a byte order mark, which TOML does not know",
        ),
        ("a = " + "[" * 100_000, "gateway.toml: nested too deeply"),
        ("a = " + "{b=" * 100_000, "gateway.toml: nested too deeply"),
    ],
)
def test_what_is_no_toml_is_told_with_the_line_of_its_first_error(
    tmp_path: Path, text: str | bytes, complaint: str
) -> None:
    assert complaint_about(write(tmp_path, text)).startswith(complaint)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert (
        complaint_about(tmp_path / "gateway.toml")
        == "gateway.toml: cannot be read: No such file or directory"
    )
    (tmp_path / "gateway.toml").mkdir()
    assert complaint_about(tmp_path / "gateway.toml") == "gateway.toml: cannot be read: Is a directory"


def test_a_file_of_absurd_size_is_not_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    assert complaint_about(file) == "gateway.toml: has more than 16777216 bytes"


def test_a_workers_key_is_read_from_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "engine.key").write_text(f" \n{SECRET}\n\n")
    (worker,) = load_settings(write(tmp_path, WITH_KEY)).workers
    assert worker.api_key is not None
    assert worker.api_key.get_secret_value() == SECRET
    assert worker.api_key_file == "engine.key"


def test_an_absolute_key_file_is_read_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "engine.key").write_text(SECRET)
    absolute = WITH_KEY.replace("engine.key", str(tmp_path / "other" / "engine.key"))
    (worker,) = parse_settings(absolute, folder=tmp_path / "nowhere").workers
    assert worker.api_key is not None


def test_a_key_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "engine.key").write_text(SECRET)
    file = write(tmp_path, WITH_KEY)
    settings = load_settings(file)
    shown = [
        repr(settings),
        str(settings),
        repr(settings.workers[0]),
        settings.model_dump_json(),
        explain(file),
    ]
    assert all("engine.key" in text for text in shown)
    assert not any(SECRET in text for text in shown)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"sk-4f1c never shown", "holds a blank or another byte that no key has; it must hold the key alone"),
        (
            b"KEY=sk-4f1c\nOTHER=x",
            "holds a blank or another byte that no key has; it must hold the key alone",
        ),
        ("sk-4f1c-é".encode(), "holds a blank or another byte that no key has; it must hold the key alone"),
        (b"sk-4f1c" + b"x" * 10_000, "has more than 8192 bytes"),
    ],
)
def test_a_key_file_without_one_key_is_told_and_not_repeated(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "engine.key").write_bytes(content)
    found = complaint_about(write(tmp_path, WITH_KEY))
    assert found == (
        f"gateway.toml:5: workers.gpu-0.api_key_file: {complaint} (relative paths count from {tmp_path})"
    )
    assert "sk-4f1c" not in found


def test_a_key_in_place_of_its_files_name_is_not_repeated() -> None:
    (found,) = complaints(WITH_KEY.replace("engine.key", SECRET))
    assert "cannot be read" in found
    assert SECRET not in found


JOIN_TOKEN = "0123456789abcdef"
INTERNAL = "[internal]\nbind = ['127.0.0.1:0', 'unix:join.sock']\njoin_token_file = 'join.key'\n"


def test_the_join_token_is_read_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "join.key").write_text(f"{JOIN_TOKEN}\n")
    file = write(tmp_path, INTERNAL)
    settings = load_settings(file)
    assert settings.internal.join_token is not None
    assert settings.internal.join_token.get_secret_value() == JOIN_TOKEN
    shown = [repr(settings), str(settings), settings.model_dump_json(), explain(file)]
    assert all("join.key" in text for text in shown)
    assert not any(JOIN_TOKEN in text for text in shown)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\n", "is empty"),
        (b" 0123456789abcde\n", "holds fewer than 16 characters, which can be guessed"),
        (b"01234567 89abcdef", "holds a blank or another byte that no key has; it must hold the key alone"),
        (
            b"0123456789abcdef\x00",
            "holds a blank or another byte that no key has; it must hold the key alone",
        ),
        (b"0" * 8193, "has more than 8192 bytes"),
    ],
)
def test_a_file_without_a_join_token_is_told_and_not_repeated(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "join.key").write_bytes(content)
    found = complaint_about(write(tmp_path, INTERNAL))
    place = f"(relative paths count from {tmp_path})"
    assert found == f"gateway.toml:3: internal.join_token_file: {complaint} {place}"
    assert "01234567" not in found


def test_a_join_token_in_place_of_its_files_name_is_not_repeated() -> None:
    (found,) = complaints(INTERNAL.replace("join.key", JOIN_TOKEN))
    assert "cannot be read" in found
    assert JOIN_TOKEN not in found


def test_a_join_token_beside_its_listener_is_refused_and_not_repeated() -> None:
    (found,) = complaints(f"[internal]\njoin_token = '{JOIN_TOKEN}'\n")
    assert found == (
        "t.toml:2: internal.join_token: must not stand here: name a file that holds it with join_token_file"
    )


def test_an_agents_secret_is_read_as_every_workers_key_is(tmp_path: Path) -> None:
    (tmp_path / "engine.key").write_text(SECRET)
    (worker,) = load_settings(write(tmp_path, WITH_KEY.replace("vllm", "agent"))).workers
    assert worker.api_key is not None
    assert worker.api_key.get_secret_value() == SECRET


def test_the_authorities_of_an_https_worker_are_read(tmp_path: Path) -> None:
    text = WORKER.replace("http:", "https:") + 'ca = "ca.pem"\n' + MODEL
    (tmp_path / "ca.pem").write_text(CERTIFICATE)
    (worker,) = load_settings(write(tmp_path, text)).workers
    assert worker.ca_pem == CERTIFICATE
    assert "BEGIN CERTIFICATE" not in repr(worker)


@pytest.mark.parametrize("content", ["", "no certificate", CERTIFICATE[:100] + CERTIFICATE[140:]])
def test_a_file_without_a_certificate_is_told(tmp_path: Path, content: str) -> None:
    text = WORKER.replace("http:", "https:") + 'ca = "ca.pem"\n' + MODEL
    (tmp_path / "ca.pem").write_text(content)
    assert complaint_about(write(tmp_path, text)) == (
        f"gateway.toml:5: workers.gpu-0.ca: holds no PEM certificate (relative paths count from {tmp_path})"
    )


def test_missing_files_are_told_with_everything_else() -> None:
    text = (
        WORKER.replace("http:", "https:") + 'api_key_file = "no.key"\nca = "no.pem"\n' + "[log]\nlevel = 1\n"
    )
    lines = [line.partition(" ")[0] for line in complaints(text)]
    assert lines == ["t.toml:5:", "t.toml:6:", "t.toml:8:"]


def test_settings_are_read_without_starting_trio() -> None:
    """`check-config` answers at once, and tools may read a configuration without the gateway's machinery."""
    code = "import sys, trio_gateway.config; sys.exit('trio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 4000, "0x" + "f" * 50_000, "1e400", "-nan"])
@pytest.mark.parametrize("key", ["limits.connections", "limits.body_bytes", "limits.keep_alive", "log.level"])
def test_a_number_of_any_size_is_judged(key: str, number: str) -> None:
    (complaint,) = complaints(f"{key} = {number}")
    assert complaint.startswith(f"t.toml:1: {key}: must be")
    assert len(complaint) < 200


def test_a_number_with_more_digits_than_python_reads_is_told() -> None:
    text = "9" * 5000
    assert complaints(f"limits.connections = {text}") == ["t.toml: holds a number with too many digits"]
    assert complaints("", {}, [f"limits.connections={text}"]) == [
        "--set: limits.connections: must be a whole number"
    ]


@pytest.mark.parametrize("depth", [1, 10, 100, 200, 400, 500, 900, 2000])
def test_nesting_of_any_depth_is_judged(depth: int) -> None:
    allowed = ("t.toml: nested too deeply", "t.toml:1: log.level: must", "t.toml:1: server.bind[0]: must")
    for text in (
        "log.level = " + "[" * depth + "]" * depth,
        "log.level = " + "{a=" * depth + "1" + "}" * depth,
        "log.level" + ".a" * depth + " = 1",
        "[log.level" + ".a" * depth + "]",
        "server.bind = [[" + "{a=[" * depth + "]}" * depth + "]]",
    ):
        (complaint,) = complaints(text)
        assert complaint.startswith(allowed)


# Any document ---------------------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["m", "gpu-0", "*", "http://h", "vllm", "tgi", "4 MiB", "5 s", "127.0.0.1:1", "[::]:1"]
)
SCALARS = st.one_of(st.integers(), st.floats(), st.booleans(), WORDS, st.text(max_size=5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
SECTIONS = ["", *Settings.model_fields]


def toml(value: Any) -> str:
    """Write a value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted_key(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return quoted(value) if isinstance(value, str) else repr(value)


@st.composite
def tables(draw: Any, section: str) -> dict[str, Any]:
    """A table with mostly known keys and mostly wrong values."""
    keys = st.one_of(st.sampled_from(known_keys((section,) if section else ())), st.text(max_size=5))
    table: dict[str, Any] = draw(st.dictionaries(keys, VALUES, max_size=4))
    return table


@st.composite
def trees(draw: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for section in draw(st.lists(st.sampled_from(SECTIONS), unique=True)):
        if not section:
            tree |= draw(tables(section))
        elif section in ("workers", "models", "tenants"):
            tree[section] = draw(st.lists(tables(section), max_size=2))
        else:
            tree[section] = draw(tables(section))
    return tree


@given(
    trees(),
    st.dictionaries(st.sampled_from(["TRIO_GATEWAY__LIMITS__CONNECTIONS", "TRIO_GATEWAY__M"]), st.text()),
)
def test_every_document_ends_in_settings_or_in_problems_with_lines(
    tree: dict[str, Any], environ: Mapping[str, str]
) -> None:
    text = "\n".join(f"{quoted_key(key)} = {toml(value)}" for key, value in tree.items())
    for problem in problems_in(text, environ):
        assert str(problem).isprintable(), "one problem, one line, nothing that moves a terminal's cursor"
        if problem.file == "gateway.toml":
            assert problem.line is not None
            assert 1 <= problem.line <= len(tree)


def problems_in(text: str, environ: Mapping[str, str]) -> tuple[Problem, ...]:
    """Answer what is wrong with a document, which may be nothing."""
    try:
        parse_settings(text, environ)
    except ConfigurationError as error:
        return error.problems
    return ()
