"""One rank of a training run: Megatron's own `pretrain`, with the plugin installed.

Imports megatron only when it trains, because on a CPU `cpu_mode` has to come first.
"""

import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import CheckpointError, ConfigError, DatasetError, DependencyError
from megatron_sparse.megatron import arguments
from megatron_sparse.telemetry.sinks import hidden_from_wandb
from megatron_sparse.transport.peer_links import check_gloo_interfaces

_KNOWN_NOISE = (
    # Repeated a dozen times on a machine without these packages; `doctor` reports it once.
    r".*(Transformer Engine|Apex|transformer-engine).*",
    # About Megatron's own code; a user cannot change it.
    r".* is experimental and still under active development.*",
    r"'pin_memory' argument is set as true but no accelerator is found.*",
    r".*torch\.distributed.*is deprecated.*",
    r".*TypedStorage is deprecated.*",
    # The launcher reads a checkpoint's arguments, and has no process group.
    r"torch\.distributed is disabled, unavailable or uninitialized.*",
    r".*`torch\.jit\.\w+` is deprecated.*",
)


@contextmanager
def _own_lines() -> Iterator[None]:
    """Prints what the plugin logs from INFO on; Megatron's root handlers do not print it again."""
    logger, handler = logging.getLogger("megatron_sparse"), logging.StreamHandler()
    level_before, propagate_before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        logger.propagate = propagate_before


@_own_lines()
def train(config: RunConfig, run_dir: Path, store: Any = None) -> int | None:
    """Trains on this rank until `training.iterations`, or until `training.save_signal`.

    Reads RANK, WORLD_SIZE and LOCAL_RANK. Makes the process group and destroys it.

    Args:
        config: the run; `cluster.device` must be `cpu` or `cuda`.
        run_dir: the run's folder, which exists.
        store: the `torch.distributed.Store` where ranks meet; None takes the one at MASTER_ADDR.

    Returns:
        On every rank: None, or the iteration after which a signal has ended the run.

    Raises:
        CheckpointError: Megatron cannot load the checkpoint.
        ConfigError: Megatron refuses the configuration, or gloo's network interface is missing.
        DatasetError: the dataset or corpus is missing, or the corpus is damaged.
        DependencyError: megatron-core with its training loop is not installed.
        HostError: Megatron lacks a function that the plugin hooks.
    """
    silence_known_noise()
    check_gloo_interfaces()
    vocab_size, data_prefix = find_data(config)
    if config.tracking.wandb != "disabled":
        _set_wandb_environment(config, run_dir)
    prepare_host(config.cluster.device)

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_sparse.megatron import batches

    derived = arguments.derived_flags(
        config, run_dir, vocab_size=vocab_size, data_prefix=data_prefix
    )
    resumes = arguments.has_checkpoint(config, run_dir / arguments.CHECKPOINTS)
    passed = arguments.passed_flags(config, own=resumes)
    command_line = arguments.command_line(derived, passed, arguments.megatron_parser())
    with hidden_from_wandb():
        megatron_args = _parse(command_line)
    model_config = model_config_of(megatron_args)
    plugin = None
    # An evaluation has no DDP and no gradients to attach to.
    if config.plugin and not megatron_args.skip_train:
        from megatron_sparse.megatron import install

        plugin = install(config.sparse, run_dir=run_dir, resolved_config=dataclasses.asdict(config))
        # Megatron calls the hook when it has wrapped the model in DDP: then the plugin attaches.
        model_config.post_wrap_hooks.append(plugin.post_wrap_hook)
    try:
        with _early_exit():
            pretrain(
                pretrain_cfg_container_from_args(megatron_args, model_config),
                batches.datasets,
                ModelType.encoder_or_decoder,
                batches.forward_step,
                store=store,
            )
    finally:
        # After errors as well. A `sys.exit` that the user asked for is no error: `_early_exit`.
        if plugin is not None:
            plugin.close()
    stopped_at = None if config.training.save_signal is None else _stopped_at()
    _leave()
    return stopped_at


def silence_known_noise() -> None:
    """Ignores warnings of Megatron's imports that a user cannot act on."""
    for message in _KNOWN_NOISE:
        warnings.filterwarnings("ignore", message=message)


def find_data(config: RunConfig) -> tuple[int, Path | None]:
    """Returns the size of the model's vocabulary, and the dataset's prefix or None for mock data.

    Raises:
        ConfigError: the model's vocabulary is smaller than the data's.
        DatasetError: the dataset or corpus is missing, or the corpus is damaged.
    """
    if config.data.dir is not None:
        from megatron_sparse.megatron import corpus

        found = corpus.load(config.data.dir)
        vocab_size, prefix = found.vocab_size, found.prefix
    else:
        assert config.data.vocab_size is not None, "checked by DataConfig"
        vocab_size = config.data.vocab_size
        prefix = None if config.data.prefix is None else Path(config.data.prefix)
        if prefix is not None and not prefix.with_name(f"{prefix.name}.idx").is_file():
            raise DatasetError(
                "there is no dataset in data.prefix",
                expected=f"{prefix}.idx and {prefix}.bin",
                got="no such file",
                remedy="give the path without .bin, or choose data=code and make it: "
                "megatron-sparse corpus --kind code --output data/code",
            )
    wanted = config.model.vocab_size  # None: as large as the data's
    if wanted is not None and wanted < vocab_size:
        raise ConfigError(
            "the model's vocabulary is smaller than the data's",
            expected=f"model.vocab_size >= {vocab_size}",
            got=wanted,
            remedy="set model.vocab_size=null to take the data's",
        )
    return wanted or vocab_size, prefix


