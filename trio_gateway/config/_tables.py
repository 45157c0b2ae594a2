"""The tables that may be repeated: workers, models, tenants and their keys."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from trio_gateway.config._addresses import Endpoint, parse_url
from trio_gateway.config._defaults import check_defaults, defaults_as_json
from trio_gateway.config._fields import (
    Duration,
    Id,
    Items,
    Many,
    ModelName,
    PublicName,
    Section,
    about,
    seconds,
    switch,
)
from trio_gateway.config._kubernetes import check_selector

Tier = Literal["interactive", "standard", "batch"]
"""Priority classes, most urgent first."""

# The same as in the table of dialects; it stands here again so that reading settings does not import Trio.
CANCEL_GRACE: Final = {
    "openai": 0.5,
    "vllm": 0.5,
    "tgi": 0.5,
    "llamacpp": 1.5,
    "ollama": 1.5,
    "sglang": 4.0,
    "agent": 5.0,
}
"""Seconds until each kind of worker has surely let an abandoned request go; agents mostly say so before."""

DEFAULT_SLOTS: Final = 64
"""Slots of a worker of which neither the file nor its engine tells how many it has."""

_HASH_OF_NOTHING: Final = hashlib.sha256(b"").hexdigest()


def _check_url(text: str) -> str:
    parse_url(text)
    return text


def check_hash(text: str) -> str:
    """Judge the hash of a key or token, and answer it in lower case."""
    if not re.fullmatch(r"sha256:[0-9A-Fa-f]{64}", text):
        raise ValueError('must be "sha256:" and 64 hexadecimal digits, the SHA-256 of the whole key')
    if text.lower().endswith(_HASH_OF_NOTHING):
        raise ValueError("is the hash of an empty key, with which everybody would be let in")
    return text.lower()


def _read_moment(value: object) -> object:
    try:
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value.astimezone(UTC)
    except OverflowError:  # in the first or last hours that a calendar has
        pass
    raise ValueError("must be a date and time with its zone and without quotes, as in 2027-01-31T00:00:00Z")


def _check_patterns(models: tuple[str, ...]) -> tuple[str, ...]:
    if "*" in models and len(models) > 1:
        raise ValueError('names more models beside "*", which already means all')
    return models


class WorkerSettings(Section):
    """One worker that the gateway may send requests to. Equal workers are taken in the order of the file.

    `api_key` and `ca_pem` are no keys of the file; they hold what stood in the files that it names.
    """

    id: Annotated[Id, about("name", "The worker's own name, in logs, metrics and [[models]].", applies="now")]
    url: Annotated[
        str,
        AfterValidator(_check_url),
        about(
            "URL",
            "Where the engine listens: http://, https:// or http+unix:///path; a path goes before the "
            "engine's own paths, and /v1 at its end may be left out; an agent has none.",
            applies="now",
        ),
    ]
    kind: Annotated[
        Literal["vllm", "sglang", "llamacpp", "tgi", "ollama", "openai", "agent"],
        about(
            "word",
            "Which engine it is; openai for everything that only speaks OpenAI's routes, agent for "
            "`trio-gateway worker` beside an engine.",
            applies="now",
        ),
    ]
    dns: Annotated[
        bool,
        switch("Makes a worker of its own out of each address that the name in `url` has, now and later."),
    ] = False
    pods: Annotated[
        Annotated[str, AfterValidator(check_selector)] | None,
        about(
            "label selector",
            'Makes a worker of its own out of each ready pod with these labels, such as "app=vllm", now and '
            "later; the port is that of `url`, whose name goes into the Host header and is looked for in "
            "certificates.",
        ),
    ] = None
    slots: Annotated[
        int | None,
        about(
            "requests",
            "Requests that it serves at a time, of all gateways together.",
            ge=1,
            le=100_000,
            applies="now",
        ),
    ] = None
    weight: Annotated[
        float,
        about(
            "ratio",
            "Its share of requests compared with other workers that have as many slots.",
            gt=0,
            le=1_000_000,
            applies="now",
        ),
    ] = 1.0
    labels: Annotated[
        Many[Id], about("names", "Words by which [[models]] can name several workers at once.", applies="now")
    ] = ()
    ca: Annotated[
        str | None,
        about(
            "path", "PEM file with the only authorities that may vouch for an https worker.", applies="now"
        ),
    ] = None
    certificate: Annotated[
        str | None,
        about(
            "path",
            "PEM file with the certificate that the gateway shows to an https worker, and behind it those "
            "that vouch for it; read at start, at each reload and whenever it is replaced.",
            applies="now",
        ),
    ] = None
    key: Annotated[
        str | None,
        about("path", "PEM file with its private key, not encrypted; read likewise.", applies="now"),
    ] = None
    api_key_file: Annotated[
        str | None,
        about(
            "path",
            "File with the credential that the gateway shows to this worker; must be given for an agent, and "
            "is read at start and at each reload.",
            applies="now",
        ),
    ] = None
    cancel_grace: Annotated[
        Duration,
        seconds(
            "How long a slot stays counted after a request was abandoned, until the engine has "
            "surely let it go.",
            zero=True,
            applies="now",
        ),
    ] = Field(default_factory=lambda known: CANCEL_GRACE[known["kind"]])
    api_key: SecretStr | None = Field(default=None, exclude=True)
    ca_pem: str | None = Field(default=None, exclude=True, repr=False)

    @property
    def many(self) -> bool:
        """Whether it stands for any number of workers, which are found while the gateway runs."""
        return self.dns or self.pods is not None

    @cached_property
    def endpoint(self) -> Endpoint:
        """The parts of `url`."""
        return parse_url(self.url)


class ModelSettings(Section):
    """One model that callers may name."""

    id: Annotated[PublicName, about("name", "The public name.", applies="new requests")]
    upstream: Annotated[
        ModelName, about("name", "The name that the engines know.", applies="new requests")
    ] = Field(default_factory=lambda known: known["id"])
    workers: Annotated[
        Many[Id] | None,
        about(
            "names",
            "Ids or labels of the workers that serve it, of those in this file and of those that register.",
            min_length=1,
            applies="new requests",
        ),
    ] = None
    fallbacks: Annotated[
        Many[PublicName],
        about(
            "names",
            "Ids of other models, best first, that serve its requests while no worker of its own can; "
            "never after a part of an answer was delivered.",
            applies="new requests",
        ),
    ] = ()
    aliases: Annotated[
        Many[PublicName],
        about(
            "names",
            "Further public names of the same model; tenants and answers know it by its id alone.",
            applies="new requests",
        ),
    ] = ()
    defaults: Annotated[
        dict[str, Any],
        AfterValidator(check_defaults),
        about(
            "table",
            "Request fields for generating text, such as {temperature = 0.7}, that engines get where a "
            "caller leaves them out.",
            applies="new requests",
        ),
    ] = Field(default_factory=dict)
    max_output_tokens: Annotated[
        int | None,
        about(
            "tokens",
            "Longest answer that a caller can ask for, and the bound of one who asks for none.",
            ge=1,
            le=2**31 - 1,
            applies="new requests",
        ),
    ] = None

    full_timeout: Annotated[
        Duration | None,
        seconds(
            "How long a client's full buffer may keep its engine from being read, before the client is cut "
            "off; 0 cuts it off as soon as the buffer is full.",
            zero=True,
            applies="new requests",
        ),
    ] = None

    @cached_property
    def default_fields(self) -> dict[str, bytes]:
        """The values of `defaults` as JSON."""
        return defaults_as_json(self.defaults)


Requests = Annotated[
    int | None,
    about(
        "requests",
        "Requests that it may make in a minute, all at once or spread.",
        ge=1,
        le=1_000_000_000,
        applies="new requests",
    ),
]

Tokens = Annotated[
    int | None,
    about(
        "tokens",
        "Tokens of prompts and answers that it may use in a minute, all at once or spread.",
        ge=1,
        le=10**12,
        applies="new requests",
    ),
]


class KeySettings(Section):
    """One API key of a tenant; only its hash is known here."""

    id: Annotated[
        Id,
        about(
            "name",
            "The key's name, in records; no other key of any tenant may have it.",
            applies="new requests",
        ),
    ]
    hash: Annotated[
        str,
        AfterValidator(check_hash),
        about("hash", '"sha256:" and the hexadecimal SHA-256 of the whole key.', applies="new requests"),
    ] = Field(repr=False)
    expires: Annotated[
        datetime | None,
        BeforeValidator(_read_moment),
        about(
            "date and time",
            "From when on it opens nothing, such as 2027-01-31T00:00:00Z.",
            applies="new requests",
        ),
    ] = None
    models: Annotated[
        Many[ModelName],
        AfterValidator(_check_patterns),
        about(
            "names",
            'Those of its tenant\'s models that it may use; "*" means all of these.',
            min_length=1,
            applies="new requests",
        ),
    ] = ("*",)
    tiers: Annotated[
        Many[Tier],
        about(
            "words",
            "Those of its tenant's priorities that it may ask for.",
            min_length=1,
            applies="new requests",
        ),
    ] = ("interactive", "standard", "batch")
    requests_per_minute: Requests = None
    tokens_per_minute: Tokens = None

    @property
    def digest(self) -> bytes:
        """The 32 bytes of the SHA-256."""
        return bytes.fromhex(self.hash.removeprefix("sha256:"))


class TenantSettings(Section):
    """One party that owns keys and is limited as a whole."""

    id: Annotated[Id, about("name", "The tenant's name, in records and metrics.", applies="new requests")]
    keys: Annotated[
        Items[KeySettings],
        about(
            "tables",
            "Its API keys, such as {id, hash}; an empty list locks the tenant out.",
            applies="new requests",
        ),
    ]
    weight: Annotated[
        float,
        about(
            "ratio",
            "Its share of busy workers, in tokens, compared with other tenants that wait.",
            gt=0,
            le=1_000_000,
            applies="now",
        ),
    ] = 1.0
    tiers: Annotated[
        Many[Tier],
        about("words", "Priorities that its requests may ask for.", min_length=1, applies="new requests"),
    ] = ("interactive", "standard")
    models: Annotated[
        Many[ModelName],
        AfterValidator(_check_patterns),
        about("names", 'Public names of the models it may use; "*" means all.', applies="new requests"),
    ] = ("*",)
    max_concurrency: Annotated[
        int | None,
        about(
            "requests", "Requests that it may have at workers at a time.", ge=1, le=1_000_000, applies="now"
        ),
    ] = None
    max_queued: Annotated[
        int, about("requests", "Requests that it may have waiting.", ge=0, le=1_000_000, applies="now")
    ] = 64
    requests_per_minute: Requests = None
    tokens_per_minute: Tokens = None
    default_timeout: Annotated[
        Duration | None,
        seconds(
            "Deadline of its requests that name none, instead of deadlines.default.", applies="new requests"
        ),
    ] = None
    max_timeout: Annotated[
        Duration | None,
        seconds(
            "Longest deadline that its requests can ask for, below deadlines.maximum.", applies="new requests"
        ),
    ] = None
    engine_fields: Annotated[
        bool,
        switch("Lets it send body fields that steer the engine itself.", applies="new requests"),
    ] = False
