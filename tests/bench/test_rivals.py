"""The rivals of `bench convergence`: PowerSGD, and masks from Adam's first moment.

On 2 gloo ranks with Megatron's own buckets in one launch, and one run of the real command.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from megatron_sparse.bench.convergence import command
from megatron_sparse.bench.convergence.rivals.moment_mask import MomentMaskRival, largest
from megatron_sparse.bench.convergence.rivals.rival import Contribution
from megatron_sparse.bench.convergence.settings import MomentMask, PowerSGD, Study
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.config.sparse import CompressionConfig, SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron import corpus_text, cpu_mode
from megatron_sparse.megatron.small_gpt import SmallGPTConfig
from megatron_sparse.recording import BucketRecord, NullSink
from tests.ranks import run_ranks

TIMEOUT_S = 500
"""Limit in seconds for a loaded machine; an idle one takes 15 for each launch."""
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)
STEPS, WARMUP, INTERVAL = 6, 1, 2
DENSITY = 0.1
SPECS = {
    "powersgd": PowerSGD(2),
    "moment": MomentMask(INTERVAL, owners=False),
    "owners": MomentMask(INTERVAL, owners=True),
}


class Records(NullSink):
    """Keeps the records of buckets."""

    def __init__(self) -> None:
        self.kept: list[BucketRecord] = []

    def record_bucket(self, record: BucketRecord) -> None:
        self.kept.append(record)


def _train(spec, setting, **changed):
    """Each synchronisation after the warm-up: (record, x before, sum, residual after)."""
    from megatron_sparse.bench.convergence.rivals.attachment import RivalAttachment
    from megatron_sparse.megatron.small_gpt import SmallGPT

    plugin = {
        "scheme": "dense_q",
        "value_bits": 4,
        "density": DENSITY,
        "warmup_iters": WARMUP,
        "ramp_iters": 0,
        "keep_below_numel": 256,
    }
    toy, sink = SmallGPT(setting), Records()
    config = SparseConfig.from_overrides(**plugin | changed)
    attachment = RivalAttachment(spec, [toy.ddp], config, sink)
    attachment.bind_optimizer(toy.optimizer, undo=False)
    seen, original = [], attachment._rival.synchronise

    def synchronise(given):
        before_N = given.bucket.grad_N + given.residual_N
        original(given)
        seen.append((given.record, before_N, given.bucket.grad_N.clone(), given.residual_N.clone()))

    attachment._rival.synchronise = synchronise
    losses = [toy.step()[0] for _ in range(STEPS)]
    kept = [
        sum(p.stop - p.start for p in bucket.parameters if p.keep) for bucket in attachment.buckets
    ]
    attachment.close()
    plain = [record.scheme for record in sink.kept if record.step < WARMUP]
    return {
        "seen": [
            (record.step, record.nnz, record.message_bytes, record.wire_bytes, *tensors)
            for record, *tensors in seen
        ],
        "names": [record.bucket for record, *_ in seen],
        "warm-up": plain,
        "kept": kept,
        "losses": losses,
        "weights": toy.weights(),
    }


def _matrix(rank, world_size):
    cpu_mode.enable()
    setting = SmallGPTConfig(overlap=True, average_in_collective=True)
    runs: dict[str, Any] = {name: _train(spec, setting) for name, spec in SPECS.items()}
    runs["full values"] = _train(SPECS["owners"], setting, value_bits=None, scheme="dense")
    try:
        _train(SPECS["powersgd"], SmallGPTConfig(distributed_optimizer=True))
    except ConfigError as error:
        runs["refused"] = str(error)
    return runs


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(_matrix, 2, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("name", [*SPECS, "full values"])
def test_what_is_not_in_the_sum_is_in_the_residuals(ranks, name):
    """Error feedback: what the ranks had is the sum, or is left to them; all have the same sum."""
    one, two = (each[name] for each in ranks)
    buckets = len(one["kept"])
    assert buckets > 1
    assert len(one["seen"]) == len(two["seen"]) == (STEPS - WARMUP) * buckets
    for (*_, before_N, sum_N, left_N), (*_, other_N, other_sum_N, other_left_N) in zip(
        one["seen"], two["seen"], strict=True
    ):
        assert torch.equal(sum_N, other_sum_N)
        had_N = before_N.double() + other_N
        # fp32's rounding; PowerSGD's products add up some more of it.
        scale = had_N.abs().max()
        assert torch.allclose(
            had_N, sum_N.double() + left_N + other_left_N, rtol=0, atol=2e-6 * scale
        )
        assert sum_N.any()
    assert torch.equal(one["weights"], two["weights"])
    assert one["warm-up"] == ["dense" if name == "full values" else "dense_q"] * buckets


def test_power_sgd_sends_thin_matrices_and_vectors(ranks):
    for step, numel, message_bytes, wire_bytes, before_N, *_ in ranks[0]["powersgd"]["seen"]:
        assert step >= WARMUP
        assert message_bytes == wire_bytes == 4 * numel  # a ring of 2 ranks
        assert numel < before_N.numel() / 4


@pytest.mark.parametrize("name", ["moment", "owners", "full values"])
def test_masks_hold_for_some_steps_and_send_values_only(ranks, name):
    run = ranks[0][name]
    kept = dict(zip(run["names"], run["kept"], strict=False))
    masks: dict[str, torch.Tensor] = {}
    changes = 0
    for bucket, (step, numel, message_bytes, _, before_N, sum_N, left_N) in zip(
        run["names"], run["seen"], strict=True
    ):
        # A parameter's count is rounded, of the part of each rank.
        assert numel == pytest.approx(
            DENSITY * (before_N.numel() - kept[bucket]) + kept[bucket], abs=20
        )
        sent_N = before_N != left_N
        chosen = (step - WARMUP) % INTERVAL == 0
        if chosen:
            changes += bucket in masks and not torch.equal(masks[bucket], sum_N != 0)
            masks[bucket] = sum_N != 0
        assert int(sent_N.sum()) <= numel
        bits = 8 * message_bytes - (before_N.numel() / 2 if name != "moment" and chosen else 0)
        if name == "full values":
            assert bits == pytest.approx(32 * numel, abs=8)
        else:
            # 4 bits and a scale of 32 for 128; kept elements in 16 bits; headers.
            least = 4.25 * (numel - kept[bucket]) + 16 * kept[bucket]
            assert least <= bits < least + 64 * 8 * 12
    assert changes


def test_owners_masks_follow_what_waits(ranks):
    """By m alone a mask keeps most of what it has; owners see the residual grow outside of it."""
    moved = {}
    for name in ("moment", "owners"):
        run = ranks[0][name]
        first = run["names"][0]
        sums = [
            each[5]
            for bucket, each in zip(run["names"], run["seen"], strict=True)
            if bucket == first
        ]
        before, after = sums[0] != 0, sums[-1] != 0
        moved[name] = float((after & ~before).sum() / after.sum())
    assert moved["owners"] > 1.3 * moved["moment"]


def test_the_distributed_optimizer_is_refused(ranks):
    assert "without the distributed optimizer" in ranks[0]["refused"]


def test_the_largest_of_each_parameter():
    pieces = [ParameterSlice("w", 0, 4), ParameterSlice("b", 4, 6, keep=True)]
    bucket = Bucket("0", torch.zeros(8), pieces, CollectiveOp.ALL_REDUCE, 2)
    moment_N = torch.tensor([1.0, -3, 2, 0, 0, 9, 9, 9])
    assert largest(bucket, moment_N, 0.5).int().tolist() == [0, 1, 1, 0, 1, 1, 0, 0]
    assert largest(bucket, moment_N, 0.5, slice(1, 5)).int().tolist() == [0, 1, 1, 0, 1, 0, 0, 0]
    # One element at least.
    assert largest(bucket, moment_N, 0.01).int().tolist() == [0, 1, 0, 0, 1, 1, 0, 0]


def test_an_optimizer_without_a_first_moment_is_one_typed_error():
    parameter = torch.nn.Parameter(torch.zeros(4))
    bucket = Bucket("0", torch.zeros(4), [ParameterSlice("w", 0, 4)], CollectiveOp.ALL_REDUCE, 2)
    rival = MomentMaskRival(CompressionConfig(), interval=1, owners=False)

    class Wrapped:
        optimizer = torch.optim.SGD([parameter], lr=1.0)

    rival.bind(Wrapped())
    record = BucketRecord("0", 0, "rival", "target", 0.5, 4)
    group: torch.distributed.ProcessGroup = None  # type: ignore[assignment] - not reached
    with pytest.raises(ConfigError, match=r"leave out megatron\.optimizer"):
        rival.synchronise(
            Contribution(bucket, [(parameter, 0)], torch.zeros(4), group, 0.5, record)
        )


def test_the_command_trains_a_rival_and_counts_its_bits(tmp_path, monkeypatch):
    every = corpus_text.code
    monkeypatch.setattr(corpus_text, "code", lambda progress: islice(every(progress), 40))
    study = Study(
        ["starcoder"],
        ["owners5"],
        [1],
        10,
        tmp_path,
        ["training.eval_interval=10", "training.eval_iters=1", "compression.ramp_iters=0"],
    )
    (result,) = command.run(study)
    assert result.final < 7.5
    # Values of 5 % of the elements and the vectors; the mask's half bit in one of 8 steps; headers.
    assert result.bits_target is not None
    assert 0.25 < result.bits_target < 0.7
    assert result.bits is not None
    assert result.bits > result.bits_target
