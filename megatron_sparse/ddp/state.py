"""Compressed gradient synchronisation for torch's own DistributedDataParallel.

Two lines, as the hooks of `torch.distributed.algorithms.ddp_comm_hooks` are used:

    state = megatron_sparse.DDPState(ddp_model, density=0.01)
    ddp_model.register_comm_hook(state, megatron_sparse.ddp_hook)

The state sees which passes are used, by the steps of torch's optimizers. Where a loop skips a step
(NaN, a norm that is too large, an overflow under GradScaler) or throws gradients away, the residual
is put back as it was before that pass; else its selections were lost, and what it left sent later.

DDP hands over each bucket when its gradients are final; the reducer averages it over the ranks on
its progress thread, which completes the bucket's future. The gradient of an
`nn.Embedding(sparse=True)`, for which DDP makes a bucket of its own, goes through the row-sparse
all-reduce instead, whole.

State and hook share one lifecycle: DDP's order of calls in a backward pass.
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
from megatron_sparse.errors import ConfigError, HostError
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
"""Passes in a row that no step used, after which a warning says so."""


class DDPState(HostState):
    """The plugin's state for one DDP model in one process: `register_comm_hook`'s first argument.

    Collective: every rank makes one, with the same configuration. Residuals are kept by parameter
        name, because DDP makes new buckets after the first iteration.

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
        # Not the transport's group, to which the progress thread posts.
        try:
            super().__init__(checked, device, group)
        except BaseException:
            self._transport.close()
            raise
        self._scaler = scaler
        self._scale = 1.0  # of the last pass's gradients, and so of residuals
        self._has_looked_at_loop = False  # whether `optimizers_of_loop` was called
        self._knows_steps = False  # whether an optimizer of torch's updates the model
        self._is_unused = False  # whether no step has used the last synchronised pass
        self._unused_in_a_row = 0
        self._is_closed = False
        self._unwatch: list[weakref.finalize] = []
        self._all_at_end = ddp.static_graph  # whether DDP calls the hook after the pass
        self._buckets = DDPBuckets(
            ddp.module,
            ParameterFilter(checked.compression),
            self._transport.world_size,
            self.residuals,
        )
        self._trained = [each for each in self._buckets.names if each.requires_grad]
        self._launched = 0  # buckets of this pass so far
        self._in_flight: list[Pending] = []
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
            self.close()  # the caller gets nothing that it could close
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
        """The last synchronised pass was not used: puts the residual back as it was before it.

        For loops without an optimizer of torch's; call it before the next pass, on every rank.
        Does nothing where the last pass was used.

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
        """Has torch call `_pass_begins` at each backward pass, `_step_taken` after each step."""
        # torch's hooks do not keep the state alive: its groups must not outlive torch's.
        state_or_none = weakref.ref(self)

        def begins(_: torch.Tensor) -> None:
            # No gradient of this pass has been added yet.
            if (state := state_or_none()) is not None:
                state._pass_begins()

        def taken(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (state := state_or_none()) is not None and state._is_updated_by(optimizer):
                state._step_taken(optimizer)

        # "any": at the first gradient of a pass.
        hooks = (
            torch.autograd.graph.register_multi_grad_hook(self._trained, begins, mode="any"),
            register_optimizer_step_post_hook(taken),
        )
        # The parameters and torch outlive the state.
        self._unwatch = [weakref.finalize(self, hook.remove) for hook in hooks]

    def _is_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer changes any parameter of the model."""
        for group in optimizer.param_groups:
            if any(parameter in self._buckets.names for parameter in group["params"]):
                return True
        return False

    def _pass_begins(self) -> None:
        """Decides what becomes of the last pass, if no step has used it; follows the scaler."""
        if self._is_unused:
            if not self._knows_steps:  # nothing reports steps: every pass counts as used
                self.residuals.commit()
                self._is_unused = False
            elif any(map(_holds_values, self._trained)):
                self.residuals.go_on()  # gradients are accumulated over several passes
            else:
                self._discard_unused()
        self._follow_scale()

    def _follow_scale(self) -> None:
        """Converts residuals to the scaler's present scale."""
        before, self._scale = self._scale, self._scaler.get_scale() if self._scaler else 1.0
        if before != self._scale:
            self._buckets.rescale(self._scale / before)

    def _discard_unused(self) -> None:
        """Puts the residual back: no step used the last pass. Warns once if that goes on."""
        self.discard_step()
        self._unused_in_a_row += 1
        if self._unused_in_a_row == WARN_AFTER:
            logger.warning(
                "%d backward passes in a row were followed by no step of an optimizer of this "
                "model's parameters; what each left in the residual is taken back",
                WARN_AFTER,
            )

    def _step_taken(self, optimizer: torch.optim.Optimizer) -> None:
        """A step has used the last pass, unless GradScaler lets the optimizer skip it."""
        self._knows_steps = True
        # GradScaler lets optimizers that understand it look for an overflow themselves.
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
            self._await_at_end_of_backward()
        if self.step and not self._launched:
            self._between_steps()
        # On CUDA the future remembers the stream of the thread that completes it.
        devices: list[int | str | torch.device] = []
        if self._device.type == "cuda":
            devices.append(self._device)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        if grad_bucket.buffer().layout == torch.sparse_coo:
            pending = self._start_sparse(grad_bucket, future)
        else:
            pending = self._start_dense(grad_bucket, future)
        self._in_flight.append(pending)
        self._launched += 1
        # Not in `_finish_backward`, which may run several times in a pass: a part of the model that
        # torch checkpoints with `use_reentrant=True` has a backward pass of its own.
        if grad_bucket.is_last():
            self._end_pass()
        if self._all_at_end:
            # In the first step of a static graph DDP calls the hook for all buckets at the end, and
            # waits for them holding the interpreter's lock, which the progress thread needs.
            if pending.drive_rest is not None and not pending.done():
                pending.drive_rest()  # there is no thread that completes the future
            future.wait()
        return future

    def _start_dense(
        self, grad_bucket: GradBucket, future: torch.futures.Future[torch.Tensor]
    ) -> Pending:
        """Starts a bucket of ordinary gradients; its future completes when the average is in it."""
        bucket = self._buckets.place(grad_bucket, self._launched)
        # DDP copies the result out, unless it is DDP's own buffer. Complete the future after a
        # failure too, or DDP would wait for ever; `_finish_backward` raises the error.
        return self._reducer.start(bucket, self.step, lambda _: future.set_result(bucket.grad_N))

    def _start_sparse(
        self, grad_bucket: GradBucket, future: torch.futures.Future[torch.Tensor]
    ) -> Pending:
        """Starts the one row-sparse gradient of a bucket; its future completes with the average."""
        gradient = grad_bucket.buffer()
        (parameter,) = grad_bucket.parameters()

        def complete(pending: Pending[torch.Tensor]) -> None:
            future.set_result(gradient if pending.result is None else pending.result)

        return self._row_reducer.start(
            self._buckets.name_of(parameter), gradient, Reduction.AVG, self.step, complete
        )

    def _await_at_end_of_backward(self) -> None:
        """Has autograd call `_finish_backward` at the end of this pass, where errors are raised.

        DDP, which gets the buckets' futures, would turn a failed one into an untyped error.

        Raises:
            HostError: no backward pass is going on.
        """
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)
        except RuntimeError as error:
            raise HostError(
                "ddp_hook was called outside a backward pass",
                expected="DDP calls it when a bucket's gradients are final",
                got=str(error).splitlines()[0],
                remedy="train without DDP's join() context, which calls it for ranks that have "
                "run out of data",
            ) from error

    def _finish_backward(self) -> None:
        """Waits for the buckets of a pass, or of a checkpointed part, whose gradients are all made.

        DDP waits for their futures later.
        """
        in_flight, self._in_flight = self._in_flight, []
        if self._all_at_end and self._launched:
            self._end_pass()  # DDP gives those buckets one index: it marks none as the last
        self._all_at_end = False
        for pending in in_flight:
            pending.wait()
        self._is_unused = self.residuals.undo
        if not self._has_looked_at_loop:
            self._has_looked_at_loop = True
            for optimizer in refusals.optimizers_of_loop(self._scaler):
                self._knows_steps |= self._is_updated_by(optimizer)

    def _end_pass(self) -> None:
        """All buckets of a backward pass have begun."""
        self._launched = 0
        self._buckets.end_pass()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. Every rank saves its own, between two steps.

        Tensors are copies on the host; on CUDA that waits for them. With
        `residual_checkpoint=none` it holds no residuals. What a pass has changed that no step of an
        optimizer has used is left out, because its gradient is not saved.
        """
        self._check_attached()
        held: dict[str, torch.Tensor] = {}
        if self.config.compression.residual_checkpoint != "none":
            settled = self._is_unused and self._knows_steps
            held = self._buckets.residuals_by_parameter(settled=settled)
        return self._own() | {
            "step": self.step,
            "enabled": self.enabled,
            "planner": self.planner.state_dict(),
            "trials": {} if self.trials is None else self.trials.state_dict(),
            "scale": self._scale,
            "residuals": {name: view.detach().cpu().clone() for name, view in held.items()},
        }

    def _own(self) -> dict[str, int]:
        """What a saved state must have in common with the one that it is loaded into."""
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
        kept = self.config.compression.residual_checkpoint != "none"
        self._buckets.load(state["residuals"] if kept else {})
        self.step, self.planner.enabled = state["step"], state["enabled"]
        if self.trials is not None:
            self.trials.load_state_dict(state.get("trials", {}), self.step)
        self.planner.load_state_dict(state.get("planner", {}))
        self._scale = state["scale"] or 1.0  # None: saved before the first pass
        if self._scaler is None:  # else the first pass does it: the scaler may be loaded later
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
        """Ends the thread and releases the process group; DDP cannot be used afterwards.

        Later calls do nothing: the group may be another state's by then.
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

    Returns at once. The future's value is DDP's own buffer; errors are raised, typed, by the
    `backward()` that they happened in.

    Args:
        state: made for this model.
        bucket: whose gradients are final, not yet divided.

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
    """Whether a gradient was kept, and not cleared, before a pass adds to it."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return bool(gradient._nnz()) if gradient.is_sparse else bool(gradient.any())
