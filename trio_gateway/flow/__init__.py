"""What flows inside one exchange: bytes under a cap, and cancellation with a cause; long work in steps."""

from ._byte_channel import BufferPool, ByteChannel, ChannelStatistics, Gathering, Joiner, Taken
from ._delta_log import Delta, DeltaLog, Dropped, NotSent
from ._event_log import EventLog
from ._read_loop import EpollPoller, Poller, ReadLoop
from ._request_scope import RequestScope
from ._steps import in_steps

__all__ = [
    "BufferPool",
    "ByteChannel",
    "ChannelStatistics",
    "Delta",
    "DeltaLog",
    "Dropped",
    "EpollPoller",
    "EventLog",
    "Gathering",
    "Joiner",
    "NotSent",
    "Poller",
    "ReadLoop",
    "RequestScope",
    "Taken",
    "in_steps",
]
