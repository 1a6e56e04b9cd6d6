"""The data path of one bucket: plan, select, exchange, write back, tell.

`start` returns at once; a progress thread does the work while the backward pass goes on. After
`PendingReduction.wait` the bucket holds the sum over all ranks of what they selected (for a
reduce-scatter: this rank's shard of it), and the residual holds the rest. Where the bucket asks for
the average, each rank's gradient is divided first, on the progress thread: one more pass over it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

from megatron_sparse.bucket import Bucket, Reduction
from megatron_sparse.collectives import SCHEMES, Exchange, Input
from megatron_sparse.collectives.base import Steps
from megatron_sparse.collectives.peer_windows import ProcessRanks, open_windows
from megatron_sparse.compression.method import CompressionMethod
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.selection import Selector
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError, DependencyError, HostError
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.planner import Plan, Planner
from megatron_sparse.planner.plan import Windows
from megatron_sparse.planner.wire_bytes import dense_wire_bytes
from megatron_sparse.profiler_ranges import marked
from megatron_sparse.recording import BucketRecord, RecordSink, StageTimer
from megatron_sparse.reduction.group_threshold import group_threshold
from megatron_sparse.reduction.instances import summed_over_instances
from megatron_sparse.reduction.progress import GATE, Pending, ProgressThread
from megatron_sparse.reduction.straggler_policy import StragglerPolicy
from megatron_sparse.sparsity.gradient_dump import NO_DUMP, GradientDumpWriter, Kind
from megatron_sparse.sparsity.sampling import selected_values
from megatron_sparse.transport import Transport
from megatron_sparse.transport.peer_memory import PeerMemory

logger = logging.getLogger("megatron_sparse")


class PendingReduction:
    """A bucket under way. Call `wait` exactly once."""

    def __init__(self, pending: Pending, record: BucketRecord, sink: RecordSink) -> None:
        self._pending = pending
        self._record = record
        self._sink = sink

    def wait(self) -> None:
        """Blocks until the bucket holds the sum; see `Pending.wait` for streams.

        Raises:
            MegatronSparseError: the bucket was not synchronised; its content is undefined.
        """
        start_s = time.perf_counter()
        with marked("host_wait"):
            self._pending.wait()
        done = self._pending
        self._record.end(done.finished_s, done.host_cpu_s, done.host_wall_s)
        self._sink.record_stage("host_wait", time.perf_counter() - start_s)
        self._sink.record_bucket(self._record)


class GradientReducer:
    """Synchronises the buckets of one group of ranks.

    Args:
        config: compression and scheme.
        transport: the group.
        planner: chooses the scheme of each bucket.
        residuals: error feedback; mutated by the progress thread between `start` and `wait`.
        sink: told about each bucket by the thread that waits for it.
        progress: drives the phases; shared by all reducers of the process.
        recording: given the gradients of the iterations that it wants.
        tensor_parallel: the group that agrees on thresholds, for `threshold_scope=tp_group`.
        instances: the ranks that own the same shards in other instances of the distributed
            optimizer, if there are any.
        method: the compression method, shared by all reducers of these residuals; see `Selector`.

    Raises:
        ConfigError: that scope without such a group.
    """

    def __init__(
        self,
        config: SparseConfig,
        transport: Transport,
        planner: Planner,
        residuals: ResidualStore,
        sink: RecordSink,
        progress: ProgressThread,
        recording: GradientDumpWriter = NO_DUMP,
        tensor_parallel: Transport | None = None,
        instances: Transport | None = None,
        method: CompressionMethod | None = None,
    ) -> None:
        self._config = config
        self.transport = transport
        self.instances = instances
        self.planner = planner
        planner.join(transport)
        self.sink = sink
        self.progress = progress
        self.recording = recording
        self.threshold_group = _threshold_group(config, tensor_parallel)
        self.buffers = MessageBuffers()
        self.options = config.scheme
        self.windows: PeerMemory | None = None
        self.selector = Selector(
            config.compression, residuals, transport.rank, self.buffers, method
        )
        self.stragglers = StragglerPolicy(config, transport, sink)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Makes what schemes need of all buckets at once, before the first of them is started.

        That is windows of peer memory, where the planner may ask for them; nothing otherwise.
        Collective over the group; waits for the device then. Marks the buckets.

        Args:
            buckets: all that this reducer will ever synchronise. Their sizes must not change.

        Raises:
            ConfigError: a scheme that needs windows, for a group that cannot have any.
            HostError: the ranks cannot reach one another's memory.
            DependencyError: this torch has no such memory.
        """
        wanted = self.planner.windows(self.transport)
        if wanted is Windows.NONE or not buckets:
            return
        try:
            peers = open_windows(
                cast("ProcessRanks", self.transport),
                buckets,
                self._config.scheme,
                in_order_of_coming=self._config.scheme.peer_in_order_of_coming
                or self._config.straggler.leaves_behind,
            )
        except (ConfigError, HostError, DependencyError) as error:
            if wanted is Windows.REQUIRED:
                raise
            if self.transport.rank == 0:
                logger.warning(
                    "the planner has no windows of peer memory to choose: %s (got: %s)",
                    error.what,
                    error.got,
                )
            return
        self.windows = peers
        for bucket in buckets:
            bucket.has_windows = True

    @property
    def window_bytes(self) -> int:
        """Of GPU memory that this rank's windows take."""
        return 0 if self.windows is None else self.windows.nbytes

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
        self.stragglers.begin_step(step)
        plan = self.stragglers.adapt(bucket, self.planner.plan_for(bucket, step))
        timer = StageTimer(bucket.grad_N.device)
        record = BucketRecord(
            bucket=bucket.name,
            step=step,
            scheme=self.stragglers.scheme_of(plan, None),
            phase=plan.phase,
            density=plan.density,
            numel=bucket.numel,
            timer=timer,
            dense_bytes=round(dense_wire_bytes(bucket, bucket.grad_N.element_size())),
            predicted_us=plan.predicted_us,
            launched_s=time.perf_counter(),
        )
        self.planner.follow(record)
        run = self._dense if SCHEMES[plan.scheme].takes is Input.DENSE else self._sparse
        pending = self.progress.submit(
            bucket.name, lambda: run(bucket, plan, step, record), timer, on_done
        )
        self.stragglers.launched(self.progress)
        return PendingReduction(pending, record, self.sink)

    def report(self, bucket: Bucket, step: int) -> dict[str, Any]:
        """The bucket's row of `plan.json`: the planner's, and whom the bucket goes on without."""
        row, plan = self.planner.report(bucket, step), self.planner.plan_for(bucket, step)
        return row | {"straggler": self.stragglers.report(bucket, plan)}

    def _sparse(
        self, bucket: Bucket, plan: Plan, step: int, record: BucketRecord
    ) -> Generator[object, None, None]:
        self._prepare(bucket, step, record.timer)
        agreed = None
        if self.threshold_group is not None and plan.density < 1:
            yield GATE
            residual_N = self.selector.begin(bucket, record.timer)
            agreed = (
                residual_N,
                (
                    yield from group_threshold(
                        bucket,
                        residual_N,
                        plan.density,
                        step,
                        self.selector.config,
                        self.threshold_group,
                        record.timer,
                    )
                ),
            )
        message = self.selector.select(
            bucket,
            plan.density,
            plan.wire_dtype,
            form=SCHEMES[plan.scheme].message_format(self.options),
            block_size=self.options.block_size,
            sharded=plan.sharded,
            extra_cuts=SCHEMES[plan.scheme].extra_cuts(bucket),
            step=step,
            timer=record.timer,
            capacity=self.options.capacity,
            agreed=agreed,
        )
        record.thresholds_R = self.selector.thresholds_R
        if self.recording.wants(step + 1, Kind.SELECTED):
            selected_N = selected_values(bucket, message, self.buffers)
            self.recording.write(bucket.name, step + 1, Kind.SELECTED, selected_N)
        yield GATE
        exchange = yield from self._decide(bucket, plan, record)
        yield from self._share(bucket, plan, step, message, record)
        steps = SCHEMES[plan.scheme].run(exchange, message)
        record.wire_bytes = yield from self._over_instances(steps, exchange, step)
        record.nnz = message.nnz

    def _dense(
        self, bucket: Bucket, plan: Plan, step: int, record: BucketRecord
    ) -> Generator[object, None, None]:
        self._prepare(bucket, step, record.timer)
        values_N = self.selector.take_whole(bucket, plan.wire_dtype, step=step, timer=record.timer)
        record.nnz = bucket.numel
        yield GATE
        exchange = yield from self._decide(bucket, plan, record)
        yield from self._share(bucket, plan, step, None, record)
        steps = SCHEMES[record.scheme].run(exchange, values_N, step)
        record.wire_bytes = yield from self._over_instances(steps, exchange, step)

    def _over_instances(self, steps: Steps, exchange: Exchange, step: int) -> Steps:
        """The collective, and the sum over the optimizer's instances where there are several."""
        if self.instances is None:
            return steps
        return summed_over_instances(steps, exchange, step, self.instances)

    def _prepare(self, bucket: Bucket, step: int, timer: StageTimer) -> None:
        """Averages; and records the gradient where it is wanted. Iterations count from 1."""
        _average(bucket, timer)
        self.recording.write(bucket.name, step + 1, Kind.GRADIENT, bucket.grad_N)

    def _decide(
        self, bucket: Bucket, plan: Plan, record: BucketRecord
    ) -> Generator[object, None, Exchange]:
        """Decides which rank the bucket does not wait for, if any."""
        record.straggler = yield from self.stragglers.decide(bucket, plan)
        record.scheme = self.stragglers.scheme_of(plan, record.straggler)
        return Exchange(
            bucket,
            self.transport,
            self.buffers,
            record.timer,
            self.options,
            record.straggler,
            self.windows,
        )

    def _share(
        self, bucket: Bucket, plan: Plan, step: int, message: Message | None, record: BucketRecord
    ) -> Generator[object, None, None]:
        """What the planner wants to know of the other ranks."""
        return self.planner.share(
            bucket, plan, step, message, self.transport, self.buffers, record.timer
        )


def _threshold_group(config: SparseConfig, given: Transport | None) -> Transport | None:
    """The group that agrees on thresholds, where the configuration asks for one."""
    if config.compression.threshold_scope != "tp_group":
        return None
    if given is None:
        raise ConfigError(
            "compression.threshold_scope=tp_group without a tensor-parallel group",
            expected="a model that Megatron trains, whose plugin knows the group",
            got="a group of data-parallel ranks alone",
            remedy="set compression.threshold_scope=parameter or bucket",
        )
    return given


def _average(bucket: Bucket, timer: StageTimer) -> None:
    """Divides the gradient by the number of ranks where the bucket asks for the average."""
    ranks = bucket.world_size * bucket.instances
    if bucket.reduction is Reduction.AVG and ranks > 1:
        with timer.stage("prune"):
            bucket.grad_N.div_(ranks)
