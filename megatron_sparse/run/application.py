"""`megatron-sparse train`: the Hydra application.

Hydra reads the command line (overrides, `--multirun`, `--cfg`, `--help`); its errors become
`MegatronSparseError`s (typed errors). With `--multirun` (a sweep), each combination of values is a
run with its own name, and a run that fails does not end the other runs, see `sweep`.

If torchrun or srun starts this command, it runs as every rank at once. An error in the command line
occurs on all of them, so `reported_by_first_rank` lets one rank of each node report it.
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
        arguments: `GROUP=OPTION`, `SECTION.KEY=VALUE`, `megatron.FLAG=VALUE`, and Hydra's flags.

    Raises:
        MegatronSparseError: the configuration or the run is wrong, or runs of a sweep failed.
        SystemExit: with the exit code of a rank that failed; also after Hydra's own flags.
    """
    end_quickly()  # must be called before torch is imported
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

    A typed error is kept, passes through Hydra as `SystemExit`, and is raised again after it: Hydra
    would add its own lines to any other exception.

    Raises:
        MegatronSparseError: the configuration or the run is wrong.
        SystemExit: with the exit code of a rank that failed.
    """
    kept_errors: list[MegatronSparseError] = []

    def run(composed: DictConfig) -> None:
        """Hydra calls this with the composed configuration. Trains, and exits if that fails."""
        try:
            with reported_by_first_rank():
                config = composition.from_hydra(composed)
            code = launch.run(config, command)
        except MegatronSparseError as error:
            kept_errors.append(error)
            code = error.exit_code
        if code:
            sys.exit(code)

    try:
        with reported_by_first_rank():
            _hydra(run, overrides)
    except SystemExit:
        if kept_errors:
            raise kept_errors[0] from None
        raise


def _train_each(overrides: Sequence[str], command: str) -> None:
    """Trains the runs of a sweep, after the configurations of all runs have been checked.

    Runs of the user's own configuration files (`--config-dir`) are checked only when they start.
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
    # Hydra's flags start with a dash; the other words are overrides.
    with_values = [text for text in overrides if "=" in text and not text.startswith("-")]
    parsed = sweep.parsed(with_values)
    _check_secrets(with_values)
    if _OWN_CONFIGS.isdisjoint(text.partition("=")[0] for text in overrides):
        check_each_run(parsed)
    folder = _sweep_folder(parsed)
    quoted_folder = str(folder).replace("'", "\\'")
    # Slurm's jobs inherit the environment: they then import the same package as this process.
    os.environ.update(package_path())
    swept = sweep.swept_keys(parsed)

    def run(composed: DictConfig) -> None:
        """Hydra calls this with the configuration of each combination of values."""
        _run_of_sweep(composed, command, swept)

    try:
        _hydra(run, [*overrides, f"hydra.sweep.dir='{quoted_folder}'"])
    except OSError as error:
        if folder.is_dir():
            raise  # the folder was made, so the error is another one
        raise ConfigError(
            "the sweep's folder cannot be made",
            expected="a folder that can be made and written",
            got=error,
            remedy="choose another runs_dir, or free the disk",
        ) from None
    if folder.is_dir():  # not after --cfg or --help
        sweep.check(folder)


def check_flags(arguments: Sequence[str]) -> None:
    """Refuses flags that Hydra does not have, and more than one of the flags in `_MODES`.

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
            remedy="give one of these flags only",
        )


def _no_flag(flag: str) -> ConfigError:
    """The error for an unknown flag; suggests the flag, or else the key, of similar spelling."""
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
    """Trains one run of a sweep, and writes its outcome (`sweep.RunEnd`).

    As a Slurm job this is called on every rank of the run. A failed run prints its error, because
    nothing else in the job does, and returns, so that the other runs go on. Only a signal to the
    process that starts the runs one after the other ends the sweep.
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
    except SystemExit as error:  # another rank reports the error
        code, problem = int(error.code or 0), _OTHER_RANK
    # Rank 0 writes the outcome. If only another rank knows the reason, that rank overwrites it.
    has_reason = code != 0 and problem != _OTHER_RANK
    if has_reason or os.environ.get("RANK", "0") == "0":
        outcome = sweep.RunEnd(name, code, problem)
        outcome.write(Path(job.runtime.output_dir), replace=has_reason or code == 0)
    by_signal = code in {128 + number for number in ENDING}
    if by_signal and job.runtime.choices["hydra/launcher"] == "basic":
        sys.exit(code)  # this process starts all runs, so the signal was for the sweep


