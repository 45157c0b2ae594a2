"""What tenants and keys have used of their minute: reserved, settled, refunded, and told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tenancy.asking import asking
from trio_gateway.contract import InternalRequest
from trio_gateway.errors import Refused
from trio_gateway.tenancy import RateBook, RateLimits

GUESS = (10.0, 19.5)  # tokens of a prompt and its answer, which count as whole ones


class Clock:
    """A moment that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def book(
    tenant: RateLimits | None = None,
    key: RateLimits | None = None,
    *,
    estimate: tuple[float, float] = GUESS,
    clock: Clock | None = None,
    dice: float = 0.0,
) -> RateBook:
    return RateBook(
        {"acme": tenant} if tenant else {},
        {"k1": key} if key else {},
        clock=clock or Clock(),
        dice=lambda: dice,
        estimate=lambda request: estimate,
    )


def request(tenant: str = "acme", key_id: str | None = "k1") -> InternalRequest:
    return asking(tenant=tenant, key_id=key_id)


def left(rates: RateBook, key_id: str | None = "k1") -> dict[str, int]:
    return {standing.kind: standing.remaining for standing in rates.standings("acme", key_id)}


def test_whoever_has_no_limits_is_never_refused_and_told_nothing() -> None:
    rates = book(RateLimits(requests=1))
    for _ in range(3):
        charge = rates.charge(request("other", None))
        charge.settle(10**9, 10**9)
    assert rates.standings("other", None) == ()
    assert RateBook().standings("acme", "k1") == ()


def test_a_request_is_charged_at_once_with_its_estimate() -> None:
    rates = book(RateLimits(5, 100))
    rates.charge(request())
    assert left(rates) == {"requests": 4, "tokens": 70}


def test_a_refunded_request_has_cost_nothing() -> None:
    rates = book(RateLimits(5, 100), RateLimits(3, 50))
    rates.charge(request()).refund()
    assert left(rates) == {"requests": 3, "tokens": 50}
    assert left(rates, None) == {"requests": 5, "tokens": 100}


@pytest.mark.parametrize(
    ("prompt", "generated", "tokens"),
    [(7, 8, 85), (None, 8, 82), (0, 0, 100), (60, 60, 0)],
)
def test_a_settled_request_has_cost_what_it_used(prompt: int | None, generated: int, tokens: int) -> None:
    rates = book(RateLimits(5, 100))
    rates.charge(request()).settle(prompt, generated)
    assert left(rates) == {"requests": 4, "tokens": tokens}


@pytest.mark.parametrize("ways", ["rs", "sr", "ss", "rr"])
def test_only_the_first_end_of_a_charge_counts(ways: str) -> None:
    once, twice = book(RateLimits(5, 100)), book(RateLimits(5, 100))
    for rates, ends in ((once, ways[:1]), (twice, ways)):
        charge = rates.charge(request())
        for way in ends:
            charge.refund() if way == "r" else charge.settle(1, 2)
    assert left(once) == left(twice)


def test_more_tokens_than_were_reserved_are_missing_afterwards() -> None:
    clock = Clock()
    rates = book(RateLimits(tokens=60), clock=clock)
    rates.charge(request()).settle(60, 30)
    with pytest.raises(Refused) as refused:
        rates.charge(request())
    assert refused.value.problem.retry_after == pytest.approx(60.0)
    clock.now += 60
    rates.charge(request())


@pytest.mark.parametrize(
    ("tenant", "key", "message"),
    [
        (RateLimits(requests=2), None, "the tenant's limit of 2 requests a minute is reached"),
        (RateLimits(tokens=60), None, "the tenant's limit of 60 tokens a minute is reached"),
        (None, RateLimits(requests=2), "the key's limit of 2 requests a minute is reached"),
        (RateLimits(9, 900), RateLimits(9, 60), "the key's limit of 60 tokens a minute is reached"),
        (
            RateLimits(requests=2),
            RateLimits(tokens=61),
            "the tenant's limit of 2 requests a minute is reached",
        ),
    ],
)
def test_a_refusal_says_whose_limit_was_reached_and_takes_nothing(
    tenant: RateLimits | None, key: RateLimits | None, message: str
) -> None:
    rates = book(tenant, key)
    rates.charge(request())
    rates.charge(request())
    before = left(rates), left(rates, None)
    with pytest.raises(Refused) as refused:
        rates.charge(request())
    problem = refused.value.problem
    assert (problem.code, problem.status, problem.message) == ("rate_limit_exceeded", 429, message)
    assert (left(rates), left(rates, None)) == before


def test_a_key_uses_its_tenants_rates_too() -> None:
    rates = book(RateLimits(requests=2), RateLimits(requests=1))
    rates.charge(request())
    rates.charge(request(key_id="k2"))
    with pytest.raises(Refused):
        rates.charge(request(key_id="k2"))


