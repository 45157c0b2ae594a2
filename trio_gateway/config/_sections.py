"""The sections that exist once: each key with its unit, default, bounds and meaning.

The reference page is made from this text, so a meaning is one sentence for an operator. Defaults are those
of the contract; where another product's limit was the model, its comment says so.
"""

from __future__ import annotations

from fractions import Fraction
from ipaddress import IPv4Network, IPv6Network
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from trio_gateway.config._addresses import Bind, parse_bind, parse_host, parse_network, parse_origin
from trio_gateway.config._database import DatabaseUrl, parse_database_url
from trio_gateway.config._fields import (
    Duration,
    Id,
    Items,
    Many,
    Section,
    Share,
    Size,
    about,
    seconds,
    switch,
)
from trio_gateway.config._tables import check_hash
from trio_gateway.units import HOURS, GiB, KiB, MiB

MOST_PROCESSES: Final = 64


def _read_bind(value: object) -> object:
    return parse_bind(value) if isinstance(value, str) else value


def _read_database_url(value: object) -> object:
    match value:
        case str():
            return parse_database_url(value)
        case DatabaseUrl():
            return value
    raise ValueError("must be a string, in quotes")


def _read_network(value: object) -> object:
    match value:
        case str():
            return parse_network(value)
        case IPv4Network() | IPv6Network():
            return value
    raise ValueError("must be a string, in quotes")


def _check_endpoint(url: str | None) -> str | None:
    if url is not None:
        parts = urlsplit(url)
        try:
            whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            whole = False
        if not whole or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError('must be a URL such as "http://127.0.0.1:4318"')
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError(
                "must have no user info, query or fragment: put credentials into otlp_headers_file"
            )
    return url


def _list_of_one(value: object) -> object:
    """Let a single address stand for a list: an environment variable can then name it without quotes."""
    return [value] if isinstance(value, str) else value


def _read_processes(processes: object) -> object:
    """Judge both forms at once: of two that were tried in turn, each would complain for itself."""
    if processes != "auto" and not (type(processes) is int and 1 <= processes <= MOST_PROCESSES):
        raise ValueError(f'must be a number from 1 to {MOST_PROCESSES}, or "auto"')
    return processes


def _check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    if "*" in origins and len(origins) > 1:
        raise ValueError('names more origins beside "*", which already means all')
    return origins


Binds = Annotated[
    Many[Annotated[Bind, BeforeValidator(_read_bind)]],
    BeforeValidator(_list_of_one),
]

Origins = Annotated[
    Many[Annotated[str, AfterValidator(parse_origin)]],
    BeforeValidator(_list_of_one),
    AfterValidator(_check_origins),
]


Networks = Annotated[
    Many[Annotated[IPv4Network | IPv6Network, BeforeValidator(_read_network)]],
    BeforeValidator(_list_of_one),
]


class TlsSettings(Section):
    """What the public listener shows of itself, and how it proves it.

    Once loaded, both paths are absolute.
    """

    certificate: Annotated[
        str,
        about(
            "path",
            "PEM file with the certificate, and behind it those that vouch for it; read at start, at each "
            "reload and whenever it is replaced.",
        ),
    ]
    key: Annotated[str, about("path", "PEM file with its private key, not encrypted; read likewise.")]


class MutualTlsSettings(TlsSettings):
    """How the gateway and agents prove to each other who they are.

    Once loaded, all paths are absolute.
    """

    ca: Annotated[
        str,
        about(
            "path",
            "PEM file with the only authorities that may vouch for agents; read likewise.",
        ),
    ]


