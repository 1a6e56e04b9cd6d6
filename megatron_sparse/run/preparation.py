"""Prepares a training run: checks it, makes its folder, and sets up the environment of its ranks.

The launcher does this before it starts the ranks; a rank that torchrun or srun started does it
itself.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from pathlib import Path

from megatron_sparse.config.level import NODE
from megatron_sparse.config.presets import allowed
from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import ConfigError, raise_together
from megatron_sparse.extras import require
from megatron_sparse.megatron import arguments, checkpoint_fit, checkpoint_folder, refusals, section
from megatron_sparse.planner.configured import basis, planner_of, with_swept_thresholds
from megatron_sparse.run import composition, provenance
from megatron_sparse.run.local_ranks import package_path
from megatron_sparse.run.resume import Start, find, run_folder
from megatron_sparse.run.resume import describe as resumed
from megatron_sparse.telemetry.run import BREAKDOWN_FILE
from megatron_sparse.telemetry.run_lock import LOCK_FILE, locked

CONFIG_FILE = "config.yaml"


def decide(config: RunConfig) -> RunConfig:
    """Replaces `auto` in `cluster.device` and `training.precision` by this machine's values.

    Also replaces `auto` in `compression.value_bits` and `scheme.sum_bits`, by a number or null. The
    schedule depends on the checkpoint that a run resumes from: `with_schedule` decides it.

    Raises:
        ConfigError: the run needs more GPUs than this machine has.
    """
    import torch

    ranks, gpus = config.cluster.ranks_per_node, torch.cuda.device_count()
    device = config.cluster.device
    if device == "auto":
        device = "cuda" if gpus >= ranks else "cpu"
    if device == "cuda" and gpus < ranks:
        raise ConfigError(
            "there are too few GPUs",
            expected=f"{ranks} on this machine, one for each rank",
            got=gpus,
            remedy=f"set cluster.ranks_per_node={gpus}" if gpus else "set cluster.device=cpu",
        )
    cluster = dataclasses.replace(config.cluster, device=device)
    config = with_precision(dataclasses.replace(config, cluster=cluster))
    if not config.plugin:
        return config
    sparse = config.sparse  # resolves `auto` bits, and null in the schedule
    configured = config.compression  # a null in the schedule must stay, for `with_schedule`
    compression = dataclasses.replace(
        sparse.compression, warmup_iters=configured.warmup_iters, ramp_iters=configured.ramp_iters
    )
    return dataclasses.replace(config, compression=compression, scheme=sparse.scheme)


def with_precision(config: RunConfig) -> RunConfig:
    """Replaces `auto` in `training.precision`; `cluster.device` must be decided."""
    precision = config.training.precision
    if precision == "auto":
        precision = "bf16" if config.cluster.device == "cuda" else "fp32"
    training = dataclasses.replace(config.training, precision=precision)
    return dataclasses.replace(config, training=training)


def begin(
    config: RunConfig, command: str, lock_stack: ExitStack, *, in_rank: bool
) -> tuple[RunConfig, Path] | None:
    """Checks a run, makes its folder, and prints where it starts.

    Device and precision must be decided. `lock_stack` receives the lock of the run's folder;
    closing the stack releases the lock. `in_rank`: this process will train; only a launcher lets
    Megatron check `megatron:`.

    Returns:
        The run with its schedule, and its folder; None if the checkpoint is the run's last one.

    Raises:
        MegatronSparseError: settings, packages, data, checkpoint or folder do not allow the run.
    """
    vocab_size = preflight(config, in_launcher=not in_rank)
    start = check_start(config, vocab_size, in_rank=in_rank)
    if start.is_done(config):
        print(resumed(config, start), flush=True)
        return None
    config = with_schedule(config, start)
    run_dir = make_run_dir(config, command, start, lock_stack)
    print(describe(config, run_dir, start), flush=True)
    return config, run_dir


def with_schedule(config: RunConfig, start: Start) -> RunConfig:
    """Replaces null in `compression.warmup_iters` and `compression.ramp_iters` by numbers.

    A resumed run takes the numbers from its folder's `config.yaml`, even if its length has changed:
    another ramp would make the density jump.
    """
    saved = composition.saved_schedule(run_folder(config) / CONFIG_FILE) if start.own else {}
    compression = config.compression
    resumed_keys = {key: value for key, value in saved.items() if getattr(compression, key) is None}
    compression = dataclasses.replace(compression, **resumed_keys)
    # Keys that are still null get the default for a run of this length.
    compression = compression.in_run_of(config.training.iterations)
    return dataclasses.replace(config, compression=compression)


def preflight(config: RunConfig, *, in_launcher: bool = False) -> int:
    """Finds mistakes in the configuration before training starts; returns the vocabulary's size.

    Device and precision must be decided. With `in_launcher`, also lets Megatron check the
    `megatron:` section, which imports Megatron.

    Raises:
        ConfigError: the model does not fit the data, settings of the plugin contradict each other,
            a file of the planner cannot be read, or `megatron:` sets a flag that another key sets.
        DependencyError: a package that the ranks need is missing.
        DatasetError: the corpus is missing or damaged.
    """
    from megatron_sparse.megatron import training
    from megatron_sparse.transport import nccl_communicator

    asks_megatron = in_launcher and bool(config.megatron)
    if not asks_megatron:  # else `section.check` finds these errors, too
        raise_together(section.TITLE, section.quick_errors(config))
    _check_packages(config)
    if config.plugin:
        # Made only for its errors: it reads the planner's files, and checks settings together.
        planner_of(with_swept_thresholds(config.sparse), logs=False)
        if config.cluster.device == "cpu" and config.scheme.nccl_engine:
            raise nccl_communicator.refusal("cluster.device=cpu")
        refusals.check_checkpoints(
            config.megatron,
            config.compression.residual_checkpoint,
            saves=bool(config.training.save_interval or config.training.save_signal),
        )
    vocab_size, data_prefix = training.find_data(config)
    if asks_megatron:
        section.check(config, vocab_size, data_prefix, rank_environment(config))
    return vocab_size


def _check_packages(config: RunConfig) -> None:
    """Raises a `DependencyError` if an optional package that the run's settings need is missing."""
    require("megatron.training", "trains the model", "train")
    if config.tracking.tensorboard:
        require("tensorboard", "draws the scalars", "train", "set tracking.tensorboard=false")
    if config.tracking.wandb != "disabled":
        require("wandb", "keeps the runs", "train", "set tracking.wandb=disabled")


