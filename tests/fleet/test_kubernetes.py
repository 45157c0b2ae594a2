"""Workers in pods, against an API on a real socket: what happens to pods, watches and the API itself."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from trio_gateway.contract import Worker
from trio_gateway.fleet import (
    Fleet,
    FleetSettings,
    KubernetesAccess,
    PodWorkers,
    Route,
    WorkerBook,
    _kubernetes,
)
from trio_gateway.testing import (
    KubernetesServer,
    make_pod,
    make_request,
    make_worker,
    open_kubernetes,
    refusing_port,
    silent_port,
    until,
)
from trio_gateway.upstream import get

TEMPLATE: Final = make_worker("vllm", host="engines.example", port=8000, labels=frozenset({"gpu"}))
PATH: Final = "/api/v1/namespaces/models/pods"


class Rig:
    """A fleet whose workers are the pods that a server tells of."""

    def __init__(self, url: str, folder: Path, *templates: tuple[Worker, str], **access: Any) -> None:
        self.fleet = Fleet((), (Route("m1", "m1", ("vllm",)),), trio.current_time, FleetSettings())
        self.begun: list[WorkerBook] = []
        self.told: list[str] = []
        self.token = folder / "token"
        self.token.write_text("secret\n")
        (folder / "namespace").write_text("models")
        known: dict[str, Any] = {
            "api": url,
            "token_file": str(self.token),
            "ca_file": str(folder / "ca.crt"),
            "namespace": None,
            "namespace_file": str(folder / "namespace"),
            "slots_key": "trio-gateway/slots",
            **access,
        }
        self.workers = PodWorkers(
            self.fleet,
            templates or ((TEMPLATE, "app=vllm"),),
            KubernetesAccess(**known),
            get,
            self.begun.append,
            lambda worker, detail: self.told.append(f"{worker}: {detail}"),
            lambda: 0.0,  # pauses are half as long as they may be
        )

    @property
    def ids(self) -> list[str]:
        return sorted(self.fleet.books)

    def book(self, name: str) -> WorkerBook:
        return self.fleet.books[f"vllm@{name}"]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.workers.run)  # noqa: ASYNC113 - what it finds is waited for
            yield self
            nursery.cancel_scope.cancel()


@pytest.fixture
async def api() -> AsyncIterator[KubernetesServer]:
    async with open_kubernetes() as server:
        yield server


async def test_each_ready_pod_with_the_labels_is_a_worker(api: KubernetesServer, tmp_path: Path) -> None:
    api.put(make_pod("a", "10.0.0.1", annotations={"trio-gateway/slots": "12"}))
    api.put(make_pod("b", "fd00::1"))
    api.put(make_pod("c", "10.0.0.3", ready=False))
    api.put(make_pod("d", "10.0.0.4", labels={"app": "web"}))
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        assert rig.ids == ["vllm@a", "vllm@b"]
        worker = rig.book("a").worker
        assert (worker.address, worker.host, worker.port, worker.authority, worker.slots) == (
            "10.0.0.1",
            "engines.example",  # what certificates and virtual hosts are for
            8000,
            TEMPLATE.authority,
            12,
        )
        assert not worker.slots_unknown
        assert worker.labels == {"gpu", "vllm"}
        assert (rig.book("b").worker.address, rig.book("b").worker.slots) == ("fd00::1", TEMPLATE.slots)
        assert rig.fleet.serves("m1")
        assert [book.worker.id for book in rig.begun] == ["vllm@a", "vllm@b"]
        assert api.asked[0] == (PATH, {"labelSelector": "app=vllm", "limit": "250"})
        path, asked = api.asked[1]
        assert path == PATH
        assert (asked["watch"], asked["allowWatchBookmarks"]) == ("1", "true")
        assert 240 <= int(asked["timeoutSeconds"]) <= 360


async def test_pods_come_and_change_and_go(api: KubernetesServer, tmp_path: Path) -> None:
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        api.put(make_pod("a"))
        await until(lambda: rig.ids == ["vllm@a"])
        book = rig.book("a")
        api.put(make_pod("a", annotations={"trio-gateway/slots": "9"}))
        await until(lambda: book.all_slots == 9)
        assert rig.book("a") is book
        api.put(make_pod("a", ready=False, annotations={"trio-gateway/slots": "9"}))
        await until(lambda: book.withheld == "not ready")
        api.put(make_pod("a", annotations={"trio-gateway/slots": "9"}))
        await until(lambda: book.withheld is None)
        api.put(make_pod("a", uid="another"))
        await until(lambda: rig.fleet.books.get("vllm@a") not in (None, book))
        assert book.removed
        api.delete("a")
        await until(lambda: rig.ids == [])
    assert rig.told == [
        "vllm@a: its pod is ready",
        "vllm@a: its pod is not ready",
        "vllm@a: its pod is ready again",
        "vllm@a: its pod is gone",
        "vllm@a: its pod is ready",
        "vllm@a: its pod is gone",
    ]


async def test_a_pod_that_terminates_gets_nothing_new_and_finishes_what_it_has(
    api: KubernetesServer, tmp_path: Path
) -> None:
    api.put(make_pod("a"))
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        book, request = rig.book("a"), make_request()
        slots = rig.fleet.hold(request, book.worker)
        assert book.placeable
        api.put(make_pod("a", terminating=True))
        await until(lambda: book.withheld == "terminating")
        assert not book.placeable
        assert (book.removed, book.held) == (False, 1)
        assert not rig.fleet.ready()
        api.delete("a")
        await until(lambda: rig.ids == [])
        assert book.held == 1  # until the stream is over
        rig.fleet.free(request, book.worker, slots, drained=False)
        assert book.held == 0


async def test_a_pod_that_loses_the_label_is_no_worker_any_more(
    api: KubernetesServer, tmp_path: Path
) -> None:
    api.put(make_pod("a"))
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        api.put(make_pod("a", labels={"app": "other"}))
        await until(lambda: rig.ids == [])


async def test_a_list_of_many_pages_is_read_to_its_end(api: KubernetesServer, tmp_path: Path) -> None:
    api.page = 2
    for number in range(5):
        api.put(make_pod(f"p{number}"))
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        assert len(rig.ids) == 5
    assert [asked.get("continue") for _, asked in api.asked[:3]] == [None, "2@105", "4@105"]


async def test_many_pods_are_taken_in_without_holding_up_the_loop(
    api: KubernetesServer, tmp_path: Path
) -> None:
    for number in range(100):
        api.put(make_pod(f"p{number}"))
    async with Rig(api.url, tmp_path).running() as rig:
        steps = set[int]()

        def look() -> bool:
            steps.add(len(rig.ids))
            return len(rig.ids) == 100

        await until(look)
        assert max(after - before for before, after in pairwise(sorted(steps))) <= 16


async def test_a_watch_that_was_cut_goes_on_where_it_was(api: KubernetesServer, tmp_path: Path) -> None:
    api.put(make_pod("a"))
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        api.bookmark()
        api.put(make_pod("b"))
        await until(lambda: len(rig.ids) == 2)
        book = rig.book("a")
        api.cut()
        await api.wait_watched(0)
        api.put(make_pod("c"))
        api.delete("b")
        await until(lambda: rig.ids == ["vllm@a", "vllm@c"])
        assert rig.book("a") is book
    assert [asked.get("resourceVersion") for _, asked in api.asked] == [None, "101", "102"]
    assert not [line for line in rig.told if "can not be followed" in line]  # once is no trouble


async def test_after_a_version_that_is_too_old_all_is_listed_again(
    api: KubernetesServer, tmp_path: Path
) -> None:
    api.put(make_pod("a"))
    api.put(make_pod("b"))
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        book = rig.book("a")
        api.cut()
        await api.wait_watched(0)
        api.delete("b")
        api.put(make_pod("c"))
        api.compact()
        await until(lambda: rig.ids == ["vllm@a", "vllm@c"])
        assert rig.book("a") is book
    kinds = ["watch" if "watch" in asked else "list" for _, asked in api.asked]
    assert kinds[:4] == ["list", "watch", "watch", "list"]


@pytest.mark.parametrize("where", ["list", "watch"])
async def test_a_410_as_status_has_all_listed_again(
    api: KubernetesServer, tmp_path: Path, where: str
) -> None:
    api.put(make_pod("a"))
    gone: tuple[int, list[tuple[str, str]], bytes] = (410, [], b"{}")
    page = {"metadata": {"resourceVersion": "100", "continue": "x"}, "items": []}
    first = [(200, [], json.dumps(page).encode()), gone] if where == "list" else []
    whole = {"metadata": {"resourceVersion": "100"}, "items": []}
    api.answers.extend(first or [(200, [], json.dumps(whole).encode()), gone])
    async with Rig(api.url, tmp_path).running() as rig:
        await until(lambda: rig.ids == ["vllm@a"])
    assert "continue" not in api.asked[2][1]
    assert "watch" not in api.asked[2][1]


@pytest.mark.parametrize(
    "refusal", [(504, [], b"{}"), (200, [], b'{"type": "ERROR", "object": {"code": 500}}\n')]
)
async def test_a_version_that_is_refused_again_and_again_has_all_listed_again(
    api: KubernetesServer, tmp_path: Path, refusal: tuple[int, list[tuple[str, str]], bytes]
) -> None:
    api.put(make_pod("a"))
    ahead = {"metadata": {"resourceVersion": "9000"}, "items": []}  # of a server that was set back since
    api.answers.extend([(200, [], json.dumps(ahead).encode()), *[refusal] * 3])
    async with Rig(api.url, tmp_path).running() as rig:
        await until(lambda: rig.ids == ["vllm@a"])
    assert [asked.get("resourceVersion") for _, asked in api.asked[:5]] == [None, *["9000"] * 3, None]


@pytest.mark.parametrize("line", [b"garbage", b'{"type": "ERROR", "object": {"code": 500}}', b"[]"])
async def test_a_watch_that_talks_nonsense_is_begun_again(
    api: KubernetesServer, tmp_path: Path, line: bytes
) -> None:
    api.put(make_pod("a"))
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        api.say(b"")  # a blank line is nothing
        api.say(line)
        await api.wait_watched(0)
        api.put(make_pod("b"))
        await until(lambda: rig.ids == ["vllm@a", "vllm@b"])


async def test_a_line_without_end_takes_no_memory(
    api: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kubernetes, "MOST_LINE", 1000)
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        api.say(b"x" * 4000)
        await api.wait_watched(0)
        api.put(make_pod("a"))
        await until(lambda: rig.ids == ["vllm@a"])


async def test_a_list_that_is_too_large_is_not_read(
    api: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kubernetes, "MOST_PAGE_BYTES", 1000)
    api.answers.extend([(200, [], b"x" * 2000)] * 2)
    async with Rig(api.url, tmp_path).running() as rig:
        await until(lambda: rig.told != [])
        assert (
            rig.told[0] == "vllm: its pods can not be followed: a page of the list has more than 1000 bytes"
        )
        await api.wait_watched()
    assert rig.told[1] == "vllm: its pods are followed again"


async def test_a_token_is_read_again_after_it_was_replaced(api: KubernetesServer, tmp_path: Path) -> None:
    api.token = "secret"
    api.put(make_pod("a"))
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
        api.token = "younger"
        api.cut()
        await until(lambda: rig.told[-1].endswith("status 401 (is the token good?)"))
        assert rig.ids == ["vllm@a"]  # nobody is lost while the API can not be had
        rig.token.write_text("younger")
        await api.wait_watched()
        assert rig.told[-1] == "vllm: its pods are followed again"


async def test_an_api_that_asks_to_be_left_alone_is(api: KubernetesServer, tmp_path: Path) -> None:
    api.answers.append((429, [("retry-after", "1")], b"{}"))
    async with Rig(api.url, tmp_path).running():
        began = trio.current_time()
        await api.wait_watched()
        assert trio.current_time() - began >= 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((403, [], b"{}"), "status 403 (may the service account list and watch pods there?)"),
        ((500, [("retry-after", "soon")], b"{}"), "status 500"),
        ((200, [], b"<html>"), "the answer is no list of pods"),
    ],
)
async def test_what_the_api_has_against_it_is_told_once(
    api: KubernetesServer, tmp_path: Path, answer: Any, why: str
) -> None:
    api.answers.extend([answer] * 3)
    async with Rig(api.url, tmp_path).running() as rig:
        await api.wait_watched()
    assert [why in line for line in rig.told] == [True, False]
    assert rig.told[1] == "vllm: its pods are followed again"


async def test_a_watch_that_ends_at_once_again_and_again_is_not_asked_for_without_pause(
    api: KubernetesServer, tmp_path: Path
) -> None:
    page = {"metadata": {"resourceVersion": "100"}, "items": []}
    api.answers.extend([(200, [], json.dumps(page).encode()), (200, [], b""), (200, [], b"")])
    async with Rig(api.url, tmp_path).running() as rig:
        began = trio.current_time()
        await api.wait_watched()
        assert trio.current_time() - began >= 0.75  # a quarter, and then a half of a second
    assert rig.told == [
        "vllm: its pods can not be followed: the watch ended at once",
        "vllm: its pods are followed again",
    ]


async def test_a_watch_whose_time_is_over_is_renewed(
    api: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kubernetes, "WATCH_SECONDS", (1, 1))
    monkeypatch.setattr(_kubernetes, "SETTLED", 0.5)
    async with Rig(api.url, tmp_path).running() as rig:
        await until(lambda: len(api.asked) == 3)
        await api.wait_watched()
        api.put(make_pod("a"))
        await until(lambda: rig.ids == ["vllm@a"])
    assert "watch" in api.asked[2][1]
    assert rig.told == ["vllm@a: its pod is ready"]


async def test_an_api_that_is_not_there_is_told_and_tried_again(tmp_path: Path) -> None:
    with refusing_port() as port:
        async with Rig(f"http://127.0.0.1:{port}", tmp_path).running() as rig:
            await until(lambda: rig.told != [])
    assert rig.told[0].startswith("vllm: its pods can not be followed: kubernetes: ")


async def test_an_api_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kubernetes, "CALL_LIMIT", 0.05)
    with silent_port() as port:
        async with Rig(f"http://127.0.0.1:{port}", tmp_path).running() as rig:
            await until(lambda: rig.told != [])
    assert rig.told == ["vllm: its pods can not be followed: no answer within 0.05 s"]


@pytest.mark.parametrize("content", [None, "", "two words", "\xff\n", "a\nb"])
async def test_a_token_that_can_not_be_used_is_told(
    api: KubernetesServer, tmp_path: Path, content: str | None
) -> None:
    rig = Rig(api.url, tmp_path)
    if content is None:
        rig.token.unlink()
    else:
        rig.token.write_text(content)
    async with rig.running():
        await until(lambda: rig.told != [])
    assert rig.told[0].startswith(f"vllm: its pods can not be followed: {rig.token}: ")
    assert api.asked == []


async def test_a_token_on_a_disk_that_is_away_takes_no_thread_of_others(
    api: KubernetesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kubernetes, "READ_LIMIT", 0.05)
    rig = Rig(api.url, tmp_path)
    rig.token.unlink()
    os.mkfifo(rig.token)  # whoever opens it waits for somebody who writes
    async with rig.running():
        await until(lambda: rig.told != [])
        assert rig.told == [f"vllm: its pods can not be followed: {rig.token}: not read within 0.05 s"]
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        writer = os.open(rig.token, os.O_RDWR)  # noqa: ASYNC230 - both are there
        rig.token.unlink()
        rig.token.write_text("secret")
        os.close(writer)
        await api.wait_watched()


async def test_an_authority_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    async with Rig("https://127.0.0.1:1", tmp_path).running() as rig:
        await until(lambda: rig.told != [])
    assert "ca.crt: " in rig.told[0]


async def test_without_a_token_file_and_with_a_namespace_nothing_is_read(
    api: KubernetesServer, tmp_path: Path
) -> None:
    rig = Rig(api.url, tmp_path, token_file=None, namespace="other", namespace_file="/nowhere")
    async with rig.running():
        await api.wait_watched()
    assert api.asked[0][0] == "/api/v1/namespaces/other/pods"


async def test_each_selector_has_workers_of_its_own(api: KubernetesServer, tmp_path: Path) -> None:
    api.put(make_pod("a"))
    api.put(make_pod("b", labels={"app": "sglang"}))
    templates = ((TEMPLATE, "app=vllm"), (make_worker("sgl", kind="sglang"), "app=sglang"))
    async with Rig(api.url, tmp_path, *templates).running() as rig:
        await api.wait_watched(2)
        assert rig.ids == ["sgl@b", "vllm@a"]
