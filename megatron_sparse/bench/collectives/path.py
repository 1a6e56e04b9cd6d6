"""The data path of one bucket in two halves, for callers that must run them separately.

`GradientReducer` runs both in one go on its progress thread. The virtual cluster drives the second
half for many ranks in one thread, and `--no-prune` times it alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_sparse.bench.collectives.case import Case
from megatron_sparse.bench.collectives.sweep import Sweep
from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import SCHEMES, Exchange, Input
from megatron_sparse.collectives.base import Steps
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.selection import Selector
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner import FixedPlanner
from megatron_sparse.recording import BucketRecord, NullSink, StageTimer
from megatron_sparse.transport import Transport

Start = Callable[[], Steps]
"""Starts the second half of a bucket's way."""


class HalvedPath:
    """One rank's residual, buffers and plan of a case.

    Args:
        case: what is synchronised.
        sweep: how.
        transport: of the rank.
        straggler: the late rank, for schemes that need one; None for the last rank.

    Attributes:
        residuals: the gradients that were not selected so far.
    """

    def __init__(
        self, case: Case, sweep: Sweep, transport: Transport, straggler: int | None = None
    ) -> None:
        late = transport.world_size - 1 if straggler is None else straggler
        config = case.config(sweep, late)
        self.residuals = new_residuals()
        self._planner = FixedPlanner(config.compression, config.scheme)
        self._options, self._straggler = config.scheme, straggler
        self._buffers = MessageBuffers()
        self._transport = transport
        self._selector = Selector(
            config.compression,
            self.residuals,
            transport.rank,
            self._buffers,
        )

    def carried_by(self, bucket: Bucket) -> str:
        """The scheme that the planner takes."""
        return self._planner.plan_for(bucket, 0).scheme

    def select(self, bucket: Bucket, step: int, timer: StageTimer) -> tuple[int, Start]:
        """The first half; `timer` gets the times of both. Mutates the residual.

        Returns:
            How many elements were selected, and the second half, which is to be driven once.
        """
        plan = self._planner.plan_for(bucket, step)
        scheme = SCHEMES[plan.scheme]
        exchange = Exchange(
            bucket, self._transport, self._buffers, timer, self._options, self._straggler
        )
        if scheme.takes is Input.DENSE:
            values_N = self._selector.take_whole(bucket, plan.wire_dtype, step=step, timer=timer)
            return bucket.numel, lambda: scheme.run(exchange, values_N, step)
        message = self._selector.select(
            bucket,
            plan.message_spec(bucket, self._options),
            step=step,
            timer=timer,
        )
        return message.nnz, lambda: scheme.run(exchange, message)


class LastRecord(NullSink):
    """Keeps the record of the last bucket."""

    record: BucketRecord

    def record_bucket(self, record: BucketRecord) -> None:
        """See `RecordSink`."""
        self.record = record


def new_residuals() -> ResidualStore:
    """A residual whose selections all count."""
    return ResidualStore(torch.float32, undo=False, outcome=Outcome.ASSUMED)


def residual_of(residuals: ResidualStore, bucket: Bucket) -> torch.Tensor:
    """A copy of a bucket's residual; zeros where it has none, as after a dense plan."""
    if bucket.name in residuals:
        return residuals.begin(bucket).clone()
    return torch.zeros(bucket.numel, device=bucket.grad_N.device)
