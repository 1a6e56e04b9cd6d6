"""`install`: hooks the plugin into a script that calls Megatron-LM's own `pretrain`.

Five functions of `megatron.training.training` are wrapped, each for one reason:
`setup_model_and_optimizer` has Megatron's arguments before a model is built (refusals);
`get_megatron_optimizer` has both the DDP-wrapped chunks and the optimizer, before any checkpoint is
loaded (`attach`); `train_step` is one iteration (breakdown, metrics, the average of `logged_loss`);
`save_checkpoint` and `load_checkpoint` save and restore the residual, in Megatron's own distributed
checkpoint through the optimizer's `sharded_state_dict`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.training.training as host
import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.checkpointing import get_checkpoint_name, get_loaded_iteration
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer
from torch.distributed.checkpoint.api import CheckpointException

from megatron_sparse.collectives import check
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CheckpointError, ConfigError, HostError
from megatron_sparse.megatron import checkpoint, checkpoint_folder, checkpoint_process, refusals
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.host_symbols import require_host_symbols
from megatron_sparse.megatron.logged_loss import LoggedLoss
from megatron_sparse.megatron.units import may_repeat_or_skip
from megatron_sparse.planner.plan_state import PLAN_FILE
from megatron_sparse.profiler_ranges import marked
from megatron_sparse.telemetry import RunTelemetry, ScalarSink, TensorBoardSink, WandbSink
from megatron_sparse.telemetry.lines import write_whole

logger = logging.getLogger("megatron_sparse")

_HOOKED = (
    "setup_model_and_optimizer",
    "get_megatron_optimizer",
    "train_step",
    "save_checkpoint",
    "load_checkpoint",
)

_installed: Plugin | None = None


class Plugin:
    """The installed plugin. Made by `install`.

    Attributes:
        attachment: the attached model; None until Megatron has built it.
        telemetry: receives the measurements; None until then.
    """

    def __init__(
        self, config: SparseConfig, run_dir: Path | None, resolved_config: dict[str, Any] | None
    ) -> None:
        require_host_symbols("install")
        checkpoint_process.end_with_rank()  # for processes that Megatron starts to save
        self.config = config
        self.attachment: Attachment | None = None
        self.telemetry: RunTelemetry | None = None
        self._run_dir = run_dir
        self._resolved_config = resolved_config
        self._optimizer_bound = False
        self._saves_sharded = False  # whether a save that takes the plugin's state is running
        self._originals: dict[str, Callable[..., Any]] = {}
        # Replaces each hooked function NAME of `megatron.training.training` by the method `_NAME`.
        for name in _HOOKED:
            self._originals[name] = getattr(host, name)
            setattr(host, name, getattr(self, f"_{name}"))

    def post_wrap_hook(self, chunks: list[Any]) -> list[Any]:
        """Attaches the plugin to DDP-wrapped chunks; returns them. For Megatron's post_wrap_hooks.

        If the plugin is attached to another model, as after a first `pretrain` in this process,
        that attachment ends: its summary and plan are written, its residual is dropped.
        """
        if self.attachment is not None:
            known = map(id, self.attachment.chunks)
            if not set(map(id, chunks)).issubset(known):
                logger.warning(
                    "another model was built: detaching from the first one, whose residual is "
                    "dropped, and attaching to the new one"
                )
                self._end_run()
        if self.attachment is None:
            self.telemetry = self._make_telemetry()
            self.attachment = Attachment(list(chunks), self.config, self.telemetry, self._run_dir)
        return chunks

    def close(self) -> None:
        """Restores Megatron's functions, and writes the run's summary and plan. Idempotent."""
        global _installed
        for name, original in self._originals.items():
            setattr(host, name, original)
        self._originals.clear()
        self._end_run()
        if _installed is self:
            _installed = None

    def _end_run(self) -> None:
        """Writes the summary and the plan, and detaches from model and optimizer. Idempotent."""
        if self.telemetry is not None:
            memory, trials = None, None
            if self.attachment is not None:
                memory = self.attachment.memory_report()
                if self.attachment.trials is not None:
                    trials = self.attachment.trials.state_dict()
                if _is_writer() and self._run_dir is not None:
                    _write_plan(self._run_dir, self.attachment, trials)
            self.telemetry.close(memory, trials)
            self.telemetry = None
        self._optimizer_bound = False
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None

    def _make_telemetry(self) -> RunTelemetry:
        """Makes the telemetry: the run's files, and dashboards that Megatron has opened here."""
        sinks: list[ScalarSink] = []
        if writer := get_tensorboard_writer():
            sinks.append(TensorBoardSink(writer))
        config = self._resolved_config or dataclasses.asdict(self.config)
        if run := get_wandb_writer():
            sinks.append(WandbSink(run, config))
        return RunTelemetry(
            self._run_dir,
            self.config.tracking,
            is_writer=_is_writer(),
            sinks=sinks,
            resolved_config=config,
            iterations=_arguments().train_iters,
            # A `resolved_config` comes from `megatron-sparse train`, which has locked the folder.
            locks=self._resolved_config is None,
        )

    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Checks Megatron's arguments, warns of what is not saved, calls the original."""
        arguments = _arguments()
        refusals.check_arguments(arguments, self.config.compression.residual_checkpoint)
        if arguments.save and arguments.ckpt_format != refusals.OWN_FORMAT and _is_writer():
            logger.warning(refusals.LOST, arguments.ckpt_format)
        return self._originals["setup_model_and_optimizer"](*args, **kwargs)

    def _get_megatron_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Returns Megatron's optimizer, with its `step` and its `sharded_state_dict` wrapped."""
        original = self._originals["get_megatron_optimizer"]
        bound = inspect.signature(original).bind(*args, **kwargs)
        # Does nothing if the model's `post_wrap_hooks` have attached it already.
        self.post_wrap_hook(bound.arguments["model_chunks"])
        optimizer = original(*args, **kwargs)
        assert self.attachment is not None
        self.attachment.bind_optimizer(optimizer, undo=may_repeat_or_skip(optimizer))
        self._optimizer_bound = True
        if _is_writer():
            for line in self.attachment.lines:
                print(line, flush=True)
        checkpoint.save_with(self.attachment, optimizer, lambda: self._saves_sharded)
        return optimizer

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs Megatron's training step, times it for the telemetry, and returns its result."""
        if not self._optimizer_bound:
            raise HostError(
                "the plugin is installed but not attached",
                expected="install(...) before pretrain(...) builds model and optimizer",
                got="a training step first",
                remedy="call install earlier in the script",
            )
        original = self._originals["train_step"]
        bound = inspect.signature(original).bind(*args, **kwargs)
        telemetry = self.telemetry
        assert telemetry is not None
        logged_loss = LoggedLoss(bound.arguments["forward_step_func"], bound.arguments["model"])
        bound.arguments["forward_step_func"] = logged_loss.forward_step
        forward_backward = bound.arguments["forward_backward_func"]
        bound.arguments["forward_backward_func"] = _timed(forward_backward, telemetry)
        # Read before the step: afterwards the scheduler sets the next iteration's rate.
        learning_rate = float(bound.arguments["optimizer"].param_groups[0]["lr"])
        telemetry.begin_iteration(_arguments().curr_iteration + 1)
        start_s = time.perf_counter()
        result = original(*bound.args, **bound.kwargs)
        self._end_iteration(result, time.perf_counter() - start_s, learning_rate)
        return result

    def _end_iteration(
        self, result: tuple[Any, ...], iteration_s: float, learning_rate: float
    ) -> None:
        """Passes an iteration to the telemetry; `result` is that of Megatron's `train_step`.

        Reads the loss, so the host waits for the GPU, as it has in the optimizer's step.
        """
        loss_dict, skipped = result[0], bool(result[1])
        assert self.telemetry is not None
        assert self.attachment is not None
        loss = loss_dict.get("lm loss") if loss_dict else None
        iteration = _arguments().curr_iteration + 1
        # The rate of operations (TFLOP/s) is computed only for GPUs.
        on_gpu = any(bucket.grad_N.is_cuda for bucket in self.attachment.buckets)
        operations_of = host.num_floating_point_operations if on_gpu else None
        rates = throughput(_arguments(), get_num_microbatches(), iteration_s, operations_of)
        extra = {"learning_rate": learning_rate} | rates
        if self.telemetry.samples(iteration):
            extra |= self._residual_scalars()
        breakdown = self.telemetry.end_iteration(
            iteration,
            iteration_s=iteration_s,
            loss=None if loss is None else float(loss),
            grad_norm=self.attachment.grad_norm,
            skipped=skipped,
            extra=extra,
        )
        if loss_dict and breakdown.wire_ratio is not None:
            # Megatron shows it in its log line, and writes it to the dashboards.
            loss_dict["comm/wire_ratio"] = torch.tensor(
                [breakdown.wire_ratio], device=loss.device if loss is not None else None
            )

    def _residual_scalars(self) -> dict[str, float]:
        """Returns the residual's norm, also relative to the gradient's, as dashboard metrics."""
        assert self.attachment is not None
        norm = self.attachment.residual_norm()
        scalars = {"compression/residual_norm": norm}
        if grad_norm := self.attachment.grad_norm:
            scalars["compression/residual_ratio"] = norm / grad_norm
        return scalars

    def _save_checkpoint(self, iteration: int, *args: Any, **kwargs: Any) -> Any:
        """Calls Megatron's save; adds the plugin's state if the checkpoint's format can hold it."""
        if self.telemetry is not None:  # None with --skip-train, which may convert a checkpoint
            # A killed run resumes from here: its files must have all iterations up to here.
            self.telemetry.flush()
        arguments = _arguments()
        is_temporary = bool(kwargs.get("non_persistent_ckpt"))
        is_local = is_temporary and arguments.non_persistent_ckpt_type == "local"
        # Read by the hook in `_get_megatron_optimizer`, which then adds the plugin's state.
        self._saves_sharded = arguments.ckpt_format == refusals.OWN_FORMAT and not is_local
        if is_local:
            logger.warning("local checkpoints do not hold the residual")
        elif self._saves_sharded and arguments.no_save_optim:
            logger.warning("--no-save-optim: the residual is not saved, like the optimizer's state")
        try:
            return self._originals["save_checkpoint"](iteration, *args, **kwargs)
        finally:
            self._saves_sharded = False

    def _load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Calls Megatron's load, then loads the plugin's state from the same checkpoint.

        Raises:
            CheckpointError: files of the checkpoint are damaged, or its residuals do not fit.
        """
        original = self._originals["load_checkpoint"]
        try:
            result = original(*args, **kwargs)
            bound = inspect.signature(original).bind(*args, **kwargs)
            bound.apply_defaults()
            folder = getattr(_arguments(), bound.arguments["load_arg"])  # e.g. "load"
            iteration = result[0]
            loaded = _loaded_checkpoint(folder, iteration) if folder else None
            if loaded is not None and self.attachment is not None:
                checkpoint.load(self.attachment, loaded, iteration)
        except CheckpointException as error:  # torch's, with (exception, traceback) by rank
            reason, _ = next(iter(error.failures.values()))
            raise CheckpointError(
                "the checkpoint cannot be read",
                expected="files as they were saved",
                got=f"{type(reason).__name__}: {str(reason).partition(chr(10))[0]}",
                remedy="go back: write the iteration of an older checkpoint into "
                f"{checkpoint_folder.TRACKER}",
            ) from error
        return result


def _write_plan(run_dir: Path, attachment: Attachment, trials: dict[str, Any] | None) -> None:
    """Writes `plan.json`: for each bucket how the next step would compress it, and why."""
    plan = {"step": attachment.step, "buckets": attachment.plan_rows()}
    if trials is not None:
        plan["trials"] = trials
    write_whole(run_dir / PLAN_FILE, json.dumps(plan, indent=1) + "\n")


def _timed(forward_backward: Callable[..., Any], telemetry: RunTelemetry) -> Callable[..., Any]:
    """Wraps `forward_backward`: records its seconds, without the waits for communication."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        start_s, waited_s = time.perf_counter(), telemetry.waited_s
        with marked("forward_backward"):
            result = forward_backward(*args, **kwargs)
        elapsed_s, inside_s = time.perf_counter() - start_s, telemetry.waited_s - waited_s
        telemetry.record_stage("forward_backward", elapsed_s - inside_s)
        return result

    return timed


