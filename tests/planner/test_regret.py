"""Prices and choices against a collective that runs with held-out prices on a virtual cluster.

Planners and cost models are compared with this MODEL. Every rank selects from its gradient,
encodes, sends, decodes and adds, by the registered collective; the network is the cluster's clock
(`VirtualCluster`) and local work is charged call by call (`ChargingTimer`): the bytes that the call
really moves, at the rate of a GPU's memory. No planner sees these charges: cost models interpolate
a cluster's table, which was made at other densities, sizes and vectors.

A bucket of some hundred thousand elements stands for one of any size: on a cluster on which each
byte and element takes as much longer (`slowed`). The number of elements should be a multiple of
4096 for each rank, so that shards have whole Pici tiles. Shards of few non-zero elements differ
more than they would at full size.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_sparse.bench.exchange.case import BucketCase
from megatron_sparse.bench.exchange.options import CollectiveSweep
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.config.level import NODE, RANK
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner.levels import inside_s
from megatron_sparse.planner.prices import candidates, predict, prices_us
from megatron_sparse.pricing.cluster import ClusterModel, find
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.recording import StageTimer
from megatron_sparse.simulate import gradients as models
from megatron_sparse.simulate.cluster_models import MACHINES
from megatron_sparse.simulate.pricing import make_message
from megatron_sparse.sparsity.sampling import sample_profile
from megatron_sparse.transport import Link, Transport, VirtualCluster
from tests.overlaps import FullyOverlapping, HardlyOverlapping
from tests.planner.planned import a_bucket, ran

SWEEP = CollectiveSweep()
"""Messages in the format that is smallest, of sizes that travel with them."""


def slowed(cluster: ClusterModel, factor: float) -> ClusterModel:
    """The cluster on which a bucket takes as long as one of `factor` times the size on this one."""
    links = {}
    for kind in ("intra", "inter", "dense"):
        link = getattr(cluster, kind)
        links[kind] = Link(link.alpha_s, factor * link.beta_s)
    rates = tuple(
        replace(rate, seconds_per_element=factor * rate.seconds_per_element)
        for rate in cluster.codec
    )
    return replace(cluster, codec=rates, **links)


def run_s(
    scheme: str,
    gradients: Sequence[torch.Tensor],
    cluster: ClusterModel,
    byte_s: float,
    op: CollectiveOp,
    level: str = RANK,
) -> float:
    """Seconds on modelled clocks until the last rank has synchronised one bucket, see `ran`.

    All elements that are not zero are selected.
    """
    case = BucketCase(op, scheme, "fp32", 1.0, gradients[0].numel(), level=level)
    return ran(case, SWEEP, cluster, gradients, byte_s).modelled_s


RANKS, NUMEL, FULL_NUMEL = 4, 2**16, 2**24
CLUSTERS = ("perlmutter", "ethernet_25gbit", "ethernet_100gbit")
OPTIONS = SchemeConfig(capacity=None)
KINDS = {
    "uniform": lambda: models.uniform(NUMEL, 0.01),
    "skewed": lambda: models.skewed(NUMEL, 0.01, exponent=1.0),
    "overlapping": lambda: FullyOverlapping(NUMEL, 0.01),
    "disjoint": lambda: HardlyOverlapping(NUMEL, 0.001),
    # The densities of ZEN's LSTM (tables 1 and 2, figure 8).
    "embedding": lambda: models.embedding_like(NUMEL, 0.0113, 0.187, 128, 64),
}
NEAR, WORST_OVER_DENSE = 0.05, 1.05


def sampled(grad_N: torch.Tensor, transport: Transport) -> Generator[Any, None, SparsityProfile]:
    """The profile that the ranks measure with the sampler that training uses."""
    n, buffers, timer = transport.world_size, MessageBuffers(), StageTimer(grad_N.device)
    bucket = a_bucket(grad_N.clone(), n)
    message = make_message(bucket, False, "auto", buffers, timer)
    return sample_profile(bucket, message, transport, buffers, timer, seed=CompressionConfig().seed)


@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_near_the_best_and_never_far_over_dense(kind):
    model = KINDS[kind]()
    given = [model.gradient(rank) for rank in range(RANKS)]
    profile = VirtualCluster(RANKS).run(lambda each: sampled(given[each.rank], each))[0]
    for name in CLUSTERS:
        op, factor = CollectiveOp.ALL_REDUCE, FULL_NUMEL / NUMEL
        cluster = slowed(find(name), factor)
        predicted_us = prices_us(
            BucketShape(NUMEL, 0, 4, op, RANKS),
            profile,
            cluster=cluster,
            options=OPTIONS,
            names=candidates(None, None),
        )
        byte_s = factor / MACHINES[name][0].codec_rate
        taken_us = {each: 1e6 * run_s(each, given, cluster, byte_s, op) for each in predicted_us}
        chosen = min(predicted_us, key=predicted_us.__getitem__)
        assert taken_us[chosen] <= (1 + NEAR) * min(taken_us.values()), (name, chosen)
        assert taken_us[chosen] <= WORST_OVER_DENSE * taken_us["dense"], name


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize(
    ("name", "inside", "nodes"),
    [
        ("ethernet_25gbit_8", 2, 2),
        ("ethernet_25gbit_8", 8, 2),
        ("ethernet_25gbit_8", 1, 4),
        ("perlmutter", 4, 2),
        ("perlmutter", 2, 8),
        ("perlmutter", 4, 4),
    ],
)
def test_the_virtual_cluster_agrees(name, inside, nodes, op):
    """The steps of training on real messages. Tolerance: that of the other cost models' tests.

    The mean error is 2 %; what is over 5 % comes from lanes that wait for the card in another
    order (docs/planner.md).
    """
    numel, density = max(4096 * nodes, 2**16), 0.02  # whole tiles a shard
    shape = BucketShape(numel * inside, 0, 4, op, inside * nodes)
    lane, factor = shape.lane(inside), FULL_NUMEL / shape.numel
    cluster = slowed(replace(find(name), nodes=(inside,) * nodes), factor)
    model = models.uniform(numel, density)
    parts = [model.gradient(node) for node in range(nodes)]
    # A node's gradient is on one of its ranks, so that its sum has the density that is asked for;
    # all lanes have the same part, as `reduction.level` cuts them.
    if op is CollectiveOp.ALL_REDUCE:
        whole = [part.repeat(inside) for part in parts]
    else:
        cut = [part.view(nodes, 1, -1) for part in parts]
        whole = [part.expand(nodes, inside, -1).flatten() for part in cut]
    given = [w if not rank else torch.zeros_like(w) for w in whole for rank in range(inside)]
    level = NODE if inside > 1 else RANK
    profile = SparsityProfile.uniform(lane.numel, density, nodes)
    byte_s = factor / MACHINES[name][0].codec_rate
    for scheme in ("dense", "direct", "ssar_rd"):
        if op in SCHEMES[scheme].ops:
            taken_s = run_s(scheme, given, cluster, byte_s, op, level)
            within_s = inside_s(shape, cluster, inside, grouped=True)
            found_s = within_s + predict(scheme, lane, profile, cluster, OPTIONS)
            assert found_s == pytest.approx(taken_s, rel=0.1), scheme
