"""`megatron-sparse train`: the Hydra application.

Hydra reads the command line (overrides, `--multirun`, `--cfg`, `--help`); its errors become typed
errors like all others. With `--multirun` each run gets a name of its own, and a run that fails does
not end the others, see `sweep`.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig

from megatron_sparse.config.redaction import redact_command, redact_text
from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import ConfigError, MegatronSparseError, SweepError, raise_together
from megatron_sparse.extras import require
from megatron_sparse.run import composition, launch, sweep
from megatron_sparse.run.interrupt import ENDING, end_quickly, reported_by_first_rank
from megatron_sparse.run.launchers import environment, slurm_ranks
from megatron_sparse.run.local_ranks import package_path

SUBMITIT = "hydra_plugins.hydra_submitit_launcher"
_MODES = (("--run", "-r"), ("--multirun", "-m"), ("--cfg", "-c"), ("--shell-completion", "-sc"))
"""Hydra's flags of which one command line has one at most, each in its two spellings."""
_OWN_CONFIGS = {"--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"}
"""Hydra's flags for files of the user's own, whose runs are not checked before a sweep."""
_FLAGS = (
    *itertools.chain(*_MODES),
    *("--help", "-h", "--hydra-help", "--version"),
    *("--resolve", "--package", "-p", *sorted(_OWN_CONFIGS)),
)
"""Hydra's flags, less --experimental-rerun, which unpickles a file, and --info."""
_OTHER_RANK = "see the error of another rank"


def train(arguments: Sequence[str]) -> None:
    """Composes a configuration from the command line and runs it; see `composition.with_preset`.

    Args:
        arguments: Hydra's: `GROUP=OPTION`, `SECTION.KEY=VALUE`, `megatron.FLAG=VALUE`, its flags.

    Raises:
        MegatronSparseError: the configuration or the run is wrong, or runs of a sweep failed.
        SystemExit: with the exit code of a rank that failed; also after Hydra's own flags.
    """
    # Spares the exit a long search for cycles. Comes before torch is imported.
    end_quickly()
    composition.register_schema()
    command = shlex.join(["megatron-sparse", "train", *arguments])
    with reported_by_first_rank():
        check_flags(arguments)
        overrides = composition.hydra_overrides(composition.with_preset(arguments))
    if {"--multirun", "-m"} & set(arguments):
        _train_each(overrides, command)
    else:
        _train_one(overrides, command)


def _train_one(overrides: Sequence[str], command: str) -> None:
    """Trains the one run that the overrides compose.

    A typed error leaves Hydra as an exit, because Hydra adds lines of its own to any other
    exception; it is raised again behind Hydra.

    Raises:
        MegatronSparseError: the configuration or the run is wrong.
        SystemExit: with the exit code of a rank that failed.
    """
    refused: list[MegatronSparseError] = []

    def run(composed: DictConfig) -> None:
        """What Hydra calls with the composed configuration: trains, and exits if that failed.

        Keeps a typed error in `refused`, which is raised again behind Hydra. An error of the
        composition is every rank's, so only the first rank of each node keeps it.
        """
        try:
            with reported_by_first_rank():
                config = composition.from_hydra(composed)
            code = launch.run(config, command)
        except MegatronSparseError as error:
            refused.append(error)
            code = error.exit_code
        if code:
            sys.exit(code)

    try:
        with reported_by_first_rank():
            _hydra(run, overrides)
    except SystemExit:
        if refused:
            raise refused[0] from None
        raise


