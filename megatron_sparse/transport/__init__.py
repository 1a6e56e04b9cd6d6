"""Moves bytes between ranks."""

from megatron_sparse.transport.base import Transport, Work
from megatron_sparse.transport.process_group import ProcessGroupTransport
from megatron_sparse.transport.topology import Link, Topology
from megatron_sparse.transport.virtual import VirtualCluster

__all__ = ["Link", "ProcessGroupTransport", "Topology", "Transport", "VirtualCluster", "Work"]
