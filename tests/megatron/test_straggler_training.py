"""Training with a rank that sleeps in every backward pass: 3 ranks, as a user would start it."""

import json

import pytest

from megatron_sparse.reduction.straggler_policy import SLOW_RANK
from tests.megatron.test_pretrain import lines, losses, train

SLOW_MS = 400.0
"""More than the difference between ranks on a loaded machine."""
SLOW = (
    "cluster.ranks_per_node=3",
    "training.global_batch_size=6",
    "compression.warmup_iters=0",
    "compression.ramp_iters=0",
    "compression.density=0.05",
    "compression.value_bits=null",
)
PINNED = ("scheme=straggler_direct", "straggler.mode=pinned", "straggler.rank=2")


def _schemes(run):
    return {(line["scheme"], line["straggler"]) for line in lines(run, "buckets")}


@pytest.fixture(scope="module", autouse=True)
def slow_rank():
    """Rank 2 of every run here sleeps in each backward pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SLOW_RANK, f"2:{SLOW_MS}")
        yield


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A run that waits for all ranks, and measures."""
    folder = tmp_path_factory.mktemp("runs")
    return train(folder, "observed", "scheme=direct", "straggler.mode=observe", *SLOW)


def test_delays_are_in_the_run(observed):
    summary = json.loads((observed / "summary.json").read_text())["stragglers"]
    assert summary["max_ms"] > SLOW_MS / 2
    delays = lines(observed, "readiness")
    # Of five iterations the first three are known to all; the first bucket waits for the sleeper.
    first = [line for line in delays if line["bucket"] == delays[0]["bucket"]]
    assert [line["iteration"] for line in first] == [1, 2, 3]
    # The first iteration also loads and allocates, which takes ranks differently long.
    assert all(line["waited_ms"][2] == 0 for line in first[1:])
    assert lines(observed, "breakdown")[-1]["extra"]["straggler/delay_ms"] > SLOW_MS / 2


def test_skipping_the_last_rank_gives_the_same_bits(observed, tmp_path):
    """Ranks add in order, then the straggler: with the last rank that is the order of `direct`."""
    run = train(tmp_path, "aware", *PINNED, *SLOW)
    assert _schemes(run) == {("straggler_direct", 2)}
    assert losses(run) == losses(observed)
    assert not (run / "readiness.jsonl").exists()
    plan = json.loads((run / "plan.json").read_text())
    pinned = {"scheme": "straggler_direct", "rank": 2, "least_delay_ms": None}
    assert all(bucket["straggler"] == pinned for bucket in plan["buckets"])
