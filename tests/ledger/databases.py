"""Empty databases for tests: SQLite, and PostgreSQL where its programs are installed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bench.postgres import PostgresServer, postgres_server, programs

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for the whole run."""
    bin_folder = programs()
    if bin_folder is None:
        pytest.skip("no PostgreSQL server is installed (on Debian: apt-get install postgresql)")
    with postgres_server(bin_folder) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty database is, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'records.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.make_database(f"test{next(_NUMBERS)}")


def rows_at(url: str, statement: str = "SELECT * FROM exchanges ORDER BY arrived_at") -> list[dict[str, Any]]:
    """What stands in a database."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return [dict(row) for row in connection.execute(sa.text(statement)).mappings()]


Rows = Callable[[], list[dict[str, Any]]]
