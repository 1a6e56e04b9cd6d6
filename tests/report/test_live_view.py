"""`megatron-sparse view`: the live view of a run's folder, as text and as a picture."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from megatron_sparse.report import live_view
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.live import RunProgress, render
from tests import commands
from tests.report_runs import make_run


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of 12 iterations of 100 ms, of which 20 were asked for."""
    return make_run(tmp_path / "one", "one", ends=False, config={"training": {"iterations": 20}})


def view(*words: object) -> None:
    assert commands.run("view", *words) == 0


def test_it_equals_the_terminals_view(run, capsys):
    """The same text that the training's own view draws of the same iterations."""
    view(run, "--iteration 8 --columns 80")
    printed = capsys.readouterr().out
    progress = RunProgress("one", 20)
    for number, line in enumerate((run / "breakdown.jsonl").read_text().splitlines()[:8], 1):
        progress.add(IterationBreakdown.of_line(json.loads(line)), number * 0.1)
    console = Console(file=io.StringIO(), width=80)
    console.print(render(progress, 80))
    assert printed == console.file.getvalue()  # type: ignore[attr-defined]
    lines = printed.splitlines()
    # Twelve of 100 ms are left.
    assert lines[1].startswith("one ")
    assert lines[1].rstrip().endswith("8/20, 0:01 left")
    assert "loss 1.1250" in lines[2]


def test_the_last_iteration_and_the_terminals_width_are_taken_by_themselves(
    run, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "60")
    view(run)
    lines = capsys.readouterr().out.splitlines()
    assert "12/20" in lines[1]
    assert max(map(len, lines)) == 60


def test_a_run_whose_configuration_is_lost(run, capsys):
    """The bar is full, because the number of iterations is unknown."""
    (run / "config.yaml").unlink()
    view(run, "--columns 80")
    assert capsys.readouterr().out.splitlines()[1].rstrip().endswith("━ 12")


def test_the_picture_loads_nothing(run, tmp_path, capsys):
    output = tmp_path / "view.svg"
    view(run, "--output", output, "--iteration 8")
    assert capsys.readouterr().out == f"{output}\n"
    text = output.read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    # A browser would load each of these.
    assert "@import" not in text
    assert "@font-face" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "style", "defs", "clipPath", "rect", "text", "g", "circle"}
    words = "".join(root.itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "one, iteration 8" in words
    assert "forward_backward" in words
    assert "wire/dense 2.00%" in words
    assert len(text) < 40_000


def test_a_name_of_the_user_is_text_in_the_picture(tmp_path):
    folder = make_run(tmp_path / "run", "<script>[bold]&</script>")
    root = ElementTree.fromstring(live_view.svg(live_view.progress_of(folder, None), 100))
    assert "script" not in {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "<script>[bold]&</script>" in "".join(root.itertext())


def test_mistakes(run, tmp_path, capsys):
    """A folder that is no run's is among `tests.integration.mistakes`."""
    error = commands.refused(capsys, "view", run, "--iteration 13")
    assert "has no iteration 13" in error
    assert "expected: 1 to 12" in error
    error = commands.refused(capsys, "view", run, "--output", tmp_path / "no" / "v.svg")
    assert "cannot be written" in error