def _check_secrets(overrides: Sequence[str]) -> None:
    """Refuses secrets in a sweep's overrides, because Hydra writes overrides into its own files.

    Raises:
        ConfigError: an override has a secret in it.
    """
    for text in overrides:
        key, word = text.partition("=")[0].lstrip("+~"), shlex.quote(text)
        # `redact_command` hides values with a secret's key name or form, and each variable of
        # `cluster.env`, as in cluster.env={NAME:VALUE}, that is not on the allow-list.
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
    """Composes every run of a sweep, so that a wrong value is reported before any run trains.

    Raises:
        ConfigError: values are refused, or two runs would have one folder.
    """
    choices: dict[str, list[str]] = {}  # key -> `key=value` for each of its values
    for override in overrides:
        key = override.get_key_element()
        if override.key_or_group.startswith("hydra"):  # about the sweep, not a key of a run
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
    refused: dict[str, MegatronSparseError] = {}  # error text -> error: runs may share a mistake
    swept, folders = sweep.swept_keys(overrides), set[Path]()
    for run_overrides in itertools.product(*choices.values()):
        try:
            config = composition.compose(run_overrides)
            folder = Path(config.runs_dir, sweep.run_name(config.name, swept, run_overrides))
            if folder in folders:
                raise ConfigError(
                    f"several runs of the sweep would have the folder {folder}",
                    expected="a different name for each run",
                    got=" ".join(run_overrides),
                    remedy="start them one by one, each with another name=",
                )
            folders.add(folder)
        except MegatronSparseError as error:
            refused.setdefault(str(error), error)
    raise_together("values of the sweep are refused", list(refused.values()))


def _sweep_folder(overrides: Sequence[Override]) -> Path:
    """The folder for the outcomes of the sweep's runs: RUNS_DIR/multirun/TIME.

    Hydra needs it before it composes a run, so `runs_dir` is read from the overrides.
    """
    runs_dir = RunConfig.runs_dir
    for override in overrides:
        if override.key_or_group == "runs_dir" and not override.is_sweep_override():
            runs_dir = str(override.value())
    return Path(runs_dir) / sweep.MULTIRUN / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"


def _hydra(task: Callable[[DictConfig], None], overrides: Sequence[str]) -> None:
    """Lets Hydra compose a configuration from the overrides and call `task` with it.

    Raises:
        ConfigError: Hydra refuses the overrides.
        SweepError: a Slurm job of a sweep ended without a result.
    """
    application = hydra.main(
        config_path=f"pkg://{composition.CONFIG_MODULE}",
        config_name=composition.CONFIG_NAME,
        version_base=None,
    )(task)
    # Hydra reads its command line from sys.argv. Without HYDRA_FULL_ERROR it prints errors and
    # exits instead of raising them.
    argv, sys.argv = sys.argv, ["megatron-sparse train", *overrides]
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}), warnings.catch_warnings():
            # Our hydra/launcher file has the name of submitit's schema, without using the schema.
            warnings.filterwarnings("ignore", message="(?s).*validated against ConfigStore schema")
            application()
    except composition.COMPOSITION_ERRORS as error:
        raise composition.config_error(error) from None
    except Exception as error:
        # submitit, Hydra's Slurm launcher, may not be installed: find its errors by module name.
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
