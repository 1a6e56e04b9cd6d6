"""Compressed gradient synchronisation for torch's own DistributedDataParallel.

Two lines, as the hooks of `torch.distributed.algorithms.ddp_comm_hooks` are used:

    state = megatron_sparse.DDPState(ddp_model, density=0.01)
    ddp_model.register_comm_hook(state, megatron_sparse.ddp_hook)

With `optimizer=` the state also learns which passes were used. Where a loop skips a step (NaN, a
norm that is too large, an overflow under GradScaler) or throws gradients away, the residual is put
back as it was before that pass; else its selections are lost, and what it left is sent later.

DDP hands over each bucket when its gradients are final; the reducer averages it over the ranks on
its progress thread, which completes the bucket's future. The gradient of an
`nn.Embedding(sparse=True)`, for which DDP makes a bucket of its own, goes through the row-sparse
all-reduce instead, whole.

This is one file because state and hook share one lifecycle: DDP's order of calls in a backward
pass.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes.

import gc
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from megatron_sparse.bucket import Bucket, CollectiveOp, Reduction
from megatron_sparse.collectives import check
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.compression.residual import RESIDUAL_DTYPES, Outcome, ResidualStore
from megatron_sparse.config.level import AUTO, RANK
from megatron_sparse.config.parameters import COMPRESSED
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CheckpointError, ConfigError, HostError
from megatron_sparse.planner.configured import planner_of, with_swept_thresholds
from megatron_sparse.recording import NullSink, RecordSink
from megatron_sparse.reduction.capacity_choice import with_agreed_capacity
from megatron_sparse.reduction.density_change import change_density
from megatron_sparse.reduction.in_order import progress_on
from megatron_sparse.reduction.reducer import GradientReducer, Groups, PendingReduction
from megatron_sparse.reduction.row_sparse import PendingRowSparse, RowSparseReducer
from megatron_sparse.transport import ProcessGroupTransport

logger = logging.getLogger("megatron_sparse")

VERSION = 1
"""Of the state dictionary."""


class DDPState:
    """The plugin's state for one DDP model in one process: `register_comm_hook`'s first argument.

    Collective: every rank makes one, with the same configuration. Residuals are kept by parameter
        name, because DDP makes new buckets after the first iteration.

    Args:
        ddp: the model, before its first backward pass.
        config: a `SparseConfig`, whose `tracking` is ignored, or the name of a preset, e.g.
            `"safe"`.
        optimizer: whose steps say which passes were used, or several. Costs an undo copy: a buffer
            of the residual's size.
        scaler: the GradScaler of the loop, with `optimizer`: residuals follow its scale.
        sink: receives the time and bytes of each bucket.
        **overrides: see `SparseConfig.from_overrides`; they win over those of a preset.

    Attributes:
        config: as given.
        step: backward passes synchronised so far; drives warm-up and ramp, keys random draws.
        residuals: error feedback.

    Raises:
        HostError: the model is not one that DDP wrapped, or it spreads over several devices.
        ConfigError: a value is refused, or the parameters are fp16. In the first backward pass: a
            GradScaler is in use that the state does not know.

    Example:
        >>> state = DDPState(ddp_model, optimizer=adam, density=0.01)  # doctest: +SKIP
        >>> ddp_model.register_comm_hook(state, ddp_hook)  # doctest: +SKIP
    """

    _kept: dict[str, Any] | None = None

    def __init__(
        self,
        ddp: DistributedDataParallel,
        config: SparseConfig | str | None = None,
        *,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        scaler: torch.amp.GradScaler | None = None,
        sink: RecordSink | None = None,
        **overrides: Any,
    ) -> None:
        device = _device_of(ddp)
        optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self.config = with_swept_thresholds(
            check(SparseConfig.given("DDPState", config, overrides))
        )
        _check_steps(self.config, ddp, knows_steps=bool(optimizers), scaler=scaler)
        _check_state_is_own(self.config)
        _check_nothing_is_gathered(self.config)
        _check_level(self.config)
        self.step = 0
        self._knows_steps = bool(optimizers)
        self._scaler = scaler
        self._scale: float | None = None
        self._has_looked_for_scalers = False
        self._is_unused = False
        self._is_plain = False
        self._all_at_end = ddp.static_graph
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        self._filter = ParameterFilter(self.config.compression)
        self._buckets: dict[int, Bucket] = {}
        self._launched = 0
        self._placed: set[int] = set()
        self._unplaced: dict[str, torch.Tensor] = {}
        self._in_flight: list[PendingReduction | PendingRowSparse] = []
        self._device = device
        scheme = self.config.scheme
        group = ddp.process_group
        assert group is not None, "DDP without a device mesh has a group"
        self._group = group
        self._transport = ProcessGroupTransport(
            group,
            scheme.timeout_s,
            device,
            liveness=scheme.watch_peers,
            nccl_engine=scheme.nccl_engine,
        )
        self._progress = progress_on(device, scheme.timeout_s)
        self.config = with_agreed_capacity(self.config, device, self._transport.group)
        self._planner = planner_of(self.config, logs=self._transport.rank == 0)
        self.residuals = ResidualStore(
            RESIDUAL_DTYPES[self.config.compression.residual_dtype],
            undo=self._knows_steps or self.config.compression.undo == "always",
            outcome=Outcome.ASSUMED,
        )
        if self.residuals.undo:
            self.residuals.outcome = Outcome.REPORTED
            self._watch(ddp, optimizers)
        sink = sink or NullSink()
        self._reducer = GradientReducer(
            self.config,
            Groups(self._transport),
            self._planner,
            self.residuals,
            sink,
            self._progress,
        )
        self._row_reducer = RowSparseReducer(self._transport, sink, self._progress)
        if ddp.find_unused_parameters:
            logger.warning(
                "find_unused_parameters: DDP ignores what is synchronised for a parameter that no "
                "rank used in a step, and what its residual sent then is lost; keep such "
                "parameters whole with keep_patterns"
            )

    @property
    def enabled(self) -> bool:
        """The running switch: if False, buckets are synchronised dense and send their residual too.

        Set it to the same value on every rank between two steps.
        """
        return self._planner.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._planner.enabled = value
        logger.info("step %d: compression switched %s", self.step, "on" if value else "off")

    def set_density(self, density: float) -> None:
        """Changes `compression.density` from the next step on.

        Collective: every rank calls it between two steps. During the warm-up it sets the density
        that the ramp will lead to. A resumed run starts with the density of its configuration.

        Args:
            density: nnz / numel, in (0, 1]; the same on every rank.

        Raises:
            CommunicationError: ranks want different densities.
            ConfigError: the value is refused, a ramp is under way, or nothing is ever pruned.
        """
        change_density(
            self.config,
            self._planner,
            density,
            step=self.step,
            device=self._device,
            group=self._transport.group,
        )

    def discard_step(self) -> None:
        """The last synchronised pass was not used: puts the residual back as it was before it.

        For loops whose optimizer the state does not know; call it before the next pass, on every
        rank. Needs `undo="always"` there. Does nothing where the last pass was used.

        Raises:
            ConfigError: there is no undo copy.
        """
        if not self.residuals.undo:
            raise ConfigError(
                "the residual of a discarded step is not kept",
                expected="DDPState(..., optimizer=...), or undo='always'",
                got="neither",
                remedy="give the state the optimizer: it then sees by itself which passes are used",
            )
        if self._is_unused:
            self.residuals.rollback()
            self._is_unused = False

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within it, passes are synchronised by DDP's own all-reduce, past the residual.

        For passes whose gradients are not those of the training: a learning-rate finder, a probe.
        Set it on every rank alike.
        """
        before, self._is_plain = self._is_plain, True
        try:
            yield
        finally:
            self._is_plain = before

    def _watch(
        self, ddp: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Learns when a backward pass begins and when its gradients are used."""
        wanted = [each for each in ddp.module.parameters() if each.requires_grad]
        # Model and optimizer do not keep the state alive: its groups must not outlive torch's.
        own = weakref.ref(self)

        def begins(_: torch.Tensor) -> None:
            # No gradient of this pass has been added yet.
            if (state := own()) is not None:
                state._pass_begins(wanted)

        def taken(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (state := own()) is not None:
                state._step_taken(optimizer)

        torch.autograd.graph.register_multi_grad_hook(wanted, begins, mode="any")
        for optimizer in optimizers:
            optimizer.register_step_post_hook(taken)

    def _pass_begins(self, parameters: Sequence[torch.Tensor]) -> None:
        if self._is_unused and not self._knows_steps:
            self.residuals.commit()
            self._is_unused = False
        elif self._is_unused and any(map(_holds_values, parameters)):
            self.residuals.go_on()
        else:
            self.discard_step()
        if self._scaler is not None:
            before, self._scale = self._scale, self._scaler.get_scale()
            if before not in (None, self._scale):
                self.residuals.rescale(self._scale / before)

    def _step_taken(self, optimizer: torch.optim.Optimizer) -> None:
        # GradScaler lets optimizers that understand it look for an overflow themselves.
        found_inf = getattr(optimizer, "found_inf", None)
        if self._is_unused and not (found_inf is not None and float(found_inf)):
            self.residuals.commit()
            self._is_unused = False

    def launch(self, grad_bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the synchronisation of one of DDP's buckets. Called by `ddp_hook`.

        Raises:
            HostError: called outside a backward pass.
            MegatronSparseError: the bucket cannot be synchronised as configured.
        """
        self._check_attached()
        if self._is_plain:
            return allreduce_hook(self._group, grad_bucket)
        if not self._in_flight:
            self._await_at_end_of_backward()
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
        if grad_bucket.is_last():
            self._end_step()
        if self._all_at_end:
            # In the first step of a static graph DDP calls the hook for all buckets at the end, and
            # waits for them holding the interpreter's lock, which the progress thread needs.
            future.wait()
        return future

    def _start_dense(
        self, grad_bucket: GradBucket, future: torch.futures.Future[torch.Tensor]
    ) -> PendingReduction:
        bucket = self._bucket_of(grad_bucket)
        # DDP copies the result out, unless it is DDP's own buffer. Complete the future after a
        # failure too, or DDP would wait for ever; `_finish_backward` raises the error.
        return self._reducer.start(bucket, self.step, lambda: future.set_result(bucket.grad_N))

    def _start_sparse(
        self, grad_bucket: GradBucket, future: torch.futures.Future[torch.Tensor]
    ) -> PendingRowSparse:
        gradient = grad_bucket.buffer()
        (parameter,) = grad_bucket.parameters()

        def complete(pending: PendingRowSparse) -> None:
            future.set_result(gradient if pending.reduced is None else pending.reduced)

        return self._row_reducer.start(
            self._names[parameter], gradient, Reduction.AVG, self.step, complete
        )

    def _await_at_end_of_backward(self) -> None:
        """DDP would turn a failed future into an untyped error, so errors are raised separately."""
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
        """Runs when all gradients are made, before DDP waits for the buckets' futures."""
        in_flight, self._in_flight = self._in_flight, []
        if self._all_at_end and self._launched:
            self._end_step()  # DDP numbers those buckets all alike, and marks none as the last
        self._all_at_end = False
        for pending in in_flight:
            pending.wait()
        self._is_unused = self.residuals.undo
        if not self._has_looked_for_scalers:
            self._has_looked_for_scalers = True
            _check_scalers(self._scaler)

    def _end_step(self) -> None:
        self._launched = 0
        self._placed.clear()
        self.step += 1

    def _bucket_of(self, grad_bucket: GradBucket) -> Bucket:
        """Makes the reducer's bucket from DDP's; its parameters are adjacent."""
        index, slices, start = self._launched, [], 0
        for parameter in grad_bucket.parameters():
            name, stop = self._names[parameter], start + parameter.numel()
            slices.append(
                self._filter.slice_of(name, start, stop, parameter.shape, replicated=False)
            )
            start = stop
        bucket = Bucket(
            f"bucket{index}",
            grad_bucket.buffer(),
            tuple(slices),
            CollectiveOp.ALL_REDUCE,
            self._transport.world_size,
            Reduction.AVG,
        )
        known = self._buckets.get(index)
        if known is not None and known.parameters == bucket.parameters:
            bucket.layouts = known.layouts
        else:
            self._take_residuals_back()
        self._buckets[index] = bucket
        self._placed.add(index)
        waiting = self._unplaced
        mine = {(p.name, 0): waiting.pop(p.name) for p in slices if p.name in waiting}
        if mine:
            self.residuals.load([bucket], mine)
        return bucket

    def _take_residuals_back(self) -> None:
        """Called when DDP has made new buckets: keeps residuals under their parameters' names.

        Residuals of buckets that this step has already launched are in use and stay in place.
        """
        for index in self._buckets.keys() - self._placed:
            bucket = self._buckets.pop(index)
            if bucket.name in self.residuals:
                held_N = self.residuals[bucket.name]
                for piece in bucket.parameters:
                    self._unplaced[piece.name] = held_N[piece.start : piece.stop]
                self.residuals.load([bucket], {})

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. Every rank saves its own, between two steps.

        Tensors are copies on the host; on CUDA that waits for them. With
        `residual_checkpoint=none` it holds no residuals.
        """
        if self._kept is not None:
            return self._kept
        held: dict[str, torch.Tensor] = {}
        if self.config.compression.residual_checkpoint != "none":
            held = self._unplaced | dict(self.residuals.by_parameter())
        return {
            "version": VERSION,
            "rank": self._transport.rank,
            "world_size": self._transport.world_size,
            "step": self.step,
            "enabled": self.enabled,
            "planner": self._planner.state_dict(),
            "scale": self._scale,
            "residuals": {name: view.detach().cpu().clone() for name, view in held.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`, on the same rank and with the same number of ranks.

        Parameters that `state` does not name start without residual.

        Raises:
            CheckpointError: the state is another rank's, or its residuals do not fit the model.
        """
        self._check_attached()
        own = {
            "version": VERSION,
            "rank": self._transport.rank,
            "world_size": self._transport.world_size,
        }
        for key, expected in own.items():
            if state.get(key) != expected:
                raise CheckpointError(
                    f"the saved state has another {key}",
                    expected=expected,
                    got=state.get(key),
                    remedy="load on each rank what it saved itself, with as many ranks, or start "
                    "with zero residuals by not loading it",
                )
        numels = {name: parameter.numel() for parameter, name in self._names.items()}
        for name, residual in state["residuals"].items():
            if residual.numel() != numels.get(name):
                raise CheckpointError(
                    f"the saved residual of {name} does not fit the model",
                    expected=f"{numels[name]} elements" if name in numels else "a parameter",
                    got=residual.numel(),
                    remedy="resume with the same model",
                )
        self.residuals.load(self._buckets.values(), {})
        kept = self.config.compression.residual_checkpoint != "none"
        self._unplaced = dict(state["residuals"]) if kept else {}
        self._planner.load_state_dict(state.get("planner", {}))
        self.step, self._planner.enabled = state["step"], state["enabled"]
        self._scale = state.get("scale")

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "_kept": self.state_dict()}

    def __setstate__(self, copied: dict[str, Any]) -> None:
        """A copy, for example in a copy of the model, belongs to no model.

        It holds the configuration and `state_dict()`, with which a new state goes on:
        `DDPState(ddp, copy.config)`, and `load_state_dict(copy.state_dict())`.
        """
        self.__dict__.update(copied)

    def _check_attached(self) -> None:
        if self._kept is not None:
            raise HostError(
                "this DDPState is a copy and belongs to no model",
                expected="DDPState(ddp, copy.config), with load_state_dict(copy.state_dict())",
                got="a copied or unpickled one",
                remedy="make a new state for the model and register the hook with it",
            )

    def close(self) -> None:
        """Ends the thread and releases the process group; DDP cannot be used afterwards."""
        self._progress.close()
        self._transport.close(broken=self._progress.broken)


