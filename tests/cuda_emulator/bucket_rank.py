"""One rank's bucket on a GPU, or an emulated one, and its reducer."""

from collections.abc import Iterator
from typing import Any, cast

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice, Reduction
from megatron_sparse.recording import BucketRecord, StageTimer
from megatron_sparse.reduction.reducer import BucketJob, Groups
from megatron_sparse.transport import Transport
from tests.cuda_emulator.device import GPU
from tests.reduction.reducers import at_target, reducer_of

NUMEL = 3000
PIECES = [
    ParameterSlice("w", 0, 2000),
    ParameterSlice("n", 2000, 2100, keep=True),
    ParameterSlice("v", 2100, NUMEL),
]


class Rank:
    """One rank, on a transport of the virtual cluster or with NCCL; it has one bucket."""

    def __init__(
        self, transport: Any, op: CollectiveOp, dtype: torch.dtype = torch.float32, **overrides: Any
    ) -> None:
        config = at_target(**{"samples": 200} | overrides)
        groups = Groups(cast("Transport", transport))
        self.reducer = reducer_of(config, groups, is_reported=False)
        grad_N = torch.zeros(NUMEL, dtype=dtype, device=GPU)
        ranks = transport.world_size
        self.bucket = Bucket("b", grad_N, PIECES, op, ranks, reduction=Reduction.AVG)
        self.transport, self.timer = transport, StageTimer()

    def fill(self, step: int) -> None:
        """The backward pass."""
        generator = torch.Generator().manual_seed(10 * step + self.transport.rank)
        self.bucket.grad_N.copy_(torch.randn(self.bucket.numel, generator=generator))

    def steps(self, step: int) -> Iterator[Any]:
        """What the progress thread drives."""
        plan = self.reducer.planner.plan_for(self.bucket, step)
        record = BucketRecord(
            "b",
            step,
            plan.scheme,
            plan.phase,
            plan.density,
            numel=self.bucket.numel,
            timer=self.timer,
        )
        yield from self.reducer.synchronise(BucketJob(self.bucket, plan, step, record, self.bucket))
        return record

    def part(self) -> torch.Tensor:
        """What the rank must know of the sum."""
        if self.bucket.op is CollectiveOp.ALL_REDUCE:
            return self.bucket.grad_N
        return self.bucket.grad_N[self.bucket.shard(self.transport.rank)]
