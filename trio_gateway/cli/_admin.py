"""The commands ``admin``: see and steer a running gateway."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ..tenancy import new_key
from ._admin_tables import COLUMNS, print_members, print_rows, print_tree, shown
from ._admin_where import DEFAULT_URL, REFUSED, Token, TokenFile, Url, asking, token_of
from ._common import USAGE_ERROR, complain

# What a path can hold as it is; the door knows no other ids.
_ID: Final = re.compile(r"[A-Za-z0-9._~:@!$&'()*+,;=-]+")

admin = typer.Typer(help="See and steer a running gateway.", no_args_is_help=True)
token = typer.Typer(help="Tokens of operators.", no_args_is_help=True)
admin.add_typer(token, name="token")

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="Rows.")]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="The request's X-Request-Id.")]
TenantId = Annotated[str, typer.Argument(metavar="ID", help="The tenant's id.")]
WorkerId = Annotated[str, typer.Argument(metavar="ID", help="The worker's id.")]


@admin.callback()
def _where(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """See and steer a running gateway."""
    context.obj = (url, token_of(token, token_file))


# Reading ----------------------------------------------------------------------------------------------------


@admin.command("requests")
def list_requests(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help="waiting, running or ended.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    model: Annotated[str | None, typer.Option(help="Only for this model.")] = None,
    worker: Annotated[str | None, typer.Option(help="Only at this worker.")] = None,
    search: Annotated[str | None, typer.Option(help="Only with this text in a name.")] = None,
    order: Annotated[str | None, typer.Option(help="Which come first: newest or oldest.")] = None,
    limit: Limit = 100,
    offset: Annotated[int, typer.Option(min=0, help="Rows to skip.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List the requests that wait or run, newest first, and behind them the latest that ended."""
    query = {"state": state, "tenant": tenant, "model": model, "worker": worker, "search": search}
    answer = _read(context, "/requests", **query, order=order, limit=limit, offset=offset)
    if as_json:
        _print_json(answer)
        return
    print_rows(answer["requests"], COLUMNS["requests"])
    if len(answer["requests"]) < answer["total"]:
        typer.echo(f"{len(answer['requests'])} of {answer['total']}; see --limit and --offset", err=True)


@admin.command("request")
def show_request(context: typer.Context, id: RequestId, as_json: AsJson = False) -> None:
    """Show one request and what happened to it."""
    answer = _read(context, f"/requests/{_segment(id)}")
    if as_json:
        _print_json(answer)
        return
    print_members(answer["request"])
    print_rows(answer["timeline"], COLUMNS["timeline"])


@admin.command("tenants")
def list_tenants(context: typer.Context, as_json: AsJson = False) -> None:
    """List what each tenant has, and may have."""
    _list(context, "tenants", as_json)


@admin.command("queues")
def show_queues(context: typer.Context, as_json: AsJson = False) -> None:
    """Show what waits, in total and in each pool of workers."""
    answer = _read(context, "/queues")
    if as_json:
        _print_json(answer)
        return
    print_members({name: value for name, value in answer.items() if name != "pools"})
    print_rows(answer["pools"], COLUMNS["pools"])


@admin.command("workers")
def list_workers(context: typer.Context, as_json: AsJson = False) -> None:
    """List what each worker has and does."""
    _list(context, "workers", as_json)


