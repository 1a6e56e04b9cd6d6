"""The compression methods, and lossless parameters, through `train` as a user starts it."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from tests.megatron.test_pretrain import losses, train

ITERATIONS = 4
FLAGS = {
    "dgc": ("compression=dgc", "megatron.optimizer=sgd", "megatron.sgd_momentum=0"),
    "sidco": (
        "compression=sidco",
        "model.tied_embeddings=false",
        "compression.lossless_patterns=[word_embeddings]",
    ),
    "threshold_reuse": ("compression=threshold_reuse",),
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name == "dgc" else pytest.mark.slow) for name in FLAGS],
)
def test_a_method_trains(tmp_path, method):
    run = train(
        tmp_path,
        method,
        *FLAGS[method],
        "scheme=agsparse",
        "compression.warmup_iters=1",
        "compression.ramp_iters=0",
        "compression.density=0.02",
        f"training.iterations={ITERATIONS}",
    )
    assert yaml.safe_load((run / "config.yaml").read_text())["compression"]["method"] == method
    found = losses(run)
    assert sorted(found) == list(range(1, ITERATIONS + 1))
    # Mock data of 512 tokens: as good as guessing among them to begin with, and no step blows up.
    assert all(loss == pytest.approx(math.log(512), rel=0.1) for loss in found.values())
    target = json.loads((run / "summary.json").read_text())["phases"]["target"]
    assert target["iterations"] == ITERATIONS - 1
    # 2 % of the pruned parameters, norms and biases whole; later steps select more.
    assert 0 < target["wire_bytes"] < 0.25 * target["dense_bytes"]