def throughput(
    arguments: Any,
    microbatches: int,
    iteration_s: float,
    operations_of: Callable[[Any, int], float] | None,
) -> dict[str, float]:
    """Computes the throughput of an iteration, as fields of its breakdown.

    Args:
        arguments: Megatron's.
        microbatches: how many each rank has in this iteration.
        iteration_s: the iteration's wall-clock seconds.
        operations_of: Megatron's `num_floating_point_operations`, which counts the operations of a
            global batch from the model's shape; None leaves their rate out, as on a CPU.

    Returns:
        `tokens_per_s` of all ranks together; `model_tflop_per_s` of each GPU.
    """
    samples = arguments.micro_batch_size * arguments.data_parallel_size * microbatches
    rates = {"tokens_per_s": samples * arguments.seq_length / iteration_s}
    if operations_of is not None:
        operations = operations_of(arguments, samples)
        rates["model_tflop_per_s"] = operations / (iteration_s * arguments.world_size * 1e12)
    return rates


def _arguments() -> Any:
    """Megatron's parsed arguments; its getter is not annotated."""
    return get_args()


def _loaded_checkpoint(folder: str, iteration: int) -> Path | None:
    """Returns the folder of the checkpoint that Megatron has loaded; None if it loaded none.

    `folder` has the run's checkpoints; temporary ones may be elsewhere. `iteration` is what
    Megatron's load returned: with `--override-ckpt-iteration` only the value of that flag.
    """
    arguments = _arguments()
    own, *temporary = checkpoint_folder.with_temporary(Path(folder), vars(arguments))
    if getattr(arguments, "override_ckpt_iteration", None) is not None:
        # Megatron loads the newest checkpoint; `get_loaded_iteration` knows only permanent ones.
        saved = [get_loaded_iteration(), *map(checkpoint_folder.tracked, temporary)]
        iteration = max(each or 0 for each in saved)
    if iteration <= 0:  # nothing was loaded, or only parameters (a release, --finetune)
        return None
    candidates = [
        Path(get_checkpoint_name(str(each), iteration, return_base_dir=True))
        for each in (own, *temporary)
    ]
    # If none is a folder, `checkpoint.load` warns that there is no state of the plugin.
    return next((each for each in candidates if each.is_dir()), candidates[-1])


