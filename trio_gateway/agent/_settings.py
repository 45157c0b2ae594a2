"""What an operator says to an agent. Durations are seconds, sizes bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..units import KiB, MiB


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """See `trio-gateway worker --help`, which has the same words.

    Attributes:
        worker_id: under which the worker is known to its gateways.
        bind: ``host:port`` to listen on; port 0 is a free one.
        url: where gateways reach this agent; None: where it listens.
        gateways: base URLs of the internal listeners of gateways; none for a static worker.
        join_token: shows gateways that this agent may register.
        certificate, key: paths of what is shown to gateways, by the listener and when calling them, over
            TLS; None: the listener speaks clear text.
        ca: path of the authorities that vouch for gateways: with a certificate, nobody else may connect;
            None: whoever has the secret may, and gateways at https are believed as the system does.
        secret: what gateways that know this worker from their file send with every call.
        slots: requests at a time; None: what the engine says, or 1.
        buffer_bytes: bound of what one request's reader has not taken yet, and of all together.
        stall_timeout: until a reader that takes nothing has its request cancelled, where the engine
            can not be paused.
        ping_interval: silence in an answer after which a ping is written.
        release_patience: the end of an answer waits so long for the engine to let go.
        grace: what runs may finish, after SIGTERM.
    """

    worker_id: str
    bind: str = "127.0.0.1:0"
    url: str | None = None
    gateways: tuple[str, ...] = ()
    join_token: str | None = None
    secret: str | None = None
    certificate: str | None = None
    key: str | None = None
    ca: str | None = None
    slots: int | None = None
    labels: tuple[str, ...] = ()
    buffer_bytes: int = 256 * KiB
    total_buffer_bytes: int = 256 * MiB
    body_bytes: int = 64 * MiB
    stall_timeout: float = 30.0
    ping_interval: float = 5.0
    release_patience: float = 1.0
    grace: float = 30.0

    def check(self) -> None:
        """See that gateways can know this worker.

        Raises:
            ValueError: they can not; the text says why.
        """
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", self.worker_id):
            raise ValueError("an id has 1 to 128 letters, digits, dots, dashes and underscores")
        if not re.fullmatch(r".*:[0-9]{1,5}", self.bind):
            raise ValueError("bind must be host:port")
        if self.gateways and self.join_token is None:
            raise ValueError("registering needs a join token")
        if not self.gateways and self.secret is None:
            raise ValueError("name a gateway to register with, or the secret of those that know this worker")
        if (self.certificate is None) is not (self.key is None):
            raise ValueError("a certificate and its key are given together")
        for gateway in self.gateways:
            if not re.fullmatch(r"https?://[A-Za-z0-9.\[\]:_-]+/?", gateway):
                raise ValueError(f"{gateway} is no URL of a gateway")
