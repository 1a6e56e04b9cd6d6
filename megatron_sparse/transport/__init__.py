"""Who moves bytes between ranks."""

from megatron_sparse.transport.base import Transport, Work
from megatron_sparse.transport.process_group import ProcessGroupTransport

__all__ = ["ProcessGroupTransport", "Transport", "Work"]
