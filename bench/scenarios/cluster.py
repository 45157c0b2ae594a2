"""Do replicas share slots, fairness and rates exactly, and what if the store or one of them is lost?

Question    Three gateways share eight slots through a real redis-server. Does the engine ever get more, are
            tenants equal over all of them, do rates hold, does anything stay held after clients left at any
            moment, what do failures of the store or of a replica cut, and what does sharing cost?
Load        *overload*: six tenants, not each at each replica, eighty requests at a time. *rates*: a tenant
            with 600 requests a minute asks at all replicas as fast as it is refused. *aborts*: 20,000
            clients that leave at random moments, half of them before they were placed. *faults*: each under
            the load of `overload`: a replica killed, one stopped for three leases; the store killed and
            started again, empty; stopped for 30 s; slow by 500 ms. *cost*: answers of 1 KB after 10
            to 30 ms to 1, 8 and 64 connections, each of which asks at once again; 100 streams, one
            event each 20 ms.
Engine      here, in the bench's process: it counts what runs at a time. For *cost* bench/native/engine.c.
Measures    most requests that ran at a time; answers by tenant; whole and broken answers; what is left at
            the store; seconds until all slots were in use again; CPU of the gateway's process a request, and
            a token.
Baseline    for *cost* the same gateway without a cluster, in turns.
Expect      never more than 8, but while a replica that was stopped, or that had more than its share when
            the store was lost, has streams of before; Jain's index at least 0.97; rates within 2 %; nothing
            left; no answer broken but of the killed replica; all slots in use again within the lease and 2
            s; at most 1.5 times the CPU a request, and as much a token (at most 1.1 times).
Run         make bench SCENARIO=cluster      (about 5 min on 2 cores)
Output      bench/results/<date>-cluster-<commit>.json, with machine facts.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Final

import trio

from trio_gateway.testing import MessageError, RawClient, chat_request

from .. import native, peers
from ..command import Options, main, progress
from ..processes import BenchError, cpu_ns, free_port
from ..report import Check, Report
from ..tenants import Tenant, jain

PARTS: Final = ("overload", "rates", "aborts", "faults", "cost")
SLOTS: Final = 8
REPLICAS: Final = 3
LEASE: Final = 2.0
TENANTS: Final = [Tenant(name, 1.0) for name in "abcdef"]
ANSWER_S: Final = 0.1
LIMIT: Final = 600  # requests a minute
ABORTS: Final = 20_000
COST: Final = 1.5  # times, a request
TOKEN_COST: Final = 1.1  # times; what two equal gateways differ by in such a run
CONNECTIONS: Final = {1: 200, 8: 1000, 64: 3000}  # and how many requests
STREAMS: Final = 100
SETTLED_S: Final = 6  # seconds after which a store is new no more


class Store:
    """A redis-server, with a way to it that can be slow."""

    def __init__(self) -> None:
        self._binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if self._binary is None:
            raise BenchError("redis-server is not installed here")
        self.port = free_port()
        self.delay = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self._binary is not None
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen([self._binary, *where], stdout=quiet, stderr=quiet)
        if not peers.eventually(self._there, 10):
            raise BenchError("redis-server does not listen")

    def _there(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def left(self, prefix: str) -> bytes:
        """What is used of anything, as the server writes it."""
        with socket.create_connection(("127.0.0.1", self.port), 2) as plain:
            plain.sendall(b"HGETALL {%b}:used\r\n" % prefix.encode())
            return plain.recv(65536)

    async def slow_way(self, task_status: trio.TaskStatus[int]) -> None:
        """Pass bytes on after `delay`, each way by half of it."""

        async def pass_on(source: trio.SocketStream, target: trio.SocketStream) -> None:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async for piece in source:
                    await trio.sleep(self.delay / 2)
                    await target.send_all(piece)
            await target.aclose()
            await source.aclose()

        async def handle(client: trio.SocketStream) -> None:
            with contextlib.suppress(OSError):
                server = await trio.open_tcp_stream("127.0.0.1", self.port)
                async with client, server, trio.open_nursery() as nursery:
                    nursery.start_soon(pass_on, client, server)
                    nursery.start_soon(pass_on, server, client)

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listeners[0].socket.getsockname()[1])
        await trio.serve_listeners(handle, listeners)


class CountingEngine:
    """Answers after `ANSWER_S`, and counts how many it works on; a client that left counts no more."""

    def __init__(self) -> None:
        self.running = self.most = self.total = 0

    async def handle(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                while (head := await self._read(stream)) is not None:
                    await self._answer(stream, asked=head.startswith(b"POST"))
        except (OSError, trio.BrokenResourceError):
            return

    async def _read(self, stream: trio.SocketStream) -> bytes | None:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = await stream.receive_some(65536)
            if not piece:
                return None
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = sum(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
        while len(body) < length:
            body += await stream.receive_some(65536)
        return head

    async def _work(self, stream: trio.SocketStream) -> None:
        self.running += 1
        self.total += 1
        self.most = max(self.most, self.running)
        try:
            with trio.move_on_after(ANSWER_S):
                await stream.receive_some(1)  # nothing comes but the end
                raise trio.BrokenResourceError
        finally:
            self.running -= 1

    async def _answer(self, stream: trio.SocketStream, *, asked: bool) -> None:
        """Answer a request; a probe is none."""
        if asked:
            await self._work(stream)
        body = (
            b'{"id":"x","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":'
            b'"assistant","content":"word"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,'
            b'"completion_tokens":20,"total_tokens":25}}'
        )
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        await stream.send_all(head % len(body) + body)


class Fleet:
    """Three gateways, the store and the engine, with clients in this process."""

    def __init__(self, store: Store, engine: CountingEngine, gateways: list[peers.Gateway]) -> None:
        self.store = store
        self.engine = engine
        self.gateways = gateways
        self.whole = Counter[str]()
        self.refused = Counter[str]()
        self.broken = Counter[int]()  # by number of the gateway

    async def ask(self, number: int, tenant: Tenant) -> None:
        request = chat_request("hello", model=peers.MODEL, stream=False, key=tenant.key)
        try:
            with await RawClient.connect(("127.0.0.1", self.gateways[number].port)) as client:
                await client.send(request)
                answer = await client.read_to_end()
        except (OSError, MessageError):
            self.broken[number] += 1
            await trio.sleep(0.05)
            return
        if answer.status == 200:
            self.whole[tenant.name] += 1
        elif answer.status in (429, 503):
            self.refused[str(answer.error().get("code"))] += 1
            await trio.sleep(0.02)
        else:
            self.broken[number] += 1

    async def load(self) -> None:
        """Ten times what the slots can do; not every tenant comes to every replica."""

        async def again(number: int, tenant: Tenant) -> None:
            while True:
                await self.ask(number, tenant)

        async with trio.open_nursery() as nursery:
            for number in range(REPLICAS):
                for tenant in (TENANTS + TENANTS)[number * 2 : number * 2 + 4]:
                    for _ in range(7):
                        nursery.start_soon(again, number, tenant)

    async def all_share(self) -> None:
        def shared() -> bool:
            each = [gateway.statistics()["cluster"] for gateway in self.gateways]
            return all(one["standing"]["shared"] and len(one["replicas"]) == REPLICAS for one in each)

        if not await trio.to_thread.run_sync(lambda: peers.eventually(shared, 10, 0.1)):
            raise BenchError("the replicas do not find each other")

    async def all_used(self) -> float:
        """Seconds until all slots are in use for a moment."""
        began = trio.current_time()
        with trio.move_on_after(30):
            while self.engine.running < SLOTS:  # noqa: ASYNC110 - for a moment
                await trio.sleep(0.01)
        return trio.current_time() - began


@asynccontextmanager
async def fleet(extra: str = "") -> AsyncIterator[Fleet]:
    store, engine = Store(), CountingEngine()
    with ExitStack() as stack:
        stack.callback(store.kill)
        store.start()
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            engine_port = listeners[0].socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, engine.handle, listeners)  # noqa: ASYNC113 - it listens
            way: int = await nursery.start(store.slow_way)
            cluster = f'[cluster]\nurl = "redis://127.0.0.1:{way}"\nlease = {LEASE}\n'
            tenants = "".join(tenant.toml for tenant in TENANTS) + extra

            def start() -> list[peers.Gateway]:
                return [
                    stack.enter_context(peers.gateway(engine_port, slots=SLOTS, extra=cluster + tenants))
                    for _ in range(REPLICAS)
                ]

            # A child ends with the thread that started it, so that one stays.
            started, done = list[peers.Gateway](), threading.Event()
            stack.callback(done.set)

            def start_and_stay() -> None:
                started.extend(start())
                done.wait()

            threading.Thread(target=start_and_stay, daemon=True).start()
            with trio.fail_after(60):
                while len(started) < REPLICAS:  # noqa: ASYNC110 - another thread starts them
                    await trio.sleep(0.05)
            running = Fleet(store, engine, started)
            await running.all_share()
            yield running
            losses = [
                gateway.statistics()["cluster"]["losses"]
                for gateway in running.gateways
                if gateway.child.running
            ]
            progress(f"losses of the store, by replica: {losses}; refused: {dict(running.refused)}")
            nursery.cancel_scope.cancel()


async def _overload(options: Options, report: Report) -> None:
    async with fleet() as all_, trio.open_nursery() as nursery:
        nursery.start_soon(all_.load)
        await trio.sleep(2)
        all_.whole.clear()
        await trio.sleep(options.some(200) / 10)
        nursery.cancel_scope.cancel()
    index = jain(list(all_.whole.values()))
    report.rows.append(
        ("overload", str(all_.engine.most), str(sum(all_.whole.values())), f"Jain {index:.4f}")
    )
    report.checks += [
        Check.at_most("overload: most at a time", all_.engine.most, SLOTS, "requests"),
        Check.at_least("overload: Jain's index", index, 0.97, ""),
        Check.exactly("overload: broken", all_.broken.total(), 0, "answers"),
    ]


async def _rates(options: Options, report: Report) -> None:
    tenant = Tenant("limited", 1.0)
    limited = tenant.toml + f"requests_per_minute = {LIMIT}\n"
    async with fleet(limited) as all_, trio.open_nursery() as nursery:

        async def again(number: int) -> None:
            while True:
                await all_.ask(number, tenant)

        began = time.monotonic()
        for number in range(REPLICAS):
            for _ in range(10):
                nursery.start_soon(again, number)
        await trio.sleep(max(options.some(300) / 10, 20))
        seconds = time.monotonic() - began
        accepted = all_.whole["limited"] + all_.engine.running
        nursery.cancel_scope.cancel()
    off = abs(accepted / (LIMIT * (1 + seconds / 60)) - 1)
    report.rows.append(("rates", str(all_.engine.most), str(accepted), f"{off:.2%} off"))
    report.checks.append(Check.at_most("rates: off the limit", 100 * off, 2, "%"))


async def _aborts(options: Options, report: Report) -> None:
    left, dice = options.some(ABORTS), random.Random(7)
    async with fleet() as all_:

        async def leave() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                with trio.move_on_after(
                    dice.choice((0.0, 0.005, 0.05, ANSWER_S, 2 * ANSWER_S)) * dice.random()
                ):
                    await all_.ask(dice.randrange(REPLICAS), dice.choice(TENANTS))

        async with trio.open_nursery() as nursery:
            for _ in range(48):
                nursery.start_soon(leave)
        idle = [await trio.to_thread.run_sync(gateway.wait_idle) for gateway in all_.gateways]
        await trio.sleep(2)
        residue = all_.store.left("trio-gateway")
    report.rows.append(("aborts", str(all_.engine.most), str(options.some(ABORTS)), repr(residue)))
    report.checks += [
        Check.exactly("aborts: left at the store", int(residue != b"*0\r\n"), 0, ""),
        Check.exactly("aborts: gateways that are idle", sum(map(bool, idle)), REPLICAS, "gateways"),
        Check.at_most("aborts: most at a time", all_.engine.most, SLOTS, "requests"),
    ]


async def _faults(options: Options, report: Report) -> None:
    stopped = options.some(300) / 10

    async def one(
        name: str,
        cause: Callable[[Fleet], object],
        seconds: float,
        cure: Callable[[Fleet], object],
        spared: int,
    ) -> None:
        async with fleet() as all_, trio.open_nursery() as nursery:
            nursery.start_soon(all_.load)
            await trio.sleep(2)
            all_.engine.most, total = 0, all_.engine.total
            cause(all_)
            await trio.sleep(seconds)
            during = (all_.engine.total - total) / seconds
            most = all_.engine.most
            cure(all_)
            recovered = await all_.all_used()
            await trio.sleep(LEASE + 1)
            all_.engine.most = 0
            await trio.sleep(2)
            after = all_.engine.most
            nursery.cancel_scope.cancel()
        cut = sum(count for number, count in all_.broken.items() if number != spared)
        row = f"{during:.0f}/s meanwhile, all slots after {recovered:.2f} s, then {after}"
        report.rows.append((name, str(most), str(cut), row))
        report.checks += [
            Check.exactly(f"{name}: answers cut", cut, 0, "answers"),
            Check.at_most(f"{name}: all slots again after", recovered, LEASE + 2, "s"),
            Check.at_most(f"{name}: most at a time afterwards", after, SLOTS, "requests"),
        ]
        if name in ("replica killed", "store slow"):
            report.checks.append(Check.at_most(f"{name}: most at a time", most, SLOTS, "requests"))
        progress(f"{name} done")

    def kill(all_: Fleet) -> None:
        all_.gateways[0].child.kill()

    def signalled(number: signal.Signals) -> Callable[[Fleet], None]:
        def send(all_: Fleet) -> None:
            for pid in all_.gateways[1].pids:
                os.kill(pid, number)

        return send

    def slowed(seconds: float) -> Callable[[Fleet], None]:
        def slow(all_: Fleet) -> None:
            all_.store.delay = seconds

        return slow

    def restart(all_: Fleet) -> None:
        all_.store.kill()
        all_.store.start()

    def nothing(all_: Fleet) -> None:
        """It heals by itself."""

    cont, halt = signal.SIGCONT, signal.SIGSTOP
    await one("replica killed", kill, LEASE + 1, nothing, 0)
    await one("replica stopped", signalled(halt), 3 * LEASE, signalled(cont), 1)
    await one("store killed", lambda all_: all_.store.kill(), 5, lambda all_: all_.store.start(), -1)
    await one("store empty", restart, 5, nothing, -1)
    await one(
        "store stopped", lambda all_: all_.store.send(halt), stopped, lambda all_: all_.store.send(cont), -1
    )
    await one("store slow", slowed(0.5), 8, slowed(0.0), -1)


@contextmanager
def _pair() -> Iterator[dict[str, peers.Gateway]]:
    store = Store()
    with ExitStack() as stack:
        stack.callback(store.kill)
        store.start()
        engine = stack.enter_context(peers.engine())
        shared = f'[cluster]\nurl = "redis://127.0.0.1:{store.port}"\n'
        yield {
            "alone": stack.enter_context(peers.gateway(engine.port)),
            "shared": stack.enter_context(peers.gateway(engine.port, extra=shared)),
        }


def _cost(options: Options, report: Report) -> None:
    def request(connections: int) -> Callable[[peers.Gateway], float]:
        return lambda gateway: _request_us(gateway, connections, options.some(CONNECTIONS[connections]))

    measures = {f"request, {count} connections": request(count) for count in CONNECTIONS}
    limits = dict.fromkeys(measures, COST) | {"token": TOKEN_COST}
    measures["token"] = lambda gateway: _token_us(gateway, options.some(4000))
    spent: dict[str, dict[str, list[float]]] = {what: {} for what in measures}
    with _pair() as pair:
        time.sleep(SETTLED_S)
        for turn in range(options.runs):
            for what, measure in measures.items():
                for name, gateway in list(pair.items())[:: 1 if turn % 2 == 0 else -1]:
                    spent[what].setdefault(name, []).append(measure(gateway))
    for what, both in spent.items():
        ratio = statistics.median(
            dear / cheap for cheap, dear in zip(both["alone"], both["shared"], strict=True)
        )
        alone, shared = (statistics.median(both[name]) for name in ("alone", "shared"))
        row = f"{alone:.1f} us alone, {shared:.1f} us shared, x{ratio:.2f}"
        report.rows.append((f"cost: {what}", "-", "-", row))
        report.checks.append(Check.at_most(f"cost: CPU a {what}", ratio, limits[what], "times alone"))


def _request_us(gateway: peers.Gateway, connections: int, requests: int) -> float:
    before = cpu_ns(gateway.pids)
    load = {"streams": connections, "requests": requests, "delay_us": 20_000, "vary": 1}
    answer = native.load("buffered", gateway.port, gateway.pids, **load)
    if answer["good"] != requests:
        raise BenchError(f"of {requests} answers {answer['good']} were whole")
    return (cpu_ns(gateway.pids) - before) / requests / 1000


def _token_us(gateway: peers.Gateway, window_ms: int) -> float:
    answer = native.load(
        "stream",
        gateway.port,
        gateway.pids,
        streams=STREAMS,
        tokens=(window_ms + 3000) // 20,
        pace_us=20_000,
        ramp_us=10_000,
        warm_ms=1500,
        window_ms=window_ms,
        measured=0,
    )
    if answer["good"] != STREAMS:
        raise BenchError(f"of {STREAMS} streams {answer['good']} were whole")
    return float(sum(answer["cpu_ns"]) / answer["tokens"] / 1000)


def run(options: Options) -> Report:
    """Play the chosen parts; see the module's docstring."""
    report = Report("cluster", ("part", "most at a time", "answers, or cut", "what came of it"))
    parts = {"overload": _overload, "rates": _rates, "aborts": _aborts, "faults": _faults}
    for name in options.chosen(PARTS):
        if name == "cost":
            _cost(options, report)
        else:
            trio.run(parts[name], options, report)
        progress(f"{name} done")
    return report


if __name__ == "__main__":
    sys.exit(main("cluster"))
