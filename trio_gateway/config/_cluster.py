"""Where replicas share what they have, and the address of that store, whose password nobody is shown."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator

from trio_gateway.config._fields import Duration, Section, about, seconds

PORT: Final = 6379
_FORM: Final = 'must be a URL such as "redis://host:6379" or "rediss://user:password@host:6379/0"'


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL of Redis or Valkey, taken apart. ``str()`` and ``repr()`` hide the password."""

    host: str
    port: int = PORT
    database: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        who = "" if self.password is None else f"{self.user or ''}:***@"
        return f"redis{'s' * self.tls}://{who}{host}:{self.port}/{self.database}"


def parse_store_url(text: str) -> StoreUrl:
    """Read ``redis://`` or, with TLS, ``rediss://[[user]:password@]host[:port][/database]``.

    Raises:
        ValueError: it is something else, or what it needs is not installed. The message does not repeat it.
    """
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise ValueError(_FORM) from None
    database = parts.path.removeprefix("/") or "0"
    if parts.scheme not in ("redis", "rediss") or not host or port == 0 or parts.query or parts.fragment:
        raise ValueError(_FORM)
    if not re.fullmatch(r"[0-9]{1,5}", database):
        raise ValueError("must end after the host and port, or with the number of a database")
    if parts.username and parts.password is None:
        raise ValueError("names a user without a password")
    if importlib.util.find_spec("coredis") is None:
        raise ValueError("needs the package coredis: install trio-gateway[cluster]")
    return StoreUrl(
        host,
        PORT if port is None else port,
        int(database),
        unquote(parts.username) if parts.username else None,
        None if parts.password is None else unquote(parts.password),
        parts.scheme == "rediss",
    )


def _read_store_url(value: object) -> object:
    match value:
        case str():
            return parse_store_url(value)
        case StoreUrl():
            return value
    raise ValueError("must be a string, in quotes")


def _check_prefix(prefix: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", prefix):
        raise ValueError("must be 1 to 64 letters, digits, dots, colons, dashes or underscores")
    return prefix


class ClusterSettings(Section):
    """What all replicas share, through Redis or Valkey; without `url` each process is alone."""

    url: Annotated[
        Annotated[StoreUrl, BeforeValidator(_read_store_url)] | None,
        about(
            "URL",
            'The store: "redis://host:6379", or "rediss://user:password@host:6379/0" with TLS; the same for '
            "all replicas.",
        ),
    ] = None
    prefix: Annotated[
        str,
        AfterValidator(_check_prefix),
        about("name", "First part, in braces, of the names of all keys there: one for each cluster."),
    ] = "trio-gateway"
    ca: Annotated[
        str | None,
        about("path", "PEM file with the only authorities that may vouch for the store."),
    ] = None
    lease: Annotated[
        Duration,
        about(
            "seconds",
            "A replica that says nothing for this long has no slots any more: others get them.",
            ge=1,
            le=300,
        ),
    ] = 5.0
    patience: Annotated[
        Duration,
        seconds("An answer of the store that takes longer means that it is lost; less than `lease`."),
    ] = 0.8
    on_loss: Annotated[
        Literal["split", "refuse"],
        about(
            "word",
            "What a replica does while the store is lost: it places by its share of all slots, by the number "
            "of replicas that were there last, or refuses what is new.",
        ),
    ] = "split"
