"""The one task that speaks to the store, from start to end: it takes turns.

Nobody calls the store: the task looks how things stand, tells it, and hands on what it hears. Requests only
wake it, and wait in their queue; whatever came meanwhile is told in the same turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import trio

from ._member import Heard, Member, Standing, Survey
from ._messages import Reply, Turn, decode_reply
from ._store import Connect, Link, StoreLost

SECONDS_BETWEEN_LOOKS: Final = 0.02  # while somebody waits: what others gave back may be his
SECONDS_APART: Final = 0.002  # at least, from one turn's begin to the next: who comes meanwhile shares it
SECONDS_TO_GATHER: Final = 0.03  # from one look to the next while nobody waits; what is idle twice is told
FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
TURNS: Final = ("joined", "fenced", "late", "failed")
FAREWELL: Final = 0.5  # seconds for the last turn
REASONS: Final = 8  # that are told of one loss, since some words may differ each time


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Durations in seconds.

    Attributes:
        lease: for which the store counts this replica as alive after a turn.
        heartbeat: at most between two turns.
    """

    lease: float
    heartbeat: float


class Local(Protocol):
    """This process, of which the store is told."""

    def survey(self) -> Survey:
        """Look how things stand."""

    def use(self, heard: Heard) -> bool:
        """Take what was heard, at once; answers whether all that was granted is in use."""

    def stand(self, standing: Standing, members: tuple[str, ...], poke: Callable[[bool], None]) -> None:
        """Place as a replica of this standing does, from now on; ``poke`` is `Replica.poke`."""


@dataclass(slots=True)
class ReplicaStatistics:
    """Counts since start: turns by how they ended, losses of the store, seconds that turns took in all."""

    turns: Counter[str]
    losses: int = 0
    granted: int = 0
    seconds: float = 0.0


class Replica:
    """See the module's docstring.

    Args:
        member: what is kept of the store.
        connect: opens a connection.
        local: this process.
        note: told whether the store was found, or else is lost, and in words what of it; of one loss each
            reason once, up to `REASONS`.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        member: Member,
        connect: Callable[[], Connect],
        local: Local,
        note: Callable[[bool, str], None],
    ) -> None:
        self._settings = settings
        self.member: Final = member
        self._connect = connect
        self._local = local
        self._note = note
        self.statistics: Final = ReplicaStatistics(Counter())
        self.tried: Final = trio.Event()  # it is known whether the store can be reached
        self._scope = trio.CancelScope()
        self._urgent = self._changed = False
        self._nap: trio.CancelScope | None = None
        self._waiting = False
        self._begun = -math.inf
        self._reasons: set[str] = set()  # that were told since the store was found

    def figures(self) -> dict[str, Any]:
        """Answer counts since start, and how it stands right now."""
        counts, member = self.statistics, self.member
        return {
            "standing": {each.value: int(each is member.standing) for each in Standing},
            "replicas": list(member.members),
            "settling": member.settling,
            "turns": {state: counts.turns[state] for state in TURNS},
            "turn_seconds": round(counts.seconds, 6),
            "losses": counts.losses,
            "granted": counts.granted,
            "scope": "fleet",
        }

    def poke(self, urgent: bool) -> None:
        """Say that something changed. Never waits."""
        self._changed = True
        self._urgent = self._urgent or urgent or self.member.contended
        if self._nap is not None:
            now = trio.current_time()
            due = self._begun + SECONDS_APART if self._urgent else now + SECONDS_TO_GATHER
            self._nap.deadline = min(self._nap.deadline, due)

    async def run(self) -> None:
        """Take turns until `leave`."""
        with self._scope:
            await self._run()

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        self._local.stand(self.member.standing, (), self.poke)
        while True:
            try:
                async with self._connect() as link:
                    await self._take_turns(link)
            except StoreLost as lost:
                pause = (
                    FIRST_PAUSE if self.member.standing is Standing.SHARED else min(2 * pause, LONGEST_PAUSE)
                )
                self._lose(lost)
            self.tried.set()
            await trio.sleep(pause)

    def _lose(self, lost: StoreLost) -> None:
        self.member.lose()
        self.statistics.turns["failed"] += 1
        self._tell_reason(str(lost))
        if self.member.standing is Standing.SHARED:
            self.statistics.losses += 1
            self.member.be_alone()
            self._local.stand(self.member.standing, self.member.members, self.poke)

    def _tell_reason(self, reason: str) -> None:
        """Note it if it is new: what keeps the store away may be another than what it was lost for."""
        if reason not in self._reasons and len(self._reasons) < REASONS:
            self._reasons.add(reason)
            self._note(False, reason)

    async def _take_turns(self, link: Link) -> None:
        while True:
            now, urgent = trio.current_time(), self._urgent
            self._urgent = self._changed = False
            survey = self._local.survey()
            self._waiting = bool(survey.want)
            alive = now < self._begun + self._settings.heartbeat
            if alive and not urgent and self.member.can_wait(survey):
                await self._rest()
                continue
            begun = self._begun = now
            turn = self.member.turn(survey)
            reply = await self._make(link, turn)
            took = trio.current_time() - begun
            self.statistics.turns[reply.state] += 1
            self.statistics.seconds += took
            if (
                took >= self._settings.lease
            ):  # this process stood still: what was granted may be others' by now
                raise StoreLost("an answer that came after the lease was over")
            before = self.member.standing
            heard = self.member.hear(reply)
            self.member.alive_until = begun + self._settings.lease
            if reply.state != "joined":
                if reply.state == "late":
                    await trio.sleep(SECONDS_BETWEEN_LOOKS)  # it may be far ahead
                continue  # it joins (again) in the next turn
            if before is not Standing.SHARED:
                self._reasons.clear()
                self._note(True, f"replicas: {len(reply.members)}")
                self._local.stand(self.member.standing, self.member.members, self.poke)
            self.statistics.granted += len(heard.grants)
            if not self._local.use(heard):
                self._urgent = True  # somebody else may want it
            self.tried.set()
            await self._rest()

    async def _make(self, link: Link, turn: Turn) -> Reply:
        try:
            return decode_reply(await link.turn(turn.encode()))
        except ValueError as exc:
            raise StoreLost(f"an answer that can not be read: {exc!r}") from None

    async def _rest(self) -> None:
        """Wait until there is something to tell, or to look for."""
        if self._urgent:
            seconds = max(self._begun + SECONDS_APART - trio.current_time(), 0.0)
        elif self._waiting:
            seconds = SECONDS_BETWEEN_LOOKS
        elif self._changed or self.member.something_idle:
            seconds = SECONDS_TO_GATHER
        else:
            seconds = max(self._begun + self._settings.heartbeat - trio.current_time(), 0.0)
        with trio.move_on_after(seconds) as self._nap:
            await trio.sleep_forever()
        self._nap = None

    async def leave(self) -> None:
        """End `run`, and tell the store that this replica has nothing any more. Gives up soon."""
        self._scope.cancel()
        with trio.move_on_after(FAREWELL):
            await trio.lowlevel.checkpoint()
            try:
                async with self._connect() as link:
                    await self._make(link, self.member.farewell())
            except StoreLost:
                return  # its lease ends by itself