@admin.command("limits")
def show_limits(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the limits in force, where they come from, and when a change counts."""
    answer = _read(context, "/limits")
    rows = [{"name": name, **row} for name, row in answer["limits"].items()]
    _print_json(answer) if as_json else print_rows(rows, COLUMNS["limits"])


@admin.command("tasks")
def show_tasks(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the tasks of the process by exchange, and where each is."""
    answer = _read(context, "/tasks")
    _print_json(answer) if as_json else print_tree(answer["tasks"])


@admin.command("self-audit")
def self_audit(context: typer.Context, as_json: AsJson = False) -> None:
    """Tell whether all accounts are right, and what is held for something that has ended."""
    answer = _read(context, "/self-audit")
    if as_json:
        _print_json(answer)
    elif answer["ok"]:
        typer.echo("All accounts are right, and nothing is left over.")
    else:
        for equation in answer["equations"]:
            typer.echo(shown(equation))
        if answer["leaks"]:
            print_rows(answer["leaks"], COLUMNS["leaks"])
    if not answer["ok"]:
        raise typer.Exit(REFUSED)


@admin.command("endings")
def list_endings(context: typer.Context, limit: Limit = 100, as_json: AsJson = False) -> None:
    """List the latest endings, newest first."""
    _list(context, "endings", as_json, limit=limit)


@admin.command("snapshot")
def show_snapshot(context: typer.Context, as_json: AsJson = False) -> None:
    """Show what the live feed tells every second, once."""
    _show(context, "/snapshot", as_json)


@admin.command("version")
def show_version(context: typer.Context, as_json: AsJson = False) -> None:
    """Tell what runs, and for how long."""
    _show(context, "/version", as_json)


@admin.command("configuration")
def show_configuration(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the configuration in force, without secrets."""
    _show(context, "/configuration", as_json)


@admin.command("statistics")
def show_statistics(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the figures of this moment."""
    _show(context, "/statistics", as_json)


@admin.command("audit")
def list_audit(context: typer.Context, limit: Limit = 100, as_json: AsJson = False) -> None:
    """List what operators did, newest first."""
    _list(context, "audit", as_json, limit=limit)


@admin.command("flight")
def save_flight(
    context: typer.Context,
    id: RequestId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="standard output")
    ] = None,
) -> None:
    """Save what was recorded of a request, for trio-gateway replay."""
    answer = json.dumps(_read(context, f"/flights/{_segment(id)}"), indent=1)
    try:
        typer.echo(answer) if output is None else output.write_text(answer + "\n", "utf-8")
    except OSError as error:
        complain(error, REFUSED)


@admin.command("feed")
def follow(context: typer.Context) -> None:
    """Follow the gateway: a line of JSON for each snapshot and ending, until interrupted."""
    with asking(*context.obj) as client:
        for name, value in client.events("/feed"):
            typer.echo(json.dumps({"event": name, **value}))


# Acting -----------------------------------------------------------------------------------------------------


@admin.command("cancel")
def cancel(context: typer.Context, id: RequestId, as_json: AsJson = False) -> None:
    """End a request."""
    _act(context, f"/requests/{_segment(id)}/cancel", as_json)


@admin.command("cancel-tenant")
def cancel_tenant(context: typer.Context, id: TenantId, as_json: AsJson = False) -> None:
    """End all requests of a tenant."""
    _act(context, f"/tenants/{_segment(id)}/cancel", as_json)


@admin.command("freeze")
def freeze(context: typer.Context, id: TenantId, as_json: AsJson = False) -> None:
    """Place nothing of a tenant any more; what runs goes on."""
    _act(context, f"/tenants/{_segment(id)}/freeze", as_json)


@admin.command("thaw")
def thaw(context: typer.Context, id: TenantId, as_json: AsJson = False) -> None:
    """Place what a frozen tenant has again."""
    _act(context, f"/tenants/{_segment(id)}/thaw", as_json)


@admin.command("drain")
def drain(context: typer.Context, id: WorkerId, as_json: AsJson = False) -> None:
    """Place nothing at a worker any more; what runs there goes on."""
    _act(context, f"/workers/{_segment(id)}/drain", as_json)


@admin.command("resume")
def resume(context: typer.Context, id: WorkerId, as_json: AsJson = False) -> None:
    """Place requests at a worker again."""
    _act(context, f"/workers/{_segment(id)}/resume", as_json)


@admin.command("eject")
def eject(context: typer.Context, id: WorkerId, as_json: AsJson = False) -> None:
    """Drain a worker, and end what runs there."""
    _act(context, f"/workers/{_segment(id)}/eject", as_json)


