"""Short ways to read a configuration from a text, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest

from trio_gateway.config import ConfigurationError, Problem, parse_settings

NOTHING: Mapping[str, str] = MappingProxyType({})

WORKER = '[[workers]]\nid = "gpu-0"\nurl = "http://127.0.0.1:8000"\nkind = "vllm"\n'
MODEL = '[[models]]\nid = "m"\n'
HASH = "sha256:" + "ab" * 32
TENANT = f'[[tenants]]\nid = "acme"\nkeys = [{{id = "k1", hash = "{HASH}"}}]\n'


def problems(
    text: str, environ: Mapping[str, str] = NOTHING, overrides: Sequence[str] = ()
) -> tuple[Problem, ...]:
    """Answer everything that is wrong with a text that must not be accepted."""
    with pytest.raises(ConfigurationError) as caught:
        parse_settings(text, environ, overrides, name="t.toml")
    assert caught.value.problems
    assert str(caught.value) == "\n".join(str(problem) for problem in caught.value.problems)
    return caught.value.problems


def complaints(text: str, environ: Mapping[str, str] = NOTHING, overrides: Sequence[str] = ()) -> list[str]:
    """Answer the problems as they are printed."""
    return [str(problem) for problem in problems(text, environ, overrides)]
