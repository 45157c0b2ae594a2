"""What one replica tells the store in one turn, and what it is told. Pure.

A *resource* is anything of which there is a number for all replicas together: slots of a worker, exchanges of
a tenant, slots of a pool for a tier. What is told of it is how it stands, never how it changed, so that
a turn may be made twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

ONCE: Final = "once:"  # begins the names of marks of which the first word counts, and not the last


@dataclass(frozen=True, slots=True)
class Want:
    """One line of waiters of which some could be placed, if there were slots.

    Attributes:
        count: how many of them; 0: none any more.
        tier: 0 is the first.
        group: in which tenants are compared by what they were served.
        tenant: whose line it is.
        slots: how many each takes at its worker.
        any: resources of which it needs ``slots`` of one, the best first.
        also: resources of which it needs one.
        wide: resources of which it needs ``slots``.
        cost: tokens for its tenant's weight that such a request usually is charged.
        rest: further ones after ``any``, parted by line feeds. What many lines have alike is looked through
            once for all of them.
    """

    count: int
    tier: int = 0
    group: str = ""
    tenant: str = ""
    slots: int = 1
    any: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    cost: float = 0.0
    rest: str = ""

    def as_json(self) -> dict[str, Any]:
        """Express it for the script."""
        if not self.count:
            return {"count": 0}
        return {
            "count": self.count,
            "tier": self.tier,
            "group": self.group,
            "tenant": self.tenant,
            "slots": self.slots,
            "any": self.any,
            "rest": self.rest,
            "also": self.also,
            "wide": self.wide,
            "cost": self.cost,
        }


@dataclass(frozen=True, slots=True)
class News:
    """Something that one replica saw, and that others may believe for a while.

    Attributes:
        value: what, in the form of its key.
        rank: while one is believed, only those of the same key whose rank is not lower, as text, replace it.
        left: milliseconds for which it is to be believed.
        stamp: another one each time that it was seen again and is to be believed longer; not told.
    """

    value: str
    rank: str = ""
    left: int = field(default=0, compare=False)
    stamp: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """All that a replica tells. Maps have what changed since the last turn that was answered.

    Attributes:
        replica: its name, of this run alone.
        epoch: as the store named it when it joined; 0: it joins.
        seq: grows by each turn that this run makes.
        lease: milliseconds for which it counts as alive.
        known: replicas that were alive when it last knew, itself included.
        ack: number of the last grant that it knows.
        whole: ``have`` and ``want`` have all there is: of what is not in them there is none.
        leave: it ends, and has nothing any more.
        version: of the marks that it knows.
        caps: how many there are of resources, by its settings.
        have: how many it uses of resources.
        want: by its own names of lines.
        served: tokens for their weight that were charged since it joined, by `field_of` group and tenant.
        settled: the same, without what is only estimated.
        rates: what was used since it joined, and what a bucket holds a minute, by the bucket's name.
        marks: what operators said, by name; "" takes back. See `ONCE`.
        news: what was seen, by name; it is forgotten by itself.
        seen: number of the last news that it knows.
    """

    replica: str
    epoch: int
    seq: int
    lease: int
    known: int = 1
    ack: int = 0
    whole: bool = False
    leave: bool = False
    version: int = 0
    caps: dict[str, int] = field(default_factory=dict)
    have: dict[str, int] = field(default_factory=dict)
    want: dict[str, Want] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    settled: dict[str, float] = field(default_factory=dict)
    rates: dict[str, tuple[float, int]] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    news: dict[str, News] = field(default_factory=dict)
    seen: int = 0

    def encode(self) -> bytes:
        """Express it for the script."""
        return json.dumps(
            {
                "replica": self.replica,
                "epoch": self.epoch,
                "seq": self.seq,
                "lease": self.lease,
                "known": self.known,
                "ack": self.ack,
                "whole": self.whole,
                "leave": self.leave,
                "version": self.version,
                "caps": self.caps,
                "have": self.have,
                "want": {key: want.as_json() for key, want in self.want.items()},
                "served": self.served,
                "settled": self.settled,
                "rates": {name: {"used": used, "size": size} for name, (used, size) in self.rates.items()},
                "marks": self.marks,
                "news": {
                    key: {"value": news.value, "rank": news.rank, "left": news.left}
                    for key, news in self.news.items()
                },
                "seen": self.seen,
            },
            separators=(",", ":"),
        ).encode()


@dataclass(frozen=True, slots=True)
class Grant:
    """Something that was wanted and is there now: it counts as had until the replica tells otherwise."""

    number: int
    want: str
    worker: str
    takes: dict[str, int]
    cost: float


@dataclass(frozen=True, slots=True)
class Reply:
    """All that a replica is told.

    Attributes:
        state: ``joined``; ``fenced``: the store does not know it (any more), and took nothing;
            ``late``: a newer turn came before this one, of which nothing was taken.
        members: names of the replicas that are alive, in order.
        grants: all that were not acknowledged, by number.
        rates: seconds until each bucket of the turn is full.
        settling: it is new, and gives each replica only its share until it knows all.
        marks: all of them, if they are others than the replica knows.
        born: names the store's memory: another one after it lost what it knew.
        contended: somebody waits for something that is not there.
        news: what others saw and this one does not know, by name.
        seen: number of the last of them.
    """

    state: str
    epoch: int = 0
    members: tuple[str, ...] = ()
    grants: tuple[Grant, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    settling: bool = False
    version: int = 0
    marks: dict[str, str] | None = None
    born: str = ""
    contended: bool = False
    news: dict[str, News] = field(default_factory=dict)
    seen: int = 0


def field_of(group: str, tenant: str) -> str:
    """Name what a tenant was served in a group."""
    return f"{group}\n{tenant}"


# What the script answers, as it is read: of the right types, numbers finite, text whole characters. Lua tells
# no empty list from an empty map, and writes large numbers as fractions.


class _Granted(msgspec.Struct):
    want: str
    worker: str
    takes: dict[str, float]
    cost: float


class _Numbered(msgspec.Struct):
    number: float
    grant: _Granted


class _Told(msgspec.Struct):
    value: str
    rank: str
    left: float


class _Joined(msgspec.Struct):
    epoch: float
    members: list[str] | dict[str, str]
    grants: list[_Numbered] | dict[str, str]
    rates: dict[str, float]
    settling: bool
    version: float
    born: str
    contended: bool
    news: dict[str, _Told]
    seen: float
    marks: dict[str, str] | None = None


class _State(msgspec.Struct):
    state: Literal["joined", "fenced", "late"]


_read_state: Final = msgspec.json.Decoder(_State).decode
_read_joined: Final = msgspec.json.Decoder(_Joined).decode


def decode_reply(data: bytes) -> Reply:
    """Read what the script answers. Raises ValueError if it is something else, whatever that is."""
    try:
        state = _read_state(data).state
        if state != "joined":
            return Reply(state)
        told = _read_joined(data)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise ValueError(str(exc)) from None
    grants = [
        Grant(
            int(each.number),
            each.grant.want,
            each.grant.worker,
            {name: int(count) for name, count in each.grant.takes.items()},
            each.grant.cost,
        )
        for each in told.grants
        if isinstance(each, _Numbered)
    ]
    return Reply(
        "joined",
        int(told.epoch),
        tuple(sorted(told.members)),
        tuple(sorted(grants, key=lambda grant: grant.number)),
        {name: milliseconds / 1000 for name, milliseconds in told.rates.items()},
        told.settling,
        int(told.version),
        told.marks,
        told.born,
        told.contended,
        {key: News(each.value, each.rank, int(each.left)) for key, each in told.news.items()},
        int(told.seen),
    )
