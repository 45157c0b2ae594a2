"""What one replica keeps of the store: what it told, what it still has to tell, what it was given. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar

from ._messages import Grant, News, Reply, Turn, Want, field_of


class Standing(Enum):
    """How a replica stands to the store; its values are labels of metrics."""

    OUTSIDE = "outside"  # it has not been there yet
    SHARED = "shared"  # it places what the store grants
    ALONE = "alone"  # the store is lost: it places by its share, or refuses


@dataclass(frozen=True, slots=True)
class Survey:
    """How things stand at a replica at one moment.

    Attributes:
        caps, have, want: see `Turn`; all of them.
        spent: what was charged since the last survey, and what of it is no estimate, by `field_of` group and
            tenant.
        rates: what was used since the replica began, and what the bucket holds, by its name; of some.
        marks: what operators said, as it is in force here.
        news: what was seen here, and others may still believe.
    """

    caps: Mapping[str, int]
    have: Mapping[str, int]
    want: Mapping[str, Want]
    spent: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    rates: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)
    news: Mapping[str, News] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Heard:
    """What is new in a reply.

    Attributes:
        grants: to be used or not, at once: the next survey tells.
        rates: by name: seconds until the bucket is full, and what it had used here when that was told.
        marks: what is to be in force here, of what is not yet; "" takes back.
        news: what others saw, by name.
    """

    grants: tuple[Grant, ...] = ()
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)
    news: Mapping[str, News] = field(default_factory=dict)


class Member:
    """One replica's side of the turns. One turn is under way at a time.

    Args:
        replica: its name, of this run alone.
        lease: seconds for which the store counts it as alive.

    Attributes:
        alive_until: on the replica's clock, when the store may have given what this one had to others.
    """

    def __init__(self, replica: str, lease: float) -> None:
        self.replica: Final = replica
        self._lease = lease
        self.alive_until = -math.inf
        self.standing = Standing.OUTSIDE
        self.members: tuple[str, ...] = ()
        self.settling = False
        self.contended = False
        self._epoch = self._seq = self._ack = self._version = 0
        self._born = ""
        self._whole = True
        self._told_caps: dict[str, int] = {}
        self._told_have: dict[str, int] = {}
        self._told_want: dict[str, Want] = {}
        self._told_news: dict[str, News] = {}
        self._seen = 0
        self._told_rates: dict[str, float] = {}
        self._told_served: dict[str, float] = {}
        self._told_settled: dict[str, float] = {}
        self._served: dict[str, float] = {}  # since it joined, as are those that are settled
        self._settled: dict[str, float] = {}
        self._rates_before: dict[str, float] = {}  # what was used before it joined
        self._marks: dict[str, str] = {}  # as the store has them
        self._counted: dict[str, int] = {}  # at least so much the store counts as had here, whatever it heard
        self._granted: Counter[str] = Counter()  # in the last turn, by what was wanted
        self._idle: frozenset[str] = frozenset()  # that of which some was of no use at the last look
        self._sent: Turn | None = None
        self._surveyed = Survey({}, {}, {})

    # -- telling

    def charge(self, group: str, tenant: str, tokens: float) -> None:
        """Add to what a tenant was charged, in tokens for its weight."""
        _add(self._served, field_of(group, tenant), tokens)

    def can_wait(self, survey: Survey) -> bool:
        """Look how things stand; answers whether a turn for that can wait for the next heartbeat.

        Nobody waits, nothing was used of rates, and of all that the store counts as had here nothing was idle
        at this look and at the last one. What was charged is remembered.
        """
        before, self._idle = (
            self._idle,
            frozenset(name for name, count in self._counted.items() if survey.have.get(name, 0) < count),
        )
        wanted = any(want.count > self._granted[key] for key, want in self._told_want.items())
        if self._whole or self.contended or wanted or survey.want or survey.rates:
            return False
        if not self._idle.isdisjoint(before) or survey.marks != self._marks:
            return False
        if _changed(survey.news, self._told_news):
            return False
        if _changed(survey.caps, self._told_caps):
            return False
        self._note_spent(survey)
        return True

    @property
    def something_idle(self) -> bool:
        """Whether something was of no use at the last look that the store counts as had here."""
        return bool(self._idle)

    def _note_spent(self, survey: Survey) -> None:
        for name, (charged, settled) in survey.spent.items():
            _add(self._served, name, charged)
            _add(self._settled, name, settled)

    def turn(self, survey: Survey) -> Turn:
        """Make the next turn out of how things stand; `hear` or `lose` follows."""
        self._note_spent(survey)
        self._idle = frozenset()
        self._seq += 1
        self._surveyed = survey
        self._counted = {
            name: least
            for name, count in self._counted.items()
            if (least := min(count, survey.have.get(name, 0))) > 0
        }
        if self._whole:
            self._told_caps, self._told_have, self._told_want = {}, {}, {}
            self._told_news = {}
        gone = dict.fromkeys(self._told_have.keys() - survey.have.keys(), 0)
        left = dict.fromkeys(self._told_want.keys() - survey.want.keys(), Want(0))
        self._sent = Turn(
            self.replica,
            self._epoch,
            self._seq,
            round(self._lease * 1000),
            known=max(len(self.members), 1),
            ack=self._ack,
            whole=self._whole,
            version=self._version,
            caps=_changed(survey.caps, self._told_caps),
            have=_changed(survey.have, self._told_have) | gone,
            want=_changed(survey.want, self._told_want) | left,
            served=_changed(self._served, self._told_served),
            settled=_changed(self._settled, self._told_settled),
            rates={
                name: (used - self._rates_before.setdefault(name, 0.0), size)
                for name, (used, size) in survey.rates.items()
            },
            marks=self._new_marks(survey.marks),
            news=_changed(survey.news, self._told_news),
            seen=self._seen,
        )
        return self._sent

    def _new_marks(self, here: Mapping[str, str]) -> dict[str, str]:
        """What operators said here and the store does not know; nothing before it told what it knows."""
        if not self._epoch:
            return {}
        gone = dict.fromkeys(self._marks.keys() - here.keys(), "")
        return _changed(here, self._marks) | gone

    def farewell(self) -> Turn:
        """Make the last turn."""
        self._seq += 1
        return Turn(self.replica, self._epoch, self._seq, round(self._lease * 1000), leave=True)

    def agreed(self, name: str) -> str | None:
        """Answer a mark as the store has it, if it does."""
        return self._marks.get(name)

    # -- keeping

    def kept(self, now: float) -> Mapping[str, int]:
        """How many of each resource the store counts as had here, used or not, until it is told otherwise.

        What was given back since the last turn may be used again without asking, as long as the store does
        not say that anybody waits for something.
        """
        if self.contended or now >= self.alive_until or self.standing is not Standing.SHARED:
            return {}
        return self._counted

    # -- hearing

    def hear(self, reply: Reply) -> Heard:
        """Take the answer of the last turn; a fenced replica has to make one more at once."""
        sent, self._sent = self._sent, None
        assert sent is not None
        if reply.state != "joined":
            self._whole = True
            self._counted.clear()
            if reply.state == "fenced":
                self._forget_epoch()
            return Heard()
        self._told_caps, self._told_want = dict(self._surveyed.caps), dict(self._surveyed.want)
        self._told_have = dict(self._surveyed.have)
        self._told_news, self._seen = dict(self._surveyed.news), reply.seen
        self._counted = dict(self._surveyed.have)
        self._told_served |= sent.served
        self._told_settled |= sent.settled
        self._whole = False
        self._epoch, self.members = reply.epoch, reply.members
        self.settling, self.contended = reply.settling, reply.contended
        self.standing = Standing.SHARED
        grants = tuple(grant for grant in reply.grants if grant.number > self._ack)
        self._granted.clear()
        for grant in grants:
            self._granted[grant.want] += 1
            # The store counts it as had until it hears otherwise: have it told again, used or not.
            self._ack = grant.number
            for resource, count in grant.takes.items():
                self._told_have[resource] = -1
                self._counted[resource] = self._counted.get(resource, 0) + count
        rates = {}
        for name in reply.rates.keys() & sent.rates.keys():
            until_full, (used, _) = reply.rates[name], sent.rates[name]
            self._told_rates[name] = used
            rates[name] = (until_full, used + self._rates_before[name])
        return Heard(grants, rates, self._take_marks(sent, reply), reply.news)

    def _take_marks(self, sent: Turn, reply: Reply) -> dict[str, str]:
        if reply.born != self._born:
            self._born, self._marks = reply.born, {}  # it forgot: what is in force here is told again
        for name, value in sent.marks.items():
            _put(self._marks, name, value)
        self._version = reply.version
        if reply.marks is None:
            return {}
        here, before, self._marks = self._surveyed.marks, self._marks, dict(reply.marks)
        return {
            name: self._marks.get(name, "")
            for name in before.keys() | self._marks.keys()
            if here.get(name, "") == before.get(name, "") != self._marks.get(name, "")
        }

    def lose(self) -> None:
        """No answer came, or too late. What was told may have been taken, or not: the next turn tells all."""
        self._sent = None
        self._whole = True
        self._counted.clear()

    def be_alone(self) -> None:
        """Go on without the store, if it was ever there."""
        if self.standing is Standing.SHARED:
            self.standing = Standing.ALONE

    def _forget_epoch(self) -> None:
        """The store has forgotten this replica: what it was told since it joined begins anew."""
        self._epoch = self._ack = self._version = self._seen = 0
        self._served = _untold(self._served, self._told_served)
        self._settled = _untold(self._settled, self._told_settled)
        self._told_served, self._told_settled = {}, {}
        for name, used in self._told_rates.items():
            self._rates_before[name] += used
        self._told_rates = {}


def share_of(slots: int, resource: str, replica: str, members: tuple[str, ...]) -> int:
    """How many of some slots are one replica's, when all divide them by number: together exactly all.

    What does not divide evenly goes to other replicas for each resource.
    """
    if replica not in members:
        return 0
    at = (members.index(replica) + sum(resource.encode())) % len(members)
    return slots // len(members) + (at < slots % len(members))


V = TypeVar("V")


def _changed(now: Mapping[str, V], before: Mapping[str, V]) -> dict[str, V]:
    return {name: value for name, value in now.items() if before.get(name) != value}


def _add(totals: dict[str, float], name: str, more: float) -> None:
    if more:
        totals[name] = totals.get(name, 0.0) + more


def _untold(totals: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    return {name: total - told.get(name, 0.0) for name, total in totals.items()}


def _put(marks: dict[str, str], name: str, value: str) -> None:
    if value == "":
        marks.pop(name, None)
    else:
        marks[name] = value
