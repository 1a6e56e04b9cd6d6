"""One rank's way of a bucket in a bench: the reducer of training, run as a bench needs it.

Between processes a progress thread drives it; virtual ranks are driven step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from megatron_sparse.bench.exchange.case import BucketCase
from megatron_sparse.bench.exchange.options import CollectiveSweep
from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import without
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.config.level import NODE
from megatron_sparse.planner import Planner
from megatron_sparse.recording import BucketRecord, GatherRecord, NullSink, StageTimer
from megatron_sparse.reduction.job import Gate
from megatron_sparse.reduction.level import LevelGroups
from megatron_sparse.reduction.level_choice import LevelChoice
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.reduction.reducer import GradientReducer, Groups
from megatron_sparse.transport import Transport, VirtualCluster


class LastRecord(NullSink):
    """Keeps the records of the last bucket and of the last gather."""

    bucket: BucketRecord
    gather: GatherRecord

    def record_bucket(self, record: BucketRecord) -> None:
        """See `RecordSink`."""
        self.bucket = record

    def record_gather(self, record: GatherRecord) -> None:
        """See `RecordSink`."""
        self.gather = record


class BucketPath:
    """One rank's reducer, with residuals that begin at zero and selections that all count.

    Args:
        case: what is synchronised.
        sweep: how.
        groups: of the rank.
        progress: drives the reducer; None for virtual ranks, which call `steps`.
    """

    def __init__(
        self,
        case: BucketCase,
        sweep: CollectiveSweep,
        groups: Groups,
        progress: Progress | None = None,
    ) -> None:
        config = case.config(sweep, groups.data_parallel.world_size)
        self._sink = LastRecord()
        self.residuals = ResidualStore(torch.float32)
        self.reducer = GradientReducer(
            config,
            groups,
            Planner(config.compression, config.scheme),
            self.residuals,
            self._sink,
            progress,  # type: ignore[arg-type] - virtual ranks launch nothing
        )

    def run(self, bucket: Bucket, step: int) -> BucketRecord:
        """Synchronises a bucket as training does."""
        self.reducer.start(bucket, step).wait()
        return self._sink.bucket

    def steps(
        self, bucket: Bucket, step: int, timer: StageTimer | None = None
    ) -> Generator[Any, None, BucketRecord]:
        """Synchronises a bucket on a virtual rank; driven by the cluster."""
        job = self.reducer.job(bucket, step)
        job.record.timer = timer or job.record.timer
        yield from without(self.reducer.synchronise(job), Gate)
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


def groups_of_nodes(
    choice: LevelChoice, rank: int, make: Callable[[Sequence[int]], Transport]
) -> LevelGroups | None:
    """The node and the lane of a rank; None at level `rank`.

    Args:
        choice: the level.
        rank: the rank.
        make: makes a group's transport; called for the two groups of the rank.
    """
    if choice.level != NODE:
        return None
    return LevelGroups(make(choice.inside(rank)), make(choice.across(rank)))


def virtual_groups(cluster: VirtualCluster, choice: LevelChoice) -> list[Groups]:
    """The groups of each rank of a cluster."""
    made = {
        ranks: dict(zip(ranks, cluster.group(ranks), strict=True))
        for ranks in [*choice.nodes, *zip(*choice.nodes, strict=True)]
    }
    return [
        Groups(
            transport,
            level=groups_of_nodes(choice, rank, lambda ranks, rank=rank: made[tuple(ranks)][rank]),
        )
        for rank, transport in enumerate(cluster.transports)
    ]
