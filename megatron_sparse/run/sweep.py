"""The runs of a sweep: the name and the outcome of each, and one table of all.

`train --multirun` makes a run of every combination, one after the other or, with a launcher of
Hydra's, as jobs of Slurm. A run that fails does not end the others: each leaves an `outcome.json`
in the sweep's folder, from which the sweep's exit code and the table come.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_sparse.config.described import flat
from megatron_sparse.errors import ConfigError, SweepError, writing
from megatron_sparse.run import composition
from megatron_sparse.run.preparation import CONFIG_FILE
from megatron_sparse.run.rows import write_rows
from megatron_sparse.telemetry import load_summary
from megatron_sparse.telemetry.quantities import QUANTITIES
from megatron_sparse.telemetry.run import SUMMARY_FILE

OUTCOME_FILE = "outcome.json"
MULTIRUN = "multirun"
"""The folder, in the runs' folder, for files that belong to no single run."""
_SAME_FOR_ALL = re.compile(r"name|runs_dir|cluster\.env\..*")
_RESULTS = ("loss_first", "loss_last", "wire_ratio", "iteration_ms", "exposed_share")
"""Of a run's `summary.json`, as its final table and `report` show them."""
_RUN_COLUMNS = 24
"""Characters of a run in the table, unless a name is longer."""


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


def swept_keys(overrides: Sequence[str]) -> list[str]:
    """The keys among overrides that have several values.

    Example:
        >>> swept_keys(["scheme=dense,direct", "name=a", "compression.leak=choice(0.9,1)"])
        ['scheme', 'compression.leak']
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [override.key_or_group for override in parsed if override.is_sweep_override()]


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
    for override in OverridesParser.create().parse_overrides(list(task_overrides)):
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
    failed = [outcome for outcome in outcomes(folder) if outcome.exit_code]
    if failed:
        names = "\n            ".join(
            f"{outcome.name}: {outcome.error.splitlines()[0]}" for outcome in failed
        )
        raise SweepError(
            f"{len(failed)} of {len(outcomes(folder))} runs of the sweep failed",
            expected="exit code 0 of every run",
            got=names,
            remedy="correct what they name, then repeat the command with resume=auto; "
            "megatron-sparse sweep shows all runs",
        )


def outcomes(folder: Path) -> list[RunEnd]:
    """The outcomes below a folder, one for each ended run, in the order of writing.

    Raises:
        SweepError: one is damaged.
    """
    found = []
    for path in sorted(folder.rglob(OUTCOME_FILE), key=lambda path: path.stat().st_mtime):
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


def rows(folder: Path) -> list[dict[str, Any]]:
    """A row for each run in a folder, and for each that failed before it had one of its own.

    Columns: `name`, `state`, `iterations` (done), every key in which the runs' configurations
    differ, the results of `summary.json`, `error`.

    Raises:
        ConfigError: there are no runs, or a run's configuration or summary is damaged.
        SweepError: an outcome is damaged.
    """
    ended = {outcome.name: outcome for outcome in outcomes(folder)}
    configs = {
        path.parent.name: flat(asdict(composition.load(path)))
        for path in sorted(folder.glob(f"*/{CONFIG_FILE}"))
    }
    if not configs and not ended:
        raise ConfigError(
            f"there are no runs in {folder}",
            expected=f"folders with {CONFIG_FILE}, as train --multirun runs_dir=... makes them",
            got="none",
            remedy="give the runs_dir of the sweep",
        )
    every = {key for config in configs.values() for key in config}
    differing = sorted(
        key
        for key in every
        if not _SAME_FOR_ALL.fullmatch(key)
        and len({repr(config.get(key)) for config in configs.values()}) > 1
    )
    found = []
    for name in sorted(configs.keys() | ended.keys()):
        config, outcome = configs.get(name, {}), ended.get(name)
        summary = _summary(folder / name)
        wanted = config.get("training.iterations")
        found.append(
            {
                "name": name,
                "state": _state(outcome, summary.get("iterations"), wanted),
                "iterations": summary.get("iterations"),
            }
            | {key: config.get(key) for key in differing}
            | {key: QUANTITIES[key].of(summary) if summary else None for key in _RESULTS}
            | {"error": outcome.error if outcome else ""}
        )
    return found


def _state(outcome: RunEnd | None, done: int | None, wanted: int | None) -> str:
    if outcome is not None and outcome.exit_code:
        return "failed"
    return "finished" if done is not None and done == wanted else "unfinished"


def _summary(run_dir: Path) -> Mapping[str, Any]:
    """The run's summary; empty if the run has not written one yet."""
    return load_summary(run_dir) if (run_dir / SUMMARY_FILE).is_file() else {}


def report(folder: Path, csv_path: Path | None, json_path: Path | None) -> None:
    """Prints the table of a sweep and writes it.

    Args:
        folder: the `runs_dir` of the sweep.
        csv_path: for the table; None writes none.
        json_path: for one JSON object a line; None writes none.

    Raises:
        ConfigError: there are no runs, a file cannot be written, or one of a run is damaged.
        SweepError: an outcome is damaged.
    """
    found = rows(folder)
    write_rows(json_path, found)
    if csv_path is not None:
        with writing("the table"), csv_path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]))
            writer.writeheader()
            writer.writerows(found)
    console = Console(highlight=False)
    console.print(f"{len(found)} runs in {folder}", markup=False)
    for table in _tables(found, console.width):
        console.print(table)


def _tables(found: Sequence[Mapping[str, Any]], width: int) -> Iterator[Table]:
    """Tables of as many runs side by side as fit, with a row for each setting and result.

    Rows that are empty in every run are left out.
    """
    shown = [key for key in found[0] if any(row[key] not in (None, "") for row in found)]
    columns = max(_RUN_COLUMNS, *(len(row["name"]) for row in found))
    each = max(1, (width - max(map(len, shown))) // (columns + 2))
    for first in range(0, len(found), each):
        some = found[first : first + each]
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        for _ in some:
            table.add_column(overflow="fold", max_width=columns)
        for key in shown:
            style = "bold" if key == "name" else None
            table.add_row(key, *(escape(_cell(key, row[key])) for row in some), style=style)
        yield table


def _cell(key: str, value: object) -> str:
    if value is None:
        return "-"
    if key in QUANTITIES:
        return QUANTITIES[key].text(value)
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.splitlines()[0] if text else ""
