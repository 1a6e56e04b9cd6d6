"""Messages between the ranks of a host through memory that they share."""

from megatron_sparse.transport.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport"]
