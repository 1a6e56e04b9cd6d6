"""Capacity mode of the collectives: exact sums, and exactly the bytes fixed beforehand."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.collectives.base import Exchange, Identity
from megatron_sparse.collectives.records import group_of
from megatron_sparse.compression.selection import segment_capacity
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import MessageBuffers, prune_encode, record_spec
from megatron_sparse.planner import Planner
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Link, Topology, VirtualCluster
from tests.collectives.cases import (
    DTYPES,
    OPTIONS,
    STEP,
    Case,
    Changing,
    error_of,
    exact_sum,
    layout_of,
    make_bucket,
    parameters,
    record_bytes,
    same_on_all_ranks,
    summed,
    whole_sums,
)
from tests.collectives.test_costs import COSTS
from tests.ranks import run_ranks
from tests.reduction.test_reducer_gloo import two_steps

CAPABLE = ("agsparse", "direct", "ssar_split_ag", "dsar_split_ag")
"""And `dense_q`, which prunes nothing: see test_dense_q.py."""
BY_FORM = [(name, op) for name in CAPABLE for op in CollectiveOp if op in SCHEMES[name].ops]


def message_of(case, bucket, density, residual, buffers):
    """All that a rank has, or at most this density of it; what does not fit is the residual."""
    layout = layout_of(case.scheme, bucket)
    limits = torch.zeros_like(residual[: layout.range_piece.numel()])
    capacity = None if density is None else segment_capacity(layout, density)
    pruning = Pruning(residual, layout.range_offsets, limits, 1.0, -1, capacity)
    return prune_encode(bucket, layout, pruning, record_spec(case.wire, STEP, "auto", 256), buffers)


def steps_of(case, transport, density):
    """One rank's selection and collective: returns (its part of the sum, residual, bytes)."""
    buffers, residual = MessageBuffers(), torch.zeros(case.numel)
    bucket = make_bucket(case, transport.rank)
    message = message_of(case, bucket, density, residual, buffers)
    exchange = Exchange(bucket, transport, buffers, StageTimer(), OPTIONS, case.straggler)
    own, sent = yield from summed(case.scheme, exchange, message)
    return own, residual, sent


def fixed_bytes(case, density):
    """The bytes that each rank sends, computed from sizes only."""
    n = case.n
    bucket = Bucket("b", torch.zeros(case.numel), parameters(case.numel), case.op, n)
    layout = layout_of(case.scheme, bucket)
    messages, sums, denses = [], [], []
    for (start, stop), keep in zip(
        pairwise(layout.segment_offsets.tolist()), layout.segment_keep.tolist(), strict=True
    ):
        numel = stop - start
        most = numel if keep else min(math.ceil(density * numel), numel)
        messages.append(record_bytes(numel, most, case.wire, dense=keep))
        sums.append(record_bytes(numel, min(n * most, numel), case.wire, dense=keep))
        denses.append(record_bytes(numel, 0, case.wire, dense=True))

    def of_shards(sizes):
        return [sum(sizes[a:b]) for a, b in pairwise(layout.shard_segments)]

    # Every rank has messages of these sizes; see `test_costs.Oracle`.
    fixed = SimpleNamespace(
        n=n,
        whole=[sum(messages)] * n,
        shards=[of_shards(messages)] * n,
        sums=lambda dense=False: of_shards(denses if dense else sums),
    )
    sent, reduce = COSTS[case.scheme][0], case.op is CollectiveOp.ALL_REDUCE
    return [sent(fixed, rank, reduce) for rank in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("name", "op"), BY_FORM)
def test_exact_with_fixed_bytes_and_no_agreement(name, op, n):
    one_a_second = Link(1.0, 0.0)
    for (dtype, wire), density, limit, numel in zip(
        (*DTYPES, *(DTYPES[0] for _ in range(4))),
        (0.3, 0.05, 0.4, 0.3, 0.3, 1.0, 0.0),
        (0.1, 0.2, 0.125, 0.0001, 2.0, 0.02, 0.1),
        (300, 1001, 5000, 300, 300, 0, 300),
        strict=True,
    ):
        case = Case(name, n, op, dtype, wire, density, numel)
        cluster = VirtualCluster(n, Topology((n,), one_a_second, one_a_second))
        outcomes = cluster.run(lambda t, case=case, limit=limit: steps_of(case, t, limit))
        # What is not in the sum is in a residual, exactly: these are small integers.
        unsent = sum(residual.double() for _, residual, _ in outcomes)
        for whole in whole_sums(case, (result for result, _, _ in outcomes)):
            assert torch.equal(whole.double() + unsent, exact_sum(case)), case
        fixed = fixed_bytes(case, limit)
        assert [sent for _, _, sent in outcomes] == fixed, case
        # Nothing else went over any link.
        assert [cluster.sent_bytes(rank) for rank in range(n)] == fixed, case
        second = 0 if op is CollectiveOp.REDUCE_SCATTER or name == "agsparse" else n - 1
        if name in ("ssar_split_ag", "dsar_split_ag"):
            second = math.ceil(math.log2(n))
        if case.numel:
            assert cluster.modelled_s == n - 1 + second, case