class ServerSettings(Section):
    """The public listener."""

    bind: Annotated[
        Binds,
        about(
            "addresses",
            'Where clients connect: "host:port", "[IPv6]:port" or "unix:path"; port 0 takes a free one, '
            "and a relative path counts from the working directory.",
            min_length=1,
        ),
    ] = (Bind("127.0.0.1", 8080),)
    tls: Annotated[
        TlsSettings | None,
        about("table", "Makes every TCP address of `bind` speak TLS, with {certificate, key}."),
    ] = None
    trusted_proxies: Annotated[
        Networks,
        about(
            "networks",
            'Where the proxies stand, such as "10.0.0.0/8", whose word on the address of a client is taken; '
            "all other connections are the client's own.",
        ),
    ] = ()
    allow_anonymous: Annotated[
        bool,
        switch(
            "Lets a gateway without [[tenants]] listen on addresses that other machines can reach, "
            "serving all."
        ),
    ] = False
    processes: Annotated[
        int | Literal["auto"],
        BeforeValidator(_read_processes),
        about(
            "processes",
            'How many processes serve clients, for one processor each; "auto": one for each processor that '
            "this one may use.",
        ),
    ] = 1
    capacity: Annotated[
        Literal["shared", "split"],
        about(
            "word",
            "Whether several processes lend each other the slots of workers, or each has its part of every "
            "worker by number.",
        ),
    ] = "shared"
    hang_limit: Annotated[
        Duration,
        about(
            "seconds",
            "How long one of several processes may do nothing at all until it is killed, and another one "
            "takes its place.",
            ge=0.5,
            le=3600,
        ),
    ] = 10.0
    expose_worker: Annotated[
        bool,
        switch(
            "Shows callers which worker served them, in answer headers and errors.", applies="new requests"
        ),
    ] = False
    cors_origins: Annotated[
        Origins,
        about(
            "origins",
            'Origins of web pages that may call the gateway from a browser, such as "https://app.example"; '
            '"*" means all, and an empty list none.',
        ),
    ] = ()


class AdminTokenSettings(Section):
    """One token of operators; only its hash is known here."""

    id: Annotated[
        Id, about("name", "Its name, under which the audit table has what was done with it.", applies="now")
    ]
    hash: Annotated[
        str,
        AfterValidator(check_hash),
        about("hash", '"sha256:" and the hexadecimal SHA-256 of the whole token.', applies="now"),
    ] = Field(repr=False)
    role: Annotated[
        Literal["viewer", "operator"],
        about("word", "What may be done with it: a viewer reads, an operator also acts.", applies="now"),
    ]

    @property
    def digest(self) -> bytes:
        """The 32 bytes of the SHA-256."""
        return bytes.fromhex(self.hash.removeprefix("sha256:"))


class AdminSettings(Section):
    """The listener of operators and metrics."""

    bind: Annotated[
        Binds,
        about(
            "addresses",
            "Where operators and Prometheus connect; without `tokens` only loopback addresses and unix "
            "sockets.",
            min_length=1,
        ),
    ] = (Bind("127.0.0.1", 9090),)
    tokens: Annotated[
        Items[AdminTokenSettings],
        about(
            "tables",
            "Who may come in, such as {id, hash, role}; with an empty list, whoever can connect is an "
            "operator.",
            applies="now",
        ),
    ] = ()
    hosts: Annotated[
        Many[Annotated[str, AfterValidator(parse_host)]],
        BeforeValidator(_list_of_one),
        about(
            "names",
            "Further names by which browsers and clients reach it, such as that of a proxy in front; "
            "addresses, localhost and the names in `bind` are known.",
        ),
    ] = ()


class InternalSettings(Section):
    """The listener where workers register themselves; there is none without `bind`.

    `join_token` is no key of the file; it holds what stood in `join_token_file`.
    """

    bind: Annotated[
        Binds,
        about(
            "addresses",
            "Where workers register and tell how they are, written as in [server]; whoever can connect there "
            "and has the join token can get requests of clients.",
        ),
    ] = ()
    tls: Annotated[
        MutualTlsSettings | None,
        about(
            "table",
            "Makes every TCP address of `bind` speak TLS and demand a certificate, with {certificate, key, "
            "ca}; agents that register must then be at https, and are shown the same certificate.",
        ),
    ] = None
    join_token_file: Annotated[
        str | None,
        about(
            "path",
            "File with the word that workers show when they register, of 16 characters or more; must be "
            "given with `bind`, and is read at start.",
        ),
    ] = None
    allowed_networks: Annotated[
        Networks,
        about(
            "networks",
            'Where the addresses of workers that register must lie, such as "10.0.0.0/8": the gateway calls '
            "no others.",
            min_length=1,
        ),
    ] = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))
    join_token: SecretStr | None = Field(default=None, exclude=True)


