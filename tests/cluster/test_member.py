"""Replicas and the store's model, with answers that get lost: nothing is given twice."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.cluster.store_model import StoreModel
from trio_gateway.cluster import Member, News, Reply, Standing, Survey, Turn, Want, field_of, share_of

LEASE = 1.0
CAPS = {"w1": 3, "w2": 2, "tenant:x": 2}
NAMES = ("a", "b", "c")


class Replica:
    """What one replica has and wants, with its side of the turns."""

    def __init__(self, name: str) -> None:
        self.member = Member(name, LEASE)
        self.running: list[dict[str, int]] = []
        self.want: dict[str, Want] = {}
        self.marks: dict[str, str] = {}

    def survey(self) -> Survey:
        have = Counter[str]()
        for takes in self.running:
            have.update(takes)
        return Survey(CAPS, dict(have), dict(self.want), marks=dict(self.marks))

    def kept(self) -> Counter[str]:
        """What the store counts as had here, and nobody uses."""
        kept = Counter(self.member.kept(0.0))
        for takes in self.running:
            kept.subtract(takes)
        return kept

    def hear(self, reply: Reply) -> None:
        heard = self.member.hear(reply)
        self.member.alive_until = LEASE
        for grant in heard.grants:
            want = self.want.get(grant.want)
            if want is None:
                continue
            self.running.append(grant.takes)
            self.want[grant.want] = Want(want.count - 1, want.tier, want.group, want.tenant, any=want.any)
            if want.count == 1:
                del self.want[grant.want]
        for name, value in heard.marks.items():
            self.marks.pop(name, None) if value == "" else self.marks.update({name: value})


class Turns(RuleBasedStateMachine):
    """See the module's docstring. No lease runs out here, and the store forgets nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.store = StoreModel()
        self.replicas = {name: Replica(name) for name in NAMES}

    def turn(self, name: str, *, lost: bool = False, taken: bool = True) -> None:
        replica = self.replicas[name]
        turn = replica.member.turn(replica.survey())
        reply = self.store.turn(turn, 0) if taken else None
        if reply is None or lost:
            replica.member.lose()
            replica.member.be_alone()
        else:
            replica.hear(reply)

    @rule(name=st.sampled_from(NAMES), lost=st.booleans(), taken=st.booleans())
    def takes_a_turn(self, name: str, lost: bool, taken: bool) -> None:
        self.turn(name, lost=lost, taken=taken)

    @rule(
        name=st.sampled_from(NAMES),
        key=st.sampled_from(("k1", "k2")),
        count=st.integers(1, 3),
        tenant=st.sampled_from("xy"),
        any_=st.sampled_from((("w1",), ("w1", "w2"))),
    )
    def wants(self, name: str, key: str, count: int, tenant: str, any_: tuple[str, ...]) -> None:
        also = ("tenant:x",) if tenant == "x" else ()
        self.replicas[name].want[key] = Want(count, 0, "g", tenant, 1, any_, also)

    @rule(name=st.sampled_from(NAMES), key=st.sampled_from(("k1", "k2")))
    def gives_up_waiting(self, name: str, key: str) -> None:
        self.replicas[name].want.pop(key, None)

    @rule(name=st.sampled_from(NAMES))
    def one_ends(self, name: str) -> None:
        if self.replicas[name].running:
            self.replicas[name].running.pop(0)

    @rule(name=st.sampled_from(NAMES), worker=st.sampled_from(("w1", "w2")), tenant=st.sampled_from("xy"))
    def one_is_placed_where_slots_are_kept(self, name: str, worker: str, tenant: str) -> None:
        replica, takes = self.replicas[name], {worker: 1, **({"tenant:x": 1} if tenant == "x" else {})}
        kept = replica.kept()
        if all(kept[resource] >= count for resource, count in takes.items()):
            replica.running.append(takes)

    @rule(name=st.sampled_from(NAMES))
    def looks_whether_a_turn_can_wait(self, name: str) -> None:
        replica = self.replicas[name]
        if replica.member.can_wait(replica.survey()):
            assert not replica.want

    @rule(name=st.sampled_from(NAMES), mark=st.sampled_from(("frozen:x", "worker:w1")), on=st.booleans())
    def an_operator_speaks(self, name: str, mark: str, on: bool) -> None:
        marks = self.replicas[name].marks
        marks.update({mark: "1"}) if on else marks.pop(mark, None)

    @invariant()
    def never_more_runs_than_there_is(self) -> None:
        for resource, cap in CAPS.items():
            running = sum(t.get(resource, 0) for r in self.replicas.values() for t in r.running)
            assert running <= min(cap, max(self.store.used(resource), 0)), resource

    def teardown(self) -> None:
        """Once nobody wants anything and all ended, the store has nothing, and all know the same marks."""
        for replica in self.replicas.values():
            replica.want, replica.running = {}, []
        for _ in range(4):
            for name in NAMES:
                self.turn(name)
                self.replicas[name].running = []
        assert all(self.store.used(resource) == 0 for resource in CAPS)
        assert all(not member.grants and not member.wants for member in self.store.members.values())
        assert all(replica.marks == self.store.marks for replica in self.replicas.values())


