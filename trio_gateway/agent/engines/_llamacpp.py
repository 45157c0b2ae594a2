"""llama.cpp itself (the extra ``local``): its own HTTP server as a child, which ends with the agent."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Final, final

import trio

from .._engine import EngineStatus, EngineStream, Rejected, Work
from ._openai import OpenAIEngine

_LONGEST_LINE: Final = 4096


class EngineEnded(Exception):
    """The child process ended, or did not start; an agent without an engine ends, too."""


@final
class LlamaCppEngine:
    """See the module and AgentEngine.

    Args:
        model_file: a GGUF file.
        name: under which the model is served.
        context: tokens of context of each slot.

    Raises:
        ValueError: the file is missing, or the extra is not installed.
    """

    kind: Final = "llamacpp"
    can_pause: Final = False

    def __init__(self, model_file: Path, *, name: str, slots: int, context: int) -> None:
        if importlib.util.find_spec("xllamacpp") is None:
            raise ValueError("the engine llamacpp needs the extra: pip install 'trio-gateway[local]'")
        if not model_file.is_file():
            raise ValueError(f"there is no model file {model_file}")
        self.version: Final = importlib.metadata.version("xllamacpp")
        self._name = name
        self._slots = slots
        module = "trio_gateway.agent.engines._llamacpp_server"
        self._command = [sys.executable, "-m", module, "--model", str(model_file), "--alias", name]
        self._command += ["--slots", str(slots), "--context", str(context)]
        self._server: OpenAIEngine | None = None
        self.pid = 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See AgentEngine.

        Raises:
            EngineEnded: the child process ended by itself.
        """
        # A session of its own: Ctrl-C at a terminal is for the agent, which lets what runs finish.
        process = await trio.lowlevel.open_process(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.pid = process.pid
        task_status.started()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._wait_for_end, process)
                server = OpenAIEngine(
                    await _url_of(process), "llamacpp", models=(self._name,), slots=self._slots
                )
                await nursery.start(server.run)
                self._server = server
        finally:
            self._server = None
            process.kill()  # nothing in it needs saving
            with trio.move_on_after(2, shield=True):
                await process.wait()

    async def _wait_for_end(self, process: trio.Process) -> None:
        raise EngineEnded(f"llama.cpp ended with status {await process.wait()}")

    def status(self) -> EngineStatus:
        """See AgentEngine."""
        if self._server is None:
            return EngineStatus(ready=False, models=(), slots=self._slots, running=0, queued=0)
        return self._server.status()

    async def open(self, work: Work) -> EngineStream:
        """See AgentEngine."""
        if self._server is None:
            await trio.lowlevel.checkpoint()
            raise Rejected("engine_unready")
        return await self._server.open(work)


async def _url_of(process: trio.Process) -> str:
    """Read the line that the child prints when it serves."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
        data = await process.stdout.receive_some(_LONGEST_LINE)
        if not data:
            await trio.sleep_forever()  # it has ended, which another task tells
        line += data
    return str(json.loads(line)["url"])
