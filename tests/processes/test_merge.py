"""What several processes answer is put together as one would answer: sums, the worst, one row for a thing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import serving
from trio_gateway.admin import SHAPES, RequestFilter, complaints
from trio_gateway.processes import _merge
from trio_gateway.telemetry import render_metrics
from trio_gateway.testing import chat_request, chat_stream, open_engine


def worker(**changes: Any) -> dict[str, Any]:
    row = {"id": "w", "slots": 8, "held": 2, "draining": 1, "free": 5, "ready": True, "breakers": {}}
    return {**row, "operator": "none", **changes}


def test_a_worker_whose_slots_are_shared_has_them_once_and_one_whose_are_split_in_parts() -> None:
    rows = [worker(), worker(held=3, draining=0)]
    assert _merge.worker(rows, shares=True) == worker(held=5, draining=1, free=2)
    assert _merge.worker(rows, shares=False) == worker(slots=16, held=5, draining=1, free=10)
    away = [worker(ready=False), worker(ready=False)]
    assert _merge.worker(away, shares=True)["free"] == 0


def test_of_breakers_and_operators_the_worst_counts() -> None:
    rows = [
        worker(breakers={"m": "closed", "n": "open"}),
        worker(breakers={"m": "half_open"}, operator="drained"),
    ]
    merged = _merge.worker(rows, shares=True)
    assert merged["breakers"] == {"m": "half_open", "n": "open"}
    assert merged["operator"] == "drained"


@pytest.mark.parametrize(("order", "ids"), [("newest", ["b", "a", "c"]), ("oldest", ["a", "b", "d"])])
def test_requests_of_all_come_in_one_order_those_that_ended_last(order: Any, ids: list[str]) -> None:
    def row(name: str, age: float, state: str = "running") -> dict[str, Any]:
        return {"id": name, "age": age, "state": state}

    first, second = [row("a", 3.0), row("d", 9.0, "ended")], [row("b", 1.0), row("c", 0.5, "ended")]
    answers = {0: {"requests": first, "total": 2}, 1: {"requests": second, "total": 2}}
    page = _merge.requests(answers, RequestFilter(order=order, limit=3))
    assert [each["id"] for each in page["requests"]] == ids
    assert (page["total"], page["offset"]) == (4, 0)
    assert {each["id"]: each["process"] for each in page["requests"]}["b"] == 1
    rest = _merge.requests(answers, RequestFilter(order=order, limit=3, offset=3))
    assert len(rest["requests"]) == 1


def test_numbers_are_added_and_what_only_one_has_is_kept() -> None:
    both = [{"a": 1, "b": {"c": 0.5}, "t": "x", "f": True}, {"a": 2, "b": {"c": 0.25, "d": 1}, "n": None}]
    assert _merge.added(both) == {"a": 3, "b": {"c": 0.75, "d": 1}, "t": "x", "f": True, "n": None}
    assert _merge.added([None, None]) is None


def series(statistics: dict[str, Any]) -> dict[str, float]:
    """The samples of the metrics page, but for those of the kernel."""
    lines = b"".join(render_metrics(statistics)).decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith("trio_gateway_"))
    return {name: float(value) for name, _, value in samples}


async def test_what_a_real_gateway_answers_twice_is_twice_as_much_and_of_the_same_shape(
    tmp_path: Path,
) -> None:
    database = {"url": f"sqlite:///{tmp_path}/records.db", "journal": str(tmp_path / "journal")}
    async with (
        open_engine(chat_stream("a", usage=(3, 1))) as engine,
        serving(engine, database=database) as gateway,
    ):
        assert (await gateway.ask(chat_request())).status == 200
        await gateway.settled()
        operations = gateway.gateway.operations
        one = operations.statistics()
        both = _merge.statistics({0: one, 1: copy.copy(one)}, shares=True)
        before, after = series(one), series(both)
        assert before.keys() == after.keys()
        same = {"trio_gateway_build_info", "trio_gateway_processes"}
        for name, value in after.items():
            if name.split("{")[0] not in same and "snapshot_age" not in name and "worker_ready" not in name:
                assert value == pytest.approx(2 * before[name]), name
        # What a process had counted that is gone stays counted.
        gone = _merge.lasting_together([_merge.lasting(one), _merge.lasting(one)])
        three = series(_merge.statistics({0: one}, shares=True, ended=[gone]))
        requests = [name for name in three if name.startswith("trio_gateway_requests_total")]
        assert [three[name] for name in requests] == [3 * before[name] for name in requests]
        assert three["trio_gateway_inter_event_gap_seconds_count"] == pytest.approx(
            3 * before["trio_gateway_inter_event_gap_seconds_count"]
        )
        assert three["trio_gateway_running"] == before["trio_gateway_running"]

        answers = {0: operations.queues(), 1: operations.queues()}
        assert not list(complaints(_merge.queues(answers, True), SHAPES["Queues"], SHAPES))
        rows = [_merge.worker([row, row], True) for row in operations.workers()]
        assert not list(complaints({"workers": rows}, SHAPES["Workers"], SHAPES))
        tenants = [_merge.tenant([row, row]) for row in await operations.tenants()]
        assert not list(complaints({"tenants": tenants}, SHAPES["Tenants"], SHAPES))
        assert tenants[0]["tokens"]["prompt"] == 6
        snapshot = _merge.snapshot({0: operations.snapshot(), 1: operations.snapshot()}, True)
        assert not list(complaints(snapshot, SHAPES["Snapshot"], SHAPES))
        endings = _merge.endings({0: operations.endings(10), 1: operations.endings(10)}, 1)
        assert len(endings) == 1
        assert not list(complaints({"endings": endings}, SHAPES["Endings"], SHAPES))


def test_of_replicas_the_worst_standing_counts_and_turns_are_added_also_those_of_the_dead() -> None:
    def row(standing: str, replicas: int, turns: int) -> dict[str, Any]:
        return {
            "standing": {each: int(each == standing) for each in ("outside", "shared", "alone")},
            "replicas": [str(number) for number in range(replicas)],
            "settling": False,
            "turns": {"joined": turns},
            "turn_seconds": 0.5,
            "losses": 1,
            "granted": turns,
            "scope": "fleet",
        }

    shared, alone = row("shared", 2, 3), row("alone", 1, 4)
    sums = _merge.added([shared, alone, {"turns": {"joined": 5}, "granted": 1}])
    merged = _merge._cluster(sums, [shared, alone])
    assert merged["standing"] == {"outside": 0, "shared": 0, "alone": 1}
    assert _merge._cluster(sums, [shared, row("outside", 0, 0)])["standing"]["outside"] == 1
    assert merged["replicas"] == ["0", "1"]
    assert (merged["turns"], merged["granted"], merged["scope"]) == ({"joined": 12}, 8, "fleet")