def check_start(config: RunConfig, vocab_size: int, *, in_rank: bool) -> Start:
    """Finds the checkpoint that the run starts from, and checks that it fits the configuration.

    Imports megatron if there is a checkpoint to compare. `vocab_size` is from `preflight`;
    `in_rank`: this process will train, and so has to prepare Megatron for its device first.

    Raises:
        CheckpointError: `training.load` has no checkpoint, or it is not complete, or does not fit.
        ConfigError: there is nothing to resume.
    """
    from megatron_sparse.megatron import training

    start = find(config)
    if not start.own:
        arguments.check_load(config)
    path = start.checkpoint
    # A release, Megatron's name for a converted checkpoint, is not compared with the run.
    if path is None or path.name == checkpoint_folder.RELEASE or start.is_done(config):
        return start
    training.silence_known_noise()
    if in_rank:
        training.prepare_host(config.cluster.device)
    flags = arguments.passed_flags(config, own=start.own)
    checkpoint_fit.check(dataclasses.replace(config, megatron=flags), vocab_size, path)
    return start


def make_run_dir(
    config: RunConfig, command: str, start: Start | None = None, lock_stack: ExitStack | None = None
) -> Path:
    """Makes the run's folder, or reuses a resumed run's; writes `config.yaml` and `starts.jsonl`.

    Changes nothing while another process trains in the folder, which then has a lock (`run_lock`).

    `start` is from `resume.find`; None: `find` is called here. `lock_stack` receives the folder's
    lock, and releases it when closed; None: the lock is released on return.

    Returns:
        The folder, absolute. The folder of an earlier run that is not resumed is now `NAME.1`, ...

    Raises:
        CheckpointError: the checkpoint of `training.load` is not complete.
        ConfigError: there is nothing to resume, the folder holds something else, or another process
            trains in it.
    """
    start = find(config) if start is None else start
    run_dir = run_folder(config)
    try:
        with ExitStack() as locks:
            if not start.own:
                _check_is_run(run_dir)
                run_dir.mkdir(parents=True, exist_ok=True)
            # Before anything is moved: another process may be starting a run in this folder.
            locks.enter_context(locked(run_dir))
            start.repair()
            # The lock file moves with an earlier run's folder, so the new folder gets another lock.
            if not start.own and _move_aside(run_dir):
                run_dir.mkdir(exist_ok=True)
                locks.enter_context(locked(run_dir))
            composition.save(config, run_dir / CONFIG_FILE, command)
            provenance.record_start(run_dir, command)
            if lock_stack is not None:
                lock_stack.enter_context(locks.pop_all())  # the caller's stack now keeps the locks
    except OSError as error:
        raise ConfigError(
            "the run's folder cannot be made",
            expected="a folder that can be made and written",
            got=error,
            remedy="choose another runs_dir, or free the disk",
        ) from None
    return run_dir


