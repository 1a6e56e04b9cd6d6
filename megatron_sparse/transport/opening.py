"""The transport that a configuration asks for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.transport.process_group import ProcessGroupTransport
from megatron_sparse.transport.shared_memory import SharedMemoryTransport

logger = logging.getLogger("megatron_sparse")
_logged: set[str] = set()


def open_transport(
    group: dist.ProcessGroup | Sequence[int],
    scheme: SchemeConfig,
    device: torch.device,
    *,
    nccl_engine: bool = False,
    any_order: bool = False,
) -> ProcessGroupTransport:
    """Makes the transport of a group; collective over it.

    With `scheme.intra_node=auto` the first rank logs once how messages inside a host travel. Its
    sums of more than two ranks stay the backend's: a dense run is Megatron's own, bit for bit.

    Args:
        group: see `ProcessGroupTransport`.
        scheme: `timeout_s`, `watch_peers` and `intra_node`.
        device: CPU for gloo, the current CUDA device for NCCL.
        nccl_engine: see `ProcessGroupTransport`.
        any_order: sums may be added in another order than the backend's, as those of a node that
            are compressed afterwards; so `auto` adds them in shared memory.

    Raises:
        ConfigError: `scheme.intra_node=shared_memory` on CUDA, or ranks of a host cannot share
            memory; and those of `ProcessGroupTransport`.
        DependencyError, CommunicationError: see `ProcessGroupTransport`.
    """
    if scheme.intra_node == "shared_memory" and device.type != "cpu":
        raise ConfigError(
            "scheme.intra_node=shared_memory is for gradients in host memory",
            expected="scheme.intra_node=auto or backend on CUDA",
            got=f"gradients on {device.type}",
            remedy="leave the key out: NCCL moves data inside a node by itself",
        )
    if scheme.intra_node == "backend" or device.type != "cpu" or nccl_engine:
        return ProcessGroupTransport(
            group,
            scheme.timeout_s,
            device,
            liveness=scheme.watch_peers,
            nccl_engine=nccl_engine,
        )
    required = scheme.intra_node == "shared_memory"
    transport = SharedMemoryTransport(
        group, scheme.timeout_s, liveness=scheme.watch_peers, sums=required or any_order
    )
    if transport.refusals and required:
        transport.close()
        rank, reason = next(iter(transport.refusals.items()))
        raise ConfigError(
            "the ranks of a host cannot share memory",
            expected="a segment that all of them map",
            got=f"rank {rank}: {reason}",
            remedy="give the container more memory and one network namespace for the ranks of a "
            "host, or set scheme.intra_node=backend",
        )
    if transport.rank == 0:
        _log(transport)
    return transport


def _log(transport: SharedMemoryTransport) -> None:
    for rank, reason in transport.refusals.items():
        text = f"rank {rank} shares no memory with its host's other ranks, which use gloo: {reason}"
        _once(logging.WARNING, text)
    if transport.shares_memory:
        _once(logging.INFO, "inside a host: shared memory (scheme.intra_node)")


def _once(level: int, text: str) -> None:
    """A run has several groups, which have the same to say."""
    if text not in _logged:
        _logged.add(text)
        logger.log(level, text)
