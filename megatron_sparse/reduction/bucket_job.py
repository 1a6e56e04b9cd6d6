"""A bucket that a reducer has launched."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.bucket import Bucket, CollectiveOp, Reduction
from megatron_sparse.planner import Plan
from megatron_sparse.recording import BucketRecord, StageTimer


@dataclass(frozen=True)
class BucketJob:
    """A bucket that was launched, with the plan it follows and the record that it fills.

    Attributes:
        bucket: what is selected from and exchanged: the whole bucket, or this rank's part of it.
        plan: of `bucket`.
        step: the training step.
        record: of `bucket`.
        whole: the launched bucket; the same as `bucket` at level `rank`.
    """

    bucket: Bucket
    plan: Plan
    step: int
    record: BucketRecord
    whole: Bucket

    @property
    def averages(self) -> bool:
        """Whether the backend divides, as in Megatron: a dense reduce-scatter of the gradient.

        The shards that other ranks own then keep their values in the gradient buffer. Follows from
        the plan and the bucket alone, so all ranks agree.
        """
        bucket, plan = self.bucket, self.plan
        is_own = plan.scheme == "dense" and bucket.op is CollectiveOp.REDUCE_SCATTER
        is_plain = not bucket.fp32_sums and not plan.narrows(bucket)
        return bucket.reduction is Reduction.AVG and is_own and is_plain

    @property
    def divisor(self) -> int:
        """The number of ranks whose gradients are averaged; 1 for a sum."""
        bucket = self.whole
        is_average = bucket.reduction is Reduction.AVG
        return bucket.world_size * bucket.instances if is_average else 1

    @property
    def timer(self) -> StageTimer:
        """Receives the time of every stage."""
        return self.record.timer
