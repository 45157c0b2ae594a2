"""A worker whose engine has more room than its agent gives away, and that tells what the engine saw.

It is ``trio-gateway worker --engine simulated`` but for two things. The engine could run
`ENGINE_SLOTS` requests and would not queue what is too much: how many ran at a time
is the agent's doing alone. And whoever connects to ``<accounts>/<id>.sock`` is told the
engine's account, as one JSON object, and at ``<accounts>/<id>.log.sock`` how many tokens it
has made for each attempt; `read_account` and `read_attempts` do that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import trio

from trio_gateway.agent import Agent, AgentSettings, EngineStatus, EngineStream, Work
from trio_gateway.agent.engines import Limits, SimulatedEngine, Speed, read_secret
from trio_gateway.telemetry import Log

from .fleet import MODEL

ENGINE_SLOTS: Final = 64
PATIENCE_S: Final = 5.0


def command(
    accounts: Path,
    *,
    prefill: float,
    decode: float,
    crowding: float = 0.01,
    blocks: int = 4096,
    context: int = 8192,
) -> list[str]:
    """Answer the command of such a worker, for `fleet.fleet`.

    Args:
        accounts: folder for the sockets.
        prefill, decode: tokens of prompts a second, and of the answer of a request that runs alone.
        crowding: share by which each further request slows all of them.
        blocks: of KV memory, and ``context`` tokens of one request, which they must hold.
    """
    program = [sys.executable, "-m", "bench.simulated_worker"]
    speed = ["--prefill", str(prefill), "--decode", str(decode), "--crowding", str(crowding)]
    size = ["--blocks", str(blocks), "--context", str(context)]
    return [*program, "--accounts", str(accounts), *speed, *size]


def read_account(accounts: Path, worker_id: str) -> dict[str, Any]:
    """Answer what a worker's engine saw so far, and what its agent holds."""
    return _read(accounts / f"{worker_id}.sock")


def read_attempts(accounts: Path, worker_id: str) -> dict[str, int]:
    """Answer how many tokens a worker's engine has made for each attempt, by the attempt's id."""
    return _read(accounts / f"{worker_id}.log.sock")


def _read(path: Path) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(path))
        with sock.makefile("rb") as told:
            account: dict[str, Any] = json.load(told)
    return account


class CountingEngine:
    """A simulated engine whose attempts are remembered; see AgentEngine.

    Attributes:
        attempts: what it has of each, by the attempt's id.
    """

    kind: Final = SimulatedEngine.kind
    version: Final = SimulatedEngine.version
    can_pause: Final = True

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self.attempts: dict[str, EngineStream] = {}

    async def run(  # noqa: ASYNC128 - the engine it stands for tells when it is started
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """See AgentEngine."""
        await self._engine.run(task_status=task_status)

    def status(self) -> EngineStatus:
        """See AgentEngine."""
        return self._engine.status()

    async def open(self, work: Work) -> EngineStream:
        """See AgentEngine."""
        stream = await self._engine.open(work)
        self.attempts[f"{work.request_id}-{work.attempt:02d}"] = stream
        return stream


def _account(engine: SimulatedEngine, agent: Agent) -> dict[str, Any]:
    core = engine.core
    return {
        "running": core.running,
        "waiting": core.waiting,
        "open": len(core.generations),
        "high_water": core.high_water,
        "arrived": core.arrived,
        "refused": core.refused,
        "released": sum(core.outcomes.values()),
        "outcomes": dict(core.outcomes),
        "prompt_tokens": core.prompt_tokens,
        "generated_tokens": core.generated_tokens,
        "cached_tokens": core.memory.hits * core.memory.block_tokens,
        "held": len(agent.slots),
    }


async def _tell(path: Path, account: Callable[[], dict[str, Any]]) -> None:
    """Tell an account to whoever connects."""
    with trio.socket.socket(trio.socket.AF_UNIX) as listener:
        await listener.bind(str(path))
        listener.listen()
        while True:
            connection, _ = await listener.accept()
            async with trio.SocketStream(connection) as stream:
                with contextlib.suppress(trio.BrokenResourceError):
                    await stream.send_all(json.dumps(account()).encode())


async def _run(given: argparse.Namespace, log: Log) -> None:
    limits = Limits(slots=ENGINE_SLOTS, blocks=given.blocks, context=given.context)
    speed = Speed(given.prefill, given.decode, given.crowding)
    engine = SimulatedEngine((MODEL,), limits=limits, speed=speed)
    counting = CountingEngine(engine)
    settings = AgentSettings(
        worker_id=given.id,
        gateways=tuple(given.gateway),
        join_token=read_secret(given.join_token_file),
        slots=given.slots,
    )
    settings.check()
    agent = Agent(settings, counting, log.write)

    def attempts() -> dict[str, Any]:
        return {name: stream.generated for name, stream in counting.attempts.items()}

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tell, given.accounts / f"{given.id}.sock", lambda: _account(engine, agent))
        nursery.start_soon(_tell, given.accounts / f"{given.id}.log.sock", attempts)
        await agent.run_until_signalled()
        nursery.cancel_scope.cancel(reason="the agent has ended")


def _main() -> None:
    parser = argparse.ArgumentParser(prog="bench.simulated_worker")
    parser.add_argument("--id", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--gateway", action="append", required=True)
    parser.add_argument("--join-token-file", type=Path, required=True)
    parser.add_argument("--accounts", type=Path, required=True)
    parser.add_argument("--prefill", type=float, required=True)
    parser.add_argument("--decode", type=float, required=True)
    parser.add_argument("--crowding", type=float, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    log = Log(sys.stdout)
    try:
        trio.run(_run, parser.parse_args(), log)
    finally:
        log.close()


if __name__ == "__main__":
    _main()
