"""Metric names: all listed, with units; the values of buckets' metrics.

The W&B workspace: every panel draws logged values; the tests contact no server.
"""

import re
from pathlib import Path

import pytest

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.recording import BUCKET_STAGES, STAGES, ReadinessRecord
from megatron_sparse.telemetry import RunTelemetry, dashboard
from megatron_sparse.telemetry.metrics import (
    METRICS,
    STEP,
    bucket_scalars,
    known,
)
from tests.commands import run
from tests.records import Sink, bucket_record

# The library's own use of an older pydantic.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
GUIDE = Path(__file__).parents[2] / "docs" / "tracking.md"
UNITS = {"ms": "_ms", "B": "_bytes"}


def record(name="group0.0", **fields):
    stage_us = {"network": 2000.0, "prune": 500.0}
    return bucket_record(name, stage_us=stage_us, **({"density": 0.02, "nnz": 30} | fields))


def test_units_are_suffixes():
    for metric in METRICS:
        suffix = UNITS.get(metric.unit)
        assert suffix is None or metric.name.endswith(suffix), metric.name
        assert metric.meaning
        # And the other way round.
        for unit, ending in UNITS.items():
            assert not metric.name.endswith(ending) or metric.unit == unit, metric.name


def test_every_stage_is_known_and_other_names_are_not():
    assert all(known(f"breakdown/{stage}_ms") for stage in (*STAGES, "other"))
    assert known("bucket/chunk1.group0.0/exposed_ms")
    for name in ("bucket/group0.0/exposed", "comm/exposed", "xcomm/exposed_ms", "exposed_ms"):
        assert not known(name), name


def test_bucket_scalars():
    made = record(
        predicted_us=4000.0,
        wire_bytes=240,
        exposed_s=0.125,
    )
    late = ReadinessRecord("group0.0", 1, (0.25, 0.0, 0.0))
    assert bucket_scalars([made], [late]) == {
        "bucket/group0.0/exposed_ms": 125.0,
        "bucket/group0.0/network_ms": 2.0,
        "bucket/group0.0/measured_ms": 2.5,
        "bucket/group0.0/predicted_ms": 4.0,
        "bucket/group0.0/wire_bytes": 240.0,
        # Two ranks were ready at the same time and waited only for each other: a delay of 0.
        "bucket/group0.0/delay_ms": pytest.approx(0.0),
    }
    # Unknown values are left out, not 0.
    assert "bucket/group0.0/predicted_ms" not in bucket_scalars([record()], [])


def test_buckets_are_logged_every_few_iterations():
    sink, tracking = Sink(), TrackingConfig(console="off", sample_every=2)
    telemetry = RunTelemetry(None, tracking, is_writer=True, sinks=[sink])
    for iteration in range(1, 9):
        telemetry.record_bucket(record("b"))
        telemetry.end_iteration(iteration, iteration_s=0.1)
    telemetry.close()
    sampled = [step for step, row in sink.rows.items() if "bucket/b/network_ms" in row]
    assert sampled == [2, 4, 6, 8]
    assert all(known(name) for row in sink.rows.values() for name in row)


def test_the_guide_lists_every_metric_with_its_unit():
    table = re.findall(r"^\| `([a-z_]+/[^`]+)` \| ([^|]*) \| ([^|]*) \|", GUIDE.read_text(), re.M)
    assert [(name, unit.strip(), meaning.strip()) for name, unit, meaning in table] == [
        (m.name, m.unit, m.meaning + (" (sampled)" if m.sampled else "")) for m in METRICS
    ]
    assert set(STAGES) >= set(BUCKET_STAGES)


OF_MEGATRON = {"lm loss", "grad-norm"}
FAMILIES = {metric.name for metric in METRICS}


def all_panels():
    return [panel for panels in dashboard.SECTIONS.values() for panel in panels]


def example(name: str) -> str:
    """A name of the family, as a run would log it."""
    return name.replace("<bucket>", "chunk0.group1.0").replace("<scheme>", "ssar_rd")


def test_every_panel_names_logged_values():
    for panel in all_panels():
        for name in panel.metrics:
            assert known(example(name)) or name in OF_MEGATRON, name
        if panel.pattern is not None:
            assert panel.metrics[0] in FAMILIES
            assert re.search(panel.pattern, example(panel.metrics[0]))
            others = [m.name for m in METRICS if m.name != panel.metrics[0]]
            assert not [name for name in others if re.search(panel.pattern, example(name))]


def test_a_dry_run_lists_the_panels(capsys):
    pytest.importorskip("wandb_workspaces")
    assert run("dashboard team/project --dry-run") == 0
    n = len(all_panels())
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{n} panels in {len(dashboard.SECTIONS)} sections; nothing was sent to W&B"
    titles = [panel.title for panel in all_panels()]
    assert [line[2:] for line in lines if line.startswith("  ")] == titles


def test_the_workspace_has_the_panels():
    pytest.importorskip("wandb_workspaces")
    workspace = dashboard.make("team", "project", "mine")
    assert (workspace.entity, workspace.project) == ("team", "project")
    assert [section.name for section in workspace.sections] == list(dashboard.SECTIONS)
    assert [section.is_open for section in workspace.sections][:3] == [True, True, False]
    for section, panels in zip(workspace.sections, dashboard.SECTIONS.values(), strict=True):
        places = {(made.layout.x, made.layout.y) for made in section.panels}
        assert len(places) == len(panels)
        for made, panel in zip(section.panels, panels, strict=True):
            assert (made.title, made.x, made.plot_type) == (panel.title, STEP, panel.plot)
            assert made.log_y is panel.log
            if panel.pattern is None:
                assert made.y == list(panel.metrics)
            else:
                assert made.metric_regex == panel.pattern
            assert made.layout.x + made.layout.w <= dashboard.COLUMNS


@pytest.mark.parametrize("target", ["project", "/project", "team/", "a/b/c", ""])
def test_a_target_that_is_none(target):
    with pytest.raises(ConfigError, match="ENTITY/PROJECT"):
        dashboard.run(target, "n", dry_run=True)


def test_a_server_that_refuses_is_one_typed_error(monkeypatch):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces")
    saved = []

    def refuse(workspace):
        saved.append(workspace.name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(workspaces.Workspace, "save", refuse)
    with pytest.raises(ConfigError, match=r"no route to host\n.*wandb login"):
        dashboard.run("team/project", "mine", dry_run=False)
    assert saved == ["mine"]
