"""A run on 2 ranks with everything on: W&B offline, TensorBoard, files and profile agree."""

import json
import re
import struct
from pathlib import Path

import pytest

from megatron_sparse.profiler_ranges import PREFIX
from megatron_sparse.recording import STEP_STAGES
from megatron_sparse.reduction.straggler_policy import SLOW_RANK
from megatron_sparse.telemetry.breakdown import IterationBreakdown
from megatron_sparse.telemetry.dashboard import SECTIONS
from megatron_sparse.telemetry.metrics import METRICS, known
from tests.megatron.test_pretrain import launch, lines
from tests.tracked import tensorboard_scalars, wandb_history, wandb_records

ITERATIONS, EVERY = 8, 2
SLOW_MS = 400.0
"""So long rank 1 sleeps in each backward pass: more than ranks differ on a loaded machine."""
OF_MEGATRON = {"train/loss", "train/grad_norm", "train/learning_rate", "comm/wire_ratio"}
SECRET = "planted-secret"
PLANTED = ("WANDB_API_KEY", "PGPASS", "HF_CRED", "COOKIE", "AWS_SESSION", "SLURM_JWT", "NO_NAME")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        for name in PLANTED:
            patch.setenv(name, SECRET)
        patch.setenv("DATABASE_URL", f"postgres://me:{SECRET}@host/db")
        patch.setenv("SLURM_EXPORT_ENV", f"ALL,PGPASS={SECRET}")
        patch.setenv("SLURM_JOB_ID", "7")
        patch.setenv(SLOW_RANK, f"1:{SLOW_MS}")
        patch.setenv("WANDB_CONFIG_DIR", str(folder / "home"))
        patch.setenv("HOME", "/proc/none")  # a job's home may be out of reach
        return launch(
            folder,
            "tracked",
            "scheme=auto",
            "planner.cluster=ethernet_25gbit",
            "compression.warmup_iters=2",
            "compression.ramp_iters=1",
            "compression.density=0.02",
            "compression.value_bits=null",
            "training.overlap_grad_reduce=true",
            "training.use_distributed_optimizer=true",
            "parameters.method=exact",
            f"training.iterations={ITERATIONS}",
            "straggler.mode=observe",
            "tracking.tensorboard=true",
            "tracking.wandb=offline",
            f"tracking.sample_every={EVERY}",
            "tracking.trace_start=4",
            "tracking.profile_iters=2",
            f"cluster.env.HF_TOKEN={SECRET}",
            f"cluster.env.INNOCENT={SECRET}",
        )


def ours(names) -> set[str]:
    """Without those of Megatron, which have no slash, and of W&B."""
    return {name for name in names if "/" in name}


def test_wandb_has_the_values_of_the_files(run):
    rows = {row["iteration"]: row for row in wandb_history(run)}
    assert list(rows) == list(range(1, ITERATIONS + 1))
    assert all(row["_step"] == iteration for iteration, row in rows.items())
    for line in lines(run, "breakdown"):
        # Both received the same double.
        scalars = IterationBreakdown(**line).scalars()
        expected = {name: value for name, value in scalars.items() if name not in OF_MEGATRON}
        row = rows[line["iteration"]]
        assert {name: row[name] for name in expected} == expected
        # No number has two names: Megatron has logged these.
        assert not {"train/loss", "train/grad_norm", "train/learning_rate", "wire ratio"} & set(row)
        assert row["lm loss"] == pytest.approx(scalars["train/loss"])
        assert row["comm/wire_ratio"] == pytest.approx(scalars["comm/wire_ratio"], rel=1e-6)
    checked = set()
    for line in lines(run, "buckets"):
        row, prefix = rows[line["iteration"]], f"bucket/{line['bucket']}"
        if line["iteration"] % EVERY:
            assert f"{prefix}/wire_bytes" not in row
            continue
        assert row[f"{prefix}/wire_bytes"] == line["wire_bytes"]
        # The lines round to a tenth of a microsecond, each stage of the sum by itself.
        for name, time_us in (
            ("network_ms", line["stage_us"]["network"]),
            ("exposed_ms", line["exposed_us"]),
            ("measured_ms", line["measured_us"]),
        ):
            assert row[f"{prefix}/{name}"] == pytest.approx(time_us / 1e3, abs=2e-4)
        if line["predicted_us"] is not None:
            assert row[f"{prefix}/predicted_ms"] == pytest.approx(
                line["predicted_us"] / 1e3, abs=2e-4
            )
        checked |= {name for name, value in row.items() if value is not None}
    assert {"compression/residual_norm", "compression/residual_ratio"} <= checked
    last = rows[ITERATIONS]
    assert last["compression/residual_norm"] > 0
    assert last["straggler/delay_ms"] >= 0