TestTurns = Turns.TestCase


def joined(member: Member, store: StoreModel, survey: Survey, now: int = 0) -> Reply:
    reply = store.turn(member.turn(survey), now)
    member.hear(reply)
    return reply


NOTHING = Survey({}, {}, {})


def test_a_replica_that_the_store_forgot_joins_again_and_tells_all_it_has() -> None:
    store, member = StoreModel(), Member("a", LEASE)
    survey = Survey({"w1": 4}, {"w1": 3}, {})
    joined(member, store, survey)
    assert joined(member, store, survey, 2000).state == "fenced"
    assert member.standing is Standing.SHARED, "it goes on in its next turn"
    assert joined(member, store, survey, 2000).state == "joined"
    assert store.used("w1") == 3


def test_a_store_that_lost_its_memory_is_told_marks_again_and_gives_shares_first() -> None:
    one, other = Member("a", LEASE), Member("b", LEASE)
    store = StoreModel()
    marked = Survey({"w1": 4}, {}, {"k": Want(4, any=("w1",))}, marks={"frozen:x": "1"})
    joined(other, store, NOTHING)
    for _ in range(2):
        joined(one, store, marked, 1500)
    joined(other, store, NOTHING, 1500)  # fenced
    joined(other, store, NOTHING, 1500)
    joined(one, store, marked, 1500)
    assert one.members == ("a", "b")
    assert store.marks == {"frozen:x": "1"}
    empty = StoreModel()
    assert joined(one, empty, marked, 1600).state == "fenced"
    reply = joined(one, empty, marked, 1600)
    assert reply.settling
    assert len(reply.grants) == 4 // 2
    joined(one, empty, Survey({"w1": 4}, {}, {}, marks={"frozen:x": "1"}), 1600)
    assert empty.marks == {"frozen:x": "1"}


def test_a_store_that_stood_still_until_all_were_forgotten_gives_shares_first_too() -> None:
    one, other = Member("a", LEASE), Member("b", LEASE)
    store, greedy = StoreModel(), Survey({"w1": 4}, {}, {"k": Want(4, any=("w1",))})
    for member in (one, other):
        joined(member, store, NOTHING)
    for _ in range(2):
        joined(one, store, NOTHING, 900)
        joined(other, store, NOTHING, 900)
    assert joined(one, store, greedy, 5000).state == "fenced"
    reply = joined(one, store, greedy, 5000)
    assert (reply.settling, len(reply.grants)) == (True, 2), (
        "the other one may have something that still runs"
    )
    joined(other, store, NOTHING, 5000)  # fenced
    joined(other, store, NOTHING, 5000)
    joined(other, store, NOTHING, 5900)
    assert len(joined(one, store, greedy, 5999).grants) == 2
    assert not joined(one, store, greedy, 6000).settling


def test_charges_and_rates_count_once_whether_answers_are_lost_or_the_replica_was_forgotten() -> None:
    store, member = StoreModel(), Member("a", LEASE)
    name = field_of("g", "x")
    spent = Survey({}, {}, {}, {name: (10.0, 4.0)}, {"r": (5.0, 60)})
    same = Survey({}, {}, {}, {}, {"r": (5.0, 60)})
    store.turn(member.turn(spent), 0)
    member.lose()
    joined(member, store, spent)
    assert (store.service[name], store.settled[name]) == (20.0, 8.0)  # surveyed twice, told twice
    assert store.full_at["r"] == 5000
    member.charge("g", "x", 2.5)
    joined(member, store, same, 2000)  # fenced
    joined(member, store, same, 2000)
    assert store.service[name] == 22.5
    assert store.full_at["r"] == 5000, "what it used before it joined again was told then"


def test_the_last_turn_gives_everything_back() -> None:
    store, member = StoreModel(), Member("a", LEASE)
    joined(member, store, Survey({"w1": 4}, {"w1": 3}, {}))
    store.turn(member.farewell(), 0)
    assert (store.used("w1"), store.members) == (0, {})