def _check_is_run(run_dir: Path) -> None:
    """Refuses a path that is a file, or a folder with other contents than a run's or a lock's."""
    if not run_dir.exists() or _is_run(run_dir):
        return
    if not run_dir.is_dir() or any(path.name != LOCK_FILE for path in run_dir.iterdir()):
        raise ConfigError(
            f"{run_dir} is not the folder of a run",
            expected=f"no such folder, an empty one, or one with {CONFIG_FILE} or {BREAKDOWN_FILE}",
            got="something else",
            remedy="choose another name, or remove it",
        )


def _is_run(run_dir: Path) -> bool:
    """Whether a folder is a run's. That of a script with `install` has no `config.yaml`."""
    return any((run_dir / name).is_file() for name in (CONFIG_FILE, BREAKDOWN_FILE))


def _move_aside(run_dir: Path) -> bool:
    """Renames an earlier run's folder to `NAME.1`, ...; returns whether there was such a folder."""
    if not _is_run(run_dir):
        return False
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    run_dir.rename(aside)
    print(f"the earlier run of this name is now {aside.name}")
    return True


def rank_environment(config: RunConfig) -> dict[str, str]:
    """The environment variables that each rank needs; `cluster.device` must be decided.

    Variables that the user has set keep their values, but a CPU run overrides two of them. Under
    torchrun `OMP_NUM_THREADS=1` does not count as the user's, because torchrun sets it by default.
    """
    variables = {"OMP_NUM_THREADS": "1"}
    if (
        config.training.tensor_parallel > 1
        or (config.megatron.get("context_parallel_size") or 1) > 1
    ):
        # Before Blackwell, Megatron requires 1 here, so that kernels run in the order of their
        # launches. It is not set without need: 1 makes buckets wait for the backward pass.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    variables |= config.cluster.env
    user_set = dict(os.environ)
    if "TORCHELASTIC_RUN_ID" in user_set and user_set.get("OMP_NUM_THREADS") == "1":
        del user_set["OMP_NUM_THREADS"]  # most likely torchrun's, so `cluster.env` counts
    variables |= {name: user_set[name] for name in variables if name in user_set}
    if config.cluster.device == "cpu":
        # Compiling Megatron's fusions takes half a minute at every start and gains nothing here.
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    return variables | package_path()


def describe(config: RunConfig, run_dir: Path, start: Start | None = None) -> str:
    """The lines that a run prints at its start: ranks, length, gradients, and the run's folder.

    If they apply, also lines on how `scheme.name=auto` chooses, on compilation, and on `start`.
    """
    from megatron_sparse.collectives import AUTO
    from megatron_sparse.cuda_ext import compiles_first

    training, cluster = config.training, config.cluster
    parts, backend = (["cpu", "cuda"], "NCCL") if cluster.device == "cuda" else (["cpu"], "gloo")
    needs_codecs = config.plugin and config.compression.enabled
    is_auto = config.plugin and config.scheme.name == AUTO
    lines = (
        f"{config.name}: {cluster.world_size} ranks on {cluster.device} ({backend}), "
        f"{training.precision}",
        f"{training.iterations} iterations of {config.global_batch_size} x "
        f"{config.model.seq_length} tokens, {_synchronisation(config)}",
        basis(config.sparse) if is_auto else "",
        compiles_first(*parts) if needs_codecs else "",
        str(run_dir),
        resumed(config, start) if start is not None else "",
    )
    return "\n  ".join(line for line in lines if line)


def _synchronisation(config: RunConfig) -> str:
    """How gradients are synchronised: the end of a line of `describe`."""
    from megatron_sparse.collectives import SCHEMES

    compression, scheme = config.compression, config.scheme.name
    if not config.plugin:
        return "plain Megatron, without the plugin"
    if not compression.enabled:
        return "compression off"
    # A scheme that `takes_all` sends every element: it has no density. `auto` is not in `SCHEMES`.
    if scheme in SCHEMES and SCHEMES[scheme].takes_all:
        return f"scheme {scheme}"
    if compression.level == NODE and config.cluster.nodes == 1:
        return "compression.level=node on one node: nothing is compressed"
    if compression.density == "auto":
        budget = compression.loss_budget
        return f"preset of {', '.join(allowed(budget))} by trials (loss_budget {budget:g} %)"
    resolved = config.sparse.compression  # with numbers for a null in the schedule
    first, bits = resolved.warmup + resolved.ramp + 1, resolved.given_value_bits
    return (
        f"scheme {scheme}, density {compression.given_density:.4g}"
        + ("" if bits is None else f" in {bits} bits")
        + f" from iteration {first} on"
        + (", which is after the end of the run" if first > config.training.iterations else "")
    )
