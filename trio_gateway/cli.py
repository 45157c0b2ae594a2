"""The commands: serve, check-config, demo."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import trio
import typer

from . import __version__
from .config import ConfigurationError, Settings, explain, load_settings
from .gateway import Gateway
from .telemetry import Log

app = typer.Typer(
    name="trio-gateway",
    help="An inference gateway for engineers who run their own GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path, typer.Option("--config", "-c", help="The configuration file (TOML).", show_default=True)
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, laid over file and environment.")
]
DEFAULT_FILE = Path("trio-gateway.toml")
CANNOT_START = 1
USAGE_ERROR = 2


@app.command()
def serve(config: ConfigFile = DEFAULT_FILE, overrides: Overrides = None) -> None:
    """Serve clients until SIGTERM or SIGINT."""
    settings = _load(config, overrides)
    log = Log(sys.stdout, settings.log.format, settings.log.level)
    try:
        trio.run(_serve, settings, log)
    except* OSError as group:
        for error in _leaves(group):
            typer.echo(f"trio-gateway: {error}", err=True)
        raise typer.Exit(CANNOT_START) from None
    finally:
        log.close()


@app.command("check-config")
def check_config(
    file: Annotated[Path, typer.Argument(help="The configuration file (TOML).")] = DEFAULT_FILE,
    overrides: Overrides = None,
) -> None:
    """Explain every problem of a configuration at once, or what it amounts to."""
    try:
        typer.echo(explain(file, os.environ, overrides or ()))
    except ConfigurationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the answer.")] = False,
) -> None:
    """Show a real small model answering through the gateway, on this machine alone."""
    from .demo import run_demo  # needs the extra 'local', which serving does not

    raise typer.Exit(run_demo(once))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


async def _serve(settings: Settings, log: Log) -> None:
    await Gateway(settings, log).run()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Answer what a nursery wrapped, however often it did."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def main() -> None:
    """Run the command line."""
    app()


def _load(config: Path, overrides: list[str] | None) -> Settings:
    try:
        return load_settings(config, os.environ, overrides or ())
    except ConfigurationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USAGE_ERROR) from None
