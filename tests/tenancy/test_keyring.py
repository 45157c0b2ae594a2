"""From a key to its tenant: whole keys only, everybody where there are no tenants, nobody else."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.tenancy import ANONYMOUS, Caller, Keyring, Tenant, new_key

ACME, OTHER = Tenant("acme"), Tenant("other")


def stored(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def ring(keys: dict[bytes, tuple[str, Tenant]] | None = None) -> Keyring:
    found = keys if keys is not None else {b"tg_k1_secret": ("k1", ACME), b"tg_k2_secret": ("k2", OTHER)}
    callers = [(stored(key), Caller(tenant, key_id)) for key, (key_id, tenant) in found.items()]
    return Keyring(callers, [ACME, OTHER])


def test_a_key_belongs_to_its_tenant() -> None:
    assert ring().find(b"tg_k1_secret") == Caller(ACME, "k1")
    assert ring().find(b"tg_k2_secret") == Caller(OTHER, "k2")
    assert not ring().open


@pytest.mark.parametrize(
    "key",
    [
        None,
        b"",
        b"tg_k1_secre",
        b"tg_k1_secret ",
        b"TG_K1_SECRET",
        b"k1",
        b"tg_k1_secret,tg_k2_secret",
        stored(b"tg_k1_secret"),
        stored(b"tg_k1_secret").hex().encode(),
    ],
)
def test_no_other_key_belongs_to_anybody(key: bytes | None) -> None:
    assert ring().find(key) is None


@given(
    st.dictionaries(st.binary(), st.tuples(st.text(max_size=3), st.sampled_from([ACME, OTHER])), max_size=5),
    st.binary(),
)
def test_exactly_the_keys_of_the_ring_are_found(keys: dict[bytes, tuple[str, Tenant]], other: bytes) -> None:
    keyring = ring(keys)
    for key, (key_id, tenant) in keys.items():
        assert keyring.find(key) == Caller(tenant, key_id)
    assert (keyring.find(other) is not None) is (other in keys)


def test_several_keys_may_belong_to_one_tenant() -> None:
    keyring = ring({b"one": ("k1", ACME), b"two": ("k2", ACME)})
    assert (keyring.find(b"one"), keyring.find(b"two")) == (Caller(ACME, "k1"), Caller(ACME, "k2"))


def test_tenants_without_keys_do_not_open_the_door() -> None:
    keyring = ring({})
    assert not keyring.open
    assert keyring.find(None) is None
    assert keyring.find(b"any") is None
    assert set(keyring.tenants) == {"acme", "other"}


@pytest.mark.parametrize("key", [None, b"", b"sk-anything"])
def test_where_there_are_no_tenants_everybody_is_anonymous(key: bytes | None) -> None:
    keyring = Keyring([], [])
    assert keyring.open
    assert keyring.find(key) == Caller(Tenant(ANONYMOUS), None)
    assert keyring.tenants == {ANONYMOUS: Tenant(ANONYMOUS)}


@pytest.mark.parametrize(
    ("models", "may", "may_not"),
    [
        ({"*"}, {"a", "org/b", ""}, set()),
        ({"a", "org/b"}, {"a", "org/b"}, {"b", "A", "a ", "*", ""}),
        ({"*", "a"}, {"a", "b"}, set()),
        (set(), set(), {"a", "*"}),
        ({"a*"}, {"a*"}, {"ab"}),
    ],
)
def test_a_tenant_may_use_the_models_it_names(models: set[str], may: set[str], may_not: set[str]) -> None:
    tenant = Tenant("acme", models=frozenset(models))
    assert {model for model in may | may_not if tenant.may_use(model)} == may


@pytest.mark.parametrize(
    ("tiers", "tier"),
    [
        (("interactive", "standard", "batch"), "standard"),
        (("batch", "standard"), "standard"),
        (("batch",), "batch"),
        (("interactive", "batch"), "interactive"),
    ],
)
def test_without_a_wish_the_tier_is_standard_or_the_first(tiers: tuple[str, ...], tier: str) -> None:
    assert Tenant("acme", tiers=tiers).default_tier == tier


def test_a_key_ends_at_its_moment() -> None:
    caller = Caller(ACME, "k1", expires=1000.0)
    assert [caller.expired(wall) for wall in (999.9, 1000.0, 2000.0)] == [False, True, True]
    assert not Caller(ACME, "k1").expired(1e12)


@pytest.mark.parametrize(
    ("models", "key", "both"),
    [
        ({"*"}, {"*"}, {"*"}),
        ({"a", "b"}, {"*"}, {"a", "b"}),
        ({"*"}, {"a"}, {"a"}),
        ({"a", "b"}, {"b", "c"}, {"b"}),
    ],
)
def test_a_key_may_use_what_both_it_and_its_tenant_may(
    models: set[str], key: set[str], both: set[str]
) -> None:
    tenant = Tenant("acme", models=frozenset(models), weight=3.0)
    narrowed = tenant.narrowed(frozenset(key), tenant.tiers)
    assert narrowed == Tenant("acme", models=frozenset(both), weight=3.0)


def test_a_key_may_ask_for_tiers_that_its_tenant_has_too_in_the_tenants_order() -> None:
    tenant = Tenant("acme", tiers=("batch", "standard"))
    assert tenant.narrowed(frozenset({"*"}), ("interactive", "standard", "batch")).tiers == tenant.tiers
    assert tenant.narrowed(frozenset({"*"}), ("interactive", "batch")).tiers == ("batch",)


def test_a_new_key_is_known_by_its_hash_alone() -> None:
    id_, key, hash_ = new_key()
    assert key.startswith(f"tg_{id_}_")
    assert hash_ == f"sha256:{stored(key.encode()).hex()}"
    keyring = Keyring([(bytes.fromhex(hash_.removeprefix("sha256:")), Caller(ACME, id_))], [ACME])
    assert keyring.find(key.encode()) == Caller(ACME, id_)


def test_no_two_new_keys_are_alike_and_each_has_more_than_128_random_bits() -> None:
    keys = [new_key("mine")[1] for _ in range(100)]
    assert len(set(keys)) == 100
    assert {len(key.removeprefix("tg_mine_")) for key in keys} == {40}  # hexadecimal digits, of 4 bits each
    assert len({new_key()[0] for _ in range(100)}) == 100


# Other keys -------------------------------------------------------------------------------------------------


def test_a_ring_that_becomes_another_has_exactly_its_keys() -> None:
    keyring = ring({b"one": ("k1", ACME), b"two": ("k2", ACME)})
    keyring.become(ring({b"two": ("k2", OTHER), b"three": ("k3", ACME)}))
    assert [keyring.find(key) for key in (b"one", b"two", b"three")] == [
        None,
        Caller(OTHER, "k2"),
        Caller(ACME, "k3"),
    ]
    keyring.become(Keyring([], []))
    assert (keyring.open, keyring.complete, set(keyring.tenants)) == (True, True, {ANONYMOUS})
    keyring.become(Keyring([], [], closed=True, complete=False))
    assert (keyring.open, keyring.complete, keyring.tenants, keyring.find(b"two")) == (False, False, {}, None)


@pytest.mark.parametrize(
    ("later", "good"),
    [
        (Caller(ACME, "k1"), True),
        (Caller(Tenant("acme", weight=2.0, models=frozenset()), "k1"), True),
        (Caller(ACME, "k1", expires=1000.1), True),
        (Caller(ACME, "k1", expires=1000.0), False),
        (Caller(OTHER, "k1"), False),
        (Caller(ACME, "k2"), False),
    ],
)
def test_who_was_let_in_is_good_for_as_long_as_its_key_is(later: Caller, good: bool) -> None:
    keyring = ring({b"one": ("k1", ACME)})
    caller = keyring.find(b"one")
    assert caller is not None
    assert keyring.is_good(caller, 1000.0)
    keyring.become(Keyring([(stored(b"one"), later)], [ACME, OTHER]))
    assert keyring.is_good(caller, 1000.0) is good


def test_who_was_anonymous_is_not_when_there_are_tenants() -> None:
    keyring = Keyring([], [])
    caller = keyring.find(None)
    assert caller is not None
    assert keyring.is_good(caller, 0.0)
    keyring.become(ring())
    assert not keyring.is_good(caller, 0.0)
