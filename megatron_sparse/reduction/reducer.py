"""The pipeline that synchronises the gradients of one bucket.

    average     divide the gradient by the number of ranks, if ranks average and the backend
                does not divide
    inside      at a level above `rank`: add up inside the node or instance (`level`)
    select      sparse plan: gradient + residual -> message to send and new residual
                dense plan: gradient + residual, all elements
                -- the gate: before it a bucket works locally, after it it may use the network;
                   buckets pass it in the order of their launch, which is the same on all ranks --
                On CUDA the gate leads from one stream to another (`job`).
    agree       decide which rank to skip, if any; exchange measurements for later plans
    exchange    run the plan's collective, which overwrites the gradient with the sum; on a CPU it
                may also encode the shards (`Message.by_shard`)
    finish      complete the bucket's telemetry record

The residual (error feedback) of a bucket is what earlier steps did not send. "Host" in a name is
the framework that runs the plugin, Megatron, which has a collective of its own for each bucket.

The planner's `Plan` for a bucket and step names the scheme (a collective algorithm), which is dense
or sparse, and the density.

`GradientReducer.start` returns at once: a progress thread runs the pipeline while the backward
pass goes on. The stages are generators; each `yield` lets the thread work on other buckets until
the network has answered. After `Pending.wait` the bucket holds the sum over all ranks of the
selected values (for a reduce-scatter: this rank's shard of the sum), and the residual holds the
values that were not selected.

Optional features, made once with the reducer:

- `StragglerPolicy` decides which rank to skip, that is, not to wait for. It may replace a plan's
  scheme by a variant that can skip one. With `straggler.mode=off` it does nothing.
- `Level`: with `compression.level=node` or `instance` the ranks of a node or an instance add up
  their gradients first, behind a gate of its own; selection and exchange get this rank's part of
  that sum.
- `sum_over_instances`: with several instances of Megatron's distributed optimizer, the exchange
  reduce-scatters inside an instance, then this sums the shards of all instances, dense.
- `GradientDumpWriter` writes gradients and selections to disk (`tracking.record_gradients_iters`).

Shape suffix: N elements of the bucket.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, Reduction
from megatron_sparse.collectives import SCHEMES, Exchange, Input
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.selection import Selector
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.formats.message import TURNS, Message, MessageBuffers
from megatron_sparse.planner import Plan, Planner
from megatron_sparse.planner.wire_bytes import dense_wire_bytes
from megatron_sparse.recording import BucketRecord, RecordSink, StageTimer
from megatron_sparse.reduction.job import GATE, Pending, Stage, used_here
from megatron_sparse.reduction.level import LevelGroups, dense_plan, level_of, sum_over_instances
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.reduction.straggler_policy import StragglerPolicy
from megatron_sparse.sparsity.gradient_dump import GradientDumpWriter
from megatron_sparse.transport import Transport


@dataclass(frozen=True)
class Groups:
    """The groups of ranks with which a bucket is synchronised.

    Attributes:
        data_parallel: the ranks whose gradients are summed.
        instances: the ranks that own the same shard in the other instances of the distributed
            optimizer; None if there is one instance, or if the level is `instance`.
        level: of a level above `rank`; None for `rank`.
    """

    data_parallel: Transport
    instances: Transport | None = None
    level: LevelGroups | None = None


@dataclass(frozen=True)
class BucketJob:
    """A bucket that was launched, with the plan it follows and the record that it fills.

    Attributes:
        bucket: what is selected from and exchanged: the whole bucket, or this rank's part of it.
        plan: of `bucket`.
        step: the training step.
        record: telemetry of `bucket`.
        whole: the launched bucket; the same as `bucket` at level `rank`.
    """

    bucket: Bucket
    plan: Plan
    step: int
    record: BucketRecord
    whole: Bucket

    @property
    def backend_divides(self) -> bool:
        """Whether the backend's collective averages, so that this reducer must not divide.

        True for a dense reduce-scatter in the gradient's dtype, as in Megatron. Other ranks' shards
        of the gradient buffer then keep undivided values. Depends only on plan and bucket, so all
        ranks agree.
        """
        bucket, plan = self.bucket, self.plan
        is_dense_scatter = plan.scheme == "dense" and bucket.op is CollectiveOp.REDUCE_SCATTER
        adds_in_gradient_dtype = not bucket.fp32_sums and not plan.narrows(bucket)
        return bucket.reduction is Reduction.AVG and is_dense_scatter and adds_in_gradient_dtype

    @property
    def divisor(self) -> int:
        """The number of ranks whose gradients are averaged; 1 for a sum."""
        bucket = self.whole
        return bucket.world_size * bucket.instances if bucket.reduction is Reduction.AVG else 1

    @property
    def timer(self) -> StageTimer:
        """Receives the time of every stage."""
        return self.record.timer


class MessageTurns:
    """On CUDA: shares `TURNS` (two) sets of message buffers among the buckets of a reducer.

    A message is selected on one stream and exchanged on another (`job`). While one bucket is
    exchanged, the next one is selected; the bucket after that begins when the first one's work on
    the device has ended, and takes over its buffers. So the memory for messages does not grow with
    the number of buckets. On a CPU each bucket has buffers of its own, because several exchanges
    run at the same time.
    """

    def __init__(self, buffers: MessageBuffers) -> None:
        self._buffers = buffers
        self._users: list[Pending | None] = [None] * TURNS  # the last job that used each set
        self._launches = 0

    def take(self, bucket: Bucket, pending: Pending) -> None:
        """Gives a bucket a set of buffers; its job will wait for the job that used the set before.

        Call it right before the job is submitted.
        """
        if bucket.grad_N.device.type == "cuda":
            turn = self._launches % TURNS
            self._launches += 1
            self._buffers.give_turn(bucket.name, turn)
            pending.after = self._users[turn]
            self._users[turn] = pending


class GradientReducer:
    """Synchronises the buckets of one group of ranks.

    Args:
        config: `compression`, `scheme` and `straggler` are read.
        groups: the ranks, and the optional features' groups.
        planner: chooses the scheme of each bucket.
        residuals: error feedback; shared by all reducers of a model. The progress thread mutates
            it between `start` and `wait`.
        sink: receives each bucket's telemetry record, in `Pending.confirm`.
        progress: drives the pipelines; shared by all reducers of the process.
        dump: writes gradients and selections to disk; None writes none.

    Raises:
        ConfigError: the configuration needs a group that is missing, or names a rank outside of the
            group.
    """

    def __init__(
        self,
        config: SparseConfig,
        groups: Groups,
        planner: Planner,
        residuals: ResidualStore,
        sink: RecordSink,
        progress: Progress,
        dump: GradientDumpWriter | None = None,
    ) -> None:
        self._config = config
        self.transport = groups.data_parallel
        self.level_groups = groups.level
        self.planner = planner
        planner.join(self.transport)
        self.progress = progress
        self._sink = sink
        self._dump = dump
        self.buffers = MessageBuffers()
        self._turns = MessageTurns(self.buffers)
        self.selector = Selector(config.compression, residuals, self.transport.rank, self.buffers)
        self._level = level_of(self.transport, groups.level, config.scheme, self.buffers)
        self._instances = groups.instances
        self._stragglers = StragglerPolicy(config, self._level.across, sink)
        # No optional feature is on: Megatron's own collective could do the sum (`left_to_host`).
        self._is_plain_sum = (
            groups.level is None
            and groups.instances is None
            and dump is None
            and config.straggler.mode == "off"
        )
        # While compression is off: bucket -> the step that has sent its residual.
        self._sent_while_off: dict[str, int] = {}

    def part(self, bucket: Bucket) -> Bucket:
        """What this rank selects from and has a residual of: at level `rank` the bucket itself.

        At other levels a part of the bucket, always the same object (`Level.part`).
        """
        return self._level.part(bucket)

    def start(
        self, bucket: Bucket, step: int, on_done: Callable[[Pending], None] | None = None
    ) -> Pending[None]:
        """Launches the synchronisation of `bucket`, whose gradients must be complete.

        The gradient buffer must not be touched until `Pending.wait` returns. Buckets must
        be started in the same order on every rank of the group.

        Args:
            bucket: the bucket to synchronise.
            step: the training step, for the density schedule and the keys of random draws.
            on_done: called when the pipeline has ended; see `Pending`.
        """
        # At a step's first launch: reads how long each rank waited for stragglers two steps ago.
        self._stragglers.begin_step(step)
        job = self.job(bucket, step)
        record = job.record
        pending = Pending(
            bucket.name, self.synchronise(job), record.timer, record, self._sink, on_done
        )
        # On CUDA buckets share message buffers: the job waits for the last user of its buffers.
        self._turns.take(bucket, pending)
        self.progress.submit(pending)
        # At a step's first launch: starts a job that gathers the waiting times of the step before.
        self._stragglers.launched(self.progress)
        return pending

    def left_to_host(self, bucket: Bucket, step: int) -> bool:
        """Whether Megatron's own collective suffices for a bucket; the same on every rank.

        False with optional features; true from the second step with `compression.enabled=false`.
        The first such step, or its repetition, goes through this reducer: it sends the residual and
        checks that ranks agree.
        """
        is_off = not self._config.compression.enabled
        residual_is_sent = self._sent_while_off.get(bucket.name, step) < step
        return is_off and self._is_plain_sum and residual_is_sent

    def residuals_came_back(self) -> None:
        """To be called when residuals were loaded or restored: `left_to_host` is false again."""
        self._sent_while_off.clear()

    def record_of_host(self, bucket: Bucket, step: int) -> BucketRecord:
        """Makes the record of a bucket left to the host, when Megatron launches its collective."""
        record = self.job(bucket, step).record  # the job itself does not run
        record.nnz = bucket.numel
        record.message_bytes = bucket.grad_N.nbytes
        record.wire_bytes = record.dense_bytes
        return record

    def job(self, bucket: Bucket, step: int) -> BucketJob:
        """Makes the job of a bucket for `synchronise`: its plan and its telemetry record."""
        part = self.part(bucket)
        # `adapt` replaces the scheme by a variant that can skip a rank, if there is one.
        plan = self._stragglers.adapt(part, self._plan_for(part, step))
        record = BucketRecord(
            bucket=bucket.name,
            step=step,
            scheme=self._stragglers.scheme_of(plan, None),  # until `_agree` knows the rank to skip
            phase=plan.phase,
            density=plan.density,
            numel=part.numel,
            timer=StageTimer(bucket.grad_N.device),
            dense_bytes=round(dense_wire_bytes(bucket, bucket.grad_N.element_size())),
            predicted_us=plan.predicted_us,
            launched_s=time.perf_counter(),
        )
        return BucketJob(part, plan, step, record, bucket)

    def _plan_for(self, part: Bucket, step: int) -> Plan:
        """The planner's plan; dense if the level is `node` and all ranks are on one node."""
        plan = self.planner.plan_for(part, step)
        return dense_plan(plan) if self._level.has_one_node else plan

    def synchronise(self, job: BucketJob) -> Stage[None]:
        """The pipeline as a generator, run by the progress thread; see the module's docstring."""
        self._average(job)
        yield from self._level.inside(job.whole, job.record)
        self._dump_gradient(job)
        selected = self._select(job)
        yield GATE
        # On CUDA: allocated on the codec stream, and from here on used on the network stream.
        used_here(selected.tensors() if isinstance(selected, Message) else [selected])
        exchange = yield from self._agree(job, selected)
        sent_bytes = yield from self._exchange(job, selected, exchange)
        self._finish(job, selected, sent_bytes)

    def _average(self, job: BucketJob) -> None:
        """Divides the gradient by the number of ranks; timed as a part of stage `prune`.

        This comes before the selection, because residuals belong to the averaged gradient.
        """
        if job.divisor > 1 and not job.backend_divides:
            with job.timer.stage("prune"):
                job.whole.grad_N.div_(job.divisor)

    def _dump_gradient(self, job: BucketJob) -> None:
        """Writes the averaged gradient, before anything is selected from it, if a dump is on."""
        if self._dump is not None:
            grad_N = job.bucket.grad_N
            divided_N = grad_N / job.divisor if job.backend_divides else grad_N
            self._dump.on_gradient(replace(job.bucket, grad_N=divided_N), job.step)

    def _select(self, job: BucketJob) -> Message | torch.Tensor:
        """Makes the message from gradient and residual; for a dense plan returns their sum [N]."""
        bucket, plan = job.bucket, job.plan
        if SCHEMES[plan.scheme].takes is Input.DENSE:
            return self._take_whole(job)
        spec = plan.message_spec(bucket, self._config.scheme)
        message = self.selector.select(bucket, spec, step=job.step, timer=job.timer)
        if self._dump is not None:
            self._dump.on_selected(bucket, job.step, message, self.buffers)
        return message

    def _take_whole(self, job: BucketJob) -> torch.Tensor:
        """Gradient + residual [N], for a dense plan: all elements are sent."""
        bucket, plan = job.bucket, job.plan
        # The residual belongs to the averaged gradient. If the backend is going to divide the sum:
        # divide the gradient, add the residual, and multiply the result by the divisor again.
        has_residual = bucket.name in self.selector.residuals
        scales_back = job.backend_divides and has_residual
        if scales_back:
            with job.timer.stage("prune"):
                bucket.grad_N.div_(job.divisor)
        values_N = self.selector.take_whole(bucket, plan.wire_dtype, step=job.step, timer=job.timer)
        return values_N.mul_(job.divisor) if scales_back else values_N

    def _agree(self, job: BucketJob, selected: Message | torch.Tensor) -> Stage[Exchange]:
        """Decides which rank to skip, if any; lets the planner exchange its measurements.

        Returns the arguments of the collective. The record gets the skipped rank and the scheme.
        """
        bucket, plan, record = job.bucket, job.plan, job.record
        record.straggler = self._stragglers.decide(bucket, plan)
        record.scheme = self._stragglers.scheme_of(plan, record.straggler)
        exchange = Exchange(
            bucket,
            self._level.across,
            self.buffers,
            job.timer,
            self._config.scheme,
            straggler=record.straggler,
            averages=job.backend_divides,
            is_agreed=bucket.name in self._sent_while_off,  # an earlier job has compared the ranks
        )
        # `left_to_host` goes by the configured value; `HostState.enabled` may change at any step.
        if self._config.compression.enabled:
            self._sent_while_off.clear()  # once it is off again, residuals must be sent again
        else:
            self._sent_while_off.setdefault(bucket.name, job.step)
        # A dense plan has no message: nothing was selected.
        message = selected if isinstance(selected, Message) else None
        yield from self.planner.share(exchange, plan, job.step, message)
        return exchange

    def _exchange(
        self, job: BucketJob, selected: Message | torch.Tensor, exchange: Exchange
    ) -> Stage[int]:
        """Runs the collective; returns the bytes that this rank has sent.

        The plan's scheme may be the variant that can skip a rank although this step skips none. A
        dense plan then runs plain `dense`, the scheme recorded by `_agree`. A sparse plan runs the
        variant, whose message is already made.
        """
        if isinstance(selected, Message):
            steps = SCHEMES[job.plan.scheme].run(exchange, selected)
        else:
            steps = SCHEMES[job.record.scheme].run(exchange, selected, job.step)
        steps = self._level.after(steps, exchange, job.whole, job.record)
        if self._instances is not None:
            whole = replace(exchange, bucket=job.whole, transport=self.transport)
            steps = sum_over_instances(steps, whole, self._instances, job.step)
        return steps

    def _finish(self, job: BucketJob, selected: Message | torch.Tensor, sent_bytes: int) -> None:
        """Completes the record with sizes, which are all known only after the collective.

        With `scheme.capacity` the collective reads nnz (selected elements) from the device.
        """
        job.record.message_bytes = selected.nbytes
        job.record.wire_bytes = job.record.inside_bytes + sent_bytes
        job.record.nnz = selected.nnz if isinstance(selected, Message) else job.bucket.numel

    def report(self, bucket: Bucket, step: int) -> dict[str, Any]:
        """The bucket's row of `plan.json`."""
        part = self.part(bucket)
        row = self.planner.report(part, step)
        if self._level.has_one_node:  # the planner does not know that `_plan_for` makes it dense
            plan = self._plan_for(part, step)
            row |= {"chosen": plan.scheme, "reason": plan.reason, "density": plan.density}
        return row
