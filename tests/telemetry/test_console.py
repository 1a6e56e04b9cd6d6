"""The final table, at common terminal widths; and its advice on presets."""

import contextlib
import copy
import io
from pathlib import Path

import pytest

from megatron_sparse.recording import STAGES
from megatron_sparse.telemetry.console import advice, print_summary
from megatron_sparse.telemetry.history import RunHistory
from megatron_sparse.telemetry.quantities import exposed_share

STAGE_MS = dict(zip(STAGES, (70.0, 10.0, 15.0, 0.0, 1.5, 2.0, 0.5, 40.0, 6.0, 0.25), strict=True))


def figures(iterations, dense_bytes, wire_bytes, density, iteration_ms, stage_ms=STAGE_MS):
    """Of iterations that were all alike but for the slowest, half as long again."""
    return {
        "iterations": iterations,
        "dense_bytes": dense_bytes,
        "wire_bytes": wire_bytes,
        "wire_ratio": wire_bytes / dense_bytes,
        "density": density,
        "iteration_ms": iteration_ms,
        "iteration_ms_mean": iteration_ms,
        "iteration_ms_p95": 1.5 * iteration_ms,
        "exposed_share": exposed_share(stage_ms, iteration_ms),
        "overlapped_ms": 31.25,
        "stage_ms": stage_ms,
        "stage_ms_mean": stage_ms,
        "stage_ms_p95": {stage: 1.5 * time_ms for stage, time_ms in stage_ms.items()},
        "network_ms_least": stage_ms["network"],
    }


SUMMARY = {
    "name": "demo [1]",
    **figures(100, 100 * 2**20, 30 * 2**20, 0.25, 105.0),
    "inside_bytes": 0,
    "param_dense_bytes": 0,
    "skipped": 2,
    "loss_first": 9.25,
    "loss_last": 4.5,
    "phases": {
        "warmup": figures(20, 20 * 2**20, 20 * 2**20, 1.0, 120.0),
        "ramp": figures(30, 30 * 2**20, 8 * 2**20, 0.125, 110.5),
        "target": figures(50, 50 * 2**20, 2 * 2**20, 0.0103, 100.0),
    },
    "target_begins": 51,
    "tokens_per_s": 20_480.0,
    "model_tflop_per_s": None,
    "memory_bytes": {"residual": 4 * 2**20, "undo": 4 * 2**20, "messages": 3 * 2**19},
    "target_density": 0.01,
    "world_size": 4,
    "device": "cpu",
    "versions": {},
}
GUIDE = Path(__file__).parents[2] / "docs" / "reading-the-breakdown.md"


def printed(summary, width):
    file = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(file):
        patch.setenv("COLUMNS", str(width))
        print_summary(summary)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def edited(**changes):
    return copy.deepcopy(SUMMARY) | changes


@pytest.mark.parametrize("width", [80, 120])
def test_the_guide_shows_the_table_as_it_is(width):
    """Its first block of code; brackets in a name are no markup."""
    _, shown, _ = GUIDE.read_text(encoding="utf-8").split("```\n", 2)
    assert printed(SUMMARY, width) == shown.replace("run demo:", "run demo [1]:").splitlines()


def test_a_run_that_gathers_parameters_shows_both_halves():
    gathered = {
        "param_dense_bytes": 80 * 2**20,
        "param_wire_bytes": 20 * 2**20,
        "total_wire_ratio": 50 / 180,
        "phases": {
            "target": figures(50, 2**20, 2**19, 0.01, 100.0, STAGE_MS | {"param_wait": 4.0})
        },
    }
    lines = printed(edited(**gathered), 80)
    assert "bytes sent by this rank: gradients by phase, and parameters" in lines
    (row,) = [line.split() for line in lines if line.startswith("params ")]
    assert row == ["params", "80.00", "MiB", "20.00", "MiB", "25.00%"]
    (stage,) = [line.split()[:3] for line in lines if line.startswith("param_wait")]
    assert stage == ["param_wait", "4.00", "4.00%"]
    assert "exposed: 19.00%, 19.00 of 100.00 ms (gradients 15.00, parameters 4.00);" in str(lines)
    assert "all bytes, gradients' and parameters', wire/dense: 27.78%" in lines
    assert max(map(len, lines)) <= 80


def test_plain_text_without_a_terminal(capsys):
    print_summary(SUMMARY)
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert "\x1b" not in printed


@pytest.mark.parametrize("width", [30, 40, 60])
def test_narrow_lines_fit_and_keep_the_verdict(width):
    lines = printed(SUMMARY, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "loss 9.2500 -> 4.5000" in text
    assert "exposed: 15.00%, 15.00 of 100.00 ms; 31.25 ms overlapped with compute" in text


def test_one_phase_needs_no_total():
    only = {"target": SUMMARY["phases"]["target"]}
    lines = printed(edited(phases=only), 80)
    assert not [line for line in lines if line.startswith("all")]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"target_density": 1e-4}, "target 0.01% from iteration 51 on, sent 1.03%"),
        ({"target_density": 1.2e-5}, "target 0.0012% from iteration 51 on, sent 1.03%"),
        # Never at its target.
        (
            {
                "phases": {name: SUMMARY["phases"][name] for name in ("warmup", "ramp")},
                "target_begins": None,
            },
            "target 1.00%, sent 25.00%",
        ),
    ],
)
def test_small_densities_keep_two_digits_and_what_was_sent_is_shown(changes, line):
    assert f"density: {line}" in printed(edited(**changes), 80)


