"""What each tenant and each key has used of its minute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, final

from ..contract import InternalRequest, RateStanding
from ..errors import Problem, Refused
from ._rates import Bucket, RateLimits

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"


class Account:
    """The buckets of one tenant or key, by what they hold; ``whose`` says which of both."""

    def __init__(self, whose: str) -> None:
        self.whose: Final = whose
        self.limits = RateLimits()
        self.buckets: Final[dict[str, Bucket]] = {}

    def limit(self, limits: RateLimits, now: float) -> None:
        """Have these limits from now on. Charges keep the buckets that they took from."""
        self.limits = limits
        for kind, size in ((REQUESTS, limits.requests), (TOKENS, limits.tokens)):
            if size is None:
                self.buckets.pop(kind, None)
            elif kind in self.buckets:
                self.buckets[kind].resize(size, now)
            else:
                self.buckets[kind] = Bucket(size)


class Accounts:
    """All tenants' accounts, or all keys'. Each is opened when it is first charged.

    Args:
        whose: ``tenant`` or ``key``.
        limits: by id; who has none has no row.
    """

    def __init__(self, whose: str, limits: Mapping[str, RateLimits]) -> None:
        self._whose = whose
        self._limits = limits
        self._accounts: dict[str, Account] = {}

    def relimit(self, limits: Mapping[str, RateLimits]) -> None:
        """Take other limits; what was used stays used."""
        self._limits = limits
        self._accounts = {id_: account for id_, account in self._accounts.items() if id_ in limits}

    def buckets(self) -> Iterator[tuple[str, Bucket]]:
        """All buckets that were ever charged, each with a name that it has in every process."""
        for id_, account in self._accounts.items():
            for kind, bucket in account.buckets.items():
                yield f"{self._whose}:{id_}:{kind}", bucket

    def of(self, id_: str, now: float) -> Account | None:
        """Answer an account; None: there are no limits."""
        limits = self._limits.get(id_)
        if limits is None:
            return None
        account = self._accounts.get(id_)
        if account is None:
            account = self._accounts[id_] = Account(self._whose)
        if account.limits is not limits and account.limits != limits:
            account.limit(limits, now)
        return account


@final
class Charge:
    """What one request reserved; settled or refunded once, of which the first counts. See ChargePort.

    Args:
        taken: what it takes of which buckets, by kind.
        prompt: tokens, as estimated.
        parties: processes that share the limits by number.
    """

    def __init__(
        self,
        taken: list[tuple[str, Bucket, int]],
        prompt: int,
        now: float,
        clock: Callable[[], float],
        parties: int = 1,
    ) -> None:
        self._prompt = prompt
        self._parties = parties
        self._clock = clock
        self._taken = taken
        for _, bucket, amount in taken:
            bucket.take(amount, now, parties)

    def refund(self) -> None:
        """See ChargePort."""
        taken, self._taken = self._taken, []
        for _, bucket, amount in taken:
            bucket.give(amount, self._parties)

    def settle(self, prompt: int | None, generated: int) -> None:
        """See ChargePort."""
        used = (self._prompt if prompt is None else prompt) + generated
        taken, self._taken = self._taken, []
        if not taken:
            return
        now = self._clock()
        for kind, bucket, amount in taken:
            if kind == TOKENS:
                bucket.give(amount, self._parties)
                bucket.take(used, now, self._parties)


@final
class RateBook:
    """All limits a minute, and what was used of them. See RatesPort.

    Args:
        tenants, keys: limits by id; who has none has no row.
        clock: seconds.
        dice: random numbers from 0 to 1, for jitter.
        estimate: guesses the tokens of a request's prompt and of its answer.
    """

    def __init__(
        self,
        tenants: Mapping[str, RateLimits] = MappingProxyType({}),
        keys: Mapping[str, RateLimits] = MappingProxyType({}),
        *,
        clock: Callable[[], float] = lambda: 0.0,
        dice: Callable[[], float] = lambda: 0.0,
        estimate: Callable[[InternalRequest], tuple[float, float]] = lambda request: (0.0, 0.0),
    ) -> None:
        self._tenants = Accounts("tenant", tenants)
        self._keys = Accounts("key", keys)
        self._clock = clock
        self._dice = dice
        self._estimate = estimate
        self.parties = 1  # processes that share the limits by number

    def relimit(self, tenants: Mapping[str, RateLimits], keys: Mapping[str, RateLimits]) -> None:
        """Take other limits from now on; what was used stays used, and what was reserved is settled."""
        self._tenants.relimit(tenants)
        self._keys.relimit(keys)

    def buckets(self) -> Iterator[tuple[str, Bucket]]:
        """All buckets that were ever charged, each with a name that it has in every process."""
        yield from self._tenants.buckets()
        yield from self._keys.buckets()

    def charge(self, request: InternalRequest) -> Charge:
        """See RatesPort."""
        now = self._clock()
        accounts = self._accounts(request.tenant, request.key_id, now)
        prompt, output = map(math.ceil, self._estimate(request)) if accounts else (0, 0)
        tokens, parties = prompt + output, self.parties
        wanted: list[tuple[str, Bucket, int]] = []
        short: list[tuple[str, str, Bucket, int]] = []
        for account in accounts:
            for kind, bucket in account.buckets.items():
                # Of tokens never more than it holds, since guesses can be wild.
                amount = 1 if kind == REQUESTS else min(tokens, bucket.size)
                wanted.append((kind, bucket, amount))
                if bucket.wait(parties * amount, now):
                    short.append((account.whose, kind, bucket, amount))
        if short:
            raise self._reached(short, now)
        return Charge(wanted, prompt, now, self._clock, parties)

    def _reached(self, short: list[tuple[str, str, Bucket, int]], now: float) -> Refused:
        """Refuse by the limit that takes longest, and promise a turn at each."""
        dice = self._dice()
        reached = [
            (bucket.promise(self.parties * amount, now, dice), whose, bucket.size, kind)
            for whose, kind, bucket, amount in short
        ]
        retry_after, whose, size, kind = max(reached, key=lambda limit: limit[0])
        reason = f"the {whose}'s limit of {size} {kind} a minute is reached"
        return Refused(Problem.of("rate_limit_exceeded", reason, retry_after=retry_after))

    def standings(self, tenant: str, key_id: str | None) -> tuple[RateStanding, ...]:
        """See RatesPort."""
        now = self._clock()
        accounts = self._accounts(tenant, key_id, now)
        if not accounts:
            return ()
        found = []
        for kind in (REQUESTS, TOKENS):
            least, lowest = None, math.inf
            for account in accounts:
                bucket = account.buckets.get(kind)
                if bucket is not None and (level := bucket.level(now)) < lowest:
                    least, lowest = bucket, level
            if least is not None:
                # What rounding took from a whole number is no request less.
                left = max(math.floor(lowest + 1e-6), 0)
                found.append(RateStanding(kind, least.size, left, least.until_full(now)))
        return tuple(found)

    def _accounts(self, tenant: str, key_id: str | None, now: float) -> tuple[Account, ...]:
        own = self._tenants.of(tenant, now)
        of_key = None if key_id is None else self._keys.of(key_id, now)
        if own is None:
            return () if of_key is None else (of_key,)
        return (own,) if of_key is None else (own, of_key)
