"""Compressed gradient synchronisation for torch's own DistributedDataParallel.

Two lines, as the hooks of `torch.distributed.algorithms.ddp_comm_hooks` are used:

    state = megatron_sparse.DDPState(ddp_model, density=0.01)
    ddp_model.register_comm_hook(state, megatron_sparse.ddp_hook)

A *pass* is a backward pass. Each selects from gradient + *residual* (the values not sent yet) the
elements to send. A pass is *used* when a step of one of torch's optimizers follows. If a loop skips
the step (NaN, a norm that is too large, an overflow under GradScaler) or throws gradients away, the
residual is restored to its value before the pass: it still has all old values, and no new ones.

DDP calls the hook for each bucket when its gradients are final; the reducer averages the bucket
over the ranks on its progress thread, which completes the bucket's future. The gradient of an
`nn.Embedding(sparse=True)`, for which DDP makes a bucket of its own, goes through the row-sparse
all-reduce instead, whole.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes.

import logging
import weakref
from typing import Any

import torch
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_sparse.bucket import Reduction
from megatron_sparse.collectives import check
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.ddp import refusals
from megatron_sparse.ddp.buckets import DDPBuckets
from megatron_sparse.errors import ConfigError, HostError, first_line
from megatron_sparse.planner.configured import with_swept_thresholds
from megatron_sparse.recording import NullSink, RecordSink
from megatron_sparse.reduction.host_state import HostState
from megatron_sparse.reduction.job import Pending
from megatron_sparse.reduction.reducer import GradientReducer, Groups
from megatron_sparse.reduction.row_sparse import RowSparseReducer
from megatron_sparse.transport import ProcessGroupTransport

logger = logging.getLogger("megatron_sparse")

VERSION = 1
"""Of the state dictionary."""
WARN_AFTER = 8
"""After so many unused passes in a row there is a warning."""


class DDPState(HostState):
    """The plugin's state for one DDP model in one process: `register_comm_hook`'s first argument.

    Collective: every rank makes one, with the same configuration.

    Args:
        ddp: the model. Passes before `register_comm_hook` are synchronised by DDP itself.
        config: a `SparseConfig`, whose `tracking` is ignored, or the name of a preset, e.g.
            `"safe"`.
        scaler: the GradScaler of the loop: residuals follow its scale.
        sink: receives the time and bytes of each bucket.
        **overrides: see `SparseConfig.from_overrides`; they win over those of a preset.

    Attributes:
        step: backward passes synchronised so far.

    Raises:
        HostError: the model is not one that DDP wrapped, or it spreads over several devices.
        ConfigError: a value is refused, or the parameters are fp16. In the first backward pass: a
            GradScaler is in use that the state does not know.
        DependencyError, ExtensionError: a rank's GPU has no compiled kernels.

    Example:
        >>> state = DDPState(ddp_model, density=0.01)  # doctest: +SKIP
        >>> ddp_model.register_comm_hook(state, ddp_hook)  # doctest: +SKIP
    """

    _is_copy = False

    def __init__(
        self,
        ddp: DistributedDataParallel,
        config: SparseConfig | str | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        sink: RecordSink | None = None,
        **overrides: Any,
    ) -> None:
        device = refusals.device_of(ddp)
        checked = with_swept_thresholds(check(SparseConfig.given("DDPState", config, overrides)))
        scheme, group = checked.scheme, ddp.process_group
        refusals.check_config(checked, ddp, scaler)
        assert group is not None, "DDP without a device mesh has a group"
        self._transport = ProcessGroupTransport(
            group,
            scheme.timeout_s,
            device,
            liveness=scheme.watch_peers,
            nccl_engine=scheme.nccl_engine,
        )
        # Ranks agree on settings over DDP's own group: the progress thread uses the transport's.
        try:
            super().__init__(checked, device, group)
        except BaseException:
            self._transport.close()
            raise
        self._scaler = scaler
        self._scale = 1.0  # the loss scale of the last pass's gradients, and so of residuals
        self._has_looked_at_loop = False  # whether `optimizers_of_loop` was called
        self._knows_steps = False  # whether an optimizer of torch's updates the model
        self._is_unused = False  # whether no step has used the last pass
        self._unused_in_a_row = 0  # passes
        self._is_closed = False
        self._unwatch: list[weakref.finalize] = []  # each removes one of torch's hooks
        # Whether DDP calls the hook for all buckets at the end: in a static graph's first pass.
        self._all_at_end = ddp.static_graph
        parameter_filter = ParameterFilter(checked.compression)
        world_size = self._transport.world_size
        self._buckets = DDPBuckets(ddp.module, parameter_filter, world_size, self.residuals)
        self._trained = [parameter for parameter in self._buckets.names if parameter.requires_grad]
        self._launched = 0  # buckets that this pass has launched
        self._in_flight: list[Pending] = []
        # Without undo copies there is no use in watching: every selection is final at once.
        self.residuals.undo = self.residuals.is_reported = checked.compression.undo != "never"
        if self.residuals.undo:
            self._watch()
        sink = sink or NullSink()
        groups = Groups(self._transport)
        try:
            self._reducer = GradientReducer(
                self.config, groups, self.planner, self.residuals, sink, self.progress
            )
        except BaseException:
            self.close()  # the caller gets no state that it could close
            raise
        self._row_reducer = RowSparseReducer(
            self._transport, sink, self.progress, checksum=scheme.checksum
        )
        if ddp.find_unused_parameters:
            logger.warning(
                "find_unused_parameters: DDP ignores what is synchronised for a parameter that no "
                "rank used in a step, and what its residual sent then is lost; keep such "
                "parameters whole with keep_patterns"
            )

    def discard_step(self) -> None:
        """Restores the residual to its value before the synchronised passes that are unused.

        For loops without an optimizer of torch's; call it before the next pass, on every rank.
        Does nothing if an optimizer has used the last pass.

        Raises:
            ConfigError: there is no undo copy.
        """
        if not self.residuals.undo:
            raise ConfigError(
                "the residual of a discarded step is not kept",
                expected="compression.undo=auto or always",
                got="never",
                remedy="leave it out",
            )
        if self._is_unused:
            self.residuals.rollback()
            self._is_unused = False

    def _watch(self) -> None:
        """Registers hooks: `_pass_begins` at each backward pass, `_step_taken` after each step."""
        # A hook that kept the state alive would keep its process groups beyond torch's own.
        state_or_none = weakref.ref(self)

        def begins(_: torch.Tensor) -> None:
            # At the first gradient of the pass, before torch adds it to `parameter.grad`.
            if (state := state_or_none()) is not None:
                state._pass_begins()

        def taken(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (state := state_or_none()) is not None and state._is_updated_by(optimizer):
                state._step_taken(optimizer)

        hooks = (
            torch.autograd.graph.register_multi_grad_hook(self._trained, begins, mode="any"),
            register_optimizer_step_post_hook(taken),
        )
        # Torch and the parameters outlive the state: remove the hooks when the state is freed.
        self._unwatch = [weakref.finalize(self, hook.remove) for hook in hooks]

    def _is_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer changes any parameter of the model."""
        for group in optimizer.param_groups:
            if any(parameter in self._buckets.names for parameter in group["params"]):
                return True
        return False

    def _pass_begins(self) -> None:
        """Decides about the last pass's selections if it is unused; then follows the scaler."""
        if self._is_unused:
            if not self._knows_steps:  # without an optimizer every pass counts as used
                self.residuals.commit()
                self._is_unused = False
            elif any(map(_holds_values, self._trained)):
                self.residuals.go_on()  # the loop accumulates gradients over several passes
            else:  # the loop has cleared the gradients
                self._discard_unused()
        self._follow_scale()

    def _follow_scale(self) -> None:
        """Converts residuals to the scaler's present loss scale."""
        before, self._scale = self._scale, self._scaler.get_scale() if self._scaler else 1.0
        if before != self._scale:
            self._buckets.rescale(self._scale / before)

    def _discard_unused(self) -> None:
        """Restores the residual from before unused passes; warns once after several in a row."""
        self.discard_step()
        self._unused_in_a_row += 1
        if self._unused_in_a_row == WARN_AFTER:
            logger.warning(
                "%d backward passes in a row were followed by no step of an optimizer of this "
                "model's parameters; what each left in the residual is taken back",
                WARN_AFTER,
            )

    def _step_taken(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the last pass's selections final, unless the optimizer has skipped an overflow."""
        self._knows_steps = True
        # After an overflow GradScaler calls fused optimizers too: they see `found_inf`, and skip.
        found_inf = getattr(optimizer, "found_inf", None)
        if self._is_unused and not (found_inf is not None and float(found_inf)):
            self.residuals.commit()
            self._is_unused = False
            self._unused_in_a_row = 0

    def launch(self, grad_bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the synchronisation of one of DDP's buckets; returns the future of its average.

        Called by `ddp_hook`.

        Raises:
            HostError: called outside a backward pass or after `close`, or for another model.
            MegatronSparseError: the bucket cannot be synchronised as configured.
        """
        self._check_attached()
        if self._is_closed:
            raise HostError(
                "a backward pass came after DDPState.close()",
                expected="close() after the last backward pass",
                got="a closed state",
                remedy="wrap the model in DDP again, with or without a new DDPState",
            )
        if not self._in_flight:
            self._register_finish()
        if self.step and not self._launched:  # a pass begins that is not the first
            self._between_steps()
        # A future with a device makes the waiter's stream wait for that of the completing thread.
        devices: list[Any] = [self._device] if self._device.type == "cuda" else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        if grad_bucket.buffer().layout == torch.sparse_coo:
            pending = self._start_sparse(grad_bucket, future)
        else:
            pending = self._start_dense(grad_bucket, future)
        self._in_flight.append(pending)
        self._launched += 1
        # `_finish_backward` cannot end the pass: it may run several times in one, because
        # activation checkpointing with `use_reentrant=True` runs a backward pass inside it.
        if grad_bucket.is_last():
            self._end_pass()
        if self._all_at_end:
            # DDP will wait for the future with the interpreter's lock held, which the progress
            # thread needs to complete it. So wait for it here.
            if pending.drive_rest is not None and not pending.done():
                pending.drive_rest()  # a job without a thread of its own
            future.wait()
        return future

    def _start_dense(
        self, grad_bucket: GradBucket, future: torch.futures.Future[torch.Tensor]
    ) -> Pending:
        """Starts the reduction of a dense bucket, which completes `future` with the average."""
        bucket = self._buckets.place(grad_bucket, self._launched)
        # The result is DDP's own buffer, so DDP copies nothing. Complete the future after a failure
        # too, or DDP would wait for ever; `_finish_backward` raises the error.
        return self._reducer.start(bucket, self.step, lambda _: future.set_result(bucket.grad_N))

    def _start_sparse(
        self, grad_bucket: GradBucket, future: torch.futures.Future[torch.Tensor]
    ) -> Pending:
        """Starts the reduction of a row-sparse gradient, which completes `future` with the average.

        DDP puts such a gradient into a bucket of its own.
        """
        gradient = grad_bucket.buffer()
        (parameter,) = grad_bucket.parameters()

        def complete(pending: Pending[torch.Tensor]) -> None:
            # After a failure there is no result, but DDP must not wait for ever.
            future.set_result(gradient if pending.result is None else pending.result)

        return self._row_reducer.start(
            self._buckets.name_of(parameter), gradient, Reduction.AVG, self.step, complete
        )

    def _register_finish(self) -> None:
        """Has autograd call `_finish_backward` at the end of this pass, which raises errors.

        Futures carry no errors, because DDP would raise another in place of a future's own.

        Raises:
            HostError: no backward pass is going on.
        """
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        except RuntimeError as error:
            raise HostError(
                "ddp_hook was called outside a backward pass",
                expected="DDP calls it when a bucket's gradients are final",
                got=first_line(error),
                remedy="train without DDP's join() context, which calls it for ranks that have "
                "run out of data",
            ) from error

    def _finish_backward(self) -> None:
        """Waits for the launched buckets, and raises their errors; DDP waits for the futures later.

        Called at the end of a pass, or of the inner pass of a part with activation checkpointing.
        """
        in_flight, self._in_flight = self._in_flight, []
        if self._all_at_end and self._launched:
            self._end_pass()  # in this case DDP marks no bucket as the last
        self._all_at_end = False
        for pending in in_flight:
            pending.wait()
        self._is_unused = self.residuals.undo  # until a step uses the pass, if it can be undone
        if not self._has_looked_at_loop:
            self._has_looked_at_loop = True  # once: a loop usually has its optimizers by now
            for optimizer in refusals.optimizers_of_loop(self._scaler):
                self._knows_steps |= self._is_updated_by(optimizer)

    def _end_pass(self) -> None:
        """Called when all buckets of a pass have been launched."""
        self._launched = 0
        self._buckets.end_pass()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. Every rank saves its own, between two steps.

        Tensors are copies on the host; on CUDA this waits for them. With `residual_checkpoint=none`
        there are no residuals. Changes of an unused pass are left out: its gradients are not saved.
        """
        self._check_attached()
        residuals: dict[str, torch.Tensor] = {}  # by the parameter's name
        if self.config.compression.residual_checkpoint != "none":
            settled = self._is_unused and self._knows_steps  # else the pass counts as used
            residuals = self._buckets.residuals_by_parameter(settled=settled)
        return self._own() | {
            "step": self.step,
            "enabled": self.enabled,
            "planner": self.planner.state_dict(),
            "trials": {} if self.trials is None else self.trials.state_dict(),
            "scale": self._scale,
            "residuals": {name: view.detach().cpu().clone() for name, view in residuals.items()},
        }

    def _own(self) -> dict[str, int]:
        """Entries in which a saved state must equal the one that it is loaded into."""
        ranks = self._transport
        return {"version": VERSION, "rank": ranks.rank, "world_size": ranks.world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`, on the same rank and with the same number of ranks.

        Parameters that `state` does not name start without residual.

        Raises:
            CheckpointError: the state is another rank's, or its residuals do not fit the model.
        """
        self._check_attached()
        refusals.check_saved(state, self._own(), self._buckets.names)
        takes_residuals = self.config.compression.residual_checkpoint != "none"
        self._buckets.load(state["residuals"] if takes_residuals else {})
        self.step, self.planner.enabled = state["step"], state["enabled"]
        if self.trials is not None:
            self.trials.load_state_dict(state.get("trials", {}), self.step)
        self.planner.load_state_dict(state.get("planner", {}))
        self._scale = state["scale"] or 1.0  # old versions saved None: no scaler, or no pass
        if self._scaler is None:  # a scaler may be loaded later: the next pass reads its scale
            self._follow_scale()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, for example in a copy of the model, belongs to no model and holds nothing."""
        return {"_is_copy": True}

    def _check_attached(self) -> None:
        """Refuses to work with a copied state, which belongs to no model."""
        if self._is_copy:
            raise HostError(
                "this DDPState is a copy and belongs to no model",
                expected="the state that was made for the model",
                got="a copied or unpickled one",
                remedy="make a new state for the model, with the saved state_dict() of the first",
            )

    def close(self) -> None:
        """Ends the progress thread and releases the process group; DDP cannot be used afterwards.

        A second call does nothing: another state may use the group by then.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for remove_hook in self._unwatch:
            remove_hook()
        self.progress.close()
        self._transport.close(broken=self.progress.broken)


def ddp_hook(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: averages a bucket over the ranks, pruned, with error feedback.

    Returns a future at once; its value is DDP's own buffer. Errors are raised by the `backward()`
    in which they happen, with their own class.

    Args:
        state: the state that was made for this model.
        bucket: gradients that are final, but not yet divided by the number of ranks.

    Raises:
        HostError: `state` is not a `DDPState`.
    """
    if not isinstance(state, DDPState):  # torch's own hooks take a process group, or None
        raise HostError(
            "ddp_hook was registered without a DDPState",
            expected="register_comm_hook(DDPState(ddp), ddp_hook)",
            got=type(state).__name__,
            remedy="make a DDPState for the model, and register the hook with it",
        )
    return state.launch(bucket)


def _holds_values(parameter: torch.Tensor) -> bool:
    """Whether the parameter has a gradient that is not zero, from an earlier pass."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return bool(gradient._nnz()) if gradient.is_sparse else bool(gradient.any())
