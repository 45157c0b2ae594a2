"""The image, built by the words of the Makefile, on a base that is made of Debian's packages.

No image registry is needed: `debootstrap` makes the base from the mirror that this machine's apt
uses, and the pinned packages are fetched beforehand as this machine's pip is configured. The build
itself then needs no network, and nothing of the machine gets into the image. `buildah` works without
a daemon, and with ``chroot`` for isolation and ``vfs`` for storage wherever there is root.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
NEEDED: Final = ("buildah", "debootstrap", "runc", "make")
ASKED: Final = "TRIO_GATEWAY_CONTAINER"
BASE: Final = "localhost/debian-python:test"
NAME: Final = "localhost/trio-gateway:test"
PACKAGES: Final = ("python3", "python3-venv", "python-is-python3", "ca-certificates")
PINS: Final = ("build.txt", "runtime.txt", "sbom.txt")


def missing() -> str | None:
    """Say why no image can be built here; None: it can."""
    if ASKED not in os.environ:
        return "takes minutes and gigabytes: say `make container`"
    if os.geteuid() != 0:
        return "needs root"
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"needs {', '.join(absent)} (on Debian: apt-get install buildah debootstrap runc)"
    return None if mirror() is not None else "needs a machine whose packages come from a Debian mirror"


def mirror() -> str | None:
    """Where this machine gets the packages of its own release; None: nowhere."""
    wanted = [
        "apt-get",
        "indextargets",
        "--format",
        "$(CODENAME) $(COMPONENT) $(REPO_URI)",
        "Created-By: Packages",
    ]
    try:
        told = subprocess.run(wanted, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    rows = [line.split() for line in told.splitlines()]
    return next((row[2] for row in rows if row[:2] == [_release(), "main"]), None)


def _release() -> str:
    facts = dict(line.partition("=")[::2] for line in Path("/etc/os-release").read_text().splitlines())
    return facts.get("VERSION_CODENAME", "").strip('"')


@dataclass(frozen=True)
class Image:
    """A built image.

    Attributes:
        base: the file system of what it was built on.
        files: its own, which nobody runs.
        root: the same once more, to run.
        config: as an engine reads it: user, entrypoint, health check and so on.
        layers: bytes of each, the base's first.
    """

    builder: Builder
    base: Path
    files: Path
    root: Path
    config: dict[str, Any]
    layers: tuple[int, ...]


class Builder:
    """`buildah` with a storage of its own.

    Args:
        folder: for everything; takes some gigabytes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        storage = folder / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{folder / "graph"}"\nrunroot = "{folder / "run"}"\n'
        )
        # An outer make must not hand its own words on to the inner one.
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        self._environment = kept | {"CONTAINERS_STORAGE_CONF": str(storage), "BUILDAH_ISOLATION": "chroot"}

    def run(self, *command: str) -> str:
        """Run a command to its end; answers what it printed.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=self._environment, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def make(self, word: str, **settings: str) -> None:
        """Say a word of the Makefile that builds."""
        python = self._python_of_base()
        wheels = self.folder / "wheels"
        if not wheels.exists():
            self._fetch(wheels, python)
        offline = self.folder / "pip.conf"
        offline.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        volumes = f"--volume {wheels}:/wheels:ro --volume {offline}:/etc/pip.conf:ro"
        words = {"BUILDER": "buildah", "BASE": BASE, "ARGS": volumes, **settings}
        self.run("make", word, *(f"{name}={value}" for name, value in words.items()))

    def make_base(self) -> None:
        """Make the base from Debian's packages."""
        container = self.run("buildah", "from", "--name", "base", "scratch")
        root = self.files_of(container)
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
        self.run("debootstrap", *options, _release(), str(root), str(mirror()))
        for rest in (*root.glob("var/cache/apt/archives/*.deb"), *root.glob("var/lib/apt/lists/*_*")):
            rest.unlink()
        self.run("buildah", "commit", "--format", "docker", container, BASE)

    def mounted(self, image: str) -> Path:
        """The file system of an image, as a folder of its own."""
        return self.files_of(self.run("buildah", "from", "--pull-never", image))

    def files_of(self, container: str) -> Path:
        return Path(self.run("buildah", "mount", container))

    def inspect(self, image: str) -> dict[str, Any]:
        """What is written in an image."""
        told: dict[str, Any] = json.loads(self.run("buildah", "inspect", "--type", "image", image))
        return told

    def _python_of_base(self) -> str:
        """The version of the base's Python, as ``3.11``."""
        (library,) = self.files_of("base").glob("usr/lib/python3.[0-9]*")
        return library.name.removeprefix("python")

    def _fetch(self, into: Path, python: str) -> None:
        """Fetch what the pins name, for the base's Python."""
        pins = [word for name in PINS for word in ("-r", str(ROOT / "constraints" / name))]
        what = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--python-version", python]
        self.run(sys.executable, "-m", "pip", "download", "--quiet", *what, "--dest", str(into), *pins)


@contextmanager
def built_image(folder: Path) -> Iterator[Image]:
    """Build the image in a folder, which is removed after the block."""
    builder = Builder(folder)
    try:
        builder.make_base()
        builder.make("image", IMAGE=NAME)
        told = builder.inspect(NAME)
        layers = tuple(layer["size"] for layer in json.loads(told["Manifest"])["layers"])
        yield Image(
            builder=builder,
            base=builder.files_of("base"),
            files=builder.mounted(NAME),
            root=builder.mounted(NAME),
            config=told["Docker"]["config"],
            layers=layers,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
