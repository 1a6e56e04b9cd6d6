"""The transports of one attachment: one for each of Megatron's groups that it uses."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.transport import ProcessGroupTransport, open_transport


class Transports:
    """Makes transports, and closes all of them.

    Args:
        scheme: timeouts, how dead ranks are noticed, and the way inside a host.
        device: of the gradients.
    """

    def __init__(self, scheme: SchemeConfig, device: torch.device) -> None:
        self._scheme = scheme
        self._device = device
        self._made: list[ProcessGroupTransport] = []

    def make(self, group: dist.ProcessGroup, *, nccl_engine: bool = False) -> ProcessGroupTransport:
        """A transport over the ranks of a group. Collective over them."""
        transport = open_transport(group, self._scheme, self._device, nccl_engine=nccl_engine)
        self._made.append(transport)
        return transport

    def lost_rank(self) -> str | None:
        """In words, the first rank of any group that is known to have died or stopped."""
        return next(filter(None, (each.trouble() for each in self._made)), None)

    def close(self, *, broken: bool) -> None:
        """See `ProcessGroupTransport.close`."""
        for transport in self._made:
            transport.close(broken=broken)
