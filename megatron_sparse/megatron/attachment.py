"""Compressed gradient synchronisation for a model that Megatron wrapped in DDP.

Megatron cuts its gradients into buckets, several of which form a bucket group, and calls a group's
`start_grad_sync` when its gradients are ready. Each process has one `Attachment`, made by
`core_entry.attach` or by the hook of `plugin`. It

- changes the class of each bucket group to a subclass (`bucket_group`), whose `start_grad_sync`
  calls `Attachment.launch` in place of Megatron's collective;
- owns the state of the process: residuals, one reducer for each process group, the count of steps;
- wraps `optimizer.step`, whose result says whether a step's selections are final or undone.

`host` means an object of Megatron's.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import check_op
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.compression.residual import RESIDUAL_DTYPES, Outcome, ResidualStore, SliceKey
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.megatron import few_tokens
from megatron_sparse.megatron.bucket_group import CompressedBucketGroup, Handle
from megatron_sparse.megatron.buckets import (
    GroupBuckets,
    check_attachable,
    collect,
    device_of,
    tensor_parallel_group,
)
from megatron_sparse.megatron.optimizer_step import UnconfirmedSums, WatchedOptimizer
from megatron_sparse.megatron.parameter_gathers import GatherHandle, ParameterGathers
from megatron_sparse.megatron.pieces import in_pieces
from megatron_sparse.megatron.residual_alarm import ALARM_INTERVAL, warn_if_large
from megatron_sparse.megatron.spikes import UsualNorm
from megatron_sparse.megatron.transports import Transports
from megatron_sparse.megatron.units import ResidualUnit, check_undo
from megatron_sparse.planner.configured import planner_of, with_swept_thresholds
from megatron_sparse.recording import RecordSink
from megatron_sparse.reduction.capacity_choice import with_agreed_capacity
from megatron_sparse.reduction.density_change import change_density
from megatron_sparse.reduction.in_order import progress_on
from megatron_sparse.reduction.memory import MemoryAccount, account, held, share_of
from megatron_sparse.reduction.reducer import GradientReducer
from megatron_sparse.sparsity.gradient_dump import GradientDumpWriter
from megatron_sparse.transport.groups import borrow_group, return_group
from megatron_sparse.transport.nccl_errors import HealthCheck

logger = logging.getLogger("megatron_sparse")


class Attachment:
    """The plugin's state in one process. Made by `attach`; ended by `detach`.

    Attributes:
        config: as given.
        step: optimizer steps seen so far, skipped ones included; drives warm-up and ramp.
        residuals: error feedback of every bucket.
        planner: chooses the scheme of each bucket; holds the switch `enabled`.
        grad_norm: the gradient's norm as the last optimizer step returned it; None without one.
        usual_norm: of recent gradients; what is withheld of a spike is scaled down to it.
        unit: the unit of the residuals' values: loss scale, and division by tokens.
        alone: a group of this rank only, for Megatron's `start_grad_sync`; see `bucket_group`.
        nccl_health: health check of NCCL's groups; None unless `scheme.nccl_errors=typed`.
        parameters: the gathers of updated parameters.

    Args:
        chunks: Megatron's DDP-wrapped model chunks.
        config: the plugin's configuration.
        sink: receives each bucket's telemetry record.
        run_dir: where recorded gradients go, if `tracking` asks for any.
    """

    def __init__(
        self,
        chunks: list[Any],
        config: SparseConfig,
        sink: RecordSink,
        run_dir: Path | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._chunks = chunks
        self.sink = sink
        self.step = 0
        self.grad_norm: float | None = None
        self.usual_norm = UsualNorm()
        self.parameters = ParameterGathers(sink)
        self.groups = collect(chunks, ParameterFilter(config.compression))
        check_attachable(self.groups)
        self._device = device = device_of(self.buckets)
        self.config = config = with_agreed_capacity(with_swept_thresholds(config), device)
        for group in self.groups:
            cut = [in_pieces(bucket, config) for bucket in group.buckets]
            group.buckets = list(itertools.chain.from_iterable(cut))
        for bucket in self.buckets:
            check_op(config.scheme, config.planner, bucket.op)
        self.planner = planner_of(config, logs=dist.get_rank() == 0)
        self.alone = borrow_group([dist.get_rank()], dist.get_backend(), config.scheme.timeout_s)
        self.progress = progress_on(device, config.scheme.timeout_s)
        # Until `bind_optimizer` is called, every step counts as accepted.
        self.residuals = ResidualStore(
            RESIDUAL_DTYPES[config.compression.residual_dtype],
            undo=False,
            outcome=Outcome.ASSUMED,
        )
        # By `id` of Megatron's process group: dense and expert parameters have different groups.
        self._reducers: dict[int, GradientReducer] = {}
        self._transports = Transports(config, device)
        tensor_parallel = None
        if config.compression.threshold_scope == "tp_group":
            tensor_parallel = self._transports.make(tensor_parallel_group())
        self._tensor_parallel = tensor_parallel
        self.nccl_health: HealthCheck | None = None
        if config.scheme.nccl_errors == "typed" and device.type == "cuda":
            self.nccl_health = HealthCheck(
                config.scheme.timeout_s, self._transports.lost_rank, device
            )
        self._launched: set[int] = set()
        self._optimizer: WatchedOptimizer | None = None
        self._sums = UnconfirmedSums(self._check_nccl)
        self.unit = ResidualUnit(chunks, self._take_residuals_out)
        for group in self.groups:
            key = id(group.process_group)
            if key not in self._reducers:
                self._reducers[key] = self._make_reducer(group)
        for group in self.groups:
            host: Any = group.host
            host.__class__ = CompressedBucketGroup
            host.sparse_attachment = self
            host.sparse_group = group

    @property
    def buckets(self) -> list[Bucket]:
        """Every bucket, in Megatron's order."""
        return [bucket for group in self.groups for bucket in group.buckets]

    def _buckets_of(self, key: int) -> list[Bucket]:
        """The buckets of one reducer."""
        groups = (group for group in self.groups if id(group.process_group) == key)
        return [bucket for group in groups for bucket in group.buckets]

    @property
    def lines(self) -> list[str]:
        """What was chosen at the start and why: the level of compression, parameters' gathers."""
        return [*self._transports.lines, *self.parameters.lines]

    @property
    def enabled(self) -> bool:
        """Switches compression during the run. Off: buckets are sent dense, residual included.

        Set it to the same value on every rank, between two steps.
        """
        return self.planner.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.planner.enabled = value
        logger.info("step %d: compression switched %s", self.step, "on" if value else "off")

    def set_density(self, density: float) -> None:
        """Changes `compression.density` from the next step on.

        Collective: every rank calls it between two steps. During the warm-up it sets the density
        that the ramp will lead to. A resumed run starts with the density of its configuration.

        Args:
            density: nnz / numel, in (0, 1]; the same on every rank.

        Raises:
            CommunicationError: ranks want different densities; nothing is changed.
            ConfigError: the value is refused, a ramp is under way, or nothing is ever pruned.
        """
        change_density(self.config, self.planner, density, step=self.step, device=self._device)

    def _make_reducer(self, group: GroupBuckets) -> GradientReducer:
        groups = self._transports.groups_of(
            group, self._buckets_of(id(group.process_group)), self._tensor_parallel
        )
        ranks = dist.get_process_group_ranks(group.process_group)
        writer = GradientDumpWriter.of(
            self.config.tracking, self.run_dir, ranks, groups.data_parallel.rank
        )
        return GradientReducer(
            self.config,
            groups,
            self.planner,
            self.residuals,
            self.sink,
            self.progress,
            [] if writer is None else [writer],
        )

    def check_before_save(self) -> None:
        """Raises if NCCL has failed, so that no checkpoint is written after an error.

        Collective with `scheme.nccl_errors=typed`.

        Raises:
            CommunicationError: a group has failed on some rank; see `HealthCheck.agree`.
        """
        if self.nccl_health is not None:
            store = dist.distributed_c10d._get_default_store()
            self.nccl_health.agree("a checkpoint", store, dist.get_rank(), dist.get_world_size())

    def bind_optimizer(self, optimizer: Any, *, undo: bool) -> None:
        """Wraps `optimizer.step()`, whose result says whether the step was accepted or skipped.

        Args:
            optimizer: Megatron's (returns `(success, grad_norm, num_zeros)`), or any object with
                `step()`; a result that is not a tuple counts as success.
            undo: whether a step can be skipped or repeated, so that undo copies are needed.

        Raises:
            ConfigError: `compression.undo=never` with an optimizer that may skip steps.
        """
        undo = undo or self.unit.per_token
        check_undo(self.config.compression, undo=undo)
        self.residuals.undo = undo or self.config.compression.undo == "always"
        self.residuals.outcome = Outcome.REPORTED
        self.unit.bind(optimizer)
        self.parameters.plan(
            self.groups,
            self.config,
            self.reducer,
            self.progress,
            self._chunks,
            optimizer,
        )
        self._optimizer = WatchedOptimizer(
            optimizer,
            self._sums,
            self.sink,
            begin=self._check_nccl,
            end=self._step_ended,
            inner_s=lambda: self.parameters.waited_s,
        )

    def launch(self, group: GroupBuckets) -> Handle:
        """Starts the synchronisation of one bucket group. Called by its `start_grad_sync`."""
        self._count_launch(group)
        reducer = self.reducer(group)
        pending = [reducer.start(bucket, self.step) for bucket in group.buckets]
        # Without an optimizer nobody confirms the sums later.
        return Handle(pending, None if self._optimizer is None else self._sums)

    def start_gather(self, group: GroupBuckets) -> GatherHandle | None:
        """Launches a group's gather of parameters; None leaves it to Megatron."""
        return self.parameters.start(group, self.step, enabled=self.enabled)

    def forget_parameters(self) -> None:
        """Gathers raw next. For all ranks, after writing parameters without `load_state_dict`."""
        self.parameters.forget()

    def _count_launch(self, group: GroupBuckets) -> None:
        """Without an optimizer, the second launch of a group begins a new step."""
        if self.residuals.outcome is Outcome.ASSUMED:
            if id(group) in self._launched:
                self._launched.clear()
                self.step += 1
            self._launched.add(id(group))

    def restore(
        self,
        residuals: Mapping[SliceKey, torch.Tensor],
        *,
        step: int,
        enabled: bool,
        loss_scale: float | None,
        gradient_factor: float | None,
        norms: Sequence[float],
        planner: dict[str, Any],
    ) -> None:
        """Restores a checkpoint's state.

        Args:
            residuals: slice -> 1-D tensor; slices are cut as those of the reducers' parts. Missing
                ones start at zero.
            step: steps taken so far.
            enabled: see the attribute of this name.
            loss_scale: part of the residuals' unit.
            gradient_factor: part of the residuals' unit.
            norms: see `UsualNorm`.
            planner: the planner's state, empty for none.
        """
        for group in self.groups:
            self.residuals.load(map(self.reducer(group).part, group.buckets), residuals)
        self.step = step
        self.usual_norm = UsualNorm(norms)
        self.parameters.forget()
        self.planner.enabled = enabled
        self.planner.load_state_dict(planner)
        self.unit.restore(loss_scale, gradient_factor)
        self._follow_loss_scale()

    def reducer(self, group: GroupBuckets) -> GradientReducer:
        """The reducer of a bucket group."""
        return self._reducers[id(group.process_group)]

    def _check_nccl(self) -> None:
        if self.nccl_health is not None:
            self.nccl_health.check("the optimizer's step")

    def _take_residuals_out(self) -> None:
        """Makes the step's sums those of its gradients alone. Collective."""
        if self._optimizer is not None:
            few_tokens.take_residuals_out(
                self.groups, self.reducer, self.residuals, self.config.compression.leak
            )

    def _step_ended(self, success: bool, grad_norm: float | None) -> None:
        """Makes the step's selections final, or undoes them if the optimizer skipped the step."""
        self.grad_norm = grad_norm
        unit_change = self.unit.end_step(accepted=success)
        if success:
            share = None
            if self.residuals.undo:
                share = self.usual_norm.share(grad_norm, self.step)
            self.residuals.commit(unit_change, share)
        else:
            self.residuals.rollback()
        self.step += 1
        self._follow_loss_scale()
        limit = self.config.compression.residual_alarm
        if success and limit and self.grad_norm and self.step % ALARM_INTERVAL == 0:
            warn_if_large(self.step, self.residual_norm(), self.grad_norm, limit)

    def _follow_loss_scale(self) -> None:
        """Rescales residuals if the optimizer has changed its loss scale."""
        factor = self.unit.follow_loss_scale()
        if factor is not None:
            self.residuals.rescale(factor)

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

    def memory_account(self) -> MemoryAccount:
        """The bytes that this rank will hold at most, computed; see `reduction.memory`."""
        shares = [share_of(each, self._buckets_of(key)) for key, each in self._reducers.items()]
        return account(self.config, shares, undo=self.residuals.undo)

    def memory_report(self) -> dict[str, int]:
        """The bytes that this rank holds now, by item; see `reduction.memory`."""
        return held(self.residuals, self._reducers.values(), self.parameters.nbytes)

    def close(self) -> None:
        """Restores Megatron's classes and the optimizer's `step`, and ends the progress thread."""
        for group in self.groups:
            host: Any = group.host
            if host.__class__ is CompressedBucketGroup:
                host.__class__ = _ParamAndGradBucketGroup
                del host.sparse_attachment, host.sparse_group
        self.unit.close()
        self.parameters.close()
        if self._optimizer is not None:
            self._optimizer.close()
            self._optimizer = None
        self.progress.close()
        self._transports.close(broken=self.progress.broken)
        return_group(self.alone)
