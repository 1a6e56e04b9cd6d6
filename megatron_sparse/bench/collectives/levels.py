"""The reducer of `bench collectives`, and the groups of `--level node`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from megatron_sparse.bench.collectives.case import Case
from megatron_sparse.bench.collectives.path import Records, new_residuals
from megatron_sparse.bench.collectives.sweep import Sweep
from megatron_sparse.bucket import Bucket
from megatron_sparse.compression.methods import method_of
from megatron_sparse.planner import FixedPlanner
from megatron_sparse.recording import BucketRecord
from megatron_sparse.reduction.job import Gate, Progress
from megatron_sparse.reduction.level import LevelGroups
from megatron_sparse.reduction.level_choice import LevelChoice
from megatron_sparse.reduction.pieces import in_pieces
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
        progress: drives the reducer; None for virtual ranks, which call `steps`. Their local work
            takes no time, so they have nothing to gain from pieces.
    """

    def __init__(
        self, case: Case, sweep: Sweep, groups: Groups, progress: Progress | None = None
    ) -> None:
        self._config = config = case.config(sweep, straggler=groups.data_parallel.world_size - 1)
        self._sink, self._on_virtual_rank = Records(), progress is None
        self.residuals = new_residuals()
        self.reducer = GradientReducer(
            config,
            groups,
            FixedPlanner(config.compression, config.scheme),
            method_of(config.compression, self.residuals),
            self._sink,
            progress,  # type: ignore[arg-type] - virtual ranks launch nothing
        )

    def open_windows(self, bucket: Bucket) -> None:
        """Makes windows of peer memory where the scheme uses them; see `GradientReducer`."""
        self.reducer.open_windows(self._pieces(bucket))

    def synchronise(self, bucket: Bucket, step: int) -> list[BucketRecord]:
        """Launches the bucket as training does, in pieces if it is large; waits for its sum.

        Returns:
            The record of each piece.
        """
        self._sink.records.clear()
        for pending in [self.reducer.start(piece, step) for piece in self._pieces(bucket)]:
            pending.wait()
        return self._sink.records

    def _pieces(self, bucket: Bucket) -> list[Bucket]:
        return [bucket] if self._on_virtual_rank else in_pieces(bucket, self._config)

    def steps(self, bucket: Bucket, step: int) -> Generator[Any, None, BucketRecord]:
        """Synchronises a bucket on a virtual rank; driven by the cluster."""
        job = self.reducer.job(bucket, step)
        for outcome in self.reducer.synchronise(job):
            if not isinstance(outcome, Gate):
                yield outcome
        return job.record

    def residual(self, bucket: Bucket) -> torch.Tensor:
        """A copy of what the rank holds, fp32 [N], at its places in the bucket."""
        held_N = torch.zeros(bucket.numel, device=bucket.grad_N.device)
        starts = {each.name: each.start for each in bucket.parameters}
        for piece in self._pieces(bucket):
            part = self.reducer.part(piece)
            if part.name not in self.residuals:
                continue
            residual_M = self.residuals.begin(part)
            for each in part.parameters:
                start = starts[each.name] + each.offset
                held_N[start : start + each.stop - each.start] = residual_M[each.start : each.stop]
        return held_N
