"""What all tests share."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Generator
from inspect import iscoroutinefunction
from typing import Any

import pytest
import trio
from hypothesis import settings

# A loaded machine is no reason to fail: how long an example takes is the bench's question.
settings.register_profile("house", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=3000)  # --hypothesis-profile deep
settings.load_profile("house")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail tests that end cancelled, and so in their middle: pytest-trio lets them pass."""
    test = getattr(item, "obj", None)
    examples = getattr(test, "hypothesis", None)
    if examples is not None and iscoroutinefunction(examples.inner_test):
        examples.inner_test = _to_its_end(examples.inner_test)
    elif iscoroutinefunction(test):
        item.obj = _to_its_end(test)  # type: ignore[attr-defined]
    return (yield)


def _to_its_end(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        try:
            await test(*args, **kwargs)
        except trio.Cancelled as cancelled:  # nobody is left whose it could be
            raise AssertionError("cancelled before its end") from cancelled  # noqa: ASYNC104

    return run
