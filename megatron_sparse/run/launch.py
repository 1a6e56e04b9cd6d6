"""Starts a training run and its ranks.

Without RANK in the environment this process is the launcher: it prepares the run (`preparation`)
and starts the ranks of this machine with torch's elastic agent. With RANK, torchrun or srun has
started this process, and it is a rank itself. Either way every rank ends up in
`megatron.training.train`.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import ConfigError, MegatronSparseError
from megatron_sparse.run import interrupt, launchers, preparation, resume, worker
from megatron_sparse.run.full_disk import naming_full_disk, probe
from megatron_sparse.run.preparation import CONFIG_FILE
from megatron_sparse.run.rank_log import log_path, read_report

RANK = "megatron_sparse.run.rank"
_TAIL_LINES = 30
MANY_FILES = 65536
"""Open files: one of two ranks of the smallest model has 170; a rank of a large job thousands."""


def run(config: RunConfig, command: str) -> int:
    """Trains the run, as its launcher or as one of its ranks.

    Values of `config` may still be `auto`. `command` is written into the run's `config.yaml`.

    Returns:
        0, the exit code of the rank that failed first, or 128 plus the number of a signal.

    Raises:
        MegatronSparseError: the run is refused before its ranks start, or this rank fails.
    """
    with interrupt.reported_by_first_rank():
        raise_file_limit()
        os.environ.update(launchers.slurm_ranks(os.environ))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return worker.run_started(config, command)
    return _launch(config, command)


def raise_file_limit() -> None:
    """Raises the limit of open files, which ranks inherit, to `MANY_FILES` or the system's limit.

    A rank opens a connection to every other rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:  # it is -1, which would compare as the smallest limit
        return
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _launch(config: RunConfig, command: str) -> int:
    """Checks the run, makes its folder, starts the ranks and waits; returns the exit code."""
    if config.cluster.nodes > 1:
        raise ConfigError(
            "a run on several nodes is not started from one process",
            expected="one process for each rank, started by srun or torchrun",
            got=f"cluster.nodes={config.cluster.nodes} and no RANK in the environment",
            remedy="put srun before the command, or set cluster.nodes=1",
        )
    with ExitStack() as lock_stack:  # `begin` puts the lock of the run's folder on it
        begun = preparation.begin(preparation.decide(config), command, lock_stack, in_rank=False)
        if begun is None:  # the checkpoint is the run's last one
            return 0
        config, run_dir = begun
        variables = preparation.rank_environment(config) | {interrupt.LAUNCHER: str(os.getpid())}
        # Restored afterwards: a sweep trains several runs in this process.
        with launchers.environment(variables):
            code = _run_agent(config, run_dir)
    # Says how to resume: always after a signal, and after a failure if there is a checkpoint; not
    # after the exit code of refused settings, which would be refused again.
    may_succeed = code not in (0, MegatronSparseError.exit_code)
    if code > 128 or (may_succeed and resume.newest(config, run_dir) is not None):
        print(resume.go_on(config, run_dir, command), file=sys.stderr, flush=True)
    return code


def _run_agent(config: RunConfig, run_dir: Path) -> int:
    """Starts the ranks with torch's agent and waits for them; returns the exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs = log_path(run_dir, 0).parent
    saves = config.training.save_signal == interrupt.SIGINT
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.cluster.ranks_per_node,
        run_id=config.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        shutdown_timeout=interrupt.SAVE_S if saves else None,
    )
    # Drops the agent's log: a page about its own source lines for each failed rank.
    agent_log = logging.getLogger("torch.distributed.elastic")
    agent_log.propagate = False
    agent_log.addHandler(logging.NullHandler())
    # `naming_full_disk`: the agent writes its files to the run's disk, too.
    with _signal_handlers_restored(), naming_full_disk(run_dir):
        logs.mkdir(exist_ok=True)
        try:
            with TemporaryDirectory(prefix="reports_", dir=logs) as folder, interrupt.saving(saves):
                settings.logs_specs = DefaultLogsSpecs(log_dir=folder)
                start = elastic_launch(settings, sys.executable)
                start("-u", "-m", RANK, str(run_dir / CONFIG_FILE))
        except ChildFailedError as error:
            return _report(*error.get_first_failure(), run_dir)
        except SignalException as error:
            print(f"stopped by {error.sigval.name}; see {logs}", file=sys.stderr)
            return 128 + error.sigval
    return 0


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restores this process's signal handlers after the block; torch's agent replaces them."""
    before = {number: signal.getsignal(number) for number in interrupt.ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: installed by C code, so that Python cannot set it
                signal.signal(number, handler)


def _report(rank: int, failure: Any, run_dir: Path) -> int:
    """Prints why the rank that failed first did, and returns the exit code for the launcher.

    `failure`: torch's `ProcessFailure`; its exit code is negative if a signal killed the rank.
    """
    # A rank that a signal killed has written no report: the agent has a message instead.
    message, typed = read_report(failure.error_file_data) or (failure.message, False)
    if typed:
        print(f"error: {message}", file=sys.stderr)
        return failure.exitcode
    full = probe(run_dir)
    if full is not None:
        # The rank may have failed for that, and been unable to write a report.
        print(f"error: {full}", file=sys.stderr)
        return full.exit_code
    print(f"error: rank {rank} failed: {message}", file=sys.stderr)
    log = log_path(run_dir, rank)
    if log.is_file():
        lines = log.read_text("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        print(f"the end of {log}:", *lines, sep="\n", file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
