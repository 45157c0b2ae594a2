"""How a database fails, in our words."""

from __future__ import annotations


class RowsRefused(Exception):
    """The database will not take one of the rows for what it is, however often it is asked."""


class StoreFailed(Exception):
    """The database is away, or does not work now. The message is for logs."""