def test_many_who_are_refused_at_once_are_told_different_times() -> None:
    rates = book(RateLimits(requests=60), RateLimits(requests=30))
    for _ in range(30):
        rates.charge(request())
    waits = []
    for _ in range(5):
        with pytest.raises(Refused) as refused:
            rates.charge(request())
        waits.append(refused.value.problem.retry_after)
    assert waits == pytest.approx([2.0, 4.0, 6.0, 8.0, 10.0])  # by the key's limit, which is reached


def test_dice_only_add_to_the_wait() -> None:
    for dice, wait in ((0.0, 30.0), (1.0, 37.5)):
        rates = book(RateLimits(requests=2), dice=dice)
        rates.charge(request())
        rates.charge(request())
        with pytest.raises(Refused) as refused:
            rates.charge(request())
        assert refused.value.problem.retry_after == pytest.approx(wait)


def test_a_request_that_may_take_more_than_a_minute_allows_goes_when_all_is_there() -> None:
    clock = Clock()
    rates = book(RateLimits(tokens=60), estimate=(1000, 1000), clock=clock)
    rates.charge(request()).settle(5, 1)
    with pytest.raises(Refused) as refused:
        rates.charge(request())
    assert refused.value.problem.retry_after == pytest.approx(6.0)
    clock.now += 6
    rates.charge(request())
    assert left(rates) == {"tokens": 0}


def test_a_standing_is_of_whoever_has_less_left() -> None:
    rates = book(RateLimits(10, 1000), RateLimits(6, 90))
    rates.charge(request(key_id="other")).settle(950, 0)
    (requests, tokens) = rates.standings("acme", "k1")
    assert (requests.kind, requests.limit, requests.remaining, requests.reset) == ("requests", 6, 6, 0)
    assert (tokens.kind, tokens.limit, tokens.remaining) == ("tokens", 1000, 50)
    assert tokens.reset == pytest.approx(57.0)


@given(
    st.integers(1, 20),
    st.integers(1, 200),
    st.lists(
        st.tuples(st.sampled_from(["refund", "settle", "keep"]), st.integers(0, 60), st.floats(0, 30)),
        max_size=30,
    ),
)
def test_what_was_accepted_in_any_stretch_stays_within_the_limit(
    limit: int, tokens: int, story: list[tuple[str, int, float]]
) -> None:
    clock = Clock()
    rates = book(RateLimits(limit, tokens), clock=clock)
    accepted: list[float] = []
    for way, used, pause in story:
        try:
            charge: Any = rates.charge(request())
        except Refused as refused:
            wait = refused.problem.retry_after or 0.0
            assert wait > 0
            again = left(rates)
            clock.now += wait + 1e-4
            rates.charge(request()).refund()
            assert all(left(rates)[kind] >= amount for kind, amount in again.items())
            continue
        if way == "refund":
            charge.refund()
        else:
            accepted.append(clock.now)
            if way == "settle":
                charge.settle(used, 0)
        assert all(
            0 <= rest <= full for rest, full in zip(left(rates).values(), (limit, tokens), strict=True)
        )
        clock.now += pause
    for first, start in enumerate(accepted):
        for last in range(first, len(accepted)):
            assert last - first + 1 <= limit * (1 + (accepted[last] - start + 0.01) / 60)


# Other limits -----------------------------------------------------------------------------------------------


def test_other_limits_count_at_once_and_what_was_used_stays_used() -> None:
    rates = book(RateLimits(5, 100), RateLimits(requests=2))
    first, second = rates.charge(request()), rates.charge(request())
    rates.relimit({"acme": RateLimits(10, 300)}, {"k1": RateLimits(requests=4)})
    assert left(rates) == {"requests": 2, "tokens": 240}
    assert left(rates, None) == {"requests": 8, "tokens": 240}
    first.settle(10, 0)
    second.refund()
    assert left(rates) == {"requests": 3, "tokens": 290}


def test_limits_that_are_lifted_are_none_and_new_ones_begin_full() -> None:
    rates = book(RateLimits(requests=1))
    charge = rates.charge(request())
    rates.relimit({"acme": RateLimits(tokens=100)}, {})
    charge.settle(1, 1)
    assert left(rates) == {"tokens": 100}
    rates.charge(request())
    rates.relimit({}, {})
    assert rates.standings("acme", "k1") == ()
    rates.relimit({"acme": RateLimits(tokens=100)}, {})  # who was gone is somebody else
    assert left(rates) == {"tokens": 100}


def test_a_tenant_that_is_gone_is_charged_and_settled_without_a_word() -> None:
    rates = book(RateLimits(5, 100), RateLimits(5, 100))
    charges = [rates.charge(request()), rates.charge(request())]
    rates.relimit({"other": RateLimits(1)}, {})
    charges.append(rates.charge(request()))
    for charge in charges:
        charge.settle(3, 4)
    assert rates.standings("acme", "k1") == ()
