"""The page of commands names every command, argument and option, and the exit statuses that they have."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.docs.pages import page, section, table, words
from trio_gateway.cli import DEFAULT_FILE, app

PAGE = "reference/commands.md"


# Any: some releases of Typer bring a click of their own, others use the package of that name.
GROUP: Any = typer.main.get_command(app)


def commands_of(group: Any, prefix: str = "") -> dict[str, Any]:
    """Every command by its words, those of groups inside of groups too."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands_of(command, f"{prefix}{name} ")
        else:
            found[prefix + name] = command
    return found


COMMANDS: dict[str, Any] = commands_of(GROUP)


def names_of(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{option}`" for option in parameter.opts)


def test_every_command_is_described() -> None:
    headings = re.findall(r"^## `trio-gateway ([\w -]+)`$", page(PAGE), re.MULTILINE)
    assert headings == list(COMMANDS)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_command_is_described_by_the_words_of_its_help(name: str) -> None:
    text = " ".join(section(PAGE, f"`trio-gateway {name}`").split())
    assert text.startswith(" ".join((COMMANDS[name].help or "").split()))


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.params])
def test_every_argument_and_option_is_described_with_its_default(name: str) -> None:
    rows = table(PAGE, f"`trio-gateway {name}`")
    first = next(iter(rows[0]))
    described = {row[first]: row["Meaning"] for row in rows}
    parameters = {names_of(parameter): parameter for parameter in COMMANDS[name].params}
    assert described.keys() == parameters.keys()
    for shown, parameter in parameters.items():
        if parameter.name == "file" and not parameter.required:
            assert f"[`{DEFAULT_FILE}`]" in described[shown]


def test_options_of_all_commands_for_operators_are_described() -> None:
    rows = table(PAGE, "Commands for operators")
    assert [row["Option"] for row in rows] == [names_of(each) for each in GROUP.commands["admin"].params]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_nothing_of_a_help_text_is_taken_for_markup_and_left_out(name: str) -> None:
    for parameter in COMMANDS[name].params:
        assert "[" not in (getattr(parameter, "help", None) or "")


def test_options_without_a_command_are_described() -> None:
    options = {option for parameter in GROUP.params for option in parameter.opts}
    assert set(words(section(PAGE, "Without a command"))) == options


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["version"], 0),
        (["check-config", "good.toml"], 0),
        (["check-config", "bad.toml"], 1),
        (["check-config", "--no-such-option"], 2),
        (["serve", "--config", "bad.toml"], 2),
        (["serve", "--config", "taken.toml"], 1),
    ],
)
def test_the_commands_have_the_described_exit_statuses(
    arguments: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.toml").write_text("")
    Path("bad.toml").write_text("[server]\nbinds = []\n")
    Path("taken.toml").write_text('[server]\nbind = ["unix:no-such-folder/x.sock"]\n')
    assert CliRunner().invoke(app, arguments).exit_code == status
    gc.collect()  # a gateway that could not start leaves descriptors to it, and other tests count them
    if arguments != ["version"]:
        listed = table(PAGE, f"`trio-gateway {arguments[0]}`", number=2)
        assert str(status) in {row["Exit status"] for row in listed}
