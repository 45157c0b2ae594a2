"""The script of the store in plain Python, to compare it with: what it should do, not how."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from trio_gateway.cluster._messages import ONCE, Grant, News, Reply, Turn, Want, field_of


@dataclass
class Member:
    """What the store knows of one replica."""

    epoch: int
    seq: int
    until: int
    held: Counter[str] = field(default_factory=Counter)
    grants: dict[int, Grant] = field(default_factory=dict)
    wants: dict[str, Want] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)

    def tell(self, name: str, total: float) -> float:
        more = total - self.told.get(name, 0.0)
        self.told[name] = total
        return more


@dataclass
class StoreModel:
    """See turn.lua."""

    members: dict[str, Member] = field(default_factory=dict)
    caps: dict[str, int] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)
    settled: dict[str, float] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    full_at: dict[str, float] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    version: int = 0
    epochs: int = 0
    numbers: int = 0
    born: int | None = None
    first: int = 0
    expect: int = 1
    news: dict[str, tuple[News, int, int, str]] = field(default_factory=dict)  # number, until when, by whom
    seen: int = 0
    ahead: int = 0
    latest: int = 0

    def used(self, resource: str) -> int:
        return sum(member.held[resource] for member in self.members.values())

    def turn(self, turn: Turn, clock: int) -> Reply:
        self.ahead += max(self.latest - clock - self.ahead, 0)  # the clock was set back
        now = self.latest = clock + self.ahead
        self.members = {name: each for name, each in self.members.items() if each.until > now}
        member = self.members.get(turn.replica)
        if turn.epoch and (member is None or member.epoch != turn.epoch):
            return Reply("fenced")
        if turn.seq <= (0 if member is None else member.seq):
            return Reply("late")
        before = None
        if turn.leave or turn.epoch == 0:
            before, member = self.members.pop(turn.replica, None), None
        if turn.leave:
            member = Member(0, 0, 0)
        elif member is None:
            self.epochs += 1
            self.born = now if self.born is None else self.born
            if not self.members:
                self.first, self.expect = now, 1
            member = self.members[turn.replica] = Member(self.epochs, 0, 0)
            member.told = {} if before is None else before.told
        member.seq, member.until = turn.seq, now + turn.lease
        settling = now < self.first + turn.lease
        if settling:
            self.expect = max(self.expect, turn.known)
        expect = self.expect if settling else 1
        self.caps |= turn.caps
        self._take(member, turn, now)
        rates = {name: max(self.full_at.get(name, 0) - now, 0) / 1000 for name in turn.rates}
        for name, value in turn.marks.items():
            self.version += 1
            if name.startswith(ONCE):
                self.marks.setdefault(name, value)
            else:
                self.marks.pop(name, None) if value == "" else self.marks.update({name: value})
        news = self._hear_news(turn, now)
        self._hear_wants(member, turn)
        self._grant(expect)
        return Reply(
            "joined",
            member.epoch,
            tuple(sorted(self.members)),
            tuple(member.grants[number] for number in sorted(member.grants)),
            rates,
            settling,
            self.version,
            dict(self.marks) if turn.version != self.version else None,
            "" if self.born is None else str(self.born),
            any(
                want.count > sum(grant.want == key for grant in each.grants.values())
                for each in self.members.values()
                for key, want in each.wants.items()
            ),
            news,
            self.seen,
        )

    def _hear_news(self, turn: Turn, now: int) -> dict[str, News]:
        self.news = {key: each for key, each in self.news.items() if each[2] > now}
        for key, told in turn.news.items():
            if told.left > 0 and not (key in self.news and self.news[key][0].rank > told.rank):
                self.seen += 1
                self.news[key] = told, self.seen, now + told.left, turn.replica
        return {
            key: News(news.value, news.rank, until - now)
            for key, (news, number, until, by) in self.news.items()
            if number > turn.seen and by != turn.replica
        }

    def _take(self, member: Member, turn: Turn, now: int) -> None:
        member.grants = {number: grant for number, grant in member.grants.items() if number > turn.ack}
        if turn.leave:
            return
        have = dict.fromkeys(member.held, 0) | turn.have if turn.whole else turn.have
        for resource, count in have.items():
            member.held[resource] = count + sum(g.takes.get(resource, 0) for g in member.grants.values())
        for name, total in turn.served.items():
            self.service[name] = self.service.get(name, 0.0) + member.tell("s" + name, total)
        for name, total in turn.settled.items():
            self.settled[name] = self.settled.get(name, 0.0) + member.tell("t" + name, total)
        for name, (used, size) in turn.rates.items():
            more, full = member.tell("r" + name, used), self.full_at.get(name, 0)
            self.full_at[name] = (max(full, now) if more > 0 else full) + more * 60000 / size
            if self.full_at[name] <= now:
                del self.full_at[name]

    def _hear_wants(self, member: Member, turn: Turn) -> None:
        told = dict.fromkeys(member.wants, Want(0)) | turn.want if turn.whole else turn.want
        for key, want in sorted(told.items()):
            if want.count == 0:
                gone = member.wants.pop(key, None)
                if gone is not None:
                    self.left[gone.group] = self._settled(gone)
            elif not turn.leave:
                if key not in member.wants:
                    self._lift(want)
                member.wants[key] = want

    def _service(self, want: Want) -> float:
        return self.service.get(field_of(want.group, want.tenant), 0.0)

    def _lift(self, want: Want) -> None:
        waiting = [w for each in self.members.values() for w in each.wants.values() if w.group == want.group]
        if any(other.tenant == want.tenant for other in waiting):
            return
        least = min(map(self._settled, waiting), default=self.left.get(want.group, 0.0))
        more = least - self._settled(want)
        if more > 0:
            name = field_of(want.group, want.tenant)
            self.settled[name] = self.settled.get(name, 0.0) + more
            self.service[name] = self.service.get(name, 0.0) + more

    def _settled(self, want: Want) -> float:
        return self.settled.get(field_of(want.group, want.tenant), 0.0)

    def _grant(self, expect: int) -> None:
        given: Counter[tuple[str, str]] = Counter()
        while found := min(self._possible(expect, given), default=None):
            *_, name, key = found
            member, want = self.members[name], self.members[name].wants[key]
            takes, worker = self._takes(member, want, expect) or ({}, "")
            self.numbers += 1
            member.grants[self.numbers] = Grant(self.numbers, key, worker, takes, want.cost)
            member.held.update(takes)
            at = field_of(want.group, want.tenant)
            self.service[at] = self.service.get(at, 0.0) + want.cost
            given[name, key] += 1

    def _possible(
        self, expect: int, given: Counter[tuple[str, str]]
    ) -> list[tuple[int, float, int, str, str]]:
        return [
            (want.tier, self._service(want), given[name, key], name, key)
            for name, member in self.members.items()
            for key, want in member.wants.items()
            if want.count > sum(grant.want == key for grant in member.grants.values())
            and self._takes(member, want, expect) is not None
        ]

    def _takes(self, member: Member, want: Want, expect: int) -> tuple[dict[str, int], str] | None:
        for worker in (*want.any, *filter(None, want.rest.split("\n"))):
            takes = {worker: want.slots} | dict.fromkeys(want.also, 1) | dict.fromkeys(want.wide, want.slots)
            if all(self._room(member, resource, count, expect) for resource, count in takes.items()):
                return takes, worker
        return None

    def _room(self, member: Member, resource: str, count: int, expect: int) -> bool:
        cap = self.caps.get(resource)
        if cap is None or self.used(resource) + count > cap:
            return False
        return expect == 1 or member.held[resource] + count <= math.floor(cap / expect)
