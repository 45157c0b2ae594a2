"""The image is the gateway and nothing else, lists what is in it, and runs without rights."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from tests.container.containers import CONFIG, Containers, Mount
from tests.container.image import ROOT, Image, built_image, missing
from trio_gateway import __version__
from trio_gateway.testing import chat_request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first one builds
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

FOLDER: Final = "opt/trio-gateway"
LIST: Final = "sbom.cdx.json"
LARGEST: Final = 130 * 10**6  # bytes that the image may add to its base
PATIENCE: Final = 60.0  # seconds; a wait that takes longer has failed
GRACE: Final = 20  # seconds
# What builds, and what is only there while it is built.
TOOLS: Final = {"pip", "setuptools", "wheel", "hatchling", "editables", "cyclonedx-bom", "uv"}
# An image can not be given them later: PostgreSQL, a store for replicas, a faster parser, traces.
EXTRAS: Final = {"psycopg", "coredis", "httptools", "opentelemetry-proto"}
LEFT_OVER: Final = re.compile(r"\.(whl|tar|gz|o|a|log)$|^(\.cache|build|builder|wheels)$")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with built_image(tmp_path_factory.mktemp("image")) as image:
        yield image


@pytest.fixture
def containers(image: Image, tmp_path: Path) -> Containers:
    return Containers(image, tmp_path)


def files(root: Path, below: str = "") -> dict[str, tuple[int, int, str]]:
    """All that is in a file system: by path, its mode, its size, and where it leads."""
    found = {}
    for folder, folders, names in os.walk(root / below):
        for name in (*folders, *names):
            path = Path(folder, name)
            seen = path.lstat()
            size = 0 if path.is_dir() else seen.st_size
            found[str(path.relative_to(root))] = (
                seen.st_mode,
                size,
                str(path.readlink()) if path.is_symlink() else "",
            )
    return found


def installed(image: Image) -> list[Distribution]:
    (packages,) = (image.files / FOLDER).glob("lib/python3.*/site-packages")
    return list(importlib.metadata.distributions(path=[str(packages)]))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(name: str) -> dict[str, set[str]]:
    """The versions that a file of pins names, by distribution."""
    pins: dict[str, set[str]] = {}
    for package, version in re.findall(
        r"^([\w.-]+)==(\S+)", (ROOT / "constraints" / name).read_text(), re.MULTILINE
    ):
        pins.setdefault(normal(package), set()).add(version)
    return pins


# What is in it ----------------------------------------------------------------------------------------------


def test_the_image_adds_one_folder_to_its_base_and_nothing_in_it_can_be_written(
    image: Image, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = files(image.base), files(image.files)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed
    assert {path for path in changed if path != FOLDER and not path.startswith(FOLDER + "/")} == set()
    for path, (mode, _, leads_to) in files(image.files, FOLDER).items():
        assert leads_to or not mode & 0o022, path
        assert (image.files / path).lstat().st_uid == 0, path
    *base, own = image.layers
    assert own < LARGEST
    with capsys.disabled():
        sys.stdout.write(f" the image: {own / 1e6:.0f} MB on a base of {sum(base) / 1e6:.0f} MB\n")


def test_only_pinned_packages_are_installed_and_nothing_that_builds(image: Image) -> None:
    found = {normal(each.name): each.version for each in installed(image)}
    assert found.pop("trio-gateway") == __version__
    assert found.keys() >= EXTRAS
    pins = pinned("runtime.txt")
    assert {name: version for name, version in found.items() if version not in pins.get(name, ())} == {}
    assert not TOOLS & found.keys()
    names = {Path(path).name for path in files(image.files, FOLDER)}
    assert {name for name in names if LEFT_OVER.search(name)} == set()
    assert not [path for path in (image.files / FOLDER / "bin").iterdir() if path.name.startswith("pip")]


def test_the_image_says_how_it_is_run_and_nothing_of_where_it_was_built(image: Image) -> None:
    config = image.config
    user, _, group = config["User"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert (config["Entrypoint"], config["Cmd"]) == (["trio-gateway"], ["serve", "--config", CONFIG])
    assert config["StopSignal"] == "SIGTERM"
    names = {each.partition("=")[0] for each in config["Env"]}
    assert names == {"PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"}


# The list of what is in it ----------------------------------------------------------------------------------


def listed(image: Image) -> dict[str, dict[str, Any]]:
    document = json.loads((image.files / FOLDER / LIST).read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    return {normal(each["name"]): each for each in document["components"]}


def test_the_list_in_the_image_has_every_distribution_with_its_version_and_no_other(image: Image) -> None:
    found = {name: each["version"] for name, each in listed(image).items()}
    assert found == {normal(each.name): each.version for each in installed(image)}
    for name, each in listed(image).items():
        if name != "trio-gateway":  # was installed from a file
            assert each["purl"] == f"pkg:pypi/{name}@{each['version']}"


def test_the_list_has_the_licence_of_every_distribution_that_names_one(image: Image) -> None:
    components = listed(image)
    for each in installed(image):
        classified = [
            line for line in each.metadata.get_all("Classifier") or () if line.startswith("License ::")
        ]
        if each.metadata["License-Expression"] or each.metadata["License"] or classified:
            assert components[normal(each.name)].get("licenses"), each.name
    assert components["trio-gateway"]["licenses"][0]["license"]["id"] == "Apache-2.0"


def test_the_list_knows_what_needs_what(image: Image) -> None:
    document = json.loads((image.files / FOLDER / LIST).read_text())
    names = {each["bom-ref"]: normal(each["name"]) for each in document["components"]}
    needs = {names.get(each["ref"]): each.get("dependsOn", ()) for each in document["dependencies"]}
    assert {"trio", "h11", "starlette"} <= {names[ref] for ref in needs["trio-gateway"]}


def test_make_sbom_writes_the_list_that_is_in_the_image(image: Image, tmp_path: Path) -> None:
    image.builder.make("sbom", TO=str(tmp_path))
    assert (tmp_path / LIST).read_bytes() == (image.files / FOLDER / LIST).read_bytes()


# How it runs ------------------------------------------------------------------------------------------------


def config(engine: str, folder: Path) -> Mount:
    file = folder / "gateway.toml"
    file.write_text(
        f"""
        [server]
        bind = ["127.0.0.1:0"]
        [admin]
        bind = ["127.0.0.1:0"]
        [[workers]]
        id = "w1"
        url = "{engine}"
        kind = "vllm"
        slots = 4
        [[models]]
        id = "m1"
        [database]
        url = "sqlite:////var/lib/trio-gateway/records.db"
        journal = "/var/lib/trio-gateway/journal"
        [shutdown]
        readiness_delay = 0
        grace = {GRACE}
        """
    )
    return Mount(file, CONFIG)


def data_of(image: Image, folder: Path) -> Mount:
    """A volume that the image's user may write."""
    data = folder / "data"
    data.mkdir()
    user, _, group = image.config["User"].partition(":")
    os.chown(data, int(user), int(group))
    return Mount(data, "/var/lib/trio-gateway", writable=True)