class LimitsSettings(Section):
    """What one client may send, and what the gateway holds for all of them."""

    connections: Annotated[
        int,
        about(
            "connections",
            "Client connections that are open at a time; further ones wait in the kernel's queue.",
            ge=1,
            le=1_000_000,
        ),
    ] = 4096
    head_bytes: Annotated[
        Size,
        about(
            "bytes",
            "Longest request head, request line included (else 431).",
            ge=256,
            le=MiB,
            applies="new requests",
        ),
    ] = 64 * KiB
    head_count: Annotated[
        int,
        about(
            "headers",
            "Most header lines in a request head (else 431).",
            ge=1,
            le=10_000,
            applies="new requests",
        ),
    ] = 100
    head_timeout: Annotated[
        Duration,
        seconds(
            "Longest time from a request's first byte, or a new connection, to its whole head (else "
            "408, or a silent close if no byte came).",
            applies="new requests",
        ),
    ] = 10.0
    body_bytes: Annotated[
        Size, about("bytes", "Largest request body (else 413).", ge=1, le=4 * GiB, applies="new requests")
    ] = 20 * MiB
    body_timeout: Annotated[
        Duration,
        seconds(
            "Longest time from a request's head to the end of its body (else 408).", applies="new requests"
        ),
    ] = 30.0
    keep_alive: Annotated[
        Duration,
        seconds("How long a connection may stay idle between two requests.", applies="new requests"),
    ] = 75.0
    unplaced_bytes: Annotated[
        Size,
        about(
            "bytes",
            "Request bodies in memory, in total, of all requests that have no worker yet.",
            ge=1,
            applies="now",
        ),
    ] = 256 * MiB
    json_values: Annotated[
        int,
        about(
            "values",
            "Most JSON values in one request body (else 400).",
            ge=1,
            le=100_000_000,
            applies="new requests",
        ),
    ] = 200_000
    event_bytes: Annotated[
        Size,
        about(
            "bytes",
            "Largest single event of an engine's stream (else the attempt fails).",
            ge=1,
            le=GiB,
            applies="new requests",
        ),
    ] = 4 * MiB
    answer_bytes: Annotated[
        Size,
        about(
            "bytes",
            "Largest buffered answer of an engine (else 502).",
            ge=1,
            le=4 * GiB,
            applies="new requests",
        ),
    ] = 64 * MiB
    gone_probe_interval: Annotated[
        Duration,
        seconds(
            "How often a client that closed its sending side is asked again whether it is still "
            "there, while nothing else is written to it.",
            applies="new requests",
        ),
    ] = 10.0


class TierSettings(Section):
    """What one tier may take."""

    max_share: Annotated[
        float,
        about(
            "ratio",
            "Largest share of a model's slots that requests of this tier may hold.",
            gt=0,
            le=1,
            applies="now",
        ),
    ] = 1.0


class TiersSettings(Section):
    """The tiers, each of them in front of the next."""

    interactive: TierSettings = TierSettings()
    standard: TierSettings = TierSettings()
    batch: TierSettings = TierSettings(max_share=0.8)


class AdmissionSettings(Section):
    """The queue of all tenants together, and how tiers stand to each other."""

    max_queued: Annotated[
        int,
        about(
            "requests",
            "Requests that wait for a worker; 0 serves at once or refuses.",
            ge=0,
            le=1_000_000,
            applies="now",
        ),
    ] = 1024
    max_queued_bytes: Annotated[
        Size, about("bytes", "Bodies of the requests that wait for a worker, in total.", ge=0, applies="now")
    ] = 128 * MiB
    max_wait: Annotated[
        Duration,
        seconds("Longest wait for a worker, retries included (then 503).", applies="new requests"),
    ] = 60.0
    promote_after: Annotated[
        Duration,
        seconds(
            "Time without a placement after which the oldest request of a tenant in a tier rises by one; "
            "the next after as long.",
            applies="now",
        ),
    ] = 30.0
    tiers: Annotated[
        TiersSettings,
        about(
            "table",
            "What a tier may take, as {batch = {max_share = 0.5}}; batch 0.8, the others all.",
            applies="now",
        ),
    ] = TiersSettings()


