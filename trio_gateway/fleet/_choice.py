"""Which worker an exchange is placed at. Pure: dice come as an argument, candidates in file order.

1. Filter: only workers that may take the request and have room; suspect ones only
   if there is no other.
2. Affinity: a request with a key goes where its key leads, so that workers meet
   prefixes again that they have in their cache. Rendezvous hashing (Thaler and
   Ravishankar 1998) gives each key an order of workers, the same in every gateway and
   after every restart, weighted as Schindelhauer and Schomaker (2005) do. Bounded
   loads (Mirrokni, Thorup and Zadimoghaddam 2017) keep a popular key from flooding
   its worker: one that would come to more than `BOUND` times the mean passes on to
   the next in the key's order.
3. Else the least loaded of a few workers that are drawn at random (Mitzenmacher 1996):
   with views that are behind, everybody who takes the least loaded of all takes the
   same one. How many are drawn follows from how much is known: all, if all known work
   is ours, since then nothing is behind; two, if nearly all of it is others'. Where views
   are behind, they are drawn among the newer half: gateways that read at moments of
   their own then decide from news half as old, each about workers of its own. (A quarter
   would be better still, but where workers tell all gateways at once, everybody would
   follow the news; a half does little harm. docs/decisions/0017 has the figures.)

Of many workers only some are looked at: the least loaded of 16 that were drawn is nearly that of thousands
(and it is better that not everybody takes the same), and all of them would cost more than a microsecond each.
A key then has an order of the workers that stand near it on a `Circle`, and the mean load is that of those
that were drawn; see `choose_near`. As many are near as are looked at where all are: one worker more than
that moves hardly a key.

Equal workers are taken in file order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from ..contract import RawJson

BOUND: Final = 1.15  # times the mean load, up to which a worker is taken for its key
LIGHT: Final = 0.25  # share of its slots below which a worker passes nothing on, whatever the mean is
NEWER: Final = 0.5  # share of the workers, those with the newest readings, that are drawn from
FEWEST: Final = 2  # workers that are looked at
MANY: Final = 32  # workers; of more only `LOOKED_AT` are looked at, and as many are near a key
LOOKED_AT: Final = 16
HOMES: Final = 2  # workers that share a key before the next, longer key decides

_DIGITS: Final = 9  # loads that differ by less are equal: sums of floats are not exact


T = TypeVar("T")


@dataclass(slots=True, eq=False)  # not frozen: it would cost three times as much, and a request makes dozens
class Candidate:
    """One worker, as a choice sees it. Work is counted in requests of usual size.

    Attributes:
        name: of the worker; keys are led by it.
        work: outstanding there, of everybody, as far as is known.
        own: this process's share of it.
        room: what it can do at once: slots times weight.
        free: slots that nobody is known to use.
        age: of what is known, in seconds; 0 where all is our own.
        open: state, model, breaker and outage let it take the request.
        suspect: taken only if no other is eligible.
        loaded: counts as fully loaded, whatever its work is.
    """

    name: str
    work: float
    own: float
    room: float
    free: int
    age: float = 0.0
    open: bool = True
    suspect: bool = False
    loaded: bool = False

    @property
    def load(self) -> float:
        """Work for its room; 1 is a worker whose slots are all in use."""
        load = self.work / self.room
        return round(load + 1 if self.loaded else load, _DIGITS)


def choose(
    candidates: Sequence[Candidate],
    dice: Callable[[], float],
    *,
    need: int = 1,
    size: float = 1.0,
    keys: Sequence[bytes] = (),
    oldest: float = math.inf,
) -> Candidate | None:
    """Choose the worker of one exchange; None if no worker is eligible now.

    Args:
        candidates: all workers of the model, in file order.
        dice: answers numbers from 0 to 1.
        need: slots that it takes.
        size: of the request, in usual ones.
        keys: what leads it to a worker, the most widely shared first; see `prefix_keys`.
        oldest: seconds; only workers of which something newer is known. For the last attempt
            of an exchange that was rejected before: better wait for news than be rejected again.
    """
    eligible = filtered(candidates, need)
    if oldest < math.inf:
        eligible = [each for each in eligible if each.age <= oldest]
    if len(eligible) < 2:
        return eligible[0] if eligible else None
    if keys:
        mean = _mean(candidates, size)
        for key in keys:
            order = in_order(key, eligible)
            home = _at_home(order if key is keys[-1] else order[:HOMES], mean, size)
            if home is not None:
                return home
    return min(_looked_at(eligible, dice), key=_load)  # the first of equals


def choose_near(
    orders: Sequence[Iterable[Candidate]],
    drawn: Sequence[Candidate],
    *,
    size: float = 1.0,
    oldest: float = math.inf,
) -> Candidate | None:
    """Choose the worker to which keys lead, among many; None: it is to be chosen as without keys.

    Args:
        orders: for each key, the most widely shared first, those near it in the order in which it
            prefers them; they are looked at one by one, as far as needed.
        drawn: some of all workers, whose mean load stands for that of all.
    """
    mean = _mean(drawn, size)
    for number, order in enumerate(orders, 1):
        eligible = (
            each for each in order if each.open and each.free > 0 and not each.suspect and each.age <= oldest
        )
        home = _at_home(eligible if number == len(orders) else islice(eligible, HOMES), mean, size)
        if home is not None:
            return home
    return None


def filtered(candidates: Sequence[Candidate], need: int) -> list[Candidate]:
    """Answer those that can take a request of ``need`` slots, suspect ones only if there is no other."""
    able = [each for each in candidates if each.open and each.free >= need]
    sound = [each for each in able if not each.suspect]
    return sound or able


def drawn(items: Sequence[T], count: int, dice: Callable[[], float]) -> list[T]:
    """Draw so many of more, each as likely as any other, and leave them in order (Floyd; Bentley 1987)."""
    found: set[int] = set()
    for last in range(len(items) - count, len(items)):
        at = int(dice() * (last + 1))
        found.add(last if at in found else at)
    return [items[at] for at in sorted(found)]


def _load(candidate: Candidate) -> float:
    return candidate.load


# -- power of a few choices


def _looked_at(eligible: Sequence[Candidate], dice: Callable[[], float]) -> Sequence[Candidate]:
    """Draw workers without repetition, larger ones more often; in file order.

    The keys are those of Efraimidis and Spirakis (2006).
    """
    count = looks(eligible)
    if count >= len(eligible):
        return eligible
    newer = max(count, math.ceil(len(eligible) * NEWER))
    oldest = sorted(each.age for each in eligible)[newer - 1]
    pool = [each for each in eligible if each.age <= oldest]
    keys = [math.log(max(dice(), 1e-300)) / each.room for each in pool]
    least = sorted(keys, reverse=True)[count - 1]
    return [each for each, key in zip(pool, keys, strict=True) if key >= least]


def looks(eligible: Sequence[Candidate]) -> int:
    """Answer how many workers are looked at: the share of the known work that is ours, of them all."""
    work = sum([each.work for each in eligible])
    own = sum([each.own for each in eligible])
    if own >= work:
        return len(eligible)
    return max(FEWEST, math.ceil(len(eligible) * own / work))


# -- affinity


def _mean(candidates: Sequence[Candidate], size: float) -> float:
    """The load of those that are up if they had this request too."""
    up = [each for each in candidates if each.open]
    room = sum([each.room for each in up])
    return (sum([each.work for each in up]) + size) / room if room else math.inf


def _at_home(order: Iterable[Candidate], mean: float, size: float) -> Candidate | None:
    """Answer the first worker in the order of a key that is within its bound."""
    for each in order:
        if not each.loaded and each.work + size <= _most(each, mean, size):
            return each
    return None


def _most(candidate: Candidate, mean: float, size: float) -> float:
    """Work that a worker may come to by affinity: whole requests, so that a small mean is no bound."""
    if mean == math.inf:  # nobody that was drawn is up
        return math.inf
    within = size * math.ceil(round(BOUND * mean * candidate.room / size, _DIGITS))
    return max(within, LIGHT * candidate.room)


def in_order(key: bytes, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Answer the workers in the order in which a key prefers them."""
    return sorted(candidates, key=lambda each: draw(key, each.name) / each.room, reverse=True)


