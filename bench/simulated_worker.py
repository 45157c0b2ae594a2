"""A worker whose engine has more room than its agent gives away, and that tells what the engine saw.

It is ``trio-gateway worker --engine simulated`` but for two things. The engine could run
`ENGINE_SLOTS` requests and would not queue what is too much: how many ran at a time
is the agent's doing alone. And whoever connects to ``<accounts>/<id>.sock`` is told the
engine's account, as one JSON object; `read_account` does that.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from typing import Any, Final

import trio

from trio_gateway.agent import Agent, AgentSettings
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
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(accounts / f"{worker_id}.sock"))
        with sock.makefile("rb") as told:
            account: dict[str, Any] = json.load(told)
    return account


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


async def _tell(listener: trio.socket.SocketType, engine: SimulatedEngine, agent: Agent) -> None:
    while True:
        connection, _ = await listener.accept()
        with connection:
            await connection.send(json.dumps(_account(engine, agent)).encode())


async def _run(given: argparse.Namespace, log: Log) -> None:
    limits = Limits(slots=ENGINE_SLOTS, blocks=given.blocks, context=given.context)
    speed = Speed(given.prefill, given.decode, given.crowding)
    engine = SimulatedEngine((MODEL,), limits=limits, speed=speed)
    settings = AgentSettings(
        worker_id=given.id,
        gateways=tuple(given.gateway),
        join_token=read_secret(given.join_token_file),
        slots=given.slots,
    )
    settings.check()
    agent = Agent(settings, engine, log.write)
    with trio.socket.socket(trio.socket.AF_UNIX) as listener:
        await listener.bind(str(given.accounts / f"{given.id}.sock"))
        listener.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_tell, listener, engine, agent)
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
