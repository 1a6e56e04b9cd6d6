"""The data of one run for a report: its folder, read once.

`breakdown.jsonl` has a line for each iteration, `buckets.jsonl` one for each bucket and iteration.
Of the second only the last `WINDOW` iterations are kept in memory. A missing or damaged file that a
report can do without becomes a sentence in the list `gaps`, which the page shows; a folder without
any iteration is an error.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from megatron_sparse.config.described import flat
from megatron_sparse.config.redaction import redact, redact_text
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.plan_state import PLAN_FILE, read_plan
from megatron_sparse.recording import ReadinessRecord
from megatron_sparse.telemetry import load_summary
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.history import Iterations, RunHistory
from megatron_sparse.telemetry.lines import other_version, read_lines
from megatron_sparse.telemetry.quantities import target_density
from megatron_sparse.telemetry.readiness import load_readiness
from megatron_sparse.telemetry.run import BREAKDOWN_FILE, BUCKETS_FILE, FLUSH_EVERY, SUMMARY_FILE

CONFIG_FILE = "config.yaml"
WINDOW = 200
"""Iterations at the end of a run that buckets' medians are taken over."""


@dataclass(frozen=True)
class BucketMedians:
    """One bucket at the end of a run: medians over its last iterations with the last scheme.

    Attributes:
        name: name of the bucket.
        scheme: the scheme that synchronised it last.
        count: number of iterations behind the medians.
        numel: number of elements.
        density: elements sent / `numel`.
        wire_bytes: bytes sent.
        stage_us: stage -> microseconds.
        measured_us: microseconds of all stages together.
        predicted_us: the cost model's `measured_us`; None if no model chose the scheme.
        exposed_us: microseconds that the training thread waited for it; a mean, so that the waits
            for all buckets add up.
    """

    name: str
    scheme: str
    count: int
    numel: int
    density: float
    wire_bytes: int
    stage_us: Mapping[str, float]
    measured_us: float
    predicted_us: float | None
    exposed_us: float


@dataclass(frozen=True)
class RunData:
    """Everything that a report needs of one run.

    Attributes:
        index: position of the run in the report, from 0.
        folder: the folder, as the user wrote it.
        name: name of the run.
        summary: the fields of `summary.json`; for a run that has not ended, the fields that its
            iterations provide.
        iterations: one value for each iteration.
        buckets: medians by bucket name, in launch order.
        plan: rows of `plan.json`, by bucket.
        readiness: bucket -> records of how long each rank waited for the last one.
        command: the command that started the run; empty if unknown.
        config: configuration values by dotted key.
        gaps: sentences about missing data.
    """

    index: int
    folder: Path
    name: str
    summary: Mapping[str, Any]
    iterations: Iterations
    buckets: Mapping[str, BucketMedians]
    plan: Mapping[str, Mapping[str, Any]]
    readiness: Mapping[str, list[ReadinessRecord]]
    command: str
    config: Mapping[str, Any]
    gaps: Sequence[str]

    @property
    def key(self) -> str:
        """A letter for the run, for places too small for its name."""
        return chr(ord("A") + self.index)


def load_run(folder: Path, index: int) -> RunData:
    """Reads the folder of a run, ended or not; `index` is the run's position in the report.

    Raises:
        ConfigError: the folder has no complete iteration of a run, or another version's fields.
    """
    gaps: list[str] = []
    lines, history = load_breakdown(folder, gaps)
    iterations = history.iterations()
    command, config = load_config(folder, gaps)
    summary = _load_summary(folder, history, config, gaps)
    return RunData(
        index=index,
        folder=folder,
        name=str(summary.get("name") or folder.resolve().name),
        summary=summary,
        iterations=iterations,
        buckets=_load_buckets(folder, lines[-1].iteration, gaps),
        plan=_load_plan(folder, gaps),
        readiness=_load_readiness(folder, gaps),
        command=command,
        config=config,
        gaps=gaps,
    )


def load_breakdown(folder: Path, gaps: list[str]) -> tuple[list[IterationBreakdown], RunHistory]:
    """The iterations of a run in order, at least one; and a history with their columns and totals.

    Appends sentences about damaged lines to `gaps`.

    Raises:
        ConfigError: the folder is not a run's, holds no complete iteration, or was written by a
            version whose lines have other fields.
    """
    path, damaged = folder / BREAKDOWN_FILE, []  # `read_lines` appends damaged lines' numbers
    history = RunHistory()
    try:
        lines = [IterationBreakdown(**line) for line in read_lines(path, damaged)]
        for line in lines:
            history.append(line)
    except OSError as error:
        raise ConfigError(
            f"{folder} is not the folder of a run",
            expected=f"a folder with {BREAKDOWN_FILE}, such as runs/quickstart",
            got=f"{path.name}: {error.strerror}",
            remedy="name the folder that training printed; training writes its first lines after "
            f"{FLUSH_EVERY} iterations",
        ) from None
    except (TypeError, ValueError, KeyError) as error:
        raise other_version(path, error) from None
    _note_damaged(path, damaged, gaps)
    if not lines:
        raise ConfigError(
            f"{folder} has no iteration to report",
            expected=f"at least one complete line in {BREAKDOWN_FILE}",
            got=gaps[-1] if damaged else "an empty file",
            remedy=f"train longer; training writes lines every {FLUSH_EVERY} iterations",
        )
    return lines, history