def draw(key: bytes, name: str) -> float:
    """A number below 0, always the same for a key and a worker; evenly spread as the log of a die."""
    digest = hashlib.blake2b(name.encode(), key=key[:64], digest_size=8).digest()
    return math.log((int.from_bytes(digest, "big") + 1) / 2**64)


# -- keys

SHARED: Final = 1024  # bytes that make the shared key: a few hundred tokens, below which a cache saves little
LONGEST: Final = 64 * 1024  # bytes that are looked at

# What engines put in front comes first, whatever the order in the body.
_TEXT: Final = ("tools", "system", "instructions", "messages", "prompt", "input")
_END: Final = b" \t\r\n]},{"


def session_keys(session: str, tenant: str) -> tuple[bytes, ...]:
    """Answer the key of a session that the caller named; other tenants' sessions have others."""
    return (_hash(b"session", tenant, session.encode()),)


def prefix_keys(members: Mapping[str, RawJson], tenant: str) -> tuple[bytes, ...]:
    """Answer the keys of a body, for `choose`: what it shares with others, then what it shares with itself.

    The first is a hash over the first block of its text (in the raw JSON, so nothing is
    decoded): tools, system prompt or template, equal for many requests. Block hashes of
    the engine's own prefix cache are the model. The second goes on to the first answer in
    it, so that all turns of one conversation have it; it is the only one of a short text.

    Costs a hash over at most 64 KiB. Keys lead, they never identify: two requests with
    one key merely meet at a worker. Each is of one tenant.
    """
    text = _text(members)
    if not text:
        return ()
    opening = _opening(text)
    conversation = _hash(b"conversation", tenant, opening)
    if len(opening) <= SHARED:
        return (conversation,)
    return (_hash(b"shared", tenant, text[:SHARED]), conversation)


def _text(members: Mapping[str, RawJson]) -> bytes:
    """The text of a body as far as it is looked at."""
    text = b""
    for name in _TEXT:
        text += members.get(name, b"")[: LONGEST - len(text)]
    return text


def _opening(text: bytes) -> bytes:
    """What stands before the first answer, the same whether an answer follows or not.

    Inside a string the quotes would be escaped, so this finds nothing that a caller wrote.
    """
    before, _, _ = text.partition(b'"assistant"')
    return before.rstrip(b" \t\r\n:").removesuffix(b'"role"').rstrip(_END)


def _hash(kind: bytes, tenant: str, text: bytes) -> bytes:
    return hashlib.blake2b(text, key=hashlib.blake2b(tenant.encode()).digest(), person=kind[:16]).digest()