async def test_it_tells_its_version(containers: Containers) -> None:
    done = await containers.run("--version")
    assert (done.returncode, done.stdout.decode().strip()) == (0, __version__)


async def test_it_has_no_rights_and_no_place_to_write(containers: Containers) -> None:
    script = (
        "grep -E '^(Uid|Gid|Cap(Prm|Eff|Bnd)|NoNewPrivs)' /proc/self/status | tr -s '\\t ' ' ';"
        "for place in / /tmp /var/tmp /dev /opt/trio-gateway /etc; do touch $place/x && echo WRITTEN; done"
    )
    told = (await containers.run("sh", "-c", script, entrypoint=False)).stdout.decode().splitlines()
    user, _, group = containers.image.config["User"].partition(":")
    assert told == [
        "Uid: " + " ".join([user] * 4),
        "Gid: " + " ".join([group] * 4),
        *(f"Cap{name}: {0:016x}" for name in ("Prm", "Eff", "Bnd")),
        "NoNewPrivs: 1",
    ]


async def test_it_checks_a_configuration(containers: Containers, tmp_path: Path) -> None:
    file = config("http://127.0.0.1:8000", tmp_path)
    done = await containers.run("check-config", CONFIG, mounts=(file,))
    assert done.returncode == 0, done.stderr.decode()
    file.source.write_text("[servr]\n")
    done = await containers.run("check-config", CONFIG, mounts=(file,))
    assert done.returncode != 0
    assert "server" in done.stdout.decode() + done.stderr.decode()


async def test_it_serves_a_stream_is_found_healthy_and_ends_when_told_without_cutting_the_stream(
    containers: Containers, image: Image, tmp_path: Path
) -> None:
    kind, *check = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    simulate = ("simulate", "--model", "m1", "--decode", "20")
    async with containers.running(*simulate) as engine:
        url = (await engine.logged("listening"))["url"]
        mounts = (config(url, tmp_path), data_of(image, tmp_path))
        async with containers.running(mounts=mounts) as gateway:
            with trio.fail_after(PATIENCE):
                first = await gateway.exec("cat", "/proc/1/cmdline")
                assert b"serve\0--config\0" in first.stdout
                (listening,) = (await gateway.logged("listening"))["public"]
                health = {"HEALTH_ADDRESS": listening.removeprefix("http://")}
                assert (await gateway.exec(*check, environment=health)).returncode == 0
                nobody = {"HEALTH_ADDRESS": "127.0.0.1:1"}
                assert (await gateway.exec(*check, environment=nobody)).returncode != 0
                with await gateway.connect() as client:
                    await client.send(chat_request(simulate={"tokens": 60}))
                    await client.read_events(3)
                    await gateway.stop()
                    answer = await client.read_to_end()
            assert (answer.status, answer.chat().done, answer.chat().errors) == (200, 1, [])
            with trio.fail_after(GRACE):
                assert await gateway.exit_code() == 0
        (exchange,) = [line for line in gateway.lines if line["event"] == "exchange"]
        assert exchange["outcome"] == "completed"
        used = await containers.run("usage", "--config", CONFIG, mounts=mounts)
        assert used.returncode == 0, used.stderr.decode()
        assert "m1" in used.stdout.decode()
        await engine.stop()
        with trio.fail_after(PATIENCE):
            assert await engine.exit_code() == 0
