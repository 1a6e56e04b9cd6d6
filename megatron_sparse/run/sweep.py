"""The runs of a sweep: the name and the outcome of each.

`train --multirun` makes a run of every combination, one after the other or, with a launcher of
Hydra's, as jobs of Slurm. A run that fails does not end the others: each leaves an `outcome.json`
in the sweep's folder, from which the sweep's exit code comes.
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

OUTCOME_FILE = "outcome.json"
MULTIRUN = "multirun"
"""The folder, in the runs' folder, for files that belong to no single run."""


@dataclass(frozen=True)
class RunEnd:
    """How a run of a sweep ended.

    Attributes:
        name: of the run.
        exit_code: of the command, had it been alone.
        error: what went wrong; empty with code 0.
    """

    name: str
    exit_code: int
    error: str

    def write(self, folder: Path, replace: bool = True) -> None:
        """Writes it into a folder of the sweep.

        Args:
            folder: of one run; made if missing.
            replace: False: an outcome that another rank has written there stays.

        Raises:
            OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        mode = "w" if replace else "x"
        with suppress(FileExistsError), (folder / OUTCOME_FILE).open(mode) as file:
            file.write(json.dumps(asdict(self)) + "\n")


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them.

    Raises:
        ConfigError: one cannot be read.
    """
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise config_error(error) from None


def swept_keys(overrides: Sequence[Override]) -> list[str]:
    """The keys among overrides that have several values.

    Example:
        >>> swept_keys(parsed(["scheme=dense,direct", "name=a", "compression.leak=choice(0.9,1)"]))
        ['scheme', 'compression.leak']
    """
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


def run_name(name: str, swept: Sequence[str], task_overrides: Sequence[str]) -> str:
    """The name of one run of a sweep, so that no two runs share a folder.

    Args:
        name: that of the configuration.
        swept: from `swept_keys`. If `name` is among them, each run has a name of its own already,
            and nothing is added.
        task_overrides: of this run, with one value each.

    Example:
        >>> run_name("run", ["scheme", "compression.leak"], ["scheme=direct", "compression.leak=1"])
        'run_scheme-direct_leak-1'
    """
    if "name" in swept:
        return name
    parts = [name]
    for override in parsed(task_overrides):
        if override.key_or_group in swept:
            # `composition` spells `scheme=NAME` as `scheme.name=NAME`; `name` would say too little.
            _, _, key = override.key_or_group.removesuffix(".name").rpartition(".")
            # The name becomes a folder: no spaces, slashes, brackets or quotes; -1 is not 1.
            text = re.sub("^-", "minus", str(override.get_value_element_as_str()))
            value = re.sub(r"[^A-Za-z0-9.]+", "-", text)
            parts.append(f"{key}-{value.strip('-')}")
    return "_".join(parts)


def check(folder: Path) -> None:
    """Checks the outcomes of all runs of a sweep.

    Raises:
        SweepError: names the runs that failed.
    """
    ended = outcomes(folder)
    failed = [outcome for outcome in ended if outcome.exit_code]
    if failed:
        names = "\n            ".join(
            f"{outcome.name}: {outcome.error.splitlines()[0]}" for outcome in failed
        )
        raise SweepError(
            f"{len(failed)} of {len(ended)} runs of the sweep failed",
            expected="exit code 0 of every run",
            got=names,
            remedy="correct what they name, then repeat the command with resume=auto; "
            "megatron-sparse report RUNS_DIR compares the others",
        )


def outcomes(folder: Path) -> list[RunEnd]:
    """The outcomes below a sweep's folder, one for each ended run, in the order of the runs.

    Raises:
        SweepError: one is damaged.
    """
    found = []
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
