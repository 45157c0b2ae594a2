"""Sharing capacity, limits and what operators say with other replicas, through Redis or Valkey.

`Replica` is the one task that takes turns with the store; `turn.lua` is the store's side of one. What the
rest of the process is asked and told stands in `Local`.
"""

from ._member import Heard, Member, Standing, Survey, share_of
from ._messages import Grant, Reply, Turn, Want, decode_reply, field_of
from ._replica import Local, Replica, ReplicaSettings, ReplicaStatistics
from ._store import Connect, Link, StoreAddress, StoreLost, connect, prepare

__all__ = [
    "Connect",
    "Grant",
    "Heard",
    "Link",
    "Local",
    "Member",
    "Replica",
    "ReplicaSettings",
    "ReplicaStatistics",
    "Reply",
    "Standing",
    "StoreAddress",
    "StoreLost",
    "Survey",
    "Turn",
    "Want",
    "connect",
    "decode_reply",
    "field_of",
    "prepare",
    "share_of",
]