class DeadlinesSettings(Section):
    """How long things may take. One absolute deadline per request covers waiting, retries and streaming."""

    default: Annotated[
        Duration,
        seconds(
            "Deadline of a request when neither its header nor its tenant names one.", applies="new requests"
        ),
    ] = 600.0
    maximum: Annotated[
        Duration, seconds("Longest deadline that anybody can ask for.", applies="new requests")
    ] = 3600.0
    connect: Annotated[
        Duration,
        seconds("Longest time to a usable connection to a worker, TCP and TLS.", applies="new requests"),
    ] = 5.0
    first_token: Annotated[
        Duration,
        seconds(
            "Longest time from the sent request to the attempt's first event with content.",
            applies="new requests",
        ),
    ] = 300.0
    between_events: Annotated[
        Duration,
        seconds(
            "Longest silence of an engine within its answer; comments are no progress.",
            applies="new requests",
        ),
    ] = 120.0


class RetrySettings(Section):
    """Further attempts, made only before anything of an answer was delivered."""

    max_attempts: Annotated[
        int, about("attempts", "Attempts per request; 1 never repeats.", ge=1, le=100, applies="new requests")
    ] = 3
    budget_ratio: Annotated[
        float,
        about(
            "retries per request",
            "Share of requests that may be repeated after a failure; at least 3 a second always may, and "
            "attempts that no engine executed cost nothing.",
            ge=0,
            le=1,
            applies="now",
        ),
    ] = 0.2
    backoff: Annotated[
        Duration,
        seconds(
            "How long a worker that turned a request away without saying when to return is left "
            "alone; doubles each time, up to eight times this value.",
            applies="now",
        ),
    ] = 1.0


class BreakerSettings(Section):
    """When a worker that fails is spared for a while, separately for each model."""

    consecutive_faults: Annotated[
        int,
        about(
            "faults",
            "Failures of a worker in a row, with no output between them, after which it gets no requests.",
            ge=1,
            le=1_000_000,
        ),
    ] = 5
    fault_ratio: Annotated[
        float,
        about(
            "faults per request",
            "Share of failures among the latest requests, of ten at least, from which on a worker gets none.",
            gt=0,
            le=1,
        ),
    ] = 0.5
    window: Annotated[Duration, seconds("How far back requests count for `fault_ratio`.")] = 30.0
    cooldown: Annotated[
        Duration,
        seconds("How long a worker gets no requests, before a probe and then a single request try it again."),
    ] = 10.0


class ProbesSettings(Section):
    """How the gateway finds out whether workers are alive, without work for their engines."""

    interval: Annotated[
        Duration,
        seconds(
            "Time from one probe of a worker to the next; 0 makes none, and all count as healthy.", zero=True
        ),
    ] = 5.0
    timeout: Annotated[Duration, seconds("Longest time for the answer to a probe, else it failed.")] = 2.0
    failures: Annotated[
        int,
        about(
            "probes",
            "Failed probes in a row after which a worker gets no requests; those that run there go on.",
            ge=1,
            le=1000,
        ),
    ] = 3
    successes: Annotated[
        int,
        about("probes", "Good probes in a row after which such a worker gets requests again.", ge=1, le=1000),
    ] = 1


class FleetSettings(Section):
    """All workers together: how one is chosen, and how those that register are kept."""

    share: Annotated[
        Share,
        about(
            "fraction",
            'The part of each worker\'s slots that this process uses, at least one: "1/4" for each of four '
            "gateways before the same workers.",
        ),
    ] = Fraction(1)
    affinity: Annotated[
        Literal["prefix", "session", "none"],
        about(
            "word",
            "What brings requests back to a worker that may have their beginning in its cache: the beginning "
            "itself or X-Gateway-Session, only X-Gateway-Session, or nothing.",
        ),
    ] = "prefix"
    heartbeat_interval: Annotated[
        Duration,
        about(
            "seconds",
            "How often a worker that registered is told to tell how it is.",
            gt=0,
            le=HOURS,  # the most that the worker protocol can say
        ),
    ] = 1.0
    ttl: Annotated[
        Duration,
        seconds("A worker that registered and tells nothing for this long is gone; more than two intervals."),
    ] = 5.0
    dns_interval: Annotated[
        Duration, seconds("How often the names of workers with `dns = true` are resolved again.")
    ] = 10.0


