"""Prices and choices against a collective that runs with held-out prices on a virtual cluster.

Planners and cost models are compared with this MODEL. Every rank selects from its gradient,
encodes, sends, decodes and adds, by the registered collective; the network is the cluster's clock
(`VirtualCluster`) and local work is charged call by call (`ChargingTimer`): the bytes that the call
really moves, at the rate of a GPU's memory. No planner sees these charges: cost models interpolate
a cluster's table, which was made at other densities, sizes and vectors.

A bucket of some hundred thousand elements stands for one of any size, as in `simulate.pricing`;
here a record counts what it would have at full size, sections' padding and its one header included.
The number of elements should be a multiple of 4096 for each rank, so that shards have whole Pici
tiles. Shards of few non-zero elements differ more than they would at full size.

Dense schemes do not look at the gradients: they are run on few elements, once for each setting.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from megatron_sparse import wire
from megatron_sparse.bench.exchange.case import BucketCase, BucketPath
from megatron_sparse.bench.exchange.options import CollectiveSweep
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.config.level import NODE, RANK
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.formats.hash_record import SUB_HEADER_BYTES
from megatron_sparse.formats.header import Header
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner.levels import inside_s
from megatron_sparse.planner.prices import candidates, predict, prices_us
from megatron_sparse.pricing.cluster import ClusterModel, find
from megatron_sparse.pricing.densities import without_chance
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.recording import BucketRecord, StageTimer
from megatron_sparse.reduction.level_choice import LevelChoice, virtual_groups
from megatron_sparse.simulate import gradients as models
from megatron_sparse.simulate.cluster_models import MACHINES
from megatron_sparse.simulate.pricing import ChargingTimer, Measure, make_message, moved_bytes
from megatron_sparse.sparsity.sampling import sample_profile
from megatron_sparse.transport import Transport, VirtualCluster
from megatron_sparse.transport.topology import members_of
from megatron_sparse.transport.virtual import VirtualTransport
from tests.overlaps import FullyOverlapping, HardlyOverlapping
from tests.planner.planned import a_bucket

SWEEP = CollectiveSweep()
"""Messages in the format that is smallest, of sizes that travel with them."""
SMALL_NUMEL = 64
"""Tensors up to this size are offsets, sizes and states: they do not grow with the bucket."""


class FullSizeCluster(VirtualCluster):
    """A virtual cluster that charges each record its bytes at full size."""

    def priced_bytes(self, data: torch.Tensor) -> float:
        """See `VirtualCluster`."""
        if data.dtype != torch.uint8:
            return super().priced_bytes(data)
        return full_size_bytes(data, self.message_scale)


def full_size_bytes(records: torch.Tensor, scale: float) -> float:
    """Bytes of some records if they had `scale` times the elements, at the same density."""
    total, position = 0.0, 0
    while position < records.numel():
        packed = records[position : position + wire.HEADER_BYTES].numpy().tobytes()
        header = Header.unpack(packed, 0)
        position += wire.HEADER_BYTES + header.payload_bytes
        total += wire.HEADER_BYTES
        if header.format in (wire.FORMAT_DENSE, wire.FORMAT_COO, wire.FORMAT_PICI):
            numel, nnz = round(header.numel * scale), round(header.nnz * scale)
            total += wire.payload_bytes(header.format, numel, nnz, header.dtype)
        else:
            is_segment = header.format in (wire.FORMAT_BLOCKS, wire.FORMAT_RICE)
            fixed = wire.BLOCKS_SUBHEADER.size if is_segment else SUB_HEADER_BYTES
            total += fixed + scale * (header.payload_bytes - fixed)
    return total


@dataclass(frozen=True, eq=False)
class TruthSetting:
    """Where and how a collective runs.

    Attributes:
        cluster: a model, whose host costs nothing: its links; its codec table is not looked at.
        codec_rate: bytes a second that local work reads and writes.
        op: all-reduce or reduce-scatter.
        full_numel: elements of the bucket that the simulated one represents.
    """

    cluster: ClusterModel
    codec_rate: float
    op: CollectiveOp
    full_numel: int

    def price(self, numel: int) -> Measure:
        """Seconds of an operation on a bucket of so few elements that stands for the whole."""
        rate, scale = self.codec_rate, self.full_numel / numel

        def seconds(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
            grows = func.namespace == "megatron_sparse" or _largest(args, kwargs) > SMALL_NUMEL
            return moved_bytes(func, args, kwargs, result) * (scale if grows else 1.0) / rate

        return seconds


def _largest(*values: Any) -> int:
    """Elements of the largest tensor in some arguments."""
    sizes = [0]
    for value in values:
        if isinstance(value, torch.Tensor):
            sizes.append(value.numel())
        elif isinstance(value, list | tuple):
            sizes.append(_largest(*value))
        elif isinstance(value, dict):
            sizes.append(_largest(*value.values()))
    return max(sizes)


def run_s(
    scheme: str, gradients: Sequence[torch.Tensor], setting: TruthSetting, level: str = RANK
) -> float:
    """Seconds on modelled clocks until the last rank has synchronised one bucket, as in training.

    Args:
        scheme: a name in `SCHEMES`, which has the setting's form.
        gradients: fp32, one for each rank, mostly zeros; all that is not zero is selected. Not
            mutated.
        setting: where.
        level: `rank`, or `node`: nodes add up first, dense.

    Raises:
        MegatronSparseError: the collective failed.
    """
    if SCHEMES[scheme].takes is Input.DENSE and level == RANK:
        return _run_dense(scheme, len(gradients), setting)
    return _run(scheme, gradients, setting, level)


@lru_cache(maxsize=4096)
def _run_dense(scheme: str, world_size: int, setting: TruthSetting) -> float:
    # All that they send and add grows with the bucket; any number of equal shards will do.
    numel = min(wire.PICI_TILE, setting.full_numel // world_size) * world_size
    return _run(scheme, [torch.ones(numel)] * world_size, setting, RANK)


def _run(
    scheme: str, gradients: Sequence[torch.Tensor], setting: TruthSetting, level: str
) -> float:
    n, numel = len(gradients), gradients[0].numel()
    case = BucketCase(setting.op, scheme, "fp32", 1.0, numel, level=level)
    topology = setting.cluster.topology(n)
    cluster = FullSizeCluster(n, topology, message_scale=setting.full_numel / numel)
    members = members_of(topology.nodes) if level == NODE else []
    choice = LevelChoice(level, "as asked", tuple(map(tuple, members)))
    groups = virtual_groups(cluster, choice)
    paths = [BucketPath(case, SWEEP, each) for each in groups]

    def start(transport: VirtualTransport) -> Generator[Any, None, BucketRecord]:
        rank = transport.rank
        path, bucket = paths[rank], case.bucket(gradients[rank].clone(), n)
        if SCHEMES[scheme].takes is Input.SPARSE:  # memory taken once is no cost of a step
            path.residuals.begin(path.reducer.part(bucket))
        return path.steps(bucket, 0, ChargingTimer(transport, setting.price(numel)))

    cluster.run(start)
    return cluster.modelled_s


RANKS, NUMEL, FULL = 4, 2**16, 2**24
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
        cluster, op = find(name), CollectiveOp.ALL_REDUCE
        predicted_us = prices_us(
            BucketShape(FULL, 0, 4, op, RANKS),
            replace(profile, numel=FULL),
            cluster=cluster,
            options=OPTIONS,
            names=candidates(None, None),
        )
        rate = MACHINES[name][0].codec_rate
        setting = TruthSetting(cluster, rate, op, FULL)
        taken_us = {each: 1e6 * run_s(each, given, setting) for each in predicted_us}
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
    cluster, full_numel = replace(find(name), nodes=(inside,) * nodes), 2**24
    shape = BucketShape(full_numel, 0, 4, op, inside * nodes)
    lane, density = shape.lane(inside), 0.02
    numel = max(4096 * nodes, 2**16)  # whole tiles a shard
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
    drawn = without_chance(SparsityProfile.uniform(numel, density, nodes))
    profile = replace(drawn, numel=lane.numel)
    rate = MACHINES[name][0].codec_rate
    setting = TruthSetting(cluster, rate, op, full_numel)
    for scheme in ("dense", "direct", "ssar_rd"):
        if op in SCHEMES[scheme].ops:
            taken_s = run_s(scheme, given, setting, level)
            within_s = inside_s(shape, cluster, inside, grouped=True)
            found_s = within_s + predict(scheme, lane, profile, cluster, OPTIONS)
            assert found_s == pytest.approx(taken_s, rel=0.1), scheme
