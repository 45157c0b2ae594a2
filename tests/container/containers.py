"""Containers of the image, run by `runc` as strictly as any engine can.

The root file system is read-only and nothing else is writable but what is mounted; there are no
capabilities and no way to get any. The network is this machine's, for its loopback.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from tests.container.image import Image
from tests.e2e.process import START_LIMIT, GatewayProcess

CONFIG: Final = "/etc/trio-gateway/gateway.toml"
NAMESPACES: Final = ("pid", "ipc", "uts", "mount")
SETS: Final = ("bounding", "effective", "inheritable", "permitted", "ambient")


@dataclass(frozen=True)
class Mount:
    """A file or folder of this machine, and where a container finds it."""

    source: Path
    at: str
    writable: bool = False


class Containers:
    """What runs containers of one image.

    Args:
        folder: for bundles and state.
    """

    def __init__(self, image: Image, folder: Path) -> None:
        self.image: Final = image
        self._folder = folder
        self._count = 0

    def runc(self, *words: str) -> list[str]:
        """Answer a command of the runtime."""
        return ["runc", "--root", str(self._folder / "runc"), *words]

    def command(self, name: str, arguments: list[str], mounts: tuple[Mount, ...]) -> list[str]:
        """Write a bundle; answer the command that runs it."""
        bundle = self._folder / name
        bundle.mkdir()
        text = json.dumps(self._bundle(arguments, mounts))
        (bundle / "config.json").write_text(text)
        return self.runc("run", "--bundle", str(bundle), name)

    def new_name(self) -> str:
        self._count += 1
        return f"trio-gateway-test-{self._folder.name[-20:]}-{self._count}"

    async def run(
        self, *arguments: str, mounts: tuple[Mount, ...] = (), entrypoint: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a container to its end."""
        first = self.image.config["Entrypoint"] if entrypoint else []
        command = self.command(self.new_name(), [*first, *arguments], mounts)
        return await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)

    @asynccontextmanager
    async def running(
        self, *arguments: str, mounts: tuple[Mount, ...] = ()
    ) -> AsyncIterator[RunningContainer]:
        """Run a container for the length of the block, which the container may end itself.

        Without arguments it runs the command of the image.
        """
        name = self.new_name()
        config = self.image.config
        words = [*config["Entrypoint"], *(arguments or config["Cmd"])]
        process = await trio.lowlevel.open_process(self.command(name, words, mounts), stdout=subprocess.PIPE)
        container = RunningContainer(process, self, name)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(container.read_log)
                with trio.fail_after(START_LIMIT):
                    await container.logged("listening")
                yield container
                await container.remove()
        finally:
            with trio.move_on_after(10, shield=True):
                await container.remove()
                await process.wait()

    def _bundle(self, arguments: list[str], mounts: tuple[Mount, ...]) -> dict[str, Any]:
        user, _, group = self.image.config["User"].partition(":")
        process: Mapping[str, Any] = {
            "user": {"uid": int(user), "gid": int(group)},
            "args": arguments,
            "env": self.image.config["Env"],
            "cwd": self.image.config["WorkingDir"] or "/",
            "capabilities": {name: [] for name in SETS},
            "noNewPrivileges": True,
        }
        inside = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["ro", "nosuid", "mode=755"],
            },
        ]
        for each in mounts:
            options = ["rbind", "rw" if each.writable else "ro"]
            inside.append(
                {"destination": each.at, "type": "bind", "source": str(each.source), "options": options}
            )
        return {
            "ociVersion": "1.0.2",
            "process": process,
            "root": {"path": str(self.image.root), "readonly": True},
            "mounts": inside,
            "linux": {"namespaces": [{"type": name} for name in NAMESPACES]},
        }


def _mount(kind: str, at: str, source: str = "none", *options: str) -> dict[str, Any]:
    return {"type": kind, "destination": at, "source": source, "options": options}


class RunningContainer(GatewayProcess):
    """A container whose command logs, as that of a gateway or of an engine."""

    def __init__(self, process: trio.Process, containers: Containers, name: str) -> None:
        super().__init__(process)
        self._containers = containers
        self._name = name

    async def exec(
        self, *command: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run another command in it, with the variables of its image."""
        variables = [*self._containers.image.config["Env"]]
        variables += [f"{name}={value}" for name, value in (environment or {}).items()]
        words = [word for each in variables for word in ("--env", each)]
        return await trio.run_process(
            self._containers.runc("exec", *words, self._name, *command),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )

    async def stop(self) -> None:
        """Send its first process the signal that the image names."""
        signal = self._containers.image.config["StopSignal"]
        await trio.run_process(self._containers.runc("kill", self._name, signal))

    async def remove(self) -> None:
        """Remove it, however it is."""
        command = self._containers.runc("delete", "--force", self._name)
        await trio.run_process(command, check=False, stderr=subprocess.DEVNULL)