@admin.command("reset-breaker")
def reset_breaker(
    context: typer.Context,
    id: WorkerId,
    model: Annotated[str | None, typer.Option(help="Only for this model.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:
    """Close the breakers of a worker and forget its faults."""
    _act(context, f"/workers/{_segment(id)}/breakers/reset", as_json, model=model)


@admin.command("force-breaker")
def force_breaker(
    context: typer.Context,
    id: WorkerId,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model.")],
    state: Annotated[str, typer.Argument(metavar="STATE", help="open or closed.")],
    as_json: AsJson = False,
) -> None:
    """Hold a breaker of a worker open until it is reset, or close it."""
    _act(context, f"/workers/{_segment(id)}/breakers/force", as_json, model=model, state=state)


@admin.command("set-limits")
def set_limits(
    context: typer.Context,
    values: Annotated[
        list[str], typer.Argument(metavar="VALUES", help="name=value, as admission.max_queued=200.")
    ],
    as_json: AsJson = False,
) -> None:
    """Change limits, all of them or none."""
    _act(context, "/limits", as_json, set=dict(map(_pair, values)))


@admin.command("rotate-key")
def rotate_key(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Id of the key's tenant.")],
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key.")],
    overlap: Annotated[
        float | None, typer.Option(min=0, help="Seconds that the old key stays good.", show_default="0")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a new key in place of one of the database, and show it, this once."""
    _act(context, "/keys/rotate", as_json, tenant=tenant, id=id, overlap=overlap)


@admin.command("reload")
def reload(context: typer.Context, as_json: AsJson = False) -> None:
    """Read the configuration file again; one with a problem changes nothing."""
    _act(context, "/reload", as_json)


@admin.command("replace-processes")
def replace_processes(context: typer.Context, as_json: AsJson = False) -> None:
    """Replace one process after the other by a new one, without losing a request."""
    _act(context, "/processes/replace", as_json, "Begun: one process after the other is replaced.")


@admin.command("log-level")
def log_level(
    context: typer.Context,
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="debug, info, warning or error.")],
    as_json: AsJson = False,
) -> None:
    """Change what is logged, until the next start."""
    _act(context, "/log-level", as_json, level=level)


@token.command("create")
def create_token(
    role: Annotated[str, typer.Option(help="viewer or operator.")],
    id: Annotated[str | None, typer.Option(help="Its name.", show_default="made up")] = None,
) -> None:
    """Make a token and print it, this once, and below it the line for the configuration."""
    if role not in ("viewer", "operator"):
        complain(f"--role {role!r} is neither viewer nor operator")
    if id is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", id):
        complain("--id must have 1 to 64 letters, digits, dots, underscores or hyphens")
    id_, secret, hash_ = new_key(id)
    typer.echo(secret)
    typer.echo(f'{{id = "{id_}", hash = "{hash_}", role = "{role}"}}')
    typer.echo("Give the token away, and put the line into admin.tokens.", err=True)


# What they share --------------------------------------------------------------------------------------------


def _read(context: typer.Context, path: str, **query: Any) -> Any:
    with asking(*context.obj) as client:
        return client.read(path, **query)


def _list(context: typer.Context, name: str, as_json: bool, **query: Any) -> None:
    answer = _read(context, f"/{name}", **query)
    _print_json(answer) if as_json else print_rows(answer[name], COLUMNS[name])


def _show(context: typer.Context, path: str, as_json: bool) -> None:
    answer = _read(context, path)
    _print_json(answer) if as_json else print_members(answer)


def _act(context: typer.Context, path: str, as_json: bool, done: str = "Done.", /, **arguments: Any) -> None:
    given = {name: value for name, value in arguments.items() if value is not None}
    with asking(*context.obj) as client:
        answer = client.act(path, given)
    if as_json:
        _print_json(answer)
        return
    typer.echo(done if answer["done"] else "There was nothing to do.")
    both = {name: answer[name] for name in ("before", "after") if answer[name] is not None}
    if both:
        print_members(both)


def _print_json(value: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=1))


def _segment(id_: str) -> str:
    if not _ID.fullmatch(id_) or id_ in (".", ".."):
        complain(f"{id_!r} is no id", USAGE_ERROR)
    return id_


def _pair(text: str) -> tuple[str, Any]:
    """Read ``name=value``; a value that is no JSON is text, such as 4 MiB."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        complain(f"{text!r} is not name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
