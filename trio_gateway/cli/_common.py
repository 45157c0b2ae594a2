"""What commands share: how they are told their configuration, and how they end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ..config import ConfigurationError, Settings, Source, load_settings

DEFAULT_FILE = Path("trio-gateway.toml")
ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="The configuration file (TOML).", show_default=str(DEFAULT_FILE)),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="The same, by name.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, laid over file and environment.")
]
CANNOT_START = 1
USAGE_ERROR = 2


def choose(file: Path | None, config: Path | None) -> Path:
    """Answer the file that was named in either way, or the usual one."""
    if file is not None and config is not None:
        raise typer.BadParameter("the configuration file is named twice", param_hint="--config")
    return file or config or DEFAULT_FILE


def load(config: Path, overrides: list[str] | None) -> Settings:
    """Read the configuration, or end with all that is wrong with it."""
    try:
        return load_settings(config, os.environ, overrides or ())
    except ConfigurationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USAGE_ERROR) from None


def read_source(config: Path, overrides: list[str] | None, copy: str | None = None) -> Source:
    """Read the configuration so that it can be read again, or end with all that is wrong with it.

    Args:
        copy: of the file, whose text counts instead.
    """
    try:
        return Source.read(config, dict(os.environ), overrides or (), copy)
    except ConfigurationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USAGE_ERROR) from None


def complain(error: object, status: int = USAGE_ERROR) -> NoReturn:
    """Say what is wrong, and end."""
    # What others say in it can not move the cursor.
    text = "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in str(error))
    typer.echo(f"trio-gateway: {text}", err=True)
    raise typer.Exit(status) from None
