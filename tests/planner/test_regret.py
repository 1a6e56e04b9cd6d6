"""The planner's choices against times of the virtual cluster, which it does not see: `truth`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner.prices import candidates, prices_us
from megatron_sparse.pricing.cluster import find
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.recording import StageTimer
from megatron_sparse.simulate import gradients
from megatron_sparse.simulate.cluster_models import MACHINES
from megatron_sparse.simulate.pricing import make_message
from megatron_sparse.sparsity.sampling import sample_profile
from megatron_sparse.transport import Transport, VirtualCluster
from tests.planner import truth

RANKS, NUMEL, FULL = 4, 2**16, 2**24
CLUSTERS = ("perlmutter", "ethernet_25gbit", "ethernet_100gbit")
OPTIONS = SchemeConfig(capacity=None)
KINDS = {
    "uniform": lambda: gradients.uniform(NUMEL, 0.01),
    "skewed": lambda: gradients.skewed(NUMEL, 0.01, exponent=1.0),
    "overlapping": lambda: gradients.fully_overlapping(NUMEL, 0.01),
    "disjoint": lambda: gradients.hardly_overlapping(NUMEL, 0.001),
    # The densities of ZEN's LSTM (tables 1 and 2, figure 8).
    "embedding": lambda: gradients.embedding_like(NUMEL, 0.0113, 0.187, 128, 64),
}
NEAR, WORST_OVER_DENSE = 0.05, 1.05


def sampled(grad_N: torch.Tensor, transport: Transport) -> Generator[Any, None, SparsityProfile]:
    """The profile that the ranks measure with the sampler that training uses."""
    n, buffers, timer = transport.world_size, MessageBuffers(), StageTimer(grad_N.device)
    whole = [ParameterSlice("w", 0, grad_N.numel())]
    bucket = Bucket("b", grad_N.clone(), whole, CollectiveOp.ALL_REDUCE, n)
    message = make_message(bucket, False, "auto", buffers, timer)
    return sample_profile(bucket, message, transport, buffers, timer, seed=CompressionConfig().seed)


@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_near_the_best_and_never_far_over_dense(kind):
    model = KINDS[kind]()
    given = [model.gradient(rank) for rank in range(RANKS)]
    profile = VirtualCluster(RANKS).run(lambda each: sampled(given[each.rank], each))[0]
    for name in CLUSTERS:
        cluster, op = find(name), CollectiveOp.ALL_REDUCE
        predicted_us = prices_us(
            BucketShape(FULL, 0, 4, op, RANKS),
            replace(profile, numel=FULL),
            cluster=cluster,
            options=OPTIONS,
            names=candidates(None, None),
        )
        rate = MACHINES[name][0].codec_rate
        setting = truth.TruthSetting(cluster, RANKS, rate, op, FULL)
        taken_us = {each: 1e6 * truth.run(each, given, setting).total_s for each in predicted_us}
        chosen = min(predicted_us, key=predicted_us.__getitem__)
        assert taken_us[chosen] <= (1 + NEAR) * min(taken_us.values()), (name, chosen)
        assert taken_us[chosen] <= WORST_OVER_DENSE * taken_us["dense"], name