def _note_damaged(path: Path, damaged: list[int], gaps: list[str]) -> None:
    if damaged:
        count, first = len(damaged), damaged[0]
        gaps.append(f"{path.name}: damaged lines are left out: {count}, the first is {first}")


def _load_summary(
    folder: Path, history: RunHistory, config: Mapping[str, Any], gaps: list[str]
) -> Mapping[str, Any]:
    """The fields of `summary.json`, with totals counted anew from the iterations.

    If the file cannot be read, returns totals, name and target density only, and `gaps` gets a
    sentence. The target density is the configuration's `compression.density`, or else the
    file's; for `auto` it is the density that was sent. It is None if all elements were sent.
    """
    found: dict[str, Any] = {}
    if (folder / SUMMARY_FILE).exists():
        try:
            found = load_summary(folder)
        except ConfigError as error:
            gaps.append(f"{SUMMARY_FILE} is damaged: {_one_line(error.got)}")
    else:
        gaps.append(
            f"the run has not ended, or was killed: {SUMMARY_FILE} is missing, and totals cover "
            "the iterations so far"
        )
    totals = history.summary()
    if found and found.get("iterations") != totals["iterations"]:
        gaps.append(
            f"{SUMMARY_FILE} counts other iterations than {BREAKDOWN_FILE}: the run has gone on "
            "since, or lines are damaged"
        )
    configured = config.get("compression.density", found.get("target_density"))
    target = target_density(configured, totals)
    return {"name": config.get("name"), **found, **totals, "target_density": target}


def load_config(folder: Path, gaps: list[str]) -> tuple[str, dict[str, Any]]:
    """Reads `config.yaml`; a missing or damaged file counts as empty, and `gaps` gets a sentence.

    Returns:
        The command that started the run, from the comment in the first line; dotted key -> value.
    """
    path = folder / CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8")
        values: Any = yaml.safe_load(text)
        if not isinstance(values, dict):
            raise ValueError("not the sections of a run")
    except OSError:
        gaps.append(f"{CONFIG_FILE} is missing: the run's configuration is unknown")
        return "", {}
    except (ValueError, yaml.YAMLError) as error:
        gaps.append(f"{CONFIG_FILE} is damaged: {_one_line(error)}")
        return "", {}
    first_line = text.partition("\n")[0]
    command = redact_text(first_line[1:].strip()) if first_line.startswith("#") else ""
    return command, flat(redact(values))


def _load_plan(folder: Path, gaps: list[str]) -> dict[str, dict[str, Any]]:
    """Each bucket's row of the plan; none if the file is missing or damaged."""
    if not (folder / PLAN_FILE).exists():
        gaps.append(f"{PLAN_FILE} is missing; a run writes it when it ends")
        return {}
    with _errors_as_gaps(gaps):
        return read_plan(folder)
    return {}  # `_errors_as_gaps` has caught an error


def _load_buckets(folder: Path, last: int, gaps: list[str]) -> dict[str, BucketMedians]:
    """Bucket name -> medians over the `WINDOW` iterations that end with iteration `last`."""
    path, damaged = folder / BUCKETS_FILE, []
    recent: dict[str, deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=WINDOW))
    try:
        for line in read_lines(path, damaged):
            # Not later lines, written since `last` was read, nor those of long before it.
            if last - WINDOW < line["iteration"] <= last:
                recent[line["bucket"]].append(line)
        found = {name: _medians(name, list(lines)) for name, lines in recent.items()}
    except OSError as error:
        gaps.append(f"{BUCKETS_FILE} cannot be read ({error.strerror}): no times for buckets")
        return {}
    except (TypeError, ValueError, KeyError) as error:
        raise other_version(path, error) from None
    _note_damaged(path, damaged, gaps)
    return found


def _medians(name: str, lines: list[dict[str, Any]]) -> BucketMedians:
    """A bucket's medians over those of its `lines` that have the scheme of the last line."""
    scheme = lines[-1]["scheme"]
    same_scheme = [line for line in lines if line["scheme"] == scheme]

    def median_of(value: Callable[[dict[str, Any]], float]) -> float:
        return float(median(value(line) for line in same_scheme))

    numel = lines[-1]["numel"]
    predicted = lines[-1]["predicted_us"]
    return BucketMedians(
        name=str(name),
        scheme=str(scheme),
        count=len(same_scheme),
        numel=numel,
        density=median_of(lambda line: line["nnz"]) / numel if numel else 0.0,
        wire_bytes=int(median_of(lambda line: line["wire_bytes"])),
        stage_us={
            stage: float(median(line["stage_us"][stage] for line in same_scheme))
            for stage in lines[-1]["stage_us"]
        },
        measured_us=median_of(lambda line: sum(line["stage_us"].values())),
        predicted_us=None if predicted is None else float(predicted),
        exposed_us=fmean(line["exposed_us"] for line in same_scheme),
    )


def _load_readiness(folder: Path, gaps: list[str]) -> dict[str, list[ReadinessRecord]]:
    """Bucket name -> records of the ranks' waits; none if the file is missing or damaged."""
    with _errors_as_gaps(gaps):
        return load_readiness(folder)
    return {}  # the file is damaged or cannot be read


@contextmanager
def _errors_as_gaps(gaps: list[str]) -> Iterator[None]:
    """Appends a sentence to `gaps` instead of raising, for a file that a report can do without."""
    try:
        yield
    except ConfigError as error:
        gaps.append(f"{error.what}: {_one_line(error.got)}")
    except OSError as error:
        gaps.append(f"{error.filename} cannot be read: {error.strerror}")


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
