"""`bench collectives --level node`: the groups of a level, and its path on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from megatron_sparse.bench.collectives.case import Case
from megatron_sparse.bench.collectives.path import LastRecord, new_residuals
from megatron_sparse.bench.collectives.sweep import Sweep
from megatron_sparse.bucket import Bucket
from megatron_sparse.planner import FixedPlanner
from megatron_sparse.recording import BucketRecord
from megatron_sparse.reduction.job import Progress, without_gates
from megatron_sparse.reduction.level import LevelGroups
from megatron_sparse.reduction.level_choice import LevelChoice
from megatron_sparse.reduction.reducer import GradientReducer, Groups
from megatron_sparse.transport import Transport, VirtualCluster


def groups_of_nodes(
    choice: LevelChoice, rank: int, make: Callable[[Sequence[int]], Transport]
) -> LevelGroups:
    """The node and the lane of a rank.

    Args:
        choice: of level `node`.
        rank: the rank.
        make: makes a group's transport; called for the two groups of the rank.
    """
    return LevelGroups(make(choice.inside(rank)), make(choice.across(rank)))


def virtual_groups(cluster: VirtualCluster, choice: LevelChoice) -> list[Groups]:
    """The groups of each rank of a cluster."""
    made = {
        ranks: dict(zip(ranks, cluster.group(ranks), strict=True))
        for ranks in [*choice.nodes, *zip(*choice.nodes, strict=True)]
    }
    found = []
    for rank, transport in enumerate(cluster.transports):

        def own(ranks: Sequence[int], rank: int = rank) -> Transport:
            return made[tuple(ranks)][rank]

        level = groups_of_nodes(choice, rank, own) if choice.nodes else None
        found.append(Groups(transport, level=level))
    return found


class LevelPath:
    """One rank's reducer, with residuals that begin at zero.

    Args:
        case: what is synchronised.
        sweep: how.
        groups: of the rank.
        progress: drives the reducer; None for virtual ranks, which call `steps`.
    """

    def __init__(
        self, case: Case, sweep: Sweep, groups: Groups, progress: Progress | None = None
    ) -> None:
        config = case.config(sweep, straggler=groups.data_parallel.world_size - 1)
        self.sink = LastRecord()
        self.residuals = new_residuals()
        self.reducer = GradientReducer(
            config,
            groups,
            FixedPlanner(config.compression, config.scheme),
            self.residuals,
            self.sink,
            progress,  # type: ignore[arg-type] - virtual ranks launch nothing
        )

    def steps(self, bucket: Bucket, step: int) -> Generator[Any, None, BucketRecord]:
        """Synchronises a bucket on a virtual rank; driven by the cluster."""
        job = self.reducer.job(bucket, step)
        yield from without_gates(self.reducer.synchronise(job))
        return job.record

    def residual(self, bucket: Bucket) -> torch.Tensor:
        """A copy of what the rank holds, fp32 [N], at its places in the bucket."""
        part = self.reducer.part(bucket)
        held_N = torch.zeros(bucket.numel, device=bucket.grad_N.device)
        if part.name not in self.residuals:
            return held_N
        residual_M = self.residuals.begin(part)
        starts = {piece.name: piece.start for piece in bucket.parameters}
        for piece in part.parameters:
            start = starts[piece.name] + piece.offset
            held_N[start : start + piece.stop - piece.start] = residual_M[piece.start : piece.stop]
        return held_N