class DeliverySettings(Section):
    """What the gateway holds for clients that read slowly, and when it stops waiting for them."""

    buffer_bytes: Annotated[
        Size,
        about(
            "bytes",
            "Answer bytes that wait for one client before the engine is read no further.",
            ge=1,
            le=GiB,
            applies="new requests",
        ),
    ] = 256 * KiB
    total_buffer_bytes: Annotated[
        Size,
        about(
            "bytes",
            "Answer bytes that wait for all clients together, buffered answers included.",
            ge=1,
            applies="now",
        ),
    ] = 256 * MiB
    upstream_receive_buffer: Annotated[
        Size,
        about(
            "bytes",
            "Receive buffer of a connection to an engine, set before it connects; the kernel may round it.",
            ge=2 * KiB,
            le=16 * MiB,
            applies="new requests",
        ),
    ] = 16 * KiB
    stall_timeout: Annotated[
        Duration,
        seconds(
            "A client that takes no byte for this long while bytes wait for it is cut off.",
            applies="new requests",
        ),
    ] = 30.0
    max_lag: Annotated[
        Duration,
        seconds("A client whose oldest waiting event is older than this is cut off.", applies="new requests"),
    ] = 120.0
    resume_window: Annotated[
        Duration,
        seconds(
            "How long a resumable answer waits for its client after a lost connection, and is kept "
            "after its end.",
            applies="new requests",
        ),
    ] = 30.0
    merge_deltas: Annotated[
        bool,
        switch(
            "Joins the deltas of a chat or completion that wait for a slow client into fewer, larger ones; "
            "never those of a stream with a receipt.",
            applies="new requests",
        ),
    ] = False


class StreamSettings(Section):
    """The shape of streamed answers."""

    heartbeat_after: Annotated[
        Duration,
        seconds(
            "Silence after which a streamed answer sends its headers and a comment, again and again; "
            "0 never does.",
            zero=True,
            applies="new requests",
        ),
    ] = 10.0
    heartbeat_while_queued: Annotated[
        bool,
        switch(
            "Sends headers and heartbeats also during the first wait in the queue.", applies="new requests"
        ),
    ] = False
    error_style: Annotated[
        Literal["event", "finish_reason"],
        about(
            "word",
            "How a failure ends a stream: by an error event, or also by a chunk with the finish_reason "
            '"error" before it, for clients that look only there.',
            applies="new requests",
        ),
    ] = "event"
    receipt: Annotated[
        bool,
        switch(
            "Puts a comment before the end of every stream, with the SHA-256 over its events and their "
            "number, also for callers that do not ask for it with X-Gateway-Receipt.",
            applies="new requests",
        ),
    ] = False


class WebSocketSettings(Section):
    """Bounds of one WebSocket, and how it is found out that nobody is there any more."""

    max_message_bytes: Annotated[
        Size,
        about(
            "bytes",
            "One message of a client, its fragments together.",
            ge=KiB,
            le=GiB,
            applies="new requests",
        ),
    ] = 4 * MiB
    ping_interval: Annotated[Duration, seconds("Time between two pings.", applies="new requests")] = 20.0
    ping_timeout: Annotated[
        Duration,
        seconds(
            "A ping that the client's machine received and that is not answered for this long ends it.",
            applies="new requests",
        ),
    ] = 20.0
    auth_timeout: Annotated[
        Duration,
        seconds("Time for the first message of a client that showed no key before.", applies="new requests"),
    ] = 10.0
    max_streams: Annotated[
        int, about("count", "Generations at a time on one socket.", ge=1, le=1024, applies="new requests")
    ] = 32


