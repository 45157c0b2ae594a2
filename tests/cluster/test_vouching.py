"""What replicas believe of each other, and the secrets that they make alike."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import example, given

from trio_gateway.cluster import Vouching

ONE = Vouching("token", "p")


@given(st.text(), st.text(), st.text())
def test_what_is_sealed_is_believed_under_its_own_name_only(name: str, other: str, text: str) -> None:
    sealed = ONE.seal(name, text)
    assert Vouching("token", "p").opened(name, sealed) == text
    assert (ONE.opened(other, sealed) == text) is (other == name)


@example("", "", 0, "\ud800")  # half a character, which no UTF-8 has
@given(st.text(), st.text(), st.integers(0, 200), st.characters())
def test_nothing_else_is_believed(name: str, text: str, at: int, character: str) -> None:
    sealed = ONE.seal(name, text)
    at %= len(sealed)
    changed = sealed[:at] + character + sealed[at + 1 :]
    assert (ONE.opened(name, changed) is None) is (changed != sealed)
    assert ONE.opened(name, sealed[:at]) is None
    for stranger in (Vouching("other", "p"), Vouching("token", "q")):
        assert stranger.opened(name, sealed) is None


def test_a_secret_is_the_same_for_all_who_know_token_salt_and_worker_and_for_nobody_else() -> None:
    secret = ONE.secret_for("salt", "gpu-1", 10, "http://10.0.0.1:9000")
    assert len(secret) == 48
    assert Vouching("token", "p").secret_for("salt", "gpu-1", 10, "http://10.0.0.1:9000") == secret
    others = {
        Vouching("other", "p").secret_for("salt", "gpu-1", 10, "http://10.0.0.1:9000"),
        Vouching("token", "q").secret_for("salt", "gpu-1", 10, "http://10.0.0.1:9000"),
        ONE.secret_for("pepper", "gpu-1", 10, "http://10.0.0.1:9000"),
        ONE.secret_for("salt", "gpu-1", 11, "http://10.0.0.1:9000"),
        ONE.secret_for("salt", "gpu-11", 0, "http://10.0.0.1:9000"),
    }
    assert len(others | {secret}) == 6