def _set_wandb_environment(config: RunConfig, run_dir: Path) -> None:
    """Sets the variables that `wandb.init` reads, on the last rank, where Megatron calls it."""
    if int(os.environ["RANK"]) != int(os.environ["WORLD_SIZE"]) - 1:
        return
    from megatron_sparse.telemetry.sinks import run_id, wandb_mode

    mode = wandb_mode(config.tracking)
    os.environ |= {"WANDB_MODE": mode, "WANDB_RUN_ID": run_id(run_dir / "wandb")}
    os.environ.setdefault("WANDB_SILENT", "true")
    for purpose in ("CACHE", "DATA"):
        # Not in the home folder, which may be read-only or full: wandb writes at each checkpoint.
        os.environ.setdefault(f"WANDB_{purpose}_DIR", str(run_dir / "wandb" / purpose.lower()))
    if mode == "online":
        os.environ["WANDB_RESUME"] = "allow"
    import wandb

    # wandb reads the environment once, at its setup, which `wandb_mode` has caused: undo that.
    wandb.teardown()


def prepare_host(device: str) -> None:
    """Imports `megatron.training` and patches it (`cpu_mode`, `repairs`). Idempotent.

    Raises:
        DependencyError: megatron-core with its training loop is not installed.
        HostError: Megatron lacks a function that is replaced.
    """
    from megatron_sparse.megatron import checkpoint_process, cpu_mode, repairs

    if device == "cpu":
        cpu_mode.enable()
    import_host()
    if device == "cpu":
        cpu_mode.enable_training()
    repairs.apply()  # on a CPU for the second time, without effect
    checkpoint_process.end_with_rank()


def import_host() -> None:
    """Imports `megatron.training`.

    Raises:
        DependencyError: megatron-core with its training loop is not installed.
    """
    try:
        import_module("megatron.training")
    except ModuleNotFoundError as error:
        raise DependencyError(
            "Megatron's training loop is not installed",
            expected="megatron-core >= 0.19 (needs Python >= 3.12)",
            got=error,
            remedy="pip install 'megatron-sparse[train]'",
        ) from None


def _parse(command_line: list[str]) -> Any:
    """Parses and validates Megatron's arguments. Megatron also opens its log writers here."""
    from unittest import mock

    from megatron.training.arguments import parse_and_validate_args

    try:
        with mock.patch.object(sys, "argv", [sys.argv[0], *command_line]):
            return parse_and_validate_args()
    except (AssertionError, ValueError) as error:
        raise arguments.refusal_of(error) from error
    except Exception as error:
        if "wandb" not in sys.modules or not isinstance(error, sys.modules["wandb"].Error):
            raise
        raise ConfigError(
            "W&B did not start",
            expected="a key, and a server that answers",
            got=error,
            remedy="wandb login, or set tracking.wandb=offline or disabled",
        ) from None


def model_config_of(megatron_args: Any) -> Any:
    """Makes Megatron's `HybridModelConfig` if there is a layer pattern, else `GPTModelConfig`."""
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    if megatron_args.hybrid_layer_pattern is not None:
        return hybrid_config_from_args(megatron_args)
    return gpt_config_from_args(megatron_args)


@contextmanager
def _early_exit() -> Iterator[None]:
    """Handles `sys.exit` by Megatron in the `with` body, according to the exit code.

    0: Megatron ended as asked (--exit-interval, --exit-duration, a signal); ignored, so that the
    run goes on to its summary. None: Megatron has printed why it cannot go on, such as a checkpoint
    that does not fit; raises CheckpointError, as Python takes None for success. Other codes pass.
    """
    try:
        yield
    except SystemExit as error:
        if error.code is None:
            raise CheckpointError(
                "Megatron has stopped without an exit code",
                expected="a checkpoint that fits this configuration",
                got="see the last lines that rank 0 printed",
                remedy="correct the setting that they name; training.load=null starts from scratch",
            ) from None
        if error.code != 0:
            raise


def _stopped_at() -> int | None:
    """Returns the iteration after which a signal ended the run; None if none did. Collective."""
    from megatron.training import get_args, get_signal_handler

    megatron_args: Any = get_args()
    handler: Any = get_signal_handler()
    # Megatron sets `curr_iteration` before an iteration, to the number of iterations before it.
    last = megatron_args.curr_iteration + 1
    # An all-gather over the ranks: a signal may have reached only some of them.
    received = any(handler.signals_received())
    return last if received and last < megatron_args.train_iters else None


def _leave() -> None:
    """Waits for the other ranks, and destroys the process group. Not for failed runs."""
    import torch.distributed as dist

    if dist.is_initialized():
        # Without the barrier, ranks that still communicate with this one would see it fail.
        dist.barrier()
        dist.destroy_process_group()
