"""Answers that are gone on with at another process than the one that keeps them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import trio

from tests.e2e.serving import tenant
from tests.e2e.test_processes import STREAM, processes
from tests.e2e.test_resuming import RESUMABLE
from trio_gateway.testing import WaitFor, chat_request, open_engine


async def test_whoever_goes_on_with_an_answer_gets_it_wherever_it_connects(tmp_path: Path) -> None:
    go = trio.Event()
    script = (*STREAM[:3], WaitFor(go), *STREAM[3:])
    async with (
        open_engine(script) as engine,
        processes(engine, folder=tmp_path, tenants=[tenant("a", "ka"), tenant("b", "kb")]) as gateway,
    ):
        key = (("authorization", "Bearer ka"),)
        ids, begun = [], []
        for _ in range(8):
            with await gateway.gateway.connect() as client:
                await client.send(chat_request(headers=(*RESUMABLE, *key)))
                answer = await client.read_head()
                await client.read_events(1)
                ids.append(answer.header("x-request-id"))
                begun.append(answer.body.split(b"\n\n")[0] + b"\n\n")
        go.set()
        rows = (await gateway.read("requests?limit=100"))["requests"]
        assert set(Counter(row["process"] for row in rows)) == {0, 1}
        whole = (await gateway.ask(key="ka")).body
        for round_ in range(2):  # every other connection is at the other process
            others = [await gateway.gateway.connect() for _ in range(round_ + 1)]
            for name, first in zip(ids, begun, strict=True):
                with await gateway.gateway.connect() as client:
                    path = f"/v1/requests/{name}/events?after=1"
                    await client.request("GET", path, headers=(("authorization", "Bearer kb"),))
                    assert (await client.read_to_end()).status == 404  # it is another's
                    await client.request("GET", path, headers=key)
                    rest = await client.read_to_end()
                    assert (rest.status, rest.header("x-request-id"), rest.ended) == (200, name, "complete")
                    assert first + rest.body == whole
                    # The connection goes on, wherever it is now.
                    state: object = "running"
                    while state == "running":  # it is settled a moment after its last byte
                        await client.request("GET", f"/v1/requests/{name}", headers=key)
                        state = (await client.read_to_end()).json()["state"]
                    assert state == "ended"
                    await client.request("GET", "/v1/requests/none/events?after=0", headers=key)
                    assert (await client.read_to_end()).status == 404
            for other in others:
                other.__exit__(None, None, None)
        found = await gateway.read("statistics")
        assert found["conservation"]["ok"]
        assert found["arrived"] == found["accepted"] + found["reading"] + sum(found["turned_away"].values())
        assert (await gateway.read("self-audit"))["ok"]
