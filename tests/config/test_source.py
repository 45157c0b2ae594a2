"""Reading a configuration again, and laying live values over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trio_gateway.config import ConfigurationError, Source

TEXT = """\
[admission]
max_queued = 5
[[workers]]
id = "gpu-0"
url = "http://127.0.0.1:1"
kind = "openai"
[[tenants]]
id = "a.b"
keys = []
"""


def problems(error: pytest.ExceptionInfo[ConfigurationError]) -> list[str]:
    return [str(problem) for problem in error.value.problems]


def test_a_file_is_read_again_with_what_lies_over_it(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(TEXT)
    environ = {"TRIO_GATEWAY__LIMITS__CONNECTIONS": "7"}
    source = Source.read(file, environ, ["admission.max_wait=3"])
    file.write_text(TEXT.replace("= 5", "= 6"))
    assert source.settings.admission.max_queued == 5
    again = source.again()
    assert again.settings.admission.max_queued == 6
    assert (again.settings.limits.connections, again.settings.admission.max_wait) == (7, 3)


def test_an_error_names_its_line_and_leaves_what_was_read(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(TEXT)
    source = Source.read(file)
    file.write_text(TEXT.replace("max_queued", "max_qeued"))
    with pytest.raises(ConfigurationError) as error:
        source.again()
    assert problems(error)[0].startswith(f"{file}:2: admission.max_qeued")
    file.unlink()
    with pytest.raises(ConfigurationError):
        source.again()


def test_a_text_is_the_same_again() -> None:
    assert Source.of_text(TEXT).again().settings == Source.of_text(TEXT).settings


def test_live_values_lie_over_all_else_and_are_judged_with_the_rest() -> None:
    source = Source.of_text(TEXT)
    live = source.with_live(
        {"admission.max_queued": 9, 'tenants."a.b".weight': 2.5, "workers.gpu-0.slots": 3}
    )
    assert live.settings.admission.max_queued == 9
    assert live.settings.tenants[0].weight == 2.5
    assert live.settings.workers[0].slots == 3
    assert source.settings.admission.max_queued == 5
    assert live.again().settings == source.settings
    assert source.with_live({}) is source


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("admission.max_queued", -1, "live: admission.max_queued: must be greater than"),
        ("admission.max_queue", 1, "live: admission.max_queue: "),
        ("admission", 1, "live: admission: names no key"),
        ("admission. ", 1, "live: admission. : names no key"),
        ("tenants.nobody.weight", 1.0, "live: tenants.nobody.weight: no entry"),
        ("deadlines.default", "4 parsecs", "live: deadlines.default: "),
    ],
)
def test_a_live_value_that_can_not_be_taken_is_named(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Source.of_text(TEXT).with_live({name: value})
    assert problems(error)[0].startswith(said), problems(error)


def test_where_a_value_comes_from_is_known(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(TEXT)
    environ = {"TRIO_GATEWAY__LIMITS__CONNECTIONS": "7"}
    source = Source.read(file, environ, ["admission.max_wait=3"]).with_live({'tenants."a.b".weight': 2.0})
    names = {
        "admission.max_queued": "file",
        "limits.connections": "environment",
        "admission.max_wait": "argument",
        'tenants."a.b".weight': "live",
        'tenants."a.b".keys': "file",
        "workers.gpu-0.weight": "default",
        "retry.max_attempts": "default",
        "tenants.nobody.weight": "default",
    }
    assert source.origins_of(names) == names
