"""The format of the journal: one line a record, each with its own checksum. Pure.

A line is ``cccccccc nnnnnn {json}``: CRC-32 of the JSON and its length, both hexadecimal,
then the JSON itself, which never holds a line feed, and a line feed. People and `grep`
can read it. Whatever happens to some bytes of a file costs the lines that they are in
and no other: the length says where a line ends even if its line feed was damaged, and the
line feed where the next one begins if anything else was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

MAX_PAYLOAD: Final = 0xFFFFFF  # bytes; a record has about a thousand
_HEAD: Final = re.compile(rb"([0-9a-f]{8}) ([0-9a-f]{6}) ")
_HEAD_SIZE: Final = 16


def frame(payload: bytes) -> bytes:
    """Make the line of a record.

    Args:
        payload: JSON without line feeds, of at most `MAX_PAYLOAD` bytes.
    """
    return b"%08x %06x %b\n" % (crc32(payload), len(payload), payload)


@dataclass(slots=True)
class Scan:
    """What was found in a piece of a journal.

    Attributes:
        payloads: of the whole lines, in order.
        end: offset behind the last byte that is done with; what follows may become a line yet.
        damaged: runs of bytes that are no line of ours, and were stepped over.
    """

    payloads: list[bytes] = field(default_factory=list)
    end: int = 0
    damaged: int = 0


def scan(data: bytes, *, final: bool) -> Scan:
    """Read the lines of a piece that begins where a line begins.

    Args:
        data: any bytes.
        final: nothing will ever follow, so that half a line at the end is a damaged one.
    """
    found = Scan()
    while found.end < len(data):
        if data[found.end] == 0x0A:  # a blank line: put in front after a write that failed half-way
            found.end += 1
            continue
        head = _HEAD.match(data, found.end)
        begin = found.end + _HEAD_SIZE
        end = begin + int(head[2], 16) if head else begin
        # The line feed belongs to the line; at the very end of a journal it may be what was cut.
        if head and end + (not final) <= len(data) and crc32(payload := data[begin:end]) == int(head[1], 16):
            found.payloads.append(payload)
            found.end = min(end + 1, len(data))
            continue
        feed = data.find(b"\n", found.end)
        if feed < 0 and not final:
            break
        found.end = len(data) if feed < 0 else feed + 1
        found.damaged += 1
    return found
