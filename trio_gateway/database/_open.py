"""Opening what needs a driver that may not be installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def open_with(make: Callable[[], T]) -> T:
    """Make what uses a database, without connecting.

    Raises:
        OSError: the driver of the database is not installed.
    """
    try:
        return make()
    except ModuleNotFoundError as error:
        raise OSError(
            f"the database needs the package {error.name}: install trio-gateway[postgres]"
        ) from None
