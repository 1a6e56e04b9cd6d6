"""Compressed gradient synchronisation for a model that Megatron wrapped in DDP.

Megatron cuts its gradients into buckets, several of which form a bucket group, and calls a group's
`start_grad_sync` when its gradients are ready. Each process has one `Attachment`, made by `attach`
in a loop of your own, or by the hook of `plugin` in scripts that run Megatron's `pretrain`. It

- changes the class of each bucket group to a subclass (`bucket_group`), whose `start_grad_sync`
  calls `Attachment.launch` in place of Megatron's collective;
- owns the state of the process: residuals, one reducer for each process group, the count of steps;
- wraps `optimizer.step`, whose result says whether a step's selections are final or undone.

`host` means an object of Megatron's.
"""

from __future__ import annotations

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
from megatron_sparse.reduction.reducer import GradientReducer
from megatron_sparse.reduction.setting_trials import AUTO
from megatron_sparse.sparsity.gradient_dump import GradientDumpWriter
from megatron_sparse.transport.groups import borrow_group, return_group


class Attachment(HostState):
    """The plugin's state in one process. Made by `attach`; ended by `detach`.

    Attributes:
        step: optimizer steps seen so far, skipped ones included.
        chunks: Megatron's DDP-wrapped model chunks.
        groups: Megatron's bucket groups, with the plugin's buckets.
        grad_norm: the gradient's norm as the last optimizer step returned it; None without one.
        usual_norm: of recent gradients; what is withheld of a spike is scaled down to it.
        unit: the unit of the residuals' values: loss scale, and division by tokens.
        alone: a group of this rank only, for Megatron's `start_grad_sync`; see `bucket_group`.
        parameters: the gathers of updated parameters.

    Args:
        chunks: Megatron's DDP-wrapped model chunks.
        config: the plugin's configuration.
        sink: receives each bucket's telemetry record.
        run_dir: where recorded gradients go, if `tracking` asks for any.
    """

    def __init__(
        self, chunks: list[Any], config: SparseConfig, sink: RecordSink, run_dir: Path | None = None
    ) -> None:
        # Collect: what Megatron has built. What cannot be attached to is refused here.
        config = with_swept_thresholds(config)
        self.groups = collect(chunks, config)
        # Make the plugin's side of it, with the other ranks.
        super().__init__(config, device_of(self.buckets))
        self.run_dir = run_dir
        self.sink = sink
        self.grad_norm: float | None = None
        self.usual_norm = UsualNorm()
        self._clips_gradients = False  # whether the optimizer clips the sum
        self.parameters = ParameterGathers(sink)
        self._launched: set[int] = set()  # `id` of each group that this step has launched
        self._optimizer: WatchedOptimizer | None = None
        self._sums = UnconfirmedSums()  # confirmed by the optimizer's step
        timeout_s = config.scheme.timeout_s
        self.alone = borrow_group([dist.get_rank()], dist.get_backend(), timeout_s)
        self._transports = Transports(self.config, self._device)
        try:
            self._reducers = self._make_reducers()
        except BaseException:
            self._give_back()  # the caller gets nothing that it could close
            raise
        # Attach: from here on Megatron calls the plugin.
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
        """Makes a reducer for each of Megatron's process groups; returns them by the group's `id`.

        Dense and expert parameters have different groups.
        """
        by_ranks: dict[int, list[GroupBuckets]] = {}
        for group in self.groups:
            by_ranks.setdefault(id(group.process_group), []).append(group)
        made: dict[int, GradientReducer] = {}
        for key, of_ranks in by_ranks.items():
            buckets = [bucket for group in of_ranks for bucket in group.buckets]
            groups = self._transports.groups_of(of_ranks[0], buckets)
            ranks = dist.get_process_group_ranks(of_ranks[0].process_group)
            writer = GradientDumpWriter.of(
                self.config.tracking, self.run_dir, ranks, groups.data_parallel.rank
            )
            made[key] = GradientReducer(
                self.config,
                groups,
                self.planner,
                self.residuals,
                self.sink,
                self.progress,
                writer,
            )
        return made

    def bind_optimizer(self, optimizer: Any, *, undo: bool) -> None:
        """Wraps `optimizer.step()`, whose result says whether the step was accepted or skipped.

        Args:
            optimizer: Megatron's (returns `(success, grad_norm, num_zeros)`), or any object with
                `step()`; a result that is not a tuple counts as success.
            undo: whether a step can be skipped or repeated, so that undo copies are needed.

        Raises:
            ConfigError: `compression.undo=never` with an optimizer that may skip steps.
        """
        undo = undo or self.unit.per_token  # `take_apart` needs the copies
        check_undo(self.config.compression, undo=undo)
        self.residuals.undo = undo or self.config.compression.undo == "always"
        self.residuals.is_reported = True  # by `_step_ended`
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
            inner_s=lambda: self.parameters.waited_s,  # these waits are a stage of their own
        )

    def launch(self, group: GroupBuckets) -> Handle:
        """Starts the synchronisation of one bucket group, which is not left to Megatron."""
        reducer = self.reducer(group)
        pending = [reducer.start(bucket, self.step) for bucket in group.buckets]
        # With an optimizer, its step confirms the sums.
        then = Pending.confirm if self._optimizer is None else self._sums.add
        return Handle(pending, then)

    def left_to_megatron(self, group: GroupBuckets) -> TimedHandle | None:
        """A handle that times Megatron's own collective, if a group needs only that; else None.

        Call it right before Megatron launches. The first bucket's stage `network` lasts from the
        launch until Megatron has waited: its handle does not say when the collective ends.
        """
        self._count_launch(group)
        reducer = self.reducer(group)
        if not all(reducer.left_to_host(bucket, self.step) for bucket in group.buckets):
            return None
        records = [reducer.record_of_host(bucket, self.step) for bucket in group.buckets]
        flight = records[0].timer.in_flight()
        flight.__enter__()  # until `count`

        def count(waited_s: float) -> None:
            """Ends the stage when Megatron has waited."""
            flight.__exit__(None, None, None)
            self.sink.record_stage(BucketRecord.WAIT, waited_s)

        return TimedHandle(records, self.sink, count)

    def start_gather(self, group: GroupBuckets) -> Handle | None:
        """Launches a group's gather of parameters; None leaves it to Megatron."""
        pending = self.parameters.start(group, self.step, enabled=self.enabled)
        return None if pending is None else Handle(pending, self.parameters.gathered)

    def forget_parameters(self) -> None:
        """Gathers raw next. For all ranks, after writing parameters without `load_state_dict`."""
        self.parameters.forget()

    def residuals_came_back(self) -> None:
        """For all ranks, when residuals were loaded, or restored after a skipped step."""
        for reducer in self._reducers.values():
            reducer.residuals_came_back()

    def _count_launch(self, group: GroupBuckets) -> None:
        """Without an optimizer, the second launch of a group begins a new step."""
        if self.residuals.is_reported:
            return  # `_step_ended` counts
        if id(group) in self._launched:
            self._launched.clear()
            self.step += 1
            self._between_steps()
        self._launched.add(id(group))

    def reducer(self, group: GroupBuckets) -> GradientReducer:
        """The reducer of a bucket group."""
        return self._reducers[id(group.process_group)]

    def _take_residuals_out(self) -> None:
        """Takes residuals out of the step's sums, for a step that has far fewer tokens than the one
        before: sums of its gradients alone are left.

        With a loss per token the sums are multiplied by one over the step's tokens, and a residual
        is in the unit of the step that left it. Added to the gradients of a step with a hundredth
        of the tokens, it would count a hundred times. The number of tokens is known only after the
        sums, and before they are multiplied. So a second, dense sum over the ranks, of what each
        one's selection lacks, leaves the gradients alone in the result, and residuals stay as they
        were (`ResidualStore.take_apart`). Collective over the ranks of each group.

        Cost: one all-reduce of every bucket in fp32, and a buffer of a bucket's size.
        """
        if self._optimizer is None:
            return
        lacking = self.residuals.take_apart(self.config.compression.leak)
        with summed_over_replicas(self.chunks):
            for group in self.groups:
                for bucket in group.buckets:
                    part = self.reducer(group).part(bucket)
                    lacking_M = lacking.pop(part.name, None)
                    if lacking_M is None:  # nothing to add, but every rank must join the sum
                        lacking_N = torch.zeros_like(bucket.grad_N, dtype=torch.float32)
                    else:
                        lacking_N = in_whole_bucket(lacking_M, part, bucket)
                    dist.all_reduce(lacking_N, group=group.process_group)
                    if group.instances_group is not None:
                        dist.all_reduce(lacking_N, group=group.instances_group)
                    bucket.grad_N.add_(lacking_N)
                    for piece in bucket.parameters:
                        if piece.name in group.accumulated:  # already copied from the bucket
                            main_grad = group.accumulated[piece.name].main_grad.view(-1)
                            part_of_it = slice(piece.offset, piece.offset + piece.numel)
                            main_grad[part_of_it].add_(lacking_N[piece.start : piece.stop])

    def _step_ended(self, success: bool, grad_norm: float | None) -> None:
        """Makes the step's selections final, or undoes them if the optimizer skipped the step."""
        self.grad_norm = grad_norm
        unit_change = self.unit.end_step(accepted=success)
        if success:
            share = None  # of the step's change that enters the residual; None: all
            # What is withheld of a spike is scaled down as Megatron clips what was sent. That needs
            # the residual as it was before the step.
            if self.residuals.undo and self._clips_gradients:
                share = self.usual_norm.share(grad_norm, self.step)
            self.residuals.commit(unit_change, share)
        else:
            self.residuals.rollback()
            self.residuals_came_back()
        self.step += 1
        self._between_steps()
        scale_change = self.unit.follow_loss_scale()
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
        """Gives back all that was taken, in the order in which one part uses the next.

        Megatron's classes and functions first, then the progress thread, and the groups of ranks
        that it was working on. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        for group in self.groups:
            swap_out(group)
        self.unit.close()
        if self._optimizer is not None:
            self._optimizer.close()  # wraps what `parameters` has wrapped
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
            and parameters are gathered raw. A static loss scale in bf16 also needs it, but only the
            optimizer knows of one, so that is not refused.
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
        _check_needs_no_optimizer(chunks, config)
    elif not hasattr(optimizer, "step"):
        raise ConfigError(
            "attach got an optimizer without step()",
            expected="attach(model, optimizer, config)",
            got=repr(optimizer),
            remedy="pass Megatron's optimizer second, and a configuration or preset third",
        )
    checkpoint_process.end_with_rank()
    attachment = Attachment(chunks, config, sink or NullSink())
    if optimizer is not None:
        try:
            attachment.bind_optimizer(optimizer, undo=may_repeat_or_skip(optimizer))
        except BaseException:
            attachment.close()  # the caller has nothing to detach
            raise
    return attachment


def _check_needs_no_optimizer(chunks: list[Any], config: SparseConfig) -> None:
    """Refuses what works only with the optimizer, for a caller of `attach` that has given none."""
    method, density = config.parameters.method, config.compression.density
    stages = [getattr(chunk.config, "pipeline_model_parallel_size", 1) for chunk in chunks]
    for what, needs_optimizer, remedy in (
        ("fp16 training", any(map(is_fp16, chunks)), ", whose loss scaling skips steps"),
        ("a loss per token", any(map(divides_by_tokens, chunks)), ": residuals change their unit"),
        (f"parameters.method={method}", method in COMPRESSED, ", or set parameters.method=raw"),
        # Without it steps are counted in the backward pass, where stages wait for one another.
        ("density=auto with pipeline stages", max(stages) > 1 and density == AUTO, ""),
    ):
        if needs_optimizer:
            raise ConfigError(
                f"{what} needs the optimizer",
                expected="attach(model, optimizer, ...)",
                got="no optimizer",
                remedy=f"pass Megatron's optimizer{remedy}",
            )


def detach(attachment: Attachment) -> None:
    """Undoes `attach` and drops the residual. To send the residual first, set `attachment.enabled =
    False` and train one more step.
    """
    attachment.close()
