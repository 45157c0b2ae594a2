"""The options by which commands for operators are told where the gateway is, and who asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from ..agent.engines import read_secret
from ._admin_client import AdminClient, AdminFailed
from ._common import CANNOT_START, complain

REFUSED: Final = CANNOT_START  # exit status
DEFAULT_URL: Final = "http://127.0.0.1:9090"
URL_VARIABLE: Final = "TRIO_GATEWAY_ADMIN_URL"
TOKEN_VARIABLE: Final = "TRIO_GATEWAY_ADMIN_TOKEN"  # noqa: S105 - the name of a variable

Url = Annotated[
    str, typer.Option("--url", envvar=URL_VARIABLE, help="http://host:port, https://host or unix:path.")
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", envvar=TOKEN_VARIABLE, help="The token, if the gateway wants one; others may see it here."
    ),
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the token.")]


def token_of(token: str | None, file: Path | None) -> str | None:
    """Answer the token that was named in either way; ends with a complaint if it can not be read."""
    try:
        return token if file is None else read_secret(file)
    except (OSError, ValueError) as wrong:
        complain(wrong)


@contextmanager
def asking(url: str, token: str | None) -> Iterator[AdminClient]:
    """Give a client for the block; what the gateway, or its absence, says ends the command."""
    try:
        with AdminClient(url, token) as client:
            yield client
    except AdminFailed as failed:
        complain(failed, REFUSED)
