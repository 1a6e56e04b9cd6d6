"""Buckets, cuts and gradients for the tests of the peer collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_sparse.cuda_ext.peer_ops import Operation, PeerLayout
from megatron_sparse.reference import peer
from megatron_sparse.wire import FORMAT_ADAPTIVE
from tests.cuda_emulator.emulated import DTYPE_CODES
from tests.cuda_emulator.emulated_peer import PeerCluster


def uneven_layout(
    ranks: int, value_dtype: torch.dtype = torch.float32, record_format: int = FORMAT_ADAPTIVE
) -> PeerLayout:
    """Shards of different lengths, the second empty; kept segments, and some under a tile."""
    offsets, dense, shards = [0], [], [0]
    for rank in range(ranks):
        numels = [] if rank == 1 else [4096 + 700 * (rank % 3), 37 + rank, 1500]
        for place, numel in enumerate(numels[: 1 + rank % 3]):
            offsets.append(offsets[-1] + numel)
            dense.append(int(place == 1))
        shards.append(len(dense))
    return PeerLayout.of(
        torch.tensor(offsets),
        torch.tensor(dense, dtype=torch.uint8),
        shards,
        DTYPE_CODES[value_dtype],
        record_format,
    )


def gradients(
    layout: PeerLayout, densities: Sequence[float], dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    """One for each rank; densities alternate."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rank in range(layout.world_size):
        kept = torch.rand(layout.numel, generator=generator) < densities[rank % len(densities)]
        found.append((torch.randn(layout.numel, generator=generator) * kept).to(dtype))
    return found


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the bits are equal, so that 0.0 and -0.0 are not. A NaN equals every NaN."""
    found, expected = (
        values.masked_fill(values.isnan(), torch.nan) for values in (found, expected)
    )
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def check(
    cluster: PeerCluster,
    operation: Operation,
    grads: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    value_dtype: torch.dtype,
) -> None:
    """No rank has an error, and each holds the oracle's result, bit for bit."""
    layout = cluster.layout
    for rank, out in enumerate(found):
        assert cluster.error(rank)[0] == 0, cluster.error(rank)
        if operation is Operation.ALL_REDUCE:
            expected = peer.all_reduce(grads, value_dtype)
        elif operation is Operation.REDUCE_SCATTER:
            expected = peer.reduce_scatter(grads, value_dtype, layout.shard(rank))
        else:
            expected = peer.all_reduce([torch.cat(list(grads))], value_dtype)
        assert same_bits(out, expected), f"rank {rank}: {operation}"
