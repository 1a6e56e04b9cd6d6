"""The name and the outcome of each run of a sweep.

A sweep is `train --multirun` with several values for some keys. Each combination of values is a
run. Runs start one after the other or, with Hydra's Slurm launcher, as jobs. A run that fails does
not end the sweep: each run leaves an `outcome.json`, and `check` makes the sweep's error of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from megatron_sparse.errors import SweepError
from megatron_sparse.run.composition import config_error
from megatron_sparse.telemetry.lines import write_whole

OUTCOME_FILE = "outcome.json"
MULTIRUN = "multirun"
"""The folder, in the runs' folder, for files that belong to no single run."""


@dataclass(frozen=True)
class RunEnd:
    """How a run of a sweep ended, with the exit code that `train` would have for this run alone.

    `error` says why the run failed; empty with code 0.
    """

    name: str
    exit_code: int
    error: str

    def write(self, folder: Path, replace: bool = True) -> None:
        """Writes the outcome as `outcome.json`.

        `folder`, the run's subfolder in the sweep's, is made if missing. `replace`: whether to
        replace an outcome that another rank of the run has written.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path, text = folder / OUTCOME_FILE, json.dumps(asdict(self)) + "\n"
        if replace:
            with suppress(FileNotFoundError):  # another rank renamed the partial file first
                write_whole(path, text)
            return
        with suppress(FileExistsError), path.open("x") as file:
            file.write(text)


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides with Hydra's parser.

    Raises:
        ConfigError: an override has the wrong syntax.
    """
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise config_error(error) from None


def swept_keys(overrides: Sequence[Override]) -> list[str]:
    """The keys to which the overrides of a sweep give several values.

    Example:
        >>> swept_keys(parsed(["scheme=dense,direct", "name=a", "compression.leak=choice(0.9,1)"]))
        ['scheme', 'compression.leak']
    """
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


def run_name(name: str, swept: Sequence[str], task_overrides: Sequence[str]) -> str:
    """Appends the run's values of the swept keys to `name`, so that no two runs share a folder.

    Args:
        name: the configuration's `name`.
        swept: from `swept_keys`. If `name` is among them, each run has another name already, and
            nothing is appended.
        task_overrides: the overrides of this run, each with one value.

    Example:
        >>> run_name("run", ["scheme", "compression.leak"], ["scheme=direct", "compression.leak=1"])
        'run_scheme-direct_leak-1'
    """
    if "name" in swept:
        return name
    parts = [name]
    for override in parsed(task_overrides):
        if override.key_or_group in swept:
            # `scheme=NAME` has become `scheme.name=NAME`; as a key, `scheme` says more than `name`.
            _, _, key = override.key_or_group.removesuffix(".name").rpartition(".")
            # For a folder's name: no spaces, slashes, brackets or quotes, and -1 differs from 1.
            text = re.sub("^-", "minus", str(override.get_value_element_as_str()))
            value = re.sub(r"[^A-Za-z0-9.]+", "-", text)
            parts.append(f"{key}-{value.strip('-')}")
    return "_".join(parts)


def check(folder: Path) -> None:
    """Raises one error for all failed runs of a sweep, with a line for each run.

    Raises:
        SweepError: a run failed.
    """
    ended = outcomes(folder)
    failed = [outcome for outcome in ended if outcome.exit_code]
    if failed:
        lines = [f"{outcome.name}: {outcome.error.splitlines()[0]}" for outcome in failed]
        raise SweepError(
            f"{len(failed)} of {len(ended)} runs of the sweep failed",
            expected="exit code 0 of every run",
            got="\n            ".join(lines),  # aligned with the first line of `got`
            remedy="correct what they name, then repeat the command with resume=auto; "
            "megatron-sparse report RUNS_DIR compares the others",
        )


def outcomes(folder: Path) -> list[RunEnd]:
    """Reads the outcomes below a sweep's folder, one for each run that has ended, in run order.

    Raises:
        SweepError: a file is damaged.
    """
    found = []
    # The name of a run's folder is its number: as text, 10 would come before 2.
    for path in sorted(folder.rglob(OUTCOME_FILE), key=lambda path: path.parent.name.zfill(6)):
        try:
            found.append(RunEnd(**json.loads(path.read_text("utf-8"))))
        except (TypeError, ValueError) as error:
            raise SweepError(
                f"{path} is damaged",
                expected="a file of train --multirun",
                got=error,
                remedy="remove it; the run's folder has everything else",
            ) from None
    return found
