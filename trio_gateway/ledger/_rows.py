"""What the journal's lines mean as rows of the database, and what a database is asked. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import astuple

from ..contract import InternalRequest
from ..units import HOURS
from ._record import Record, microseconds

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

RELEASE: Final = ("exchange_id", "attempt", "released_at", "generated")
"""What is known when an engine has let go: the number of the attempt, when, and the tokens it had made."""

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

Row = tuple[Any, ...]
_DAY: Final = 24 * HOURS
_EPOCH: Final = date(1970, 1, 1).toordinal()


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What the exchanges of one group used.

    Attributes:
        group: value of each dimension that was asked for, in that order.
        requests: settled exchanges; ``open`` ones are not among them.
        tokens: by kind, see `KINDS`. Where nobody knows them they count as none.
        estimated: settled exchanges of which some tokens were estimated.
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
            accepted: values of `IDENTITY`; they change nothing that is there.
            settled: values of `COLUMNS`; they change what is open or was taken for crashed.
            released: values of `RELEASE`; they change a settled exchange whose last attempt this was; the
                first moment and the most tokens count.

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
            "arrived_at": microseconds(arrived_at),
        }
    )


def record_json(record: Record) -> bytes:
    """Write a record as a JSON object, for whoever keeps or shows it."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return _encoded(record.as_dict())


def settled_line(record: bytes, gateway_id: str) -> bytes:
    """Write down how an exchange ended.

    Args:
        record: as `record_json` writes it.
    """
    return b'{"t":"settled","gateway_id":%b,%b' % (msgspec.json.encode(gateway_id), record[1:])


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


# Reading ----------------------------------------------------------------------------------------------------


class Line(msgspec.Struct):
    """A line that was read; one of no kind below is of a version that this one does not know."""

    exchange_id: str


def _kind(tag: str, columns: Sequence[str]) -> Any:
    """Make the type of a kind of lines.

    Nothing but the exchange has to be there and of its type: an older or a newer version may have
    written it, and what a column takes is the database's to judge.
    """
    assert columns[0] == "exchange_id"
    values = [(name, Any, None) for name in columns[1:]]
    return msgspec.defstruct(f"{tag.title()}Line", values, bases=(Line,), tag_field="t", tag=tag)


_Accepted: Final = _kind("accepted", IDENTITY)
_Settled: Final = _kind("settled", COLUMNS)
_Released: Final = _kind("released", RELEASE)


_KNOWN: Final = msgspec.json.Decoder(_Accepted | _Settled | _Released)
_ANY: Final = msgspec.json.Decoder(Line)


def read_line(payload: bytes) -> Line:
    """Read a line.

    Raises:
        ValueError: it is none of ours, whatever its checksum says.
    """
    try:
        line: Line = _KNOWN.decode(payload)
        return line
    except msgspec.DecodeError:
        try:
            return _ANY.decode(payload)
        except msgspec.DecodeError as error:
            raise ValueError(f"no record: {error}") from None


# Rows -------------------------------------------------------------------------------------------------------


def rows_of(lines: Iterable[Line]) -> tuple[list[Row], list[Row], list[Row]]:
    """Turn lines into the rows that `StorePort.write` takes.

    An exchange whose settlement is among the lines needs no row for its acceptance. Fields
    that this version does not know are left out, those that another one did not write are null.
    """
    accepted: dict[str, Any] = {}
    settled: dict[str, Any] = {}
    released: list[Row] = []
    for line in lines:
        kind, name = type(line), line.exchange_id
        if kind is _Settled:
            settled.setdefault(name, line)
        elif kind is _Accepted:
            accepted.setdefault(name, line)
        elif kind is _Released:
            released.append(astuple(line))
    for name in accepted.keys() & settled.keys():
        del accepted[name]
    # In order, so that two gateways that write the same rows do not wait for each other in a circle.
    return _in_order(accepted), _in_order(settled), sorted(released, key=itemgetter(0))


def _in_order(lines: Mapping[str, Any]) -> list[Row]:
    """Make rows of lines that say when an exchange arrived."""
    for line in lines.values():
        line.day = _day_of(line.arrived_at)
    return [astuple(lines[name]) for name in sorted(lines)]


def _day_of(moment: object) -> str | None:
    """The date of a moment in UTC, as ISO 8601 writes it."""
    if not isinstance(moment, int | float):
        return None
    try:
        return _date_of(int(moment // _DAY))
    except (OverflowError, ValueError):
        return None


@lru_cache(maxsize=8)
def _date_of(day: int) -> str:
    """The date of a day, counted from the epoch."""
    return date.fromordinal(_EPOCH + day).isoformat()
