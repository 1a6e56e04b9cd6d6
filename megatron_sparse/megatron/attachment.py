"""Compressed gradient synchronisation for a model that Megatron wrapped in DDP.

Megatron cuts its gradients into buckets, several of which form a bucket group, and calls a group's
`start_grad_sync` when its gradients are ready. Each process has one `Attachment`, made by `attach`
in a loop of your own, or by the hook of `plugin` in scripts that run Megatron's `pretrain`. It

- changes the class of each bucket group to a subclass (`bucket_group`), whose `start_grad_sync`
  calls `Attachment.launch` in place of Megatron's collective;
- owns the state of the process: residuals, one reducer for each process group, the count of steps;
- wraps `optimizer.step`, whose result says whether the optimizer took the step or skipped it.

A *selection* chooses the elements of gradient + residual that a rank sends; the *residual* keeps
the others for later steps (error feedback). If the step is skipped, each residual is restored from
its *undo copy*, made before the selection. `host` means an object of Megatron's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import check
from megatron_sparse.config.parameters import COMPRESSED
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError, HostError
from megatron_sparse.megatron import checkpoint_process
from megatron_sparse.megatron.bucket_group import Handle, TimedHandle, swap_in, swap_out
from megatron_sparse.megatron.buckets import GroupBuckets, collect, device_of
from megatron_sparse.megatron.host_symbols import require_host_symbols
from megatron_sparse.megatron.optimizer_step import (
    UnconfirmedSums,
    WatchedOptimizer,
    WrappedMethod,
    clips_gradients,
)
from megatron_sparse.megatron.parameter_gathers import ParameterGathers
from megatron_sparse.megatron.replica_sums import summed_over_replicas
from megatron_sparse.megatron.spikes import UsualNorm
from megatron_sparse.megatron.transports import Transports
from megatron_sparse.megatron.units import (
    ResidualUnit,
    check_undo,
    divides_by_tokens,
    is_fp16,
    may_repeat_or_skip,
)
from megatron_sparse.planner.configured import with_swept_thresholds
from megatron_sparse.recording import BucketRecord, NullSink, RecordSink
from megatron_sparse.reduction.host_state import HostState
from megatron_sparse.reduction.job import Pending
from megatron_sparse.reduction.level_parts import in_whole_bucket
from megatron_sparse.reduction.memory import held
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.reduction.reducer import GradientReducer
from megatron_sparse.reduction.setting_trials import AUTO
from megatron_sparse.sparsity.gradient_dump import GradientDumpWriter
from megatron_sparse.transport.groups import borrow_group, return_group


class Attachment(HostState):
    """The plugin's state in one process. Made by `attach`; ended by `detach`.

    Attributes:
        step: optimizer steps seen so far, skipped ones included.
        groups: Megatron's bucket groups, with the plugin's buckets.
        grad_norm: the gradient's norm as the last optimizer step returned it; None if it did not.
        usual_norm: the running median of gradient norms; a far larger norm is a spike (`spikes`).
        unit: the unit of the residuals' values: loss scale, and division by the step's tokens.
        alone: a process group of this rank alone; see `bucket_group`.
        parameters: the all-gathers of updated parameters.

    Args:
        chunks: Megatron's DDP-wrapped model chunks.
        config: the plugin's configuration.
        sink: receives each bucket's telemetry record.
        run_dir: where recorded gradients go, if `tracking` asks for any.
    """

    def __init__(
        self, chunks: list[Any], config: SparseConfig, sink: RecordSink, run_dir: Path | None = None
    ) -> None:
        config = with_swept_thresholds(config)
        self.groups = collect(chunks, config)  # first: it refuses unsupported models
        super().__init__(config, device_of(self.buckets))  # residuals, planner, progress thread
        self.run_dir = run_dir
        self.sink = sink
        self.grad_norm: float | None = None
        self.usual_norm = UsualNorm()
        self._clips_gradients = False  # whether the optimizer clips the summed gradients
        self.parameters = ParameterGathers(sink)
        self._launched: set[int] = set()  # `id` of each bucket group launched in this step
        self._optimizer: WatchedOptimizer | None = None
        self.wrapped: list[WrappedMethod] = []  # of `checkpoint.save_with`, until `close`
        self._sums = UnconfirmedSums()  # the optimizer's step confirms them before its update
        timeout_s = config.scheme.timeout_s
        self.alone = borrow_group([dist.get_rank()], dist.get_backend(), timeout_s)
        self._transports = Transports(self.config, self._device)
        try:
            self._reducers = self._make_reducers()
        except BaseException:
            self._give_back()  # the caller gets no attachment that it could close
            raise
        # From here on Megatron calls the plugin.
        self.chunks = chunks
        self._closed = False
        self.unit = ResidualUnit(chunks, self._take_residuals_out)
        for group in self.groups:
            swap_in(group, self)

    @property
    def buckets(self) -> list[Bucket]:
        """Every bucket, in Megatron's order."""
        return [bucket for group in self.groups for bucket in group.buckets]

    @property
    def lines(self) -> list[str]:
        """What was chosen at the start and why: the level of compression, parameters' gathers."""
        return [*self._transports.lines, *self.parameters.lines]

    def _make_reducers(self) -> dict[int, GradientReducer]:
        """Makes one reducer for each process group; returns them by the `id` of the process group.

        Bucket groups of dense and of expert parameters have different process groups.
        """
        by_ranks: dict[int, list[GroupBuckets]] = {}  # bucket groups that the same ranks reduce
        for group in self.groups:
            by_ranks.setdefault(id(group.process_group), []).append(group)
        reducers: dict[int, GradientReducer] = {}
        for key, bucket_groups in by_ranks.items():
            buckets = [bucket for group in bucket_groups for bucket in group.buckets]
            any_group = bucket_groups[0]  # all of them have the same process groups
            groups = self._transports.groups_of(any_group, buckets)  # with their transports
            ranks = dist.get_process_group_ranks(any_group.process_group)
            writer = GradientDumpWriter.of(  # None unless `tracking` asks to record gradients
                self.config.tracking, self.run_dir, ranks, groups.data_parallel.rank
            )
            reducers[key] = GradientReducer(
                self.config, groups, self.planner, self.residuals, self.sink, self.progress, writer
            )
        return reducers

    def bind_optimizer(self, optimizer: Any, *, undo: bool) -> None:
        """Wraps `optimizer.step()`, whose result says whether the optimizer took the step.

        Args:
            optimizer: Megatron's (returns `(success, grad_norm, num_zeros)`), or any object with
                `step()`; a result that is not a tuple counts as success.
            undo: whether a step can be skipped or repeated, so that residuals need undo copies.

        Raises:
            ConfigError: `compression.undo=never` with an optimizer that may skip steps.
        """
        undo = undo or self.unit.per_token  # `_take_residuals_out` needs undo copies
        check_undo(self.config.compression, undo=undo)
        self.residuals.undo = undo or self.config.compression.undo == "always"
        self.residuals.is_reported = True  # `_step_ended` commits or rolls back each step
        self._clips_gradients = clips_gradients(optimizer)
        self.unit.bind(optimizer)
        self.parameters.plan(
            self.groups, self.config, self.reducer, self.progress, self.chunks, optimizer
        )
        self._optimizer = WatchedOptimizer(
            optimizer,
            self._sums,
            self.sink,
            end=self._step_ended,
            inner_s=lambda: self.parameters.waited_s,  # waits that count as `param_wait` instead
        )

    def launch(self, group: GroupBuckets) -> Handle:
        """Starts the plugin's reduction of a bucket group; returns the handle to wait for."""
        reducer = self.reducer(group)
        pending = [reducer.start(bucket, self.step) for bucket in group.buckets]
        # Confirming reads a sum's error reports: in `wait`, or later in the optimizer's step.
        when_queued = Pending.confirm if self._optimizer is None else self._sums.add
        return Handle(pending, when_queued)

    def time_megatron_sum(self, group: GroupBuckets) -> TimedHandle | None:
        """Starts to time Megatron's own collective for a bucket group that only needs a sum.

        Call it right before Megatron launches. Returns None, and times nothing, if the plugin must
        reduce the group. The time goes to the first bucket's stage `network`, and ends when
        Megatron has waited, because its handle does not say when the collective ends.
        """
        self._count_launch(group)
        reducer = self.reducer(group)
        if not all(reducer.left_to_host(bucket, self.step) for bucket in group.buckets):
            return None
        records = [reducer.record_of_host(bucket, self.step) for bucket in group.buckets]
        network_stage = records[0].timer.in_flight()
        network_stage.__enter__()  # `end_stage` leaves it

        def end_stage(waited_s: float) -> None:
            """Called when Megatron has waited."""
            network_stage.__exit__(None, None, None)
            self.sink.record_stage(BucketRecord.WAIT, waited_s)

        return TimedHandle(records, self.sink, end_stage)

    def start_gather(self, group: GroupBuckets) -> Handle | None:
        """Launches the plugin's gather of a group's parameters; None if Megatron's is to run."""
        pending = self.parameters.start(group, self.step, enabled=self.enabled)
        return None if pending is None else Handle(pending, self.parameters.gathered)

    @property
    def starts_all_gathers(self) -> bool:
        """Whether the gathers of a chunk start together, with overlap.

        A thread must run them. Experts' gathers would come after those of all other parameters.
        """
        return isinstance(self.progress, ProgressThread) and len(self._reducers) == 1

    def forget_parameters(self) -> None:
        """Gathers raw next. For all ranks, after writing parameters without `load_state_dict`."""
        self.parameters.forget()

    def residuals_came_back(self) -> None:
        """For all ranks, when residuals were loaded, or restored after a skipped step."""
        for reducer in self._reducers.values():
            reducer.residuals_came_back()

    def _count_launch(self, group: GroupBuckets) -> None:
        """Counts steps where no optimizer does: a group's second launch begins a new step."""
        if self.residuals.is_reported:
            return  # there is an optimizer: `_step_ended` counts
        if id(group) in self._launched:
            self._launched.clear()
            self.step += 1
            self._between_steps()
        self._launched.add(id(group))

    def reducer(self, group: GroupBuckets) -> GradientReducer:
        """The reducer of a bucket group."""
        return self._reducers[id(group.process_group)]

    def _take_residuals_out(self) -> None:
        """Turns the step's sums into sums of gradients alone, without the residuals.

        Called if a step has far fewer tokens than the one before. With a loss per token Megatron
        multiplies the sums by one over the step's tokens, a number that is known only after the
        selection. A residual from a step with a hundred times the tokens would count a hundred
        times. Each rank has sent gradient + old residual - new residual, so a second, dense sum
        over the ranks adds new - old residual. The residuals then stay as they were before the step
        (`ResidualStore.take_apart`). Collective over the ranks of each group.

        Cost: one all-reduce of every bucket in fp32, and a buffer of a bucket's size.
        """
        if self._optimizer is None:
            return  # without a bound optimizer the residuals have no undo copies to restore
        corrections = self.residuals.take_apart(self.config.compression.leak)
        with summed_over_replicas(self.chunks):
            for group in self.groups:
                for bucket in group.buckets:
                    part = self.reducer(group).part(bucket)  # the elements this rank selects from
                    correction_M = corrections.pop(part.name, None)
                    if correction_M is None:  # no selection, but every rank must join the sum
                        correction_N = torch.zeros_like(bucket.grad_N, dtype=torch.float32)
                    else:
                        correction_N = in_whole_bucket(correction_M, part, bucket)
                    dist.all_reduce(correction_N, group=group.process_group)
                    if group.instances_group is not None:
                        dist.all_reduce(correction_N, group=group.instances_group)
                    bucket.grad_N.add_(correction_N)
                    for piece in bucket.parameters:
                        if piece.name in group.accumulated:  # the sum is in a copy, `main_grad`
                            main_grad = group.accumulated[piece.name].main_grad.view(-1)
                            elements = slice(piece.offset, piece.offset + piece.numel)
                            main_grad[elements].add_(correction_N[piece.start : piece.stop])

    def _step_ended(self, success: bool, grad_norm: float | None) -> None:
        """Keeps the new residuals if the optimizer took the step, else restores the old ones."""
        self.grad_norm = grad_norm
        unit_change = self.unit.end_step(accepted=success)
        if success:
            share = None  # how much of the step's change the residuals keep; None: all of it
            # Megatron clips a spike after the sum. Its unsent values, now in the residual, must be
            # scaled down too (`spikes`), which needs the undo copies.
            if self.residuals.undo and self._clips_gradients:
                share = self.usual_norm.share(grad_norm, self.step)
            self.residuals.commit(unit_change, share)
        else:
            self.residuals.rollback()
            self.residuals_came_back()  # they are sent even if compression is off now
        self.step += 1
        self._between_steps()
        scale_change = self.unit.follow_loss_scale()  # None, unless the optimizer has changed it
        if scale_change is not None:
            self.residuals.rescale(scale_change)

    def residual_norm(self) -> float:
        """The residual's norm in units of `grad_norm`; reads the residual and waits for it."""
        return float(self.residuals.norm()) * self.unit.of_gradient()

    def plan_rows(self) -> list[dict[str, Any]]:
        """The plan of each bucket for the next step, and the reason; rows of `plan.json`."""
        return [
            self.reducer(group).report(bucket, self.step)
            for group in self.groups
            for bucket in group.buckets
        ]

    def memory_report(self) -> dict[str, int]:
        """The bytes that this rank holds now, by item; see `reduction.memory`."""
        return held(self.residuals, self._reducers.values(), self.parameters.nbytes)

    def close(self) -> None:
        """Restores Megatron's classes and methods, then ends the plugin's thread and groups.

        In this order, so that nothing calls what is already closed. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        for group in self.groups:
            swap_out(group)
        self.unit.close()
        for wrapped in self.wrapped:
            wrapped.close()
        if self._optimizer is not None:
            self._optimizer.close()  # before `parameters`, which wrapped updates earlier
            self._optimizer = None
        self.parameters.close()
        self._give_back()

    def _give_back(self) -> None:
        """Ends the progress thread, then gives back the groups of ranks that it worked on."""
        self.progress.close()
        self._transports.close(broken=self.progress.broken)
        return_group(self.alone)


def attach(
    model: Any,
    optimizer: Any = None,
    config: SparseConfig | str | None = None,
    *,
    sink: RecordSink | None = None,
    **overrides: Any,
) -> Attachment:
    """Compresses the gradient synchronisation of a model that Megatron's DDP wraps.

    Collective: every rank must call it, with the same configuration. Buffers are allocated when
    they are first needed.

    Args:
        model: a `megatron.core.distributed.DistributedDataParallel` or a list of them.
        optimizer: Megatron's optimizer, whose steps may be skipped; a skipped step's selections
            are undone. Without it every selection is final, so fp16 with loss scaling is refused,
            and parameters are gathered uncompressed. A static loss scale in bf16 needs the
            optimizer too, but cannot be refused: without the optimizer the plugin does not see it.
        config: a `SparseConfig`, or the name of a preset, e.g. `"safe"`.
        sink: receives the time and bytes of each bucket.
        **overrides: see `SparseConfig.from_overrides`; they win over those of a preset.

    Returns:
        The attachment; `detach` it, or switch it with `attachment.enabled`.

    Raises:
        HostError: Megatron lacks a function that the plugin hooks, or the model is of a kind that
            the plugin refuses.
        ConfigError: a value is refused, or fp16 without the optimizer. Nothing is attached then.
        DependencyError, ExtensionError: a rank's GPU has no compiled kernels.

    Example:
        >>> attachment = attach(ddp_model, optimizer, density=0.01)  # doctest: +SKIP
    """
    require_host_symbols("attach")
    config = check(SparseConfig.given("attach", config, overrides))
    chunks = list(model) if isinstance(model, Sequence) else [model]
    if not 0 < len(chunks) == len(set(map(id, chunks))):
        raise HostError(
            "the model's chunks are none, or one of them comes twice",
            expected="a DistributedDataParallel of Megatron's, or a list of different ones",
            got=f"{len(chunks)} chunks, {len(set(map(id, chunks)))} different ones",
            remedy="pass the list that Megatron's get_model returned",
        )
    if optimizer is None:
        _refuse_without_optimizer(chunks, config)
    elif not hasattr(optimizer, "step"):
        raise ConfigError(
            "attach got an optimizer without step()",
            expected="attach(model, optimizer, config)",
            got=repr(optimizer),
            remedy="pass Megatron's optimizer second, and a configuration or preset third",
        )
    checkpoint_process.end_with_rank()  # else checkpoint writers outlive a rank that is killed
    attachment = Attachment(chunks, config, sink or NullSink())
    if optimizer is not None:
        try:
            attachment.bind_optimizer(optimizer, undo=may_repeat_or_skip(optimizer))
        except BaseException:
            attachment.close()  # the caller has nothing to detach
            raise
    return attachment


def _refuse_without_optimizer(chunks: list[Any], config: SparseConfig) -> None:
    """Refuses settings that need the optimizer, for a call of `attach` without one."""
    method, density = config.parameters.method, config.compression.density
    stages = [getattr(chunk.config, "pipeline_model_parallel_size", 1) for chunk in chunks]
    for what, is_set, hint in (
        ("fp16 training", any(map(is_fp16, chunks)), ", whose loss scaling skips steps"),
        ("a loss per token", any(map(divides_by_tokens, chunks)), ", to rescale residuals"),
        (f"parameters.method={method}", method in COMPRESSED, ", or set parameters.method=raw"),
        # `auto` has a collective between steps. Without an optimizer it comes in the backward
        # pass, where pipeline stages wait for one another.
        ("density=auto with pipeline stages", max(stages) > 1 and density == AUTO, ""),
    ):
        if is_set:
            raise ConfigError(
                f"{what} needs the optimizer",
                expected="attach(model, optimizer, ...)",
                got="no optimizer",
                remedy=f"pass Megatron's optimizer{hint}",
            )


def detach(attachment: Attachment) -> None:
    """Undoes `attach` and drops the residual. To send the residual first, set `attachment.enabled =
    False` and train one more step.
    """
    attachment.close()
