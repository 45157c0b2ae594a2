"""Tenants that ask at a rate of their own, whatever they are told, and what the records say of them."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
import trio

from trio_gateway.testing import MessageError, RawClient, chat_request

from .fleet import MODEL

SETTLING: Final = 0.02  # seconds, at most, from a slot's being free to the record that says so
GENERATED: Final = 2  # what a generated token costs, in prompt tokens
PATIENCE: Final = 90.0  # seconds for an answer; the gateway's own bounds are shorter


@dataclass(frozen=True)
class Tenant:
    """Who asks, and how.

    Attributes:
        rate: requests a second.
        even: from half to one and a half of the mean lies between two requests; else arrivals are Poisson's.
        tokens: least and most of an answer.
        words: least and most of a prompt.
        limit: ``max_tokens`` that every request names; None: none does.
        begins: seconds after which it starts.
    """

    name: str
    rate: float
    tier: str = "standard"
    weight: float = 1.0
    tokens: tuple[int, int] = (8, 16)
    words: tuple[int, int] = (10, 10)
    limit: int | None = None
    begins: float = 0.0
    even: bool = False

    @property
    def key(self) -> str:
        return f"key of {self.name}".replace(" ", "-")

    @property
    def toml(self) -> str:
        """Its table in the gateway's configuration."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        return (
            f'[[tenants]]\nid = "{self.name}"\nweight = {self.weight}\ntiers = ["{self.tier}"]\n'
            f'keys = [{{id = "{self.name}-key", hash = "sha256:{digest}"}}]\n'
        )

    def pause(self, dice: random.Random) -> float:
        """Seconds until its next request."""
        return dice.uniform(0.5, 1.5) / self.rate if self.even else dice.expovariate(self.rate)

    def request(self, dice: random.Random) -> bytes:
        fields: dict[str, Any] = {} if self.limit is None else {"max_tokens": self.limit}
        text = " ".join(f"word{dice.randrange(10_000)}" for _ in range(dice.randint(*self.words)))
        simulate = {"tokens": dice.randint(*self.tokens)}
        return chat_request(text, model=MODEL, stream=False, key=self.key, simulate=simulate, **fields)


@dataclass
class Asked:
    """What clients saw: when requests were sent, by tenant, and what became of them."""

    sent: dict[str, list[float]] = field(default_factory=dict)
    got: Counter[tuple[str, str]] = field(default_factory=Counter)


async def ask_for(port: int, tenants: Iterable[Tenant], seconds: float, seed: int) -> Asked:
    """Let tenants ask for some time; who has no answer then leaves."""
    asked, dice = Asked(), random.Random(seed)

    async def ask(tenant: Tenant) -> None:
        try:
            with await RawClient.connect(("127.0.0.1", port)) as client:
                await client.send(tenant.request(dice))
                with trio.move_on_after(PATIENCE):
                    answer = await client.read_to_end()
                    code = "whole" if answer.status == 200 else str(answer.error().get("code"))
                    asked.got[tenant.name, code] += 1
        except (OSError, MessageError):
            asked.got[tenant.name, "odd"] += 1

    async def ask_on(tenant: Tenant, nursery: trio.Nursery) -> None:
        asked.sent[tenant.name] = []
        at = trio.current_time() + tenant.begins
        while True:
            at += tenant.pause(dice)
            await trio.sleep_until(at)
            asked.sent[tenant.name].append(time.time())
            nursery.start_soon(ask, tenant)

    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for tenant in tenants:
                nursery.start_soon(ask_on, tenant, nursery)
    return asked


# Records ----------------------------------------------------------------------------------------------------

ROWS: Final = """
SELECT tenant, outcome, arrived_at, placed_at, settled_at, coalesce(released_at, settled_at) AS freed_at,
  coalesce(tokens_prompt, 0) AS prompt, coalesce(tokens_generated, 0) AS generated
FROM exchanges ORDER BY arrived_at"""


@dataclass(frozen=True)
class Row:
    """One exchange of the gateway's records; times are of the wall clock, in seconds."""

    tenant: str
    outcome: str
    arrived: float
    placed: float | None
    freed: float
    cost: int

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Row:
        cost = columns["prompt"] + GENERATED * columns["generated"] if columns["placed_at"] else 0
        return cls(
            columns["tenant"],
            columns["outcome"],
            columns["arrived_at"],
            columns["placed_at"],
            columns["freed_at"],
            cost,
        )

    @property
    def waited(self) -> float:
        """Seconds until it was placed, or until it gave up."""
        return (self.freed if self.placed is None else self.placed) - self.arrived


def read_rows(database: Path) -> list[Row]:
    """Answer every settled exchange of a SQLite database, by arrival."""
    engine = sa.create_engine(f"sqlite:///{database}", poolclass=sa.NullPool)
    with engine.connect() as connection:
        found = connection.execute(sa.text(ROWS)).mappings().all()
    return [Row.of(dict(columns)) for columns in found if columns["outcome"] is not None]


@dataclass(frozen=True)
class Span:
    """The records of one stretch of time.

    Attributes:
        rows: of the gateway, by arrival; also those of before and after.
    """

    rows: Sequence[Row]
    begin: float
    end: float

    def _has(self, moment: float | None) -> bool:
        return moment is not None and self.begin <= moment < self.end

    def served(self) -> Counter[str]:
        """Tokens by tenant of what was over in this time, a generated one as two."""
        counted = Counter[str]()
        for row in self.rows:
            if row.placed is not None and self._has(row.freed):
                counted[row.tenant] += row.cost
        return counted

    def waits(self, tenants: Iterable[str]) -> list[float]:
        """Seconds that those waited who came in this time."""
        wanted = set(tenants)
        return [row.waited for row in self.rows if row.tenant in wanted and self._has(row.arrived)]

    def gaps(self) -> list[float]:
        """Seconds between one slot that came free and the next."""
        freed = sorted(row.freed for row in self.rows if row.placed is not None and self._has(row.freed))
        return [later - sooner for sooner, later in itertools.pairwise(freed)]

    def mean_stay(self, tenant: str) -> float:
        """Seconds that a tenant's requests had a slot, on average."""
        stays = [
            row.freed - row.placed
            for row in self.rows
            if row.tenant == tenant and row.placed is not None and self._has(row.freed)
        ]
        return sum(stays) / len(stays) if stays else 0.0

    def most_at_once(self, tenants: Iterable[str]) -> int:
        """The most slots that tenants ever had at a time."""
        wanted, changes = set(tenants), list[tuple[float, int]]()
        for row in self.rows:
            if row.tenant in wanted and row.placed is not None and row.freed > self.begin:
                changes += [(row.placed, 1), (max(row.placed, row.freed - SETTLING), -1)]
        held = most = 0
        for at, change in sorted(changes):
            held += change
            if self.begin <= at < self.end:
                most = max(most, held)
        return most


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 if all are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0
