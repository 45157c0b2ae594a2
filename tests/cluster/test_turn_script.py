"""The script of the store against its model, on a real server, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.cluster.redis_server import Plain, RedisServer, needs_redis, open_server
from tests.cluster.store_model import StoreModel
from trio_gateway.cluster import _messages
from trio_gateway.cluster._messages import News, Reply, Turn, Want, decode_reply

pytestmark = needs_redis
LEASE: Final = 1000
CLOCK: Final = "local now = stamp[1] * 1000 + math.floor(stamp[2] / 1000)"
SCRIPT: Final = (Path(_messages.__file__).parent / "turn.lua").read_text()


def with_clock_as_argument() -> str:
    assert CLOCK in SCRIPT
    return SCRIPT.replace(CLOCK, "local now = tonumber(ARGV[2])")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    yield from open_server()


REPLICAS: Final = ("a", "b", "c")
LINES: Final = ("k1", "k2", "k3")
counts = st.integers(0, 3)
wants = st.builds(
    Want,
    count=counts,
    tier=st.integers(0, 1),
    group=st.sampled_from(("g1", "g2")),
    tenant=st.sampled_from(("x", "y", "z")),
    slots=st.integers(1, 2),
    any=st.sampled_from(((), ("w1",), ("w2",), ("w1", "w2"), ("unheard",))),
    rest=st.sampled_from(("", "w1", "w1\nw2", "w2\nw1", "unheard\nw2")),
    also=st.sampled_from(((), ("tenant:x",))),
    wide=st.sampled_from(((), ("tier:batch",))),
    cost=st.sampled_from((0.0, 10.0, 25.5)),
)
tellings = st.fixed_dictionaries(
    {},
    optional={
        "caps": st.dictionaries(st.sampled_from(("w1", "w2", "tenant:x", "tier:batch")), counts, max_size=2),
        "have": st.dictionaries(st.sampled_from(("w1", "w2", "tenant:x")), counts, max_size=2),
        "want": st.dictionaries(st.sampled_from(LINES), wants, max_size=2),
        "served": st.dictionaries(
            st.sampled_from(("g1\nx", "g1\ny", "g2\nx")), st.integers(0, 100).map(float), max_size=2
        ),
        "settled": st.dictionaries(
            st.sampled_from(("g1\nx", "g1\ny", "g2\nx")), st.integers(0, 100).map(float), max_size=2
        ),
        "rates": st.dictionaries(
            st.sampled_from(("t:x:requests", "t:y:tokens")),
            st.tuples(st.integers(0, 50).map(float), st.sampled_from((10, 600))),
            max_size=2,
        ),
        "marks": st.dictionaries(
            st.sampled_from(("frozen:x", "drained:w1", "once:salt")),
            st.sampled_from(("", "1", "2")),
            max_size=1,
        ),
        "news": st.dictionaries(
            st.sampled_from(("n1", "n2")),
            st.builds(
                News, st.sampled_from(("up", "down")), st.sampled_from(("01", "02")), st.integers(0, 1500)
            ),
            max_size=1,
        ),
        "seen": st.integers(0, 4),
        "known": st.integers(1, 3),
        "whole": st.booleans(),
        "version": st.integers(0, 2),
    },
)


class Comparison(RuleBasedStateMachine):
    """Replicas that make turns, lose answers, come late, and vanish, by a clock that may be set back."""

    plain: Plain
    sha: bytes

    def __init__(self) -> None:
        super().__init__()
        self.plain("FLUSHALL")
        self.model = StoreModel()
        self.now = 1_700_000_000_000
        self.epochs = dict.fromkeys(REPLICAS, 0)
        self.seqs = dict.fromkeys(REPLICAS, 0)
        self.acks = dict.fromkeys(REPLICAS, 0)

    def make(self, turn: Turn) -> Reply:
        got = decode_reply(self.plain("EVALSHA", self.sha, 1, "{p}", turn.encode(), self.now))
        expected = self.model.turn(turn, self.now)
        assert got.rates == pytest.approx(expected.rates)
        assert (got.state, got.epoch, got.members, got.grants) == (
            expected.state,
            expected.epoch,
            expected.members,
            expected.grants,
        )
        assert (got.settling, got.version, got.marks, got.born, got.contended) == (
            expected.settling,
            expected.version,
            expected.marks,
            expected.born,
            expected.contended,
        )
        assert (got.news, got.seen) == (expected.news, expected.seen)
        assert {key: news.left for key, news in got.news.items()} == {
            key: news.left for key, news in expected.news.items()
        }
        return got

    @rule(replica=st.sampled_from(REPLICAS), told=tellings, heard=st.booleans())
    def takes_a_turn(self, replica: str, told: dict[str, Any], heard: bool) -> None:
        self.seqs[replica] += 1
        turn = Turn(replica, self.epochs[replica], self.seqs[replica], LEASE, ack=self.acks[replica], **told)
        reply = self.make(turn)
        if reply.state == "fenced":
            self.epochs[replica] = self.acks[replica] = 0
        elif heard:
            self.epochs[replica] = reply.epoch
            self.acks[replica] = max((grant.number for grant in reply.grants), default=self.acks[replica])
        else:  # the same again, as after a lost answer
            self.seqs[replica] += 1
            again = Turn(
                replica, self.epochs[replica], self.seqs[replica], LEASE, ack=self.acks[replica], **told
            )
            repeated = self.make(again)
            if turn.epoch:
                assert repeated.grants == reply.grants, "a repetition takes nothing more"

    @rule(replica=st.sampled_from(REPLICAS), told=tellings)
    def comes_late(self, replica: str, told: dict[str, Any]) -> None:
        self.make(Turn(replica, self.epochs[replica], self.seqs[replica], LEASE, **told))

    @rule(replica=st.sampled_from(REPLICAS))
    def leaves(self, replica: str) -> None:
        self.seqs[replica] += 1
        self.make(Turn(replica, self.epochs[replica], self.seqs[replica], LEASE, leave=True))
        self.epochs[replica] = self.acks[replica] = 0

    @rule(milliseconds=st.sampled_from((1, 100, 600, 1100)))
    def time_passes(self, milliseconds: int) -> None:
        self.now += milliseconds

    @rule(milliseconds=st.sampled_from((1, 700, 3_600_000)))
    def the_clock_is_set_back(self, milliseconds: int) -> None:
        self.now -= milliseconds

    @invariant()
    def what_is_used_is_what_replicas_hold(self) -> None:
        used = self.plain("HGETALL", "{p}:used")
        found = {key.decode(): int(value) for key, value in zip(used[::2], used[1::2], strict=True)}
        held: dict[str, int] = {}
        for replica in REPLICAS:
            flat = self.plain("HGETALL", f"{{p}}:held:{replica}")
            for key, value in zip(flat[::2], flat[1::2], strict=True):
                held[key.decode()] = held.get(key.decode(), 0) + int(value)
        assert found == held

    @invariant()
    def service_is_as_expected(self) -> None:
        flat = self.plain("HGETALL", "{p}:service")
        found = {key.decode(): float(value) for key, value in zip(flat[::2], flat[1::2], strict=True)}
        expected = {name: value for name, value in self.model.service.items() if value}
        assert {name: value for name, value in found.items() if value} == pytest.approx(expected)


def test_a_clock_that_is_set_back_gives_nobody_more_time(server: RedisServer) -> None:
    plain = Plain(server.port)
    try:
        plain("FLUSHALL")
        sha = plain("SCRIPT", "LOAD", with_clock_as_argument())

        def turn(told: Turn, now: int) -> Reply:
            return decode_reply(plain("EVALSHA", sha, 1, "{p}", told.encode(), now))

        now, hour = 1_700_000_000_000, 3_600_000
        used = {"x": (600.0, 600)}
        turn(Turn("dead", 0, 1, LEASE, caps={"w1": 1}, have={"w1": 1}, rates=used), now)
        epoch = turn(Turn("me", 0, 1, LEASE), now).epoch
        turn(Turn("me", epoch, 2, LEASE), now - hour)  # and from here on it goes as before
        turn(Turn("me", epoch, 3, LEASE), now - hour + LEASE // 2)
        reply = turn(
            Turn("me", epoch, 4, LEASE, want={"k": Want(1, any=("w1",))}, rates={"x": (0.0, 600)}),
            now - hour + LEASE,
        )
        assert reply.members == ("me",)
        assert not reply.settling
        assert [grant.worker for grant in reply.grants] == ["w1"]
        assert 58 < reply.rates["x"] < 60
    finally:
        plain.close()


@pytest.mark.slow
def test_the_script_does_what_its_model_does_whatever_replicas_do(server: RedisServer) -> None:
    plain = Plain(server.port)
    try:
        sha = plain("SCRIPT", "LOAD", with_clock_as_argument())
        bound = type("Bound", (Comparison,), {"plain": plain, "sha": sha})
        run_state_machine_as_test(
            bound,
            settings=settings(
                max_examples=150,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        plain.close()