def test_messages_of_ranks_with_different_capacities_do_not_match():
    tags, case = set(), Case("direct", 2, numel=900)
    for limit in (0.1, 0.2, None):
        bucket = Bucket("b", torch.zeros(900), parameters(900), case.op, 2)
        message = message_of(case, bucket, limit, torch.zeros(900), MessageBuffers())
        transport = VirtualCluster(2).transports[0]
        tags.add(
            group_of(
                Identity("direct", bucket, message.value_dtype, message.step), message, transport
            ).tag
        )
    assert len(tags) == 3


def damaged(records, peer):
    """A bit of the step is flipped in what goes to rank 0."""
    changed = records.clone()
    changed[40] ^= 1
    return records if peer else changed


@pytest.mark.parametrize(("name", "op"), BY_FORM)
def test_a_damaged_record_names_rank_and_field(name, op):
    """Rank 1's records to rank 0: found late, and still no rank continues with a wrong sum."""
    case = Case(name, 3, op, numel=900)

    def start(transport):
        tap = Changing(transport, damaged) if transport.rank == 1 else transport
        return error_of(steps_of(case, tap, 0.1))

    errors = VirtualCluster(3).run(start)
    assert "rank 1: field checksum" in str(errors[0])
    for error in errors[1:]:
        if op is CollectiveOp.ALL_REDUCE and name != "agsparse":
            # Rank 0 adds up a shard for all ranks, and invalidates it for all.
            assert "rank 0: field magic" in str(error)
        else:
            assert error is None


@pytest.mark.parametrize("name", ["auto", *(name for name in SCHEMES if name != "dense_q")])
def test_other_schemes_are_refused_in_the_first_step(name):
    """It is still warming up."""
    compression = CompressionConfig(warmup_iters=100)
    planner = Planner(compression, SchemeConfig(name=name, capacity=1.25))
    bucket = Bucket("b", torch.zeros(90), parameters(90), CollectiveOp.ALL_REDUCE, 2)
    if name in ("auto", *CAPABLE):
        assert planner.plan_for(bucket, 0).scheme == "dense"
        return
    with pytest.raises(ConfigError, match=f"scheme.name={name} has no messages of fixed size"):
        planner.plan_for(bucket, 0)


def test_auto_compares_sent_bytes_not_selected_elements():
    """At a factor of 1.25 messages are up to a quarter longer, which can tip the scales."""
    bucket = Bucket("b", torch.zeros(90_000), parameters(90_000), CollectiveOp.ALL_REDUCE, 4)
    chosen = {}
    for capacity in (None, 1.25, 60.0):
        compression = CompressionConfig(density=0.02, warmup_iters=0, ramp_iters=0)
        planner = Planner(compression, SchemeConfig(capacity=capacity))
        chosen[capacity] = planner.plan_for(bucket, 0).scheme
    assert chosen[None] != "dense"
    assert chosen[60.0] == "dense"


NUMEL = 4 * 3001


def _gradient(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(-9, 10, (NUMEL,), generator=generator).float()


def _train(rank, world_size, schemes):
    pieces = parameters(NUMEL)
    return [two_steps(name, op, _gradient, pieces, 0.05, capacity=1.0) for name, op in schemes]


def test_gloo_ranks_through_the_reducer():
    outcomes = run_ranks(_train, 2, BY_FORM)
    for (name, op), by_rank in zip(BY_FORM, zip(*outcomes, strict=True), strict=True):
        for step, ranks in enumerate(zip(*by_rank, strict=True)):
            parts, sent, records = zip(*ranks, strict=True)
            assert torch.equal(same_on_all_ranks(op, list(parts)), sum(sent)), (name, step)
            case = Case(name, 2, op, numel=NUMEL)
            assert [record.wire_bytes for record in records] == fixed_bytes(case, 0.05), case
            # Half of the thresholds select more than the target density: some did not fit.
            for own, record in zip(sent, records, strict=True):
                assert 0 < record.nnz <= 0.05 * NUMEL + 2 * 5
                assert int(own.count_nonzero()) <= record.nnz
