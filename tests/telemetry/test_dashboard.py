"""The W&B workspace: every panel draws logged values; the tests contact no server."""

from __future__ import annotations

import json
import re

import pytest

from megatron_sparse.errors import ConfigError
from megatron_sparse.telemetry import dashboard
from megatron_sparse.telemetry.metrics import METRICS, STEP, known
from tests.commands import run

# The library's own use of an older pydantic.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

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


def test_titles_tell_the_unit():
    for panel in all_panels():
        units = {m.unit for m in METRICS for name in panel.metrics if m.matches(example(name))}
        (unit,) = units
        assert (f"({unit})" in panel.title) is (unit not in ("", "buckets")), panel.title


def test_the_first_row_is_exposed_communication_how_much_where_and_since_when():
    share, halves, by_bucket, parts = dashboard.SECTIONS["Communication time"][:4]
    assert share.metrics == ("comm/exposed_share",)
    assert halves.metrics == ("comm/exposed_ms", "comm/grad_exposed_ms", "params/exposed_ms")
    assert by_bucket.metrics == ("bucket/<bucket>/exposed_ms",)
    assert parts.plot == "stacked-area"
    assert {"comm/grad_exposed_ms", "breakdown/other_ms"} < set(parts.metrics)


def test_the_specification_has_the_panels(tmp_path, capsys):
    pytest.importorskip("wandb_workspaces")
    path = tmp_path / "workspace.json"
    assert run("dashboard team/project --dry-run --json", path) == 0
    n = len(all_panels())
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{n} panels in {len(dashboard.SECTIONS)} sections; nothing was sent to W&B"
    titles = [panel.title for panel in all_panels()]
    assert [line[2:] for line in lines if line.startswith("  ")] == titles
    assert lines[:3] == ["", "Communication time", "  Exposed communication over the iteration"]
    specification = json.loads(path.read_text())
    assert (specification["entity"], specification["project"]) == ("team", "project")
    sections = specification["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(dashboard.SECTIONS)
    # The section that the user should see first is open.
    assert sections[0]["name"] == "Communication time"
    assert [section["isOpen"] for section in sections][:3] == [True, True, False]
    for section, panels in zip(sections, dashboard.SECTIONS.values(), strict=True):
        boxes = set()
        for made, panel in zip(section["panels"], panels, strict=True):
            config = made["config"]
            assert (config["chartTitle"], config["xAxis"]) == (panel.title, STEP)
            if panel.pattern is None:
                assert config["metrics"] == list(panel.metrics)
            else:
                assert (config["metricRegex"], config["useMetricRegex"]) == (panel.pattern, True)
            assert config.get("plotType", "line") == panel.plot
            assert config.get("yLogScale", False) is panel.log
            box = made["layout"]
            assert box["x"] + box["w"] <= dashboard.COLUMNS
            boxes.add((box["x"], box["y"]))
        assert len(boxes) == len(panels)


@pytest.mark.parametrize("target", ["project", "/project", "team/", "a/b/c", ""])
def test_a_target_that_is_none(target):
    with pytest.raises(ConfigError, match="ENTITY/PROJECT"):
        dashboard.run(target, "n", None, dry_run=True)


def test_a_file_that_cannot_be_written(tmp_path):
    pytest.importorskip("wandb_workspaces")
    with pytest.raises(ConfigError, match="cannot be written"):
        dashboard.run("team/project", "n", tmp_path / "no" / "folder.json", dry_run=True)


def test_a_server_that_refuses_is_one_typed_error(monkeypatch):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces")
    saved = []

    def refuse(workspace):
        saved.append(workspace.name)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(workspaces.Workspace, "save", refuse)
    with pytest.raises(ConfigError, match=r"no route to host\n.*wandb login"):
        dashboard.run("team/project", "mine", None, dry_run=False)
    assert saved == ["mine"]