class ShutdownSettings(Section):
    """What happens between the first signal and the end of the process."""

    readiness_delay: Annotated[
        Duration,
        seconds("How long new work is still served after /readyz began to fail.", zero=True, applies="now"),
    ] = 5.0
    grace: Annotated[
        Duration, seconds("How long running requests may continue after that.", zero=True, applies="now")
    ] = 30.0
    hard_limit: Annotated[
        Duration,
        seconds("The process has ended this long after the signal, whatever hangs.", applies="now"),
    ] = 60.0


class DatabaseSettings(Section):
    """Where records are kept, and tenants that can change at any time; without `url` records are logged."""

    url: Annotated[
        Annotated[DatabaseUrl, BeforeValidator(_read_database_url)] | None,
        about(
            "URL",
            'The database: "sqlite:///gateway.db", where a relative path counts from the file\'s folder, or '
            '"postgresql+psycopg://user@host/name", which several gateways can share.',
        ),
    ] = None
    journal: Annotated[
        str,
        about(
            "path",
            "Folder of this gateway alone, on a local disk, from which records get into the database.",
            min_length=1,
        ),
    ] = "journal"
    journal_bytes: Annotated[
        Size,
        about(
            "bytes",
            "The most that may wait there while the database is away; then new requests are refused with "
            "503 `records_unavailable`.",
            ge=MiB,
        ),
    ] = GiB
    sync_interval: Annotated[
        Duration,
        seconds("How often the disk confirms the journal: the most that a loss of power can take."),
    ] = 1.0
    retention_days: Annotated[
        int,
        about(
            "days",
            "Records of requests that came longer ago are deleted from the database; 0 keeps all.",
            ge=0,
            le=36_500,
        ),
    ] = 0
    gateway_id: Annotated[
        Id | None,
        about(
            "name",
            "Name of this gateway in the database, the same after each start and no other's; without it, the "
            "journal holds one that was drawn once.",
        ),
    ] = None


class LogSettings(Section):
    """What the gateway writes about itself and its requests."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        about("word", "The least severe message that is written.", applies="now"),
    ] = "info"
    format: Annotated[
        Literal["json", "console"], about("word", "One JSON object a line, or lines for people.")
    ] = "json"


class TelemetrySettings(Section):
    """What the gateway tells OpenTelemetry, and when it complains of itself.

    `otlp_headers` is no key of the file; it holds what stood in `otlp_headers_file`.
    """

    otlp_endpoint: Annotated[
        str | None,
        AfterValidator(_check_endpoint),
        about(
            "URL",
            'Base URL of a collector that takes OTLP over HTTP, such as "http://127.0.0.1:4318"; traces go '
            "to `/v1/traces` below it, metrics to `/v1/metrics`; none: nothing is sent.",
        ),
    ] = None
    otlp_headers_file: Annotated[
        str | None,
        about(
            "path",
            'File with header lines that the collector wants, such as "authorization: Bearer ..."; read at '
            "start.",
        ),
    ] = None
    sample_ratio: Annotated[
        float,
        about(
            "ratio",
            "Share of the exchanges that leave a trace, where the caller brought none; a caller's own trace "
            "is sampled if the caller says so.",
            ge=0,
            le=1,
        ),
    ] = 1.0
    export_interval: Annotated[
        Duration, about("seconds", "Time between two sendings of metrics.", ge=1, le=HOURS)
    ] = 15.0
    service_name: Annotated[Id, about("name", "Name of this service in traces and metrics.")] = "trio-gateway"
    stall_limit: Annotated[
        Duration,
        seconds(
            "Time without the event loop after which a log line tells where it hangs; 0 tells nothing.",
            zero=True,
        ),
    ] = 0.25
    flights: Annotated[
        int,
        about(
            "exchanges",
            "How many that completed, and how many that did not, are kept after their end with the times and "
            "sizes of what moved; 0: none, and nothing of that is recorded.",
            ge=0,
            le=100_000,
        ),
    ] = 256
    otlp_headers: tuple[tuple[str, SecretStr], ...] = Field(default=(), exclude=True)
