"""W3C Trace Context: what of a caller's trace is passed on. Sans-IO.

Section numbers are those of the Recommendation of November 2021.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from ._head_parser import Header

PARENT: Final = b"traceparent"
STATE: Final = b"tracestate"
MAX_STATE_BYTES: Final = 512  # all that anybody must pass on (3.3.1.5)
MAX_STATE_MEMBERS: Final = 32

_PARENT = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL
)
# Keys as the next edition allows them, which is more than this one does.
_MEMBER = re.compile(
    rb"([a-z0-9][a-z0-9_*/@-]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


def trace_context(parents: Sequence[bytes], states: Sequence[bytes]) -> tuple[Header, ...]:
    """Answer the headers that carry a caller's trace on; none, where it came without a valid one.

    A trace of a later version is passed on as this one (3.2.4). The state is nothing without its parent,
    and one that is malformed or over 512 bytes is dropped whole, so that nobody takes a part of it for all.

    Args:
        parents: values of all ``traceparent`` headers.
        states: values of all ``tracestate`` headers, in order.
    """
    parent = _parent(parents[0]) if len(parents) == 1 else None
    if parent is None:
        return ()
    state = b",".join(states)
    return ((PARENT, parent), (STATE, state)) if _is_state(state) else ((PARENT, parent),)


def _parent(value: bytes) -> bytes | None:
    found = _PARENT.fullmatch(value)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == b"00":
        return None if more is not None else value
    sampled = int(flags, 16) & 1  # what other bits of a later version mean is not known
    return b"00-%b-%b-%02x" % (trace, span, sampled)


def _is_state(value: bytes) -> bool:
    """Whether there is a list of members by 3.3.1, with something in it."""
    if len(value) > MAX_STATE_BYTES:
        return False
    members = [member for part in value.split(b",") if (member := part.strip(b" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in found if match is not None}
    return 0 < len(members) <= MAX_STATE_MEMBERS and len(keys) == len(members)
