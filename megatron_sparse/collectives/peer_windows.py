"""Windows of peer memory for the buckets of a group: which groups can have them, and providers.

`peer_two_shot` runs in windows that all ranks of a group reach by pointer. They are made once, when
a model is attached, with room for the largest bucket, and serve all of the group's buckets in turn:
2 (1 + 1 / n) dense buckets of memory on each of n ranks. Making them takes one all-gather of a few
bytes for each provider that is tried, for which the host and the device wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.peer_two_shot import NAME, peer_layout
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext.peer_ops import MAX_PEERS
from megatron_sparse.errors import ConfigError, DependencyError, HostError
from megatron_sparse.formats.message import wire_dtype_of
from megatron_sparse.transport.peer_memory import (
    CudaIpc,
    PeerMemory,
    SymmetricMemory,
    WindowProvider,
)

logger = logging.getLogger("megatron_sparse")

PROVIDERS: Mapping[str, Callable[[dist.ProcessGroup, torch.device], WindowProvider]] = {
    "symmetric_memory": SymmetricMemory,
    "cuda_ipc": CudaIpc,
}
"""The values of `scheme.peer_windows`, in the order in which `auto` tries them."""

DEADLINE_FACTOR = 0.5
"""Of `scheme.timeout_s`, for messages; sums may take twice as long. Both together end before the
progress thread gives up, so that the error names the rank that is missing."""


class ProcessRanks(Protocol):
    """The properties of a group that windows need; `ProcessGroupTransport` has them.

    Attributes:
        rank: of this process.
        world_size: ranks of the group.
        device: on which the gradients lie.
        nodes: for each rank its machine; equal numbers share one.
        group: through which the ranks tell one another where their memory is.
    """

    rank: int
    world_size: int
    device: torch.device
    nodes: tuple[int, ...]
    group: dist.ProcessGroup


def check_domain(ranks: ProcessRanks) -> None:
    """Refuses a group whose ranks cannot be an NVLink domain; the same answer on every rank.

    Raises:
        ConfigError: it is not on CUDA, spreads over machines, or is too large.
    """
    machines = len(set(ranks.nodes))
    if ranks.device.type == "cuda" and machines == 1 and ranks.world_size <= MAX_PEERS:
        return
    if ranks.device.type != "cuda":
        got = f"a group of {ranks.world_size} ranks on {ranks.device.type}"
    elif machines > 1:
        got = f"a group of {ranks.world_size} ranks on {machines} machines"
    else:
        got = f"a group of {ranks.world_size} ranks"
    raise refusal(got)


def refusal(got: str) -> ConfigError:
    """The error for ranks that can have no windows.

    Args:
        got: a description of the ranks.
    """
    return ConfigError(
        f"{NAME} needs the memory of GPUs that reach one another",
        expected=f"a group of at most {MAX_PEERS} ranks on CUDA, all on one machine",
        got=got,
        remedy="use scheme.name=direct, which does the same over any process group, or "
        "scheme.name=hierarchical across machines",
    )


def open_windows(
    ranks: ProcessRanks,
    buckets: Sequence[Bucket],
    scheme: SchemeConfig,
    *,
    in_order_of_coming: bool,
) -> PeerMemory:
    """The windows for all buckets of a group. Collective; waits for the device.

    Args:
        ranks: the group.
        buckets: all that will ever be synchronised, in the same order on every rank.
        scheme: dtype and format of records, provider and timeout.
        in_order_of_coming: owners add parts in the order in which ranks arrive.

    Raises:
        ConfigError: the group is not one that can have windows.
        HostError: the ranks cannot reach one another's memory with any provider; raised on every
            rank.
        DependencyError: this torch lacks the provider that is asked for.
    """
    check_domain(ranks)
    layouts = {
        bucket.name: peer_layout(
            bucket, wire_dtype_of(bucket.grad_N.dtype, scheme.wire_dtype), scheme.format
        )
        for bucket in buckets
    }
    wanted = list(PROVIDERS) if scheme.peer_windows == "auto" else [scheme.peer_windows]
    for name in wanted:
        provider = PROVIDERS[name](ranks.group, ranks.device)
        try:
            return PeerMemory(
                provider,
                layouts,
                DEADLINE_FACTOR * scheme.timeout_s,
                in_order_of_coming=in_order_of_coming,
            )
        except (HostError, DependencyError) as error:
            if name == wanted[-1]:
                raise
            if ranks.rank == 0:
                logger.warning(
                    "no windows of peer memory by %s (%s); trying the next provider",
                    name,
                    error.got or error.what,
                )
    raise AssertionError("the last provider either works or raises")
