"""What one gateway and several processes that are one do alike: name their version, reload at a signal."""

from __future__ import annotations

import platform
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, Protocol

import trio

from .. import __version__
from ..admin import Action, Actor, ActResult, Row
from ..errors import Refused
from ..telemetry import Log


class Acts(Protocol):
    """Who carries out what operators want; see AdminPort."""

    def act(
        self, actor: Actor, action: Action, target: str | None, arguments: Mapping[str, Any]
    ) -> Awaitable[ActResult]:
        """See AdminPort."""


def version_of(boot_id: str, started: float) -> Row:
    """Tell which gateway this is, as AdminPort's ``version`` does; ``started``: Trio clock, seconds."""
    return {
        "version": __version__,
        "boot_id": boot_id,
        "python": platform.python_version(),
        "trio": trio.__version__,
        "uptime": round(trio.current_time() - started, 3),
    }


async def reload_at_signals(signals: AsyncIterator[int], operations: Acts, log: Log) -> None:
    """Read the configuration again at each SIGHUP, for ever, and log what came of it."""
    actor = Actor("SIGHUP", "operator", "signal")
    async for _ in signals:
        try:
            result = await operations.act(actor, "reload", None, {})
        except Refused as refused:
            log.write("error", "reload_refused", reason=refused.problem.message)
        else:
            told = result.after
            log.write(
                "info",
                "reloaded",
                applied=told["applied"],
                new_requests=told["new_requests"],
                restart=told["restart"],
                dropped=told["live_values_dropped"],
            )