def test_sizes_beyond_the_largest_unit():
    lines = printed(edited(dense_bytes=3 * 2**50, wire_bytes=512), 100)
    (total,) = (line for line in lines if line.startswith("all"))
    assert "3072.00 TiB" in total
    assert "512 B" in total


def test_a_run_without_an_iteration():
    alone = {"name": None, "world_size": 1, "device": "cpu", "versions": {}, "memory_bytes": {}}
    nothing = RunHistory().summary() | {"target_density": None}
    lines = printed(alone | nothing, 80)
    assert lines[:2] == ["run: 0 iterations, 1 rank, cpu", "density: no target, sent -"]
    assert "other" not in " ".join(line.split(" ")[0] for line in lines)


# A bucket's dense ring between 4 ranks: 60 MB; `safe` sends 0.112 of it.
DENSE_BYTES = 60e6


def of_run(
    exposed_ms, hidden_ms, network_ms, *, bits=1.73, share=0.112, ranks=4, density=1.0, **changes
):
    """What `advice` says of a run of ten iterations, of `safe` by default; milliseconds of each."""
    passes_ms = 300.0
    stage_ms = {"host_wait": exposed_ms, "forward_backward": passes_ms}
    figures = {
        "iterations": 10,
        "iteration_ms_mean": passes_ms + exposed_ms + 100,
        "stage_ms_mean": stage_ms,
        "network_ms_least": network_ms,
        "bits_per_element": bits,
        "dense_bytes": 10 * DENSE_BYTES,
        "wire_bytes": 10 * share * DENSE_BYTES,
        "overlapped_ms": hidden_ms,
        "density": density,
    }
    summary = {"world_size": ranks, "device": "cpu", "target_density": None, **figures}
    return advice(summary | {"phases": {"target": figures}} | changes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"exposed_ms": 4, "hidden_ms": 60, "network_ms": 5.6},
            "links of 9.6 Gbit/s, gradients expose 1% of an iteration: by a model, preset=lossless "
            "would do",
        ),
        # Hides in few bits, but not whole.
        ({"exposed_ms": 4, "hidden_ms": 60, "network_ms": 50}, "preset=quantised would do"),
        # k = 0.6 / 1.73: 530 - 0.653 x 500 = 203 ms in flight, 130 of them hidden.
        (
            {"exposed_ms": 400, "hidden_ms": 130, "network_ms": 500},
            "links of 0.108 Gbit/s, gradients expose 50% of an iteration: by a model, "
            "preset=balanced would save 0.33 s an iteration; it costs 0.41 % of the loss",
        ),
        # A dense run on a slow link is told the least lossy gain.
        (
            {"bits": 32, "share": 1, "exposed_ms": 4000, "hidden_ms": 130, "network_ms": 4100},
            "preset=quantised would save 3.6 s an iteration; it costs 0.05 % of the loss",
        ),
        # Waits that no network takes: of codecs, or of another rank.
        (
            {"bits": 0.16, "share": 0.012, "exposed_ms": 100, "hidden_ms": 130, "network_ms": 120},
            "no other preset would be faster",
        ),
    ],
)
def test_what_is_said(given, said):
    found = of_run(**given)
    assert found.endswith(said)
    assert found.startswith("links of ")


@pytest.mark.parametrize("known", [{"ranks": 1}, {"bits": None}, {"share": 0.0}])
def test_without_a_network_it_says_nothing(known):
    assert of_run(4.0, 60.0, 5.0, **known) is None


SLOW = {"exposed_ms": 400, "hidden_ms": 130, "network_ms": 500}


@pytest.mark.parametrize("changes", [{"phases": {"warmup": {}}}, {"device": "NVIDIA H200"}])
def test_what_was_not_measured_is_not_advised(changes):
    assert of_run(bits=4.43, share=0.2, **SLOW) is not None
    assert of_run(bits=4.43, share=0.2, **SLOW, **changes) is None


def test_what_is_sent_whole_does_not_advise_the_runs_own_preset():
    """`extreme` on a small model: 1 % is always sent whole."""
    said = of_run(bits=0.39, share=0.012, **SLOW, density=0.025, target_density=0.015)
    assert said.endswith("no other preset would be faster")


def test_a_preset_that_was_not_tried_is_said_to_be():
    lines = printed(edited(trials={"chosen": "safe", "times_ms": {}}), 80)
    assert "preset safe, untried" in lines