def test_the_waits_for_the_buckets_add_up_to_the_exposed_time(run):
    waits_ms = dict.fromkeys(range(1, ITERATIONS + 1), 0.0)
    for line in lines(run, "buckets"):
        waits_ms[line["iteration"]] += line["exposed_us"] / 1e3
    for line in lines(run, "breakdown"):
        assert waits_ms[line["iteration"]] == pytest.approx(line["stage_ms"]["host_wait"], abs=1e-2)


def test_the_delays_of_ranks_are_in_the_run(run):
    summary = json.loads((run / "summary.json").read_text())["stragglers"]
    assert summary["max_ms"] > SLOW_MS / 2
    delays = lines(run, "readiness")
    first = [line for line in delays if line["bucket"] == delays[0]["bucket"]]
    assert [line["iteration"] for line in first] == list(range(1, ITERATIONS - 1)), "two late"
    # The first iteration also loads and allocates, which takes ranks differently long.
    assert all(line["waited_ms"][1] == 0 for line in first[1:])
    assert lines(run, "breakdown")[-1]["extra"]["straggler/delay_ms"] > SLOW_MS / 2


def test_every_name_is_listed_and_every_name_of_such_a_run_is_present(run):
    logged = ours(name for row in wandb_history(run) for name in row)
    assert [name for name in logged if not known(name)] == []
    absent = {m.name for m in METRICS if not any(m.matches(name) for name in logged)}
    # Nothing extra is measured; there is no GPU; the rest has Megatron's names.
    assert absent == {
        "extra/<name>",
        "train/model_tflop_per_s",
        "train/loss",
        "train/grad_norm",
        "train/learning_rate",
    }


def test_tensorboard_has_the_same_scalars(run):
    scalars = tensorboard_scalars(run / "tensorboard")
    rows = wandb_history(run)
    names = ours(name for row in rows for name in row)
    assert ours(scalars) >= names
    for name in names:
        # TensorBoard keeps fp32.
        expected = [
            (row["iteration"], struct.unpack("f", struct.pack("f", row[name]))[0])
            for row in rows
            if name in row
        ]
        assert scalars[name] == expected, name


def test_every_panel_of_the_dashboard_draws_something(run):
    logged = {name for row in wandb_history(run) for name in row}
    for panel in (panel for panels in SECTIONS.values() for panel in panels):
        if panel.pattern is not None:
            assert [name for name in logged if re.search(panel.pattern, name)], panel.title
        else:
            # Loss and norm also have a name for loops other than Megatron's.
            shown = set(panel.metrics) - OF_MEGATRON | ({"comm/wire_ratio"} & set(panel.metrics))
            assert shown, panel.title
            assert shown <= logged, panel.title


def test_the_configuration_is_in_wandb_without_secrets(run):
    updates = {
        (update.key or update.nested_key[0]): json.loads(update.value_json)
        for record in wandb_records(run)
        if record.WhichOneof("record_type") == "config"
        for update in record.config.update
    }
    config = updates["megatron_sparse"]
    assert config["compression"]["density"] == 0.02
    assert config["cluster"]["env"]["HF_TOKEN"] == config["cluster"]["env"]["INNOCENT"] == "***"
    steps = {
        record.metric.glob_name: record.metric.step_metric
        for record in wandb_records(run)
        if record.WhichOneof("record_type") == "metric" and record.metric.glob_name
    }
    assert steps == {f"{m.group}/*": "iteration" for m in METRICS}


def test_no_file_of_the_run_has_a_secret(run):
    """Of this package, Megatron, torch, TensorBoard and W&B; W&B keeps Slurm's variables."""
    (start,) = lines(run, "starts")
    assert start["environment"]["SLURM_JOB_ID"] == "7"
    assert not {*PLANTED, "HOME", "PATH"} & set(start["environment"])
    files = [path for path in run.parent.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_the_profile_has_every_stage_and_the_backward_pass(run):
    events = json.loads((run / "profile.json").read_text())["traceEvents"]
    ranges = {event["name"] for event in events if event["name"].startswith(PREFIX)}
    stages = {*STEP_STAGES, "threshold", "prune", "network", "decode", "profile"}
    assert {PREFIX + stage for stage in stages} <= ranges
    assert any("Backward" in event["name"] for event in events)
    of_buckets = [event for event in events if re.match(r"group\d+\.\d+", event["name"])]
    assert {event["args"]["iteration"] for event in of_buckets} == {4, 5}


def test_progress_is_a_line_every_few_iterations(run):
    text = (run.parent / "tracked.log").read_text()
    told = re.findall(r"^tracked: (\d+)/8.*wire/dense.* ms = forward_backward", text, re.M)
    assert told == ["2", "4", "6", "8"]
    assert "\x1b" not in text
