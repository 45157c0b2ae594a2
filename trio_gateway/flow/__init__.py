"""What flows inside one exchange: bytes under a cap, and cancellation with a cause."""

from ._byte_channel import BufferPool, ByteChannel, ChannelStatistics, Gathering
from ._request_scope import RequestScope

__all__ = ["BufferPool", "ByteChannel", "ChannelStatistics", "Gathering", "RequestScope"]