def _train_each(overrides: Sequence[str], command: str) -> None:
    """Trains the runs of a sweep, after every one of their configurations has been checked.

    Those that come from files of the user's own are checked when their run begins.
    """
    with reported_by_first_rank():
        if "RANK" in os.environ or slurm_ranks(os.environ):
            raise ConfigError(
                "ranks cannot start a sweep: their processes train one run",
                expected="one process, or hydra/launcher=submitit_slurm",
                got="a rank of srun or torchrun",
                remedy="leave srun or torchrun out, or start the runs one by one",
            )
    if any("hydra/launcher=submitit" in text for text in overrides):
        require(SUBMITIT, "hands the runs to Slurm", "slurm")
    with_values = [text for text in overrides if "=" in text and not text.startswith("-")]
    parsed = sweep.parsed(with_values)
    _check_secrets(with_values)
    if _OWN_CONFIGS.isdisjoint(text.partition("=")[0] for text in overrides):
        check_each_run(parsed)
    folder = _sweep_folder(parsed)
    quoted = str(folder).replace("'", "\\'")
    # A job of Slurm imports the package from the same place as this process.
    os.environ.update(package_path())
    swept = sweep.swept_keys(parsed)

    def run(composed: DictConfig) -> None:
        """What Hydra calls with each combination."""
        _run_of_sweep(composed, command, swept)

    try:
        _hydra(run, [*overrides, f"hydra.sweep.dir='{quoted}'"])
    except OSError as error:
        if folder.is_dir():
            raise
        raise ConfigError(
            "the sweep's folder cannot be made",
            expected="a folder that can be made and written",
            got=error,
            remedy="choose another runs_dir, or free the disk",
        ) from None
    if folder.is_dir():  # not after --cfg or --help
        sweep.check(folder)


def check_flags(arguments: Sequence[str]) -> None:
    """Refuses flags that Hydra does not have, and two that exclude each other.

    Raises:
        ConfigError: names the key that the user most likely means.
    """
    flags = [text.partition("=")[0] for text in arguments if text.startswith("-")]
    for flag in flags:
        if flag not in _FLAGS:
            raise _no_flag(flag)
    modes = [mode for mode in _MODES if not set(mode).isdisjoint(flags)]
    if len(modes) > 1:
        raise ConfigError(
            "these flags exclude each other",
            expected="one of " + ", ".join(flag for flag, _ in _MODES),
            got=" ".join(flags),
            remedy="leave the others out",
        )


def _no_flag(flag: str) -> ConfigError:
    """The error for an unknown flag: names the flag, or else the key, that is nearest to it."""
    word = flag.strip("-")
    near = difflib.get_close_matches(word, [each.strip("-") for each in _FLAGS], 1)
    if near:
        remedy = f"did you mean --{near[0]}?"
    elif key := composition.closest_key(word.replace("-", "_")):
        remedy = f"did you mean {key}=VALUE?"
    else:
        remedy = "write keys without dashes; megatron-sparse train --help shows them"
    return ConfigError(
        f"train has no flag {flag}",
        expected="a key and its value, as compression.density=0.01, or a flag of Hydra's, such as "
        "--multirun or --cfg",
        got=flag,
        remedy=remedy,
    )


def _run_of_sweep(composed: DictConfig, command: str, swept: Sequence[str]) -> None:
    """One run of a sweep; called on every rank of it if a launcher of Hydra's started the ranks.

    Returns even if the run fails, so that the others go on; a signal to the process that starts
    them one by one ends the sweep. Prints the error itself, because in a job of Slurm nothing else
    would.
    """
    job = HydraConfig.get()
    assert job.mode == RunMode.MULTIRUN
    name, code, problem = str(composed.name), 0, ""
    try:
        name = sweep.run_name(name, swept, list(job.overrides.task))
        config: RunConfig = dataclasses.replace(composition.from_hydra(composed), name=name)
        code = launch.run(config, command)
        if code:
            problem = _OTHER_RANK if "RANK" in os.environ else f"a rank ended with code {code}"
    except MegatronSparseError as error:
        code, problem = error.exit_code, redact_text(str(error))
        print(f"error: {problem}", file=sys.stderr, flush=True)
    except SystemExit as error:
        code, problem = int(error.code or 0), _OTHER_RANK
    # Of several ranks, one that knows the reason overwrites what rank 0 has written without it.
    has_reason = code != 0 and problem != _OTHER_RANK
    if has_reason or os.environ.get("RANK", "0") == "0":
        outcome = sweep.RunEnd(name, code, problem)
        outcome.write(Path(job.runtime.output_dir), replace=has_reason or code == 0)
    stopped = code in {128 + number for number in ENDING}
    if stopped and job.runtime.choices["hydra/launcher"] == "basic":
        sys.exit(code)  # the signal was for the sweep: no other run starts


