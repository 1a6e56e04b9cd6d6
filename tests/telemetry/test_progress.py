"""The progress of a training: its words, its lines, and the view drawn of it."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_sparse.config.tracking import TrackingConfig
from megatron_sparse.recording import STAGES
from megatron_sparse.report.live_view import render
from megatron_sparse.telemetry import RunTelemetry
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.history import PHASES
from megatron_sparse.telemetry.progress import RunProgress, clock


def breakdown(iteration: int, *, loss: float | None = 4.5, **fields) -> IterationBreakdown:
    stage_ms = dict.fromkeys(STAGES, 0.0) | {
        "forward_backward": 70.0,
        "optimizer": 10.0,
        "host_wait": 15.0,
        "network": 40.0,
    }
    values = {
        "loss": loss,
        "phase": "target",
        "iteration_ms": 100.0,
        "stage_ms": stage_ms,
        "overlapped_ms": 25.0,
        "dense_bytes": 2**20,
        "wire_bytes": 2**15,
        "param_dense_bytes": 0,
        "param_wire_bytes": 0,
        "density": 0.01,
    }
    unknown = dict.fromkeys(field.name for field in dataclasses.fields(IterationBreakdown))
    return IterationBreakdown(**(unknown | values | {"iteration": iteration} | fields))


def drawn(progress: RunProgress, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(progress))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def first_view(width: int = 80, **fields) -> list[str]:
    """The view of a run's first iteration, which has these values."""
    progress = RunProgress("demo", 10)
    progress.add(breakdown(1, **fields), 0.0)
    return drawn(progress, width)


def progressed(total: int | None = 10) -> RunProgress:
    progress = RunProgress("demo", total)
    for iteration in range(1, 5):
        progress.add(breakdown(iteration), now_s=100.0 + 2 * iteration)
    return progress


def test_the_guide_shows_the_view_as_it_is():
    """Six iterations are left, of 2 s each by the clock on the wall."""
    guide = Path(__file__).parents[2] / "docs" / "tracking.md"
    assert "\n".join(drawn(progressed(), 80)) in guide.read_text(encoding="utf-8")


def test_every_phase_has_words():
    """A bare `target` behind the density reads as if a number were missing."""
    words = ("trials of presets", "dense warm-up", "ramp", "at its target", "compression off")
    for phase, said in zip(PHASES, words, strict=True):
        assert first_view(100, phase=phase)[2].endswith(f"density 1.00% ({said})")


@pytest.mark.parametrize("width", [30, 40, 60, 100])
def test_it_fits_the_terminal(width):
    assert max(map(len, drawn(progressed(), width))) <= width


def test_it_shows_both_halves_where_parameters_are_gathered():
    stage_ms = breakdown(1).stage_ms | {"param_wait": 5.0}
    gathered = {"param_dense_bytes": 2**20, "param_wire_bytes": 2**19, "stage_ms": stage_ms}
    text = "\n".join(first_view(120, param_gathers={"exact": 1}, **gathered))
    assert "wire/dense 26.56% (544.00 KiB)" in text
    assert "20.00 of 100.00 ms (gradients 15.00, parameters 5.00)" in text
    assert "param_wait" in text
    assert "param_wait" not in "\n".join(drawn(progressed(), 120))


@pytest.mark.parametrize(
    ("time_ms", "shown"), [(9999.99, "9999.99 ms"), (16_250.17, "16250 ms"), (1e6, "1000000 ms")]
)
def test_a_long_iteration_is_not_cut_off(time_ms, shown):
    stage_ms = dict.fromkeys(STAGES, 0.0) | {"forward_backward": time_ms}
    lines = first_view(stage_ms=stage_ms, iteration_ms=time_ms)
    assert lines[3] == f"an iteration takes {shown}, so far"
    assert f"{shown} 100%" in lines[4]


def test_unknown_values_are_left_out():
    progress = RunProgress(None, None)
    progress.add(breakdown(1, loss=None, dense_bytes=0, wire_bytes=0, density=None), 0.0)
    lines = drawn(progress, 80)
    assert lines[1].endswith(" 1")
    assert lines[2] == "wire/dense - (0 B)  density - (at its target)"
    # An iteration without a logged loss shows the one before.
    progress.add(breakdown(2, loss=3.0), 1.0)
    progress.add(breakdown(3, loss=None), 2.0)
    assert "loss 3.0000" in progress.facts()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00")])
def test_clock_rounds(seconds, text):
    assert clock(seconds) == text


def test_it_shows_the_rate():
    progress = RunProgress("demo", 10)
    for _ in range(2):
        progress.add(breakdown(1, tokens_per_s=20_480.0), 0.0)
    assert drawn(progress, 100)[3] == (
        "an iteration takes 100.00 ms, mean of the last 2  20,480 tokens/s"
    )


def test_the_writer_prints_a_line_now_and_then(capsys):
    def printed(every: int, is_writer: bool = True, **how) -> list[str]:
        tracking = TrackingConfig(sample_every=every, **how)
        telemetry = RunTelemetry(None, tracking, is_writer=is_writer, iterations=7)
        for iteration in range(1, 7):
            telemetry.end_iteration(iteration, iteration_s=0.1)
        return capsys.readouterr().out.splitlines()

    lines = printed(3)
    assert [line.split(",")[0].split("  ")[0] for line in lines] == ["run: 3/7", "run: 6/7"]
    assert lines[0].endswith(
        "100.00 ms = forward_backward 0.00 + optimizer 0.00 + host_wait 0.00 + other 100.00"
    )
    assert printed(0) == printed(1, is_writer=False) == printed(1, console="off") == []


def test_a_line_has_the_facts_in_ascii():
    line = progressed().line()
    assert line.isascii()
    assert "wire/dense 3.12%" in line
    assert line.endswith(
        "100.00 ms = forward_backward 70.00 + optimizer 10.00 + host_wait 15.00 + other 5.00"
    )