def ddp_hook(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: averages a bucket over the ranks, pruned, with error feedback.

    Returns at once. The future's value is DDP's own buffer; errors are raised, typed, by the
    `backward()` that they happened in.

    Args:
        state: made for this model.
        bucket: whose gradients are final, not yet divided.
    """
    return state.launch(bucket)


def _device_of(ddp: object) -> torch.device:
    if not isinstance(ddp, DistributedDataParallel):
        raise HostError(
            "this model was not wrapped by DDP",
            expected="a torch.nn.parallel.DistributedDataParallel",
            got=f"{type(ddp).__module__}.{type(ddp).__qualname__}",
            remedy="wrap it first; for Megatron's own DDP use megatron_sparse.attach",
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise HostError(
            "torch's compiled DDP calls no communication hook with gradients in buckets",
            expected='torch._dynamo.config.optimize_ddp = "ddp_optimizer", the default, or False',
            got='"python_reducer"',
            remedy="change it before the model is wrapped by DDP",
        )
    devices = {parameter.device for parameter in ddp.module.parameters()}
    if len(devices) != 1:
        raise HostError(
            "the model spreads over several devices",
            expected="all parameters on one device",
            got=", ".join(sorted(map(str, devices))),
            remedy="use one process for each device",
        )
    return devices.pop()


def _check_state_is_own(config: SparseConfig) -> None:
    """Each rank saves only its own state, so nothing can add residuals up."""
    if config.compression.residual_checkpoint == "sum":
        raise ConfigError(
            "compression.residual_checkpoint=sum does not go with plain DDP",
            expected="full or none",
            got="sum",
            remedy="set compression.residual_checkpoint=full",
        )


def _check_nothing_is_gathered(config: SparseConfig) -> None:
    """Every rank of plain DDP updates all parameters itself."""
    if config.parameters.method in COMPRESSED:
        raise ConfigError(
            f"parameters.method={config.parameters.method} does not go with plain DDP",
            expected="parameters.method=auto or raw",
            got=config.parameters.method,
            remedy="leave it out; it is for Megatron's distributed optimizer",
        )


def _check_level(config: SparseConfig) -> None:
    """DDP makes new buckets after the first step, and their parts would lie on other ranks."""
    if config.compression.level not in (RANK, AUTO):
        raise ConfigError(
            f"compression.level={config.compression.level} does not go with plain DDP",
            expected="compression.level=rank or auto, which takes rank",
            got=config.compression.level,
            remedy="leave it out, or use Megatron with megatron_sparse.attach; scheme.name="
            "hierarchical adds up inside a node what its ranks have selected",
        )


def _check_steps(
    config: SparseConfig,
    ddp: DistributedDataParallel,
    *,
    knows_steps: bool,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Refuses settings with which a skipped step would corrupt residuals."""
    if knows_steps and config.compression.undo == "never":
        raise ConfigError(
            "compression.undo=never does not go with DDPState(..., optimizer=...)",
            expected="compression.undo=auto or always: an unused pass is undone by a copy",
            got="never",
            remedy="leave it out",
        )
    if scaler is not None and not knows_steps:
        raise ConfigError(
            "DDPState got a scaler and no optimizer",
            expected="both: a step that overflows is skipped, and the optimizer says so",
            got="scaler=...",
            remedy="give optimizer=... too",
        )
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{dtype} parameters do not go with plain DDP",
                expected="fp32 or bf16 parameters; fp16 by autocast and a GradScaler",
                got=f"{name} in {dtype}",
                remedy="train in fp32 or bf16; in fp16 under Megatron, with megatron_sparse.attach",
            )


def _check_scalers(known: torch.amp.GradScaler | None) -> None:
    """Refuses loss scaling that the state does not follow; looks at all objects once."""
    for each in gc.get_objects():
        is_scaler = issubclass(type(each), torch.amp.GradScaler)
        if is_scaler and each is not known and each._scale is not None:
            raise ConfigError(
                "a GradScaler scales the loss, and DDPState does not know it",
                expected="DDPState(ddp, optimizer=..., scaler=...)",
                got="a scaler in use",
                remedy="give both to DDPState, or train in bf16 without a scaler",
            )


def _holds_values(parameter: torch.Tensor) -> bool:
    """Whether a gradient was kept, and not cleared, before a pass adds to it."""
    gradient = parameter.grad
    if gradient is None:
        return False
    return bool(gradient._nnz()) if gradient.is_sparse else bool(gradient.any())
