"""The commands that run something or tell something."""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import trio
import typer

from .. import __version__
from ..agent import Agent, AgentSettings, HowEnded
from ..agent.engines import (
    ENGINES,
    EngineEnded,
    EngineOptions,
    SimulatedSettings,
    make_engine,
    names,
    read_secret,
    serve_simulated,
)
from ..config import ConfigurationError, Source, explain
from ..database import StoreFailed
from ..errors import spoken_tls
from ..gateway import Gateway
from ..ledger import FORMATS, parse_dimensions, parse_moment, read_usage, usage_page
from ..lending import Place
from ..processes import ProcessEnded, Supervisor
from ..telemetry import Log
from ._admin import admin
from ._common import (
    CANNOT_START,
    ConfigFile,
    ConfigOption,
    Overrides,
    choose,
    complain,
    load,
    read_source,
)
from ._replay import replay_file
from ._tenants import keys, tenants
from ._top import top

app = typer.Typer(
    name="trio-gateway",
    help="An inference gateway for engineers who run their own GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
SUPERSEDED = 3
COMMAND = (sys.executable, "-m", "trio_gateway")  # of a process that a supervisor starts


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that need no command."""


@app.command()
def serve(file: ConfigFile = None, config: ConfigOption = None, overrides: Overrides = None) -> None:
    """Serve clients until SIGTERM or SIGINT."""
    place = Place.read(os.environ)
    if place is not None:
        place.end_with_supervisor()
    chosen = choose(file, config)
    source = read_source(chosen, overrides, None if place is None else place.copy_path)
    always = {} if place is None else {"process": place.number}
    log = Log(sys.stdout, source.settings.log.format, source.settings.log.level, **always)
    try:
        if place is None and source.settings.processes > 1:
            again = [argument for override in overrides or () for argument in ("--set", override)]
            trio.run(_supervise, source, (*COMMAND, "serve", "--config", str(chosen), *again), log)
        else:
            trio.run(_serve, source, log, place)
    except* (OSError, ProcessEnded) as group:
        for error in _leaves(group):
            complain(error, CANNOT_START)
    finally:
        log.close()


@app.command()
def worker(
    engine: Annotated[str, typer.Option(help=f"What generates: {', '.join(ENGINES)}.")],
    id: Annotated[str, typer.Option(help="Name of this worker, the same after each start.")],
    gateway: Annotated[
        list[str] | None, typer.Option(help="Internal URL of a gateway to register with; repeatable.")
    ] = None,
    join_token_file: Annotated[
        Path | None, typer.Option(help="File with the token that gateways want from workers that register.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(help="File with the secret that gateways which know this worker have."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="PEM file with what is shown to gateways; makes the agent speak TLS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file with its private key.")] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file with who vouches for gateways; nobody else may connect.")
    ] = None,
    bind: Annotated[str, typer.Option(help="host:port to listen on; port 0 is a free one.")] = "127.0.0.1:0",
    url: Annotated[
        str | None, typer.Option(help="Where gateways reach it.", show_default="where it listens")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Name of a model to serve; repeatable.")] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time.", show_default="the engine's")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(help="Label for routing; repeatable.")] = None,
    upstream: Annotated[str | None, typer.Option(help="Base URL of the server behind `openai`.")] = None,
    upstream_kind: Annotated[str, typer.Option(help="Dialect of that server, as for workers.")] = "openai",
    upstream_key_file: Annotated[Path | None, typer.Option(help="File with the key of that server.")] = None,
    model_file: Annotated[Path | None, typer.Option(help="GGUF file for `llamacpp`.")] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of context a slot, for `llamacpp`.")] = 2048,
    simulate: Annotated[
        list[str] | None,
        typer.Option(help="name=number of a simulated engine, as decode=100; repeatable."),
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that running requests get at the end.")] = 30.0,
    stall_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds until a reader that takes nothing is given up.")
    ] = 30.0,
) -> None:
    """Guard an engine on this machine and offer it to gateways, until SIGTERM or SIGINT."""
    try:
        settings = AgentSettings(
            worker_id=id,
            bind=bind,
            url=url,
            gateways=names(gateway),
            join_token=read_secret(join_token_file) if join_token_file else None,
            secret=read_secret(secret_file) if secret_file else None,
            certificate=str(certificate) if certificate else None,
            key=str(key) if key else None,
            ca=str(ca) if ca else None,
            slots=slots,
            labels=names(label),
            grace=grace,
            stall_timeout=stall_timeout,
        )
        settings.check()
        upstream_key = read_secret(upstream_key_file) if upstream_key_file else None
        options = EngineOptions(
            names(model), slots, upstream, upstream_kind, upstream_key, model_file, context, names(simulate)
        )
        behind = make_engine(engine, options)
        log = Log(sys.stdout)
        agent = Agent(settings, behind, log.write)
    except ssl.SSLError as wrong:
        complain(ValueError(f"--certificate, --key, --ca: {spoken_tls(wrong)}"))
    except (OSError, ValueError) as wrong:
        complain(wrong)
    try:
        ended = trio.run(agent.run_until_signalled)
    except* (OSError, EngineEnded) as group:
        for error in _leaves(group):
            complain(error, CANNOT_START)
    finally:
        log.close()
    if ended is not HowEnded.DRAINED:
        raise typer.Exit(SUPERSEDED)


@app.command("check-config")
def check_config(file: ConfigFile = None, config: ConfigOption = None, overrides: Overrides = None) -> None:
    """Explain every problem of a configuration at once, or what it amounts to."""
    chosen = choose(file, config)
    try:
        typer.echo(explain(chosen, os.environ, overrides or ()))
    except ConfigurationError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


app.add_typer(keys, name="keys")
app.add_typer(tenants, name="tenants")
app.add_typer(admin, name="admin")
app.command()(top)


@app.command()
def usage(
    file: ConfigFile = None,
    config: ConfigOption = None,
    overrides: Overrides = None,
    by: Annotated[
        str, typer.Option(help="What to sum up by: tenant, model, day and others, with commas.")
    ] = "tenant,model",
    since: Annotated[
        str | None, typer.Option(help="Only requests that came at this time or later, as 2026-11-01.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Only requests that came before this time.")] = None,
    form: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "table",
) -> None:
    """Sum up the requests and tokens that the database has records of."""
    url = load(choose(file, config), overrides).database.url
    try:
        if form not in FORMATS:
            raise ValueError(f"--format {form!r} is none of {', '.join(FORMATS)}")
        if url is None:
            raise ValueError("the configuration names no database.url")
        dimensions = parse_dimensions(by)
        first, end = (None if text is None else parse_moment(text) for text in (since, until))
    except ValueError as wrong:
        complain(wrong)
    try:
        rows = read_usage(url.value, dimensions, first, end)
    except (OSError, StoreFailed) as error:
        complain(error, CANNOT_START)
    typer.echo(usage_page(rows, dimensions, form))


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the answer.")] = False,
    workers: Annotated[
        int, typer.Option("--workers", min=0, max=16, help="Simulated workers beside it.")
    ] = 0,
) -> None:
    """Show a real small model answering through the gateway, on this machine alone."""
    from ..demo import run_demo  # needs the extra 'local', which serving does not

    raise typer.Exit(run_demo(once, workers))


@app.command()
def simulate(
    kind: Annotated[str, typer.Option("--kind", help="vllm, sglang, llamacpp, tgi or openai.")] = "vllm",
    bind: Annotated[str, typer.Option("--bind", help="host:port; port 0 takes a free one.")] = "127.0.0.1:0",
    models: Annotated[list[str] | None, typer.Option("--model", help="A name that it serves.")] = None,
    slots: Annotated[int, typer.Option("--slots", help="Choices that run at a time.")] = 8,
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of KV memory, of 16 tokens.")] = 4096,
    context: Annotated[int, typer.Option("--context", help="Tokens of a prompt and its answer.")] = 8192,
    max_queued: Annotated[int | None, typer.Option("--max-queued", help="Choices that may wait.")] = None,
    prefill: Annotated[float, typer.Option("--prefill", help="Tokens of prompts a second.")] = 8000.0,
    decode: Annotated[float, typer.Option("--decode", help="Tokens a second of one that runs alone.")] = 50.0,
    load: Annotated[float, typer.Option("--load", help="Seconds until the model is there.")] = 0.0,
    speed: Annotated[float, typer.Option("--speed", help="Everything so many times as fast.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of all texts and dice.")] = 0,
    metrics: Annotated[bool, typer.Option("--metrics", help="Serve metrics, as engines do if told.")] = False,
) -> None:
    """Serve a simulated engine, which has no model and breaks on demand."""
    settings = SimulatedSettings(
        kind=kind,
        bind=bind,
        models=tuple(models or ("simulated",)),
        slots=slots,
        blocks=blocks,
        context=context,
        max_queued=max_queued,
        prefill=prefill,
        decode=decode,
        load=load,
        speed=speed,
        seed=seed,
        metrics=metrics,
    )
    try:
        engine = settings.engine()
    except ValueError as error:
        complain(error)
    try:
        trio.run(serve_simulated, settings, engine, typer.echo)
    except* OSError as group:
        for failed in _leaves(group):
            typer.echo(f"trio-gateway: {failed}", err=True)
        raise typer.Exit(CANNOT_START) from None


app.command("replay")(replay_file)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


async def _serve(source: Source, log: Log, place: Place | None) -> None:
    await Gateway(source.settings, log, source, place=place).run(last=True)


async def _supervise(source: Source, command: tuple[str, ...], log: Log) -> None:
    await Supervisor(source, command, log).run()


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
