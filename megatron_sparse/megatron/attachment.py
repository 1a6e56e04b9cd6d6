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

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_sparse.bucket import Bucket
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.megatron import few_tokens
from megatron_sparse.megatron.bucket_group import Handle, swap_in, swap_out
from megatron_sparse.megatron.buckets import GroupBuckets, collect, device_of
from megatron_sparse.megatron.optimizer_step import UnconfirmedSums, WatchedOptimizer
from megatron_sparse.megatron.parameter_gathers import ParameterGathers
from megatron_sparse.megatron.residual_alarm import ALARM_INTERVAL, warn_if_large
from megatron_sparse.megatron.spikes import UsualNorm
from megatron_sparse.megatron.transports import Transports
from megatron_sparse.megatron.units import ResidualUnit, check_undo
from megatron_sparse.planner.configured import with_swept_thresholds
from megatron_sparse.recording import RecordSink
from megatron_sparse.reduction.host_state import HostState
from megatron_sparse.reduction.job import Pending
from megatron_sparse.reduction.memory import MemoryAccount, account, held, share_of
from megatron_sparse.reduction.reducer import GradientReducer
from megatron_sparse.sparsity.gradient_dump import GradientDumpWriter
from megatron_sparse.transport.groups import borrow_group, return_group
from megatron_sparse.transport.nccl_errors import HealthCheck


class Attachment(HostState):
    """The plugin's state in one process. Made by `attach`; ended by `detach`.

    Attributes:
        step: optimizer steps seen so far, skipped ones included.
        groups: Megatron's bucket groups, with the plugin's buckets.
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
        self.parameters = ParameterGathers(sink)
        self._launched: set[int] = set()
        self._optimizer: WatchedOptimizer | None = None
        self._sums = UnconfirmedSums(self._check_nccl)
        timeout_s = config.scheme.timeout_s
        self.alone = borrow_group([dist.get_rank()], dist.get_backend(), timeout_s)
        self._transports = Transports(self.config, self._device)
        self.nccl_health: HealthCheck | None = None
        if config.scheme.nccl_errors == "typed" and self._device.type == "cuda":
            self.nccl_health = HealthCheck(timeout_s, self._transports.lost_rank, self._device)
        self._reducers = self._make_reducers(chunks[0].tp_group)
        # Attach: from here on Megatron calls the plugin.
        self._chunks = chunks
        self.unit = ResidualUnit(chunks, self._take_residuals_out)
        for group in self.groups:
            swap_in(group, self)

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

    def _make_reducers(
        self, tensor_parallel_group: dist.ProcessGroup
    ) -> dict[int, GradientReducer]:
        """A reducer for each process group: dense and expert parameters have different ones.

        By the `id` of Megatron's process group.
        """
        tensor_parallel, made = None, {}
        if self.config.compression.threshold_scope == "tp_group":
            tensor_parallel = self._transports.make(tensor_parallel_group)
        for group in self.groups:
            key = id(group.process_group)
            if key in made:
                continue
            groups = self._transports.groups_of(group, self._buckets_of(key), tensor_parallel)
            ranks = dist.get_process_group_ranks(group.process_group)
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
                [] if writer is None else [writer],
            )
        return made

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
        self.residuals.is_reported = True
        self.unit.bind(optimizer)
        self.parameters.plan(
            self.groups, self.config, self.reducer, self.progress, self._chunks, optimizer
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
        return Handle(pending, Pending.confirm if self._optimizer is None else self._sums.add)

    def start_gather(self, group: GroupBuckets) -> Handle | None:
        """Launches a group's gather of parameters; None leaves it to Megatron."""
        pending = self.parameters.start(group, self.step, enabled=self.enabled)
        return None if pending is None else Handle(pending, self.parameters.gathered)

    def forget_parameters(self) -> None:
        """Gathers raw next. For all ranks, after writing parameters without `load_state_dict`."""
        self.parameters.forget()

    def _count_launch(self, group: GroupBuckets) -> None:
        """Without an optimizer, the second launch of a group begins a new step."""
        if not self.residuals.is_reported:
            if id(group) in self._launched:
                self._launched.clear()
                self.step += 1
                self._between_steps()
            self._launched.add(id(group))

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
        self._between_steps()
        self.follow_loss_scale()
        limit = self.config.compression.residual_alarm
        if success and limit and self.grad_norm and self.step % ALARM_INTERVAL == 0:
            warn_if_large(self.step, self.residual_norm(), self.grad_norm, limit)

    def follow_loss_scale(self) -> None:
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
            swap_out(group)
        self.unit.close()
        self.parameters.close()
        if self._optimizer is not None:
            self._optimizer.close()
            self._optimizer = None
        self.progress.close()
        self._transports.close(broken=self.progress.broken)
        return_group(self.alone)
