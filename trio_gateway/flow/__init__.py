"""What flows inside one exchange: bytes under a cap, and cancellation with a cause. Beside it: steps, TLS."""

from ._byte_channel import BufferPool, ByteChannel, ChannelStatistics, Gathering, Joiner, Taken
from ._delta_log import Delta, DeltaLog, Dropped, NotSent
from ._event_log import EventLog
from ._read_loop import EpollPoller, Poller, ReadLoop
from ._request_scope import RequestScope
from ._steps import in_steps
from ._tls_files import READ_AGAIN, Certificates, TlsFiles, shake_hands

__all__ = [
    "READ_AGAIN",
    "BufferPool",
    "ByteChannel",
    "Certificates",
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
    "TlsFiles",
    "in_steps",
    "shake_hands",
]
