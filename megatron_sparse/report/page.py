"""`megatron-sparse report`: one HTML page of one run or of several side by side.

The page is one self-contained file: charts are SVG, styles are inline, there is no script, and a
content security policy forbids loading anything. The template engine escapes every text of a run
(names, folders, plans, configuration). Secrets in a run's configuration are hidden (`redaction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from megatron_sparse.config.described import canonical
from megatron_sparse.errors import ConfigError, writing
from megatron_sparse.report import run_charts, tables, theme
from megatron_sparse.report.charts import Chart, short
from megatron_sparse.report.run_data import RunData, load_run
from megatron_sparse.telemetry.quantities import at_target, of_all, percent, rate, scope
from megatron_sparse.telemetry.run import BREAKDOWN_FILE
from megatron_sparse.version import __version__

MOST_RUNS = len(theme.SERIES)
"""Each run needs a colour."""


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Attributes:
        name: name of its anchor.
        title: its heading.
        lead: a paragraph for each run, before the charts.
        charts: rows of charts, which a wide screen shows side by side.
        tables: shown after the charts.
        unknown: the sentence shown if the runs have no data for the section.
        folds: (title, text) of texts that are hidden until the reader unfolds them.
    """

    name: str
    title: str
    lead: list[str] = field(default_factory=list)
    charts: list[list[Chart]] = field(default_factory=list)
    tables: list[tables.Table] = field(default_factory=list)
    unknown: str = ""
    folds: list[tuple[str, str]] = field(default_factory=list)

    @property
    def absent(self) -> str:
        """The sentence `unknown`; empty if the section has anything to show."""
        return "" if self.charts or self.tables or self.folds else self.unknown


def run(folders: Sequence[Path], outputs: Sequence[Path]) -> list[Path]:
    """Reads the runs and writes the report.

    Args:
        folders: each is the folder of a run, or holds the folders of runs.
        outputs: the files. One that ends in `.csv` gets a line for each run, any other is a page.
            Their folders are made if needed.

    Returns:
        The files, in the order in which they are written.

    Raises:
        ConfigError: a folder is not a run's, there are too many, or a file cannot be written.
    """
    # Each run once, at its first mention: `report runs/b runs` shows run b first.
    found: dict[Path, Path] = {}
    for folder in folders:
        found |= {run_folder.resolve(): run_folder for run_folder in _runs_of(folder)}
    folders = list(found.values())
    outputs = list(dict.fromkeys(outputs))  # each file once
    pages = [path for path in outputs if path.suffix.lower() != ".csv"]
    if pages and len(folders) > MOST_RUNS:
        raise ConfigError(
            "report: too many runs for one page",
            expected=f"1 to {MOST_RUNS} folders",
            got=len(folders),
            remedy="write several reports, or --output FILE.csv alone",
        )
    runs = [load_run(folder, index) for index, folder in enumerate(folders)]
    with writing("the report"):
        for path in outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path in pages:
                path.write_text(render(runs, sections_of(runs)), encoding="utf-8")
            else:
                tables.write_csv(runs, path)
    return outputs


def _runs_of(folder: Path) -> list[Path]:
    """The runs in a folder that have an iteration; the folder itself if there are none."""
    lines = sorted(folder.glob(f"*/{BREAKDOWN_FILE}"))
    return [path.parent for path in lines if path.stat().st_size] or [folder]


def sections_of(runs: Sequence[RunData]) -> list[Section]:
    """The sections of the page, in reading order."""
    charts = run_charts.charts_of(runs)
    sending = [run for run in runs if run.iterations.dense_bytes.any()]  # of several ranks
    measured = [run for run in runs if run.readiness]  # measured how long ranks waited

    def section(name: str, title: str, **rest: Any) -> Section:
        """A section with the charts of its name, and the other fields in `rest`."""
        return Section(name, title, charts=charts.get(name, []), **rest)

    return [
        section("exposed", "Exposed communication", lead=[_paragraph(run, runs) for run in runs]),
        section("summary", "Summary", tables=[tables.summary_table(runs)]),
        section("loss", "Loss", unknown="No finite loss."),
        section(
            "bytes",
            "Bytes on the wire",
            tables=[tables.phase_table(run, runs) for run in sending],
            unknown="A run of one rank sends nothing.",
        ),
        section(
            "buckets",
            "Buckets: plan and times",
            tables=[tables.bucket_table(run, runs) for run in runs if run.buckets],
            unknown="No times for buckets.",
        ),
        section(
            "stragglers",
            "Stragglers",
            tables=[tables.straggler_table(measured)] if measured else [],
            unknown="Not measured: train with straggler.mode=observe.",
        ),
        section(
            "configuration",
            "Configuration",
            tables=[tables.difference_table(runs)] if len(runs) > 1 else [],
            folds=[_configuration(run, runs) for run in runs if run.config],
            unknown="Unknown.",
        ),
    ]


def _paragraph(run: RunData, runs: Sequence[RunData]) -> str:
    """A paragraph on a run at its target density: exposed communication, waits and throughput.

    If the report has several `runs`, the paragraph begins with the run's name.
    """
    summary, steady = run.summary, at_target(run.summary)
    sentences = [] if len(runs) == 1 else [f"{run_charts.label_of(run, runs)}."]
    sentences.append(
        f"{percent(steady['exposed_share'])} of an iteration is exposed communication: "
        f"{of_all(steady)}, means of {scope(summary)}."
    )
    if summary.get("device", "cpu") != "cpu":
        sentences.append(
            "These are the CPU thread's waits: waits of CUDA streams are in the stage optimizer."
        )
    waits_ms = {bucket.name: bucket.exposed_us / 1e3 for bucket in run.buckets.values()}
    if param_wait_ms := steady["stage_ms_mean"]["param_wait"]:
        waits_ms["parameters"] = param_wait_ms
    total_ms = sum(waits_ms.values())
    if total_ms and len(waits_ms) > 1:
        worst = sorted(waits_ms, key=lambda name: -waits_ms[name])[:2]
        named = " and ".join(f"{short(name)} ({waits_ms[name] / total_ms:.0%})" for name in worst)
        sentences.append(f"The longest waits are for {named}.")
    if speed := rate(summary["tokens_per_s"], summary["model_tflop_per_s"]):
        sentences.append(f"Throughput: {speed}.")
    return " ".join(sentences)


def _configuration(run: RunData, runs: Sequence[RunData]) -> tuple[str, str]:
    lines = [f"{key}: {canonical(value)}" for key, value in run.config.items()]
    return f"All of {run_charts.label_of(run, runs)}", "\n".join([run.command, "", *lines])


def render(runs: Sequence[RunData], sections: Sequence[Section]) -> str:
    """The page's HTML, from the template `page.html.j2`."""
    source = files("megatron_sparse.report")
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        (source / "page.html.j2").read_text(encoding="utf-8")
    )
    gaps: list[str] = []  # sentences about missing data, which the page shows
    for run in runs:
        prefix = "" if len(runs) == 1 else f"{run_charts.label_of(run, runs)}: "
        gaps += [prefix + gap for gap in run.gaps]
    return page.render(
        title=" and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs",
        colours=theme.OF_PAGE,
        style=(source / "page.css").read_text(encoding="utf-8"),
        runs=runs,
        series=theme.SERIES,
        gaps=gaps,
        sections=sections,
        version=__version__,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )
