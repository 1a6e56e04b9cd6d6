"""Megatron's own training loop on 2 ranks: what a user's command, or its ranks, leave behind."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_sparse.profiler_ranges import PREFIX
from megatron_sparse.run.composition import compose
from megatron_sparse.sparsity.gradient_dump import GradientDump, Kind
from tests.megatron.checkpoint_cases import saved_tensors
from tests.megatron.train_ranks import equal
from tests.programs import ROOT, SMALL_RUN, ended, with_variables
from tests.ranks import MEGATRON, run_command

SMALL = (
    "model=gpt_tiny",
    *SMALL_RUN,
    "tracking=off",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
    "megatron.ddp_bucket_size=40000",
    "compression.keep_below_numel=256",
)
PRUNED = (
    "compression.warmup_iters=1",
    "compression.ramp_iters=1",
    "compression.density=0.02",
    "compression.value_bits=null",
)
AT_TARGET = ("scheme=agsparse", *PRUNED)
ITERATIONS = 5
TIMEOUT_S = 400
"""Limit in seconds for a run; an idle machine takes ten."""
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)


def _words(folder: Path, name: str, overrides: Sequence[str]) -> list[str]:
    """Overrides for a training of the small model, whose run is in `folder / name`."""
    run = (f"name={name}", f"runs_dir={folder}", f"training.iterations={ITERATIONS}")
    return [*SMALL, *run, *overrides]


def launch(folder: Path, name: str, *overrides: str) -> Path:
    """Runs `scripts/train.py` in a process of its own, which says no word of noise."""
    variables = with_variables(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    script = str(ROOT / "scripts" / "train.py")
    command = [sys.executable, script, *_words(folder, name, overrides)]
    done = ended(command, TIMEOUT_S, env=variables)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-6000:]
    (folder / f"{name}.log").write_text(done.stdout)
    return folder / name


def train(folder: Path, name: str, *overrides: str) -> Path:
    """The same run in ranks as torchrun would start them, which is seconds faster."""
    # In the CPU mode there seems to be a GPU, so that a single rank would take it.
    words = _words(folder, name, ("cluster.device=cpu", *overrides))
    log = folder / f"{name}.log"
    ranks = compose(words).cluster.world_size
    codes = run_command(["megatron-sparse", "train", *words], ranks, log, MEGATRON, TIMEOUT_S)
    assert codes == [0] * ranks, log.read_text()[-6000:]
    return folder / name


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """Loss of every iteration, at full precision."""
    return {line["iteration"]: line["loss"] for line in lines(run, "breakdown")}


def _flags(overlap: bool, distributed: bool) -> tuple[str, str]:
    return (
        f"training.overlap_grad_reduce={str(overlap).lower()}",
        f"training.use_distributed_optimizer={str(distributed).lower()}",
    )


@pytest.mark.parametrize(
    ("overlap", "distributed"),
    [
        pytest.param(False, False, marks=pytest.mark.slow),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_training_and_resuming_is_bit_exact(tmp_path, overlap, distributed):
    """A run of five iterations, and one that stops after three and resumes from its checkpoint."""
    flags = (*AT_TARGET, *_flags(overlap, distributed), "training.save_interval=3")
    whole = train(tmp_path, "whole", *flags)
    logs = {path.name: path.read_text() for path in (whole / "logs").iterdir()}
    assert sorted(logs) == ["rank0.log", "rank1.log"]
    assert f"iteration {ITERATIONS:8}/" in logs["rank1.log"], "the losses"
    # A model without knowledge has a loss of log(512) = 6.24; an untrained one is near it.
    assert losses(whole)[1] == pytest.approx(6.24, abs=0.1)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["iterations"] == ITERATIONS
    assert summary["phases"]["target"]["iterations"] == ITERATIONS - 2
    target = summary["phases"]["target"]
    assert 0 < target["wire_bytes"] < 0.25 * target["dense_bytes"]
    # Encoding is fused into pruning on a CPU.
    assert all(summary["stage_ms_mean"][s] > 0 for s in ("threshold", "prune", "decode"))
    buckets = {line["bucket"] for line in lines(whole, "buckets")}
    assert len(buckets) == len(json.loads((whole / "plan.json").read_text())["buckets"])
    assert (len(buckets) > 1) is overlap
    last = lines(whole, "breakdown")[-1]
    assert last["learning_rate"] > 0
    assert last["grad_norm"] > 0

    part = train(tmp_path, "part", *flags, "megatron.exit_interval=3")
    assert max(losses(part)) == 3
    resumed = train(tmp_path, "part", *flags, "resume=must")
    assert losses(resumed) == losses(whole)
    tensors = saved_tensors(whole, ITERATIONS)
    assert equal(tensors, saved_tensors(resumed, ITERATIONS))
    residuals = [rows for name, rows in tensors.items() if "megatron_sparse.residual." in name]
    assert all(any(rows[rank].any() for rows in residuals) for rank in range(2))


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_dense_through_the_plugin_is_bit_for_bit_megatron(tmp_path, overlap):
    """Also with the distributed optimizer; compared by the weights that Megatron saves."""
    flags = (*_flags(overlap, overlap), f"training.save_interval={ITERATIONS}")
    plain = train(tmp_path, "plain", *flags, "plugin=false", "megatron.ckpt_format=torch")
    dense = train(
        tmp_path,
        "dense",
        *flags,
        "scheme=dense",
        "compression.warmup_iters=0",
        "compression.ramp_iters=0",
        "megatron.ckpt_format=torch",
        "compression.residual_checkpoint=none",
    )
    assert _logged_losses(plain) == _logged_losses(dense)
    assert equal(_weights(plain), _weights(dense))
    summary = json.loads((dense / "summary.json").read_text())
    assert summary["wire_bytes"] == summary["dense_bytes"] > 0
    log = (tmp_path / "dense.log").read_text()
    assert "--ckpt-format torch: checkpoints hold nothing of the plugin" in log


def _logged_losses(run: Path) -> list[str]:
    """Megatron's averages over ranks, one of each iteration."""
    found = re.findall(r" lm loss: (\S+)", (run / "logs/rank1.log").read_text())
    assert len(found) == ITERATIONS
    return found


