"""What the journal's lines mean as rows of the database, and what a database is asked. Pure."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

import msgspec

from ..contract import InternalRequest
from ._record import Record

GATEWAY_CRASHED: Final = "gateway_crashed"
"""The outcome of what was open when its process died: no exchange ends so, it is found at the next start."""

IDENTITY: Final = (
    "exchange_id",
    "client_request_id",
    "gateway_id",
    "boot_id",
    "tenant",
    "key_id",
    "operation",
    "model",
    "stream",
    "tier",
    "arrived_at",
    "day",
)
"""Columns that are known when an exchange is accepted; ``day`` is the date of arrival in UTC."""

COLUMNS: Final = (*IDENTITY, *(field.name for field in fields(Record) if field.name not in IDENTITY))
"""Columns that are known when it is settled; ``released_at`` is known later still."""

DIMENSIONS: Final = (
    "tenant",
    "key_id",
    "model",
    "operation",
    "worker",
    "tier",
    "outcome",
    "code",
    "gateway_id",
    "day",
)
"""Columns by which usage can be summed up."""

KINDS: Final = ("prompt", "cached", "generated", "delivered", "acknowledged")
"""Kinds of tokens that are counted."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What the exchanges of one group used.

    Attributes:
        group: value of each dimension that was asked for, in that order.
        requests: settled exchanges; ``open`` ones are not among them.
        tokens: by kind, see `KINDS`. Where nobody knows them they count as none.
        estimated: settled exchanges whose generated tokens were counted from events.
    """

    group: tuple[str | None, ...]
    requests: int
    completed: int
    open: int
    estimated: int
    tokens: Mapping[str, int]


class StorePort(Protocol):
    """What is asked of a database. All of it blocks, and raises `StoreFailed`."""

    def write(self, accepted: Sequence[Row], settled: Sequence[Row], released: Sequence[Row]) -> None:
        """Write rows in one transaction.

        Args:
            accepted: with `IDENTITY`; they change nothing that is there.
            settled: with `COLUMNS`; they change what is open or was taken for crashed.
            released: with the values of `release_line`; they change a settled exchange whose last attempt
                this was; the first moment and the most tokens count.

        Raises:
            RowsRefused: and nothing is written.
        """

    def close_crashed(self, gateway_ids: Sequence[str], boot_id: str, now: float) -> int:
        """Settle what earlier processes of a gateway left open; answers how many exchanges."""

    def forget(self, before: float, most: int) -> int:
        """Delete settled exchanges that arrived before a moment, at most so many; answers how many."""

    def close(self) -> None:
        """Let go of the connection; the next call makes a new one. Idempotent, never raises."""


# Lines ------------------------------------------------------------------------------------------------------


def accepted_line(request: InternalRequest, gateway_id: str, boot_id: str, arrived_at: float) -> bytes:
    """Write down that a request was accepted.

    Args:
        arrived_at: by the wall clock.
    """
    return _encoded(
        {
            "t": "accepted",
            "exchange_id": request.exchange_id,
            "client_request_id": request.client_request_id,
            "gateway_id": gateway_id,
            "boot_id": boot_id,
            "tenant": request.tenant,
            "key_id": request.key_id,
            "operation": request.operation.name,
            "model": request.model,
            "stream": request.stream,
            "tier": request.tier,
            "arrived_at": round(arrived_at, 6),
        }
    )


def settled_line(record: Record, gateway_id: str) -> bytes:
    """Write down how an exchange ended."""
    return _encoded({"t": "settled", "gateway_id": gateway_id, **record.as_dict()})


def release_line(attempt_id: str, released_at: float, generated: int | None) -> bytes:
    """Write down that the engine has let go of what was over before, and how many tokens it had made.

    Args:
        attempt_id: an exchange id, a hyphen and the attempt's number.
    """
    exchange_id, _, number = attempt_id.rpartition("-")
    return _encoded(
        {
            "t": "released",
            "exchange_id": exchange_id,
            "attempt": int(number),
            "released_at": round(released_at, 6),
            "generated": generated,
        }
    )


def _encoded(line: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(line)
    except UnicodeEncodeError:  # a lone surrogate in a name that an engine made up: no database takes it
        return json.dumps(line, ensure_ascii=False).encode("utf-8", "replace")


def read_line(payload: bytes) -> dict[str, Any]:
    """Read a line.

    Raises:
        ValueError: it is none of ours, whatever its checksum says.
    """
    try:
        line = msgspec.json.decode(payload)
    except msgspec.DecodeError:
        raise ValueError("no JSON") from None
    if not isinstance(line, dict) or not isinstance(line.get("exchange_id"), str):
        raise ValueError("no exchange")
    return line


# Rows -------------------------------------------------------------------------------------------------------


def rows_of(lines: Iterable[dict[str, Any]]) -> tuple[list[Row], list[Row], list[Row]]:
    """Turn lines into the rows that `StorePort.write` takes.

    An exchange whose settlement is among the lines needs no row for its acceptance. Fields
    that this version does not know are left out, those that another one did not write are null.
    """
    accepted: dict[str, Row] = {}
    settled: dict[str, Row] = {}
    released: list[Row] = []
    for line in lines:
        name, row = line["exchange_id"], {**line, "day": _day_of(line.get("arrived_at"))}
        match line.get("t"):
            case "settled":
                settled.setdefault(name, {column: row.get(column) for column in COLUMNS})
            case "accepted":
                accepted.setdefault(name, {column: row.get(column) for column in IDENTITY})
            case "released":
                released.append({f"the_{column}": row.get(column) for column in _RELEASE})
    open_ = accepted.keys() - settled.keys()
    # In order, so that two gateways that write the same rows do not wait for each other in a circle.
    return (
        [accepted[name] for name in sorted(open_)],
        [settled[name] for name in sorted(settled)],
        sorted(released, key=lambda row: str(row["the_exchange_id"])),
    )


_RELEASE: Final = ("exchange_id", "attempt", "released_at", "generated")


def _day_of(moment: object) -> str | None:
    """The date of a moment in UTC, as ISO 8601 writes it."""
    if not isinstance(moment, int | float):
        return None
    try:
        return datetime.datetime.fromtimestamp(moment, datetime.UTC).date().isoformat()
    except (OverflowError, ValueError, OSError):
        return None