def test_a_turn_that_comes_late_is_not_taken() -> None:
    store, member = StoreModel(), Member("a", LEASE)
    joined(member, store, NOTHING)
    late: Turn = member.turn(Survey({"w1": 4}, {"w1": 1}, {}))
    member.lose()
    joined(member, store, NOTHING)
    assert store.turn(late, 0).state == "late"
    assert store.used("w1") == 0
    member.turn(NOTHING)
    member.hear(Reply("late"))
    assert member.turn(NOTHING).whole, "it tells everything then"


@given(st.integers(0, 100), st.sets(st.text("abc", min_size=1), min_size=1), st.text("w123"))
def test_all_shares_together_are_all_slots_and_no_two_differ_by_more_than_one(
    slots: int, names: set[str], resource: str
) -> None:
    members = tuple(sorted(names))
    shares = [share_of(slots, resource, name, members) for name in members]
    assert sum(shares) == slots
    assert max(shares) - min(shares) <= 1
    assert share_of(slots, resource, "nobody", members) == 0


def test_who_was_never_there_is_not_alone_but_outside() -> None:
    member = Member("a", LEASE)
    member.turn(NOTHING)
    member.lose()
    member.be_alone()
    assert member.standing is Standing.OUTSIDE


def test_what_was_given_back_is_kept_until_the_next_turn_unless_somebody_waits_or_the_lease_is_over() -> None:
    store, one, other = StoreModel(), Member("a", LEASE), Member("b", LEASE)
    using = Survey({"w1": 2}, {"w1": 2}, {})
    joined(one, store, using)
    assert one.kept(0.0) == {}, "it is not known yet how long it counts as alive"
    one.alive_until = LEASE
    assert one.kept(0.0) == {"w1": 2}
    assert one.kept(LEASE) == {}
    one.turn(Survey({"w1": 2}, {"w1": 1}, {}))
    assert one.kept(0.0) == {"w1": 1}, "what it is about to tell may be others' before the answer comes"
    one.lose()
    assert one.kept(0.0) == {}
    joined(one, store, using)
    joined(other, store, Survey({"w1": 2}, {}, {"k": Want(1, any=("w1",))}))
    joined(one, store, using)
    assert one.contended
    assert one.kept(0.0) == {}
    joined(one, store, using, 2000)  # fenced
    one.contended = False
    assert one.kept(0.0) == {}


def test_a_turn_waits_for_the_next_heartbeat_while_there_is_nothing_that_others_lack() -> None:
    store, member, caps = StoreModel(), Member("a", LEASE), {"w1": 4}
    name = field_of("g", "x")
    busy, free = Survey(caps, {"w1": 1}, {}), Survey(caps, {}, {})
    wanting = Survey(caps, {}, {"k": Want(1, 0, "g", "x", any=("w1",))})
    assert not member.can_wait(busy), "it has to join"
    joined(member, store, busy, 0)
    assert member.can_wait(busy)
    assert not member.something_idle
    # What was of no use at one look may be between two requests; at two looks it is others'.
    assert member.can_wait(free)
    assert member.something_idle
    assert member.can_wait(busy)
    assert member.can_wait(free)
    assert not member.can_wait(free)
    # Who waits, and what others have to hear at once, has a turn.
    assert not member.can_wait(wanting)
    (grant,) = joined(member, store, wanting, 1).grants
    assert grant.worker == "w1"
    assert member.can_wait(busy), "what was granted, it has, and nobody wants more"
    joined(member, store, Survey(caps, {}, {"k": Want(9, 0, "g", "x", any=("w1",))}), 2)
    four = {"w1": 4}
    assert not member.can_wait(Survey(caps, four, {})), "somebody waited in vain, and left"
    joined(member, store, Survey(caps, four, {}), 3)
    assert member.can_wait(Survey(caps, four, {}))
    for more in (
        Survey(caps, four, {}, rates={"r": (1.0, 60)}),
        Survey(caps, four, {}, marks={"frozen:x": "1"}),
        Survey(caps, four, {}, news={"n": News("up", left=1000)}),
        Survey({"w1": 5}, four, {}),
    ):
        assert not member.can_wait(more)
    # What was charged meanwhile is told then, once.
    assert member.can_wait(Survey(caps, four, {}, {name: (10.0, 4.0)}))
    joined(member, store, Survey(caps, four, {}, {name: (1.0, 1.0)}), 4)
    assert (store.service[name], store.settled[name]) == (11.0, 5.0)
    other = Member("b", LEASE)
    joined(other, store, wanting, 5)
    joined(member, store, Survey(caps, four, {}), 6)
    assert not member.can_wait(Survey(caps, four, {})), "others wait for what it may give back any moment"