def _is_writer() -> bool:
    """Whether this is the last rank: it has the loss, and Megatron's own writers."""
    return dist.get_rank() == dist.get_world_size() - 1


def install(
    config: SparseConfig | str | None = None,
    *,
    run_dir: str | Path | None = None,
    resolved_config: dict[str, Any] | None = None,
    **overrides: Any,
) -> Plugin:
    """Compresses the gradient synchronisation of the `pretrain` call that follows.

    Args:
        config: a `SparseConfig`, or the name of a preset, e.g. `"safe"`.
        run_dir: folder for summary, breakdown and plan; None writes no files. When Megatron has
            built the model, the last rank locks the folder: a ConfigError if another run has it.
        resolved_config: of `megatron-sparse train`, which has locked `run_dir`; for the summary.
        **overrides: see `SparseConfig.from_overrides`; they win over those of a preset.

    Returns:
        The plugin; call `close()` after `pretrain` to write the summary. Without `close`, a second
        `pretrain` in the process ends the first attachment and attaches to the new model.

    Raises:
        HostError: Megatron lacks a function that the plugin hooks (see `megatron-sparse doctor`).
        ConfigError: a value is refused, the plugin is installed already, or Megatron's arguments,
            if it has parsed them, hold a setting that the plugin refuses.

    Example:
        >>> plugin = install(density=0.01)          # doctest: +SKIP
        >>> pretrain(...)                           # doctest: +SKIP
        >>> plugin.close()                          # doctest: +SKIP
    """
    global _installed
    if _installed is not None:
        raise ConfigError(
            "megatron_sparse is installed already",
            expected="one install(...)",
            got="a second",
            remedy="close() the first plugin",
        )
    given = check(SparseConfig.given("install", config, overrides))
    with contextlib.suppress(AssertionError):  # raised by Megatron while it has no arguments
        refusals.check_arguments(_arguments(), given.compression.residual_checkpoint)
    _installed = Plugin(given, None if run_dir is None else Path(run_dir), resolved_config)
    return _installed