def _weights(run: Path) -> dict[str, torch.Tensor]:
    path = next((run / f"checkpoints/iter_{ITERATIONS:07d}").glob("mp_rank_00*/model_optim_rng.pt"))
    state = torch.load(path, map_location="cpu", weights_only=False)
    return {name: value for name, value in state["model"].items() if torch.is_tensor(value)}


def _check_recording(run: Path) -> None:
    """The first iteration was dense; in the second, the selection is smaller than the gradient."""
    recording = GradientDump(run)
    assert recording.iterations == [1, 2]
    assert len(recording.buckets) > 2
    for name in recording.buckets:
        assert recording.kinds(1, name) == [Kind.GRADIENT]
        gradients = recording.read(2, name)
        selected = recording.read(2, name, Kind.SELECTED)
        assert len(gradients) == len(selected) == 2
        for gradient, part in zip(gradients, selected, strict=True):
            assert 0 < part.to_dense().count_nonzero() < gradient.to_dense().numel()
        assert not torch.equal(gradients[0].to_dense(), gradients[1].to_dense())


def test_a_profile_shows_later_phases_of_a_bucket_during_later_backward_work(tmp_path):
    run = train(
        tmp_path,
        "traced",
        "scheme=direct",
        "compression.value_bits=null",
        "compression.warmup_iters=1",
        "compression.ramp_iters=0",
        *_flags(True, False),
        "model.num_layers=4",
        "training.iterations=12",
        "tracking.trace_start=3",
        "tracking.profile_iters=10",
        "tracking.record_gradients_iters=[1,2]",
    )
    _check_recording(run)
    events = json.loads((run / "profile.json").read_text())["traceEvents"]
    spans = [event for event in events if "iteration" in event.get("args", {})]
    iterations = range(3, 13)
    assert {event["args"]["iteration"] for event in spans} == set(iterations)
    backwards = [event for event in events if event["name"] == f"{PREFIX}forward_backward"]
    backwards.sort(key=lambda event: event["ts"])
    # Of many iterations and buckets: on a busy machine a small model's backward pass may be over
    # before a peer has answered.
    overlapping = 0
    for iteration, backward in zip(iterations, backwards, strict=True):
        mine = [event for event in spans if event["args"]["iteration"] == iteration]
        end = backward["ts"] + backward["dur"]
        # The hooks of the backward pass launch the buckets, so before the last launch there is
        # backward work to come.
        launches = [event["ts"] for event in mine if "scheme" in event["args"]]
        assert len(launches) > 2
        assert backward["ts"] < max(launches) < end
        network = [event for event in mine if event["name"] == "network"]
        for row in {event["tid"] for event in network}:
            begins = sorted(event["ts"] for event in network if event["tid"] == row)
            # The first wait is for the agreement, the later ones for the phases.
            overlapping += begins[1] < max(launches)
    assert overlapping > 0
