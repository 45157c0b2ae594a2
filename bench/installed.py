"""Peers from the package registries, each in an environment of its own below ``.venv/peers``.

``python -m bench.installed`` installs all of them; a scenario installs those that it needs and misses.
What is there already in the version of the table is left as it is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from .processes import BenchError

PEERS: Final = Path(__file__).parent.parent / ".venv" / "peers"  # where no check of our own code looks
PATIENCE_S: Final = 900  # for one installation
TOLD: Final = 600  # bytes of what an installer that failed said last


@dataclass(frozen=True)
class Package:
    """What one peer is installed from.

    Attributes:
        registry: whose client fetches it: pip into a virtual environment, npm below a prefix.
        requirement: in that client's words, with the version that is measured.
        program: what is run, from the environment's folder.
        overrides: versions of what it depends on, where the newest does not work with it.
    """

    registry: Literal["pypi", "npm"]
    requirement: str
    program: str
    overrides: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return self.requirement.rpartition("==" if self.registry == "pypi" else "@")[2]


TABLE: Final = {
    "smg": Package("pypi", "smg==1.13.0", "bin/smg"),
    "vllm-router": Package("pypi", "vllm-router==0.1.17", "bin/vllm-router"),
    "litellm": Package("pypi", "litellm[proxy]==1.108.7", "bin/litellm"),
    "portkey": Package(
        "npm",
        "@portkey-ai/gateway@1.15.2",
        "node_modules/@portkey-ai/gateway/build/start-server.js",
        # Later ones hand the engine's own headers on, which can not be written to: every stream is a 500.
        {"@hono/node-server": "1.3.3"},
    ),
}


def program(name: str) -> Path:
    """Answer the path of a peer's program, installing it first if it is not there in its version.

    Raises:
        BenchError: it can not be installed here; says why.
    """
    package, folder = TABLE[name], PEERS / name
    stamp = folder / "installed"
    if not (stamp.exists() and stamp.read_text() == str(package)):
        install(package, folder)
        stamp.write_text(str(package))
    return folder / package.program


def install(package: Package, folder: Path) -> None:
    """Install a package into a folder, in the place of what was there.

    Raises:
        BenchError: it can not be installed here; says why.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if package.registry == "pypi":
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        _run([*pip, "install", "--quiet", package.requirement])
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise BenchError(f"{package.requirement} needs npm: apt-get install npm")
        folder.mkdir(parents=True)
        (folder / "package.json").write_text(json.dumps({"overrides": package.overrides}))
        _run([npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), package.requirement])
    if not (folder / package.program).exists():
        raise BenchError(f"{package.requirement} has no {package.program}")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise BenchError(f"not installed after {PATIENCE_S} s: {' '.join(command[-2:])}") from None
    if done.returncode:
        raise BenchError(f"can not be installed: {command[-1]}: {done.stderr.strip()[-TOLD:]}")


def main() -> int:
    """Install every peer; answer how many could not be."""
    failed = 0
    for name, package in TABLE.items():
        try:
            print(f"{package.requirement}: {program(name)}", flush=True)
        except BenchError as error:
            failed += 1
            print(f"{package.requirement}: {error}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
