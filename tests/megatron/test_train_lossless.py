"""Lossless parameters through `train`, as a user starts it."""

from __future__ import annotations

import json
import math

import pytest

from tests.megatron.test_pretrain import losses, train

ITERATIONS = 4


@pytest.mark.slow
def test_lossless_parameters_train(tmp_path):
    run = train(
        tmp_path,
        "lossless",
        "compression=topk99",
        "compression.density=0.02",
        "compression.warmup_iters=1",
        "compression.ramp_iters=0",
        "compression.lossless_patterns=[word_embeddings]",
        "model.tied_embeddings=false",
        "scheme=agsparse",
        f"training.iterations={ITERATIONS}",
    )
    found = losses(run)
    assert sorted(found) == list(range(1, ITERATIONS + 1))
    # Mock data of 512 tokens: as good as guessing among them to begin with, and no step blows up.
    assert all(loss == pytest.approx(math.log(512), rel=0.1) for loss in found.values())
    target = json.loads((run / "summary.json").read_text())["phases"]["target"]
    assert target["iterations"] == ITERATIONS - 1
    # 2 % of the pruned parameters, norms and biases whole, and the rows that a step asked for.
    assert 0 < target["wire_bytes"] < 0.25 * target["dense_bytes"]
