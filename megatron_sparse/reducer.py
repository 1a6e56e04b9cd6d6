"""The data path of one bucket: plan, select, exchange, write back, tell.

`start` returns at once; a progress thread does the work while the backward pass goes on. After
`PendingReduction.wait` the bucket holds the sum over all ranks of what they selected (for a
reduce-scatter: this rank's shard of it), and the residual holds the rest. Where the bucket asks for
the average, each rank's gradient is divided first, on the progress thread: one more pass over it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from megatron_sparse.bucket import Bucket, Reduction
from megatron_sparse.collectives import SCHEMES, Input, SchemeOptions
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.selection import Selector
from megatron_sparse.config import SparseConfig
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner import Plan, Planner
from megatron_sparse.planner.wire_bytes import dense_wire_bytes
from megatron_sparse.progress import GATE, Pending, ProgressThread
from megatron_sparse.recording import BucketRecord, Recorder, Stopwatch
from megatron_sparse.transport import Transport


class PendingReduction:
    """A bucket under way. Call `wait` exactly once."""

    def __init__(self, pending: Pending, record: BucketRecord, recorder: Recorder) -> None:
        self._pending = pending
        self._record = record
        self._recorder = recorder

    def wait(self) -> None:
        """Blocks until the bucket holds the sum; see `Pending.wait` for streams.

        Raises:
            MegatronSparseError: the bucket was not synchronised; its content is undefined.
        """
        start_s = time.perf_counter()
        self._pending.wait()
        self._record.finished_s = self._pending.finished_s
        self._recorder.record_stage("host_wait", time.perf_counter() - start_s)
        self._recorder.record_bucket(self._record)


class GradientReducer:
    """Synchronises the buckets of one group of ranks.

    Args:
        config: compression and scheme.
        transport: the group.
        planner: chooses the scheme of each bucket.
        residuals: error feedback; mutated by the progress thread between `start` and `wait`.
        recorder: told about each bucket by the thread that waits for it.
        progress: drives the phases; shared by all reducers of the process.
    """

    def __init__(
        self,
        config: SparseConfig,
        transport: Transport,
        planner: Planner,
        residuals: ResidualStore,
        recorder: Recorder,
        progress: ProgressThread,
    ) -> None:
        self.transport = transport
        self.planner = planner
        self.recorder = recorder
        self.progress = progress
        self.buffers = MessageBuffers()
        self.options = SchemeOptions.of(config.scheme)
        self.selector = Selector(config.compression, residuals, transport.rank, self.buffers)

    def start(
        self, bucket: Bucket, step: int, on_done: Callable[[], None] | None = None
    ) -> PendingReduction:
        """Launches the synchronisation of `bucket`, whose gradients must be final.

        The gradient buffer must not be touched until `PendingReduction.wait` returns. Buckets must
        be started in the same order on every rank of the group.

        Args:
            bucket: what to synchronise.
            step: drives the schedule and keys the random draws.
            on_done: see `ProgressThread.submit`.
        """
        plan = self.planner.plan_for(bucket, step)
        watch = Stopwatch(bucket.grad_N.device)
        record = BucketRecord(
            bucket=bucket.name, step=step, scheme=plan.scheme, phase=plan.phase,
            density=plan.density, numel=bucket.numel, watch=watch,
            dense_bytes=round(dense_wire_bytes(bucket, bucket.grad_N.element_size())),
            launched_s=time.perf_counter(),
        )  # fmt: skip
        run = self._dense if SCHEMES[plan.scheme].takes is Input.DENSE else self._sparse
        pending = self.progress.submit(
            bucket.name, lambda: run(bucket, plan, step, record), watch, on_done
        )
        return PendingReduction(pending, record, self.recorder)

    def _sparse(
        self, bucket: Bucket, plan: Plan, step: int, record: BucketRecord
    ) -> Generator[object, None, None]:
        _average(bucket, record.watch)
        message = self.selector.select(
            bucket, plan.density, plan.wire_dtype, form=self.options.message_format(plan.scheme),
            block_size=self.options.block_size, sharded=plan.sharded, step=step,
            watch=record.watch, capacity=self.options.capacity,
        )  # fmt: skip
        record.nnz = message.nnz
        yield GATE
        record.wire_bytes = yield from SCHEMES[plan.scheme].exchange(
            bucket, message, self.transport, self.buffers, record.watch, self.options
        )

    def _dense(
        self, bucket: Bucket, plan: Plan, step: int, record: BucketRecord
    ) -> Generator[object, None, None]:
        _average(bucket, record.watch)
        values_N = self.selector.take_whole(bucket, plan.wire_dtype, step=step, watch=record.watch)
        record.nnz = bucket.numel
        yield GATE
        record.wire_bytes = yield from SCHEMES[plan.scheme].run(
            bucket, values_N, step, self.transport, self.buffers, record.watch
        )


def _average(bucket: Bucket, watch: Stopwatch) -> None:
    if bucket.reduction is Reduction.AVG and bucket.world_size > 1:
        with watch.stage("prune"):
            bucket.grad_N.div_(bucket.world_size)