def _check_secrets(overrides: Sequence[str]) -> None:
    """Refuses secrets in a sweep's overrides: Hydra writes those into files of its own.

    Raises:
        ConfigError: an override has a secret in it.
    """
    for text in overrides:
        key, word = text.partition("=")[0].lstrip("+~"), shlex.quote(text)
        # By its name, or inside the value, as in cluster.env={NAME:VALUE}, or by its form.
        if redact_command(word) != word:
            name = key.rpartition(".")[2]
            variable = "the variable" if name == "env" else name
            raise ConfigError(
                f"{key} cannot be an override of a sweep",
                expected="a key without a secret: Hydra writes a sweep's overrides into its files",
                got=f"{key}=***",
                remedy=f"export {variable} in the environment instead",
            )


def check_each_run(overrides: Sequence[Override]) -> None:
    """Composes every run of a sweep, so that a wrong value is told before the first one trains.

    Args:
        overrides: of the sweep.

    Raises:
        ConfigError: values are refused, or two runs would have one folder.
    """
    choices: dict[str, list[str]] = {}
    """For each key, as `key=value`, what the runs set it to."""
    for override in overrides:
        key = override.get_key_element()
        if override.key_or_group.startswith("hydra"):
            continue
        if override.is_discrete_sweep():
            values = list(override.sweep_string_iterator())
        elif override.is_sweep_override():
            raise ConfigError(
                f"{key} has no list of values",
                expected="values such as 0.1,0.2 or range(1,4)",
                got=str(override.input_line),
                remedy="write the values of the runs",
            )
        else:
            values = [override.get_value_element_as_str()]
        choices[key] = [f"{key}={value}" for value in values]
    refused: dict[str, MegatronSparseError] = {}  # by text: many runs share a mistake
    swept, folders = sweep.swept_keys(overrides), set[Path]()
    for run in itertools.product(*choices.values()):
        try:
            config = composition.compose(run)
            folder = Path(config.runs_dir, sweep.run_name(config.name, swept, run))
            if folder in folders:
                raise ConfigError(
                    f"several runs of the sweep would have the folder {folder}",
                    expected="a name of its own for each",
                    got=" ".join(run),
                    remedy="start them one by one, each with another name=",
                )
            folders.add(folder)
        except MegatronSparseError as error:
            refused.setdefault(str(error), error)
    raise_together("values of the sweep are refused", list(refused.values()))


def _sweep_folder(overrides: Sequence[Override]) -> Path:
    """The folder of the sweep itself, beside its runs': RUNS_DIR/multirun/TIME."""
    runs_dir = RunConfig.runs_dir
    for override in overrides:
        if override.key_or_group == "runs_dir" and not override.is_sweep_override():
            runs_dir = str(override.value())
    return Path(runs_dir) / sweep.MULTIRUN / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"


def _hydra(task: Callable[[DictConfig], None], overrides: Sequence[str]) -> None:
    """Lets Hydra compose a configuration from the overrides and call `task` with it.

    Raises:
        ConfigError: Hydra refuses them.
        SweepError: a job of a launcher of Hydra's ended without a result.
    """
    application = hydra.main(
        config_path=f"pkg://{composition.CONFIG_MODULE}",
        config_name=composition.CONFIG_NAME,
        version_base=None,
    )(task)
    # Hydra reads its command line from sys.argv; without the variable it prints errors and exits.
    argv, sys.argv = sys.argv, ["megatron-sparse train", *overrides]
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}), warnings.catch_warnings():
            # Our launcher's file has the name of the plugin's schema, but does not use it.
            warnings.filterwarnings("ignore", message="(?s).*validated against ConfigStore schema")
            application()
    except composition.COMPOSITION_ERRORS as error:
        raise composition.config_error(error) from None
    except Exception as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        raise SweepError(
            "a job of the sweep ended without a result",
            expected="every job to end by itself",
            got=str(error).strip().splitlines()[0],
            remedy="see its files in RUNS_DIR/multirun/TIME/jobs; repeat the command with "
            "resume=auto",
        ) from None
    finally:
        sys.argv = argv
