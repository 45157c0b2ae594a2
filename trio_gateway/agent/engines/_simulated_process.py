"""The simulated engine as a process of its own: an address, a line that tells it, and an end on a signal."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from ._simulated_dialects import MANNERS
from ._simulated_engine import SimulatedEngine
from ._simulated_generation import Limits, Speed
from ._simulated_http import SimulatedServer

_SIZE: Final = Limits()
_PACE: Final = Speed()


@dataclass(frozen=True, slots=True)
class SimulatedSettings:
    """What the command ``simulate`` is told.

    Attributes:
        kind: how it speaks; a key of `MANNERS`.
        bind: ``host:port``; port 0 takes a free one.
        models, seed, metrics: see `SimulatedEngine` and `SimulatedServer`.
        slots, blocks, context: see `Limits`.
        max_queued: see `Limits`; None: what is usual for the kind.
        prefill, decode, load: see `Speed`; ``speed`` multiplies them.
    """

    kind: str = "vllm"
    bind: str = "127.0.0.1:0"
    models: tuple[str, ...] = ("simulated",)
    slots: int = _SIZE.slots
    blocks: int = _SIZE.blocks
    context: int = _SIZE.context
    max_queued: int | None = None
    prefill: float = _PACE.prefill
    decode: float = _PACE.decode
    load: float = _PACE.load
    speed: float = 1.0
    seed: int = 0
    metrics: bool = False

    def engine(self) -> SimulatedEngine:
        """Make the engine.

        Raises:
            ValueError: a setting has no meaning; the text says which.
        """
        manner = MANNERS.get(self.kind)
        if manner is None:
            raise ValueError(f"no kind {self.kind}: there are {', '.join(MANNERS)}")
        if not self.bind.rpartition(":")[2].isdigit() or not self.speed > 0:
            raise ValueError("bind must be host:port, and speed positive")
        limits = Limits(
            slots=self.slots,
            blocks=self.blocks,
            context=self.context,
            max_queued=manner.max_queued if self.max_queued is None else self.max_queued,
            together=manner.together,
        )
        pace = Speed(prefill=self.prefill, decode=self.decode, load=self.load).times(self.speed)
        return SimulatedEngine(self.models, limits=limits, speed=pace, seed=self.seed)


async def serve_simulated(
    settings: SimulatedSettings, engine: SimulatedEngine, announce: Callable[[str], None]
) -> None:
    """Serve an engine over HTTP until SIGTERM or SIGINT, which end everything at once.

    Args:
        engine: that `settings` made.
        announce: gets one line of JSON when the address is there.

    Raises:
        OSError: the address can not be had.
    """
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            nursery.start_soon(_serve, settings, engine, announce)
            async for _ in signals:
                break
            nursery.cancel_scope.cancel()


async def _serve(
    settings: SimulatedSettings, engine: SimulatedEngine, announce: Callable[[str], None]
) -> None:
    server = SimulatedServer(engine, settings.kind, metrics=settings.metrics)
    await server.wait_answering()
    host, _, port = settings.bind.rpartition(":")
    try:
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]") or None)
    except OSError as exc:
        raise OSError(
            exc.errno, exc.strerror, settings.bind
        ) from exc  # the system's own words name no address
    announce(json.dumps({"event": "listening", "kind": settings.kind, "url": _url(listeners[0])}))
    await server.serve(listeners)


def _url(listener: trio.SocketListener) -> str:
    host, port = listener.socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
