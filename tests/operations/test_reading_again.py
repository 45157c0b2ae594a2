"""Files that are read again while the gateway runs: certificates, and files that can not be read at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from tests.e2e.serving import Serving, configuration, serving
from tests.e2e.tls import Issued, TlsClient, issue
from tests.operations.test_live_limits import URL, act, refused
from trio_gateway.operations import _configuration
from trio_gateway.testing import WaitFor, chat_request, good_answer, open_engine


class Secured:
    """A gateway that speaks TLS, its file, and certificates that can take the place of the one it shows."""

    def __init__(self, folder: Path) -> None:
        self.gateway: Serving
        self.folder = folder
        self.file = folder / "gateway.toml"
        self.first = self.issue("first")
        self.shown = Issued(folder / "shown.pem", folder / "shown.key", folder / "nobody.pem")
        self.show(self.first)

    def issue(self, name: str, **options: Any) -> Issued:
        folder = self.folder / name
        folder.mkdir()
        return issue(folder, **options)

    def show(self, certificate: Issued, key: Issued | None = None) -> None:
        """Put other files in the place of those that the configuration names."""
        shutil.copy(certificate.certificate, self.shown.certificate)
        shutil.copy((key or certificate).key, self.shown.key)

    async def is_shown(self, certificate: Issued) -> bool:
        """Whether who connects now gets a certificate of this authority."""
        try:
            with trio.fail_after(10):
                client = await TlsClient.dial(self.gateway.address, certificate.trust())
        except OSError:
            return False
        with client:
            return True


@asynccontextmanager
async def secured(folder: Path, *engines: Any) -> AsyncIterator[Secured]:
    found = Secured(folder)
    async with serving(*engines or (URL,), file=found.file, server=found.shown.server) as gateway:
        found.gateway = gateway
        yield found


async def test_a_renewed_certificate_is_shown_to_who_connects_from_then_on(tmp_path: Path) -> None:
    go = trio.Event()
    async with (
        open_engine(lambda request: (WaitFor(go), *good_answer(request))) as engine,
        secured(tmp_path, engine) as one,
    ):
        renewed = one.issue("renewed")
        with await TlsClient.dial(one.gateway.address, one.first.trust()) as before:
            await before.send(chat_request(headers=(("connection", "close"),)))
            await one.gateway.until(lambda: one.gateway.held == 1)
            one.show(renewed)
            await act(one.gateway, "reload")
            assert await one.is_shown(renewed)
            assert not await one.is_shown(one.first)
            go.set()
            with trio.fail_after(10):
                assert (await before.read_to_end()).status == 200


@pytest.mark.parametrize("kind", trustme.KeyType)
async def test_a_key_of_another_type_takes_the_place_of_the_one_before(
    tmp_path: Path, kind: trustme.KeyType
) -> None:
    async with secured(tmp_path) as one:
        for number, other in enumerate((*trustme.KeyType, kind)):
            renewed = one.issue(f"renewed{number}", key_type=other)
            one.show(renewed)
            await act(one.gateway, "reload")
            assert await one.is_shown(renewed)


async def test_a_certificate_that_can_not_be_served_changes_nothing(tmp_path: Path) -> None:
    async with secured(tmp_path) as one:
        one.show(one.issue("other"), key=one.first)
        problem = await refused(one.gateway, "reload")
        assert (problem.code, problem.message.count("server.tls.key: does not belong")) == (
            "invalid_configuration",
            1,
        )
        one.shown.certificate.unlink()
        assert (await refused(one.gateway, "reload")).code == "invalid_configuration"
        assert await one.is_shown(one.first)


@pytest.mark.parametrize("how", ["of another", "gone"])
async def test_files_in_force_that_are_half_replaced_leave_the_certificate_as_it_was(
    tmp_path: Path, how: str
) -> None:
    """The file names others by then, which count from the next start: those are judged, these are not."""
    async with secured(tmp_path) as one:
        named = one.issue("named")
        one.file.write_text(
            one.file.read_text()
            .replace(str(one.shown.certificate), str(named.certificate))
            .replace(str(one.shown.key), str(named.key))
        )
        one.show(one.issue("other"), key=one.first)
        if how == "gone":
            one.shown.key.unlink()
        result = await act(one.gateway, "reload")
        assert result.after["restart"] == ["server.tls.certificate", "server.tls.key"]
        assert await one.is_shown(one.first)
    assert len(one.gateway.logged("certificate_kept")) == 1


async def test_a_file_that_can_not_be_read_to_its_end_holds_up_no_other_lever_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is away. A pipe without a writer waits in the same place."""
    monkeypatch.setattr(_configuration, "READ_LIMIT", 0.05)
    file = tmp_path / "gateway.toml"
    async with serving(URL, file=file) as gateway:
        file.unlink()
        os.mkfifo(file)
        operations = gateway.gateway.operations
        for _ in range(3):
            assert (await refused(gateway, "reload")).code == "not_possible"
        problem = await refused(gateway, "limits.set", set={"admission.max_queued": 3})
        assert problem.code == "not_possible"
        assert len((await operations.limits())["limits"]) > 40
        assert (await operations.configuration())["admission"]["max_queued"] == 1024
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        with file.open("w") as writer:  # the disk is back
            writer.write(configuration(URL))
        await gateway.until(lambda: operations.configured._change.borrowed_tokens == 0)
        file.unlink()
        file.write_text(configuration(URL, admission={"max_queued": 9}))
        monkeypatch.undo()
        assert (await act(gateway, "reload")).after["applied"] == ["admission.max_queued"]


async def test_files_that_are_replaced_are_noticed_without_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_gateway.flow._tls_files.LOOK_EVERY", 0.02)
    async with secured(tmp_path) as one:
        renewed = one.issue("renewed")
        shutil.copy(renewed.certificate, one.shown.certificate)  # and not yet its key
        await one.gateway.until(lambda: one.gateway.logged("certificates_kept") != [])
        assert await one.is_shown(one.first)
        one.show(renewed)
        await one.gateway.until(lambda: one.gateway.logged("certificates_read") != [])
        assert await one.is_shown(renewed)
    (kept, *_) = one.gateway.logged("certificates_kept")
    assert (kept["level"], kept["reason"]) == ("error", "key values mismatch")
