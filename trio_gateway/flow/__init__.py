"""What flows inside one exchange: bytes under a cap, and cancellation with a cause."""

from ._byte_channel import BufferPool, ByteChannel, ChannelStatistics, Gathering, Joiner, Taken
from ._delta_log import Delta, DeltaLog, Dropped, NotSent
from ._event_log import EventLog
from ._request_scope import RequestScope

__all__ = [
    "BufferPool",
    "ByteChannel",
    "ChannelStatistics",
    "Delta",
    "DeltaLog",
    "Dropped",
    "EventLog",
    "Gathering",
    "Joiner",
    "NotSent",
    "RequestScope",
    "Taken",
]
