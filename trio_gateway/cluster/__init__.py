"""Sharing capacity, limits and what operators say with other replicas, through Redis or Valkey.

`Replica` is the one task that takes turns with the store; `turn.lua` is the store's side of one. What the
rest of the process is asked and told stands in `Local`.
"""

from ._member import Heard, Member, Standing, Survey, share_of
from ._messages import ONCE, Grant, News, Reply, Turn, Want, decode_reply, field_of
from ._replica import Local, Replica, ReplicaSettings, ReplicaStatistics
from ._store import Connect, Link, StoreAddress, StoreLost, connect, prepare
from ._vouching import Vouching

__all__ = [
    "ONCE",
    "Connect",
    "Grant",
    "Heard",
    "Link",
    "Local",
    "Member",
    "News",
    "Replica",
    "ReplicaSettings",
    "ReplicaStatistics",
    "Reply",
    "Standing",
    "StoreAddress",
    "StoreLost",
    "Survey",
    "Turn",
    "Vouching",
    "Want",
    "connect",
    "decode_reply",
    "field_of",
    "prepare",
    "share_of",
]
