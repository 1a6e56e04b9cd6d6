"""Messages of kind Rice in every sparse scheme: sums are exact over what the ranks have sent."""

from dataclasses import replace

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES, Exchange, Input
from megatron_sparse.compression.selection import segment_capacity
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.formats.message import (
    QUANTISED,
    MessageBuffers,
    name_of,
    prune_encode,
    record_spec,
)
from megatron_sparse.recording import StageTimer
from megatron_sparse.sparsity.sampling import selected_values
from megatron_sparse.transport import Link, Topology, VirtualCluster
from tests.collectives.cases import (
    OPTIONS,
    layout_of,
    numel_for,
    parameters,
    same_on_all_ranks,
    summed,
)

DENSITY, NUMEL, STEP = 0.2, 9000, 3
TAKING = [
    name
    for name, scheme in SCHEMES.items()
    if scheme.takes is Input.SPARSE and scheme.own_format is None
]
OPS = list(CollectiveOp)


def run(
    name,
    n,
    op,
    value_dtype,
    *,
    grad_dtype=torch.float32,
    capacity=None,
    sum_bits=None,
    numel=NUMEL,
    form=OPTIONS.format,
    is_skewed=False,
    topology=None,
):
    """Each rank's result, and what each has sent as fp32 [N]; conserves gradient + residual.

    With `sum_bits` also each rank's residual after the selection, and after the collective.
    """
    numel, options = numel_for(n, numel, op), replace(OPTIONS, sum_bits=sum_bits, format=form)
    sent, selected, after = {}, {}, {}

    def start(transport):
        generator = torch.Generator().manual_seed(transport.rank)
        grad_N = torch.randn(numel, generator=generator).to(grad_dtype)
        if is_skewed:
            grad_N[: numel // 4] += 100
        residual_N = torch.randn(numel, generator=generator) / 8
        bucket = Bucket("b", grad_N, parameters(numel), op, n)
        before_N = grad_N.float() + residual_N
        layout = layout_of(name, bucket)
        starts_R, ends_S = layout.range_offsets[:-1], layout.segment_offsets[1:]
        keep_R = layout.segment_keep[torch.bucketize(starts_R, ends_S, right=True)] != 0
        limits_R = torch.where(keep_R, -1.0, 1.28)
        capacity_S = None if capacity is None else segment_capacity(layout, capacity * DENSITY)
        pruning = Pruning(residual_N, layout.range_offsets, limits_R, 1.0, 5, capacity_S)
        spec = record_spec(value_dtype, STEP, "rice", density=DENSITY)
        buffers = MessageBuffers()
        message = prune_encode(bucket, layout, pruning, spec, buffers)
        message.residual_N, selected[transport.rank] = residual_N, residual_N.clone()
        own_N = selected_values(bucket, message, MessageBuffers()).clone()
        sent[transport.rank] = own_N
        if grad_dtype == torch.float32:
            assert torch.equal(own_N + residual_N, before_N)
        exchange = Exchange(bucket, transport, buffers, StageTimer(), options, 1)
        after[transport.rank] = residual_N
        return (yield from summed(name, exchange, message))[0]

    results = VirtualCluster(n, topology).run(start)
    told = [sent] if sum_bits is None else [sent, selected, after]
    return results, *([ranks[rank] for rank in range(n)] for ranks in told)


@pytest.mark.parametrize(
    ("name", "n", "capacity"),
    [
        *((name, n, None) for name in TAKING for n in (1, 2, 3, 4, 5, 8)),
        *((name, 4, 0.9) for name in TAKING if SCHEMES[name].takes_slots),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_sums_are_exact_over_what_was_sent(name, n, op, capacity):
    """Of messages of fixed size too, of which some elements are left out."""
    if op not in SCHEMES[name].ops:
        pytest.skip("an all-reduce only")
    for value_dtype in ("fp32", *QUANTISED.values()):
        results, sent = run(name, n, op, value_dtype, capacity=capacity)
        exact = torch.stack(sent).double().sum(0)
        # fp32 sums of at most 8 numbers below 16, in some order: 8 roundings of half a unit of 16.
        torch.testing.assert_close(
            same_on_all_ranks(op, results).double(), exact, rtol=0, atol=8 * 2**-20, msg=value_dtype
        )
        if capacity is not None:
            pruned = sum((values != 0).sum() for values in sent) / (n * len(exact))
            assert pruned <= capacity * DENSITY + 0.01


@pytest.mark.parametrize("name", TAKING)
def test_records_of_few_bits_may_be_longer_than_their_values_in_fp32(name):
    for value_dtype in QUANTISED.values():
        results, sent = run(name, 5, CollectiveOp.ALL_REDUCE, value_dtype, numel=7)
        for result in results:
            torch.testing.assert_close(result, sum(sent), rtol=0, atol=8 * 2**-20)


def test_ranks_whose_sums_are_dense_gather_them_in_few_bits_too():
    found = run("adaptive_ring", 4, CollectiveOp.ALL_REDUCE, "q4", sum_bits=8, is_skewed=True)
    same_on_all_ranks(CollectiveOp.ALL_REDUCE, found[0])


def test_a_lanes_sums_are_not_rounded():
    """No residual would keep the rest."""
    nodes = Topology.even(4, 2, Link(0, 0), Link(0, 0))
    more = {"sum_bits": 8, "form": "rice", "topology": nodes}
    results, sent, *_ = run("hierarchical", 4, CollectiveOp.ALL_REDUCE, "q4", **more)
    torch.testing.assert_close(results[0], sum(sent), rtol=0, atol=8 * 2**-20)


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16])
def test_sums_of_a_narrower_gradient_are_rounded_once(grad_dtype):
    for value_dtype in (name_of(grad_dtype), "q4"):
        results, sent = run(
            "direct", 4, CollectiveOp.ALL_REDUCE, value_dtype, grad_dtype=grad_dtype
        )
        total_N = torch.zeros_like(sent[0])
        for values_N in sent:
            total_N += values_N
        assert torch.equal(
            same_on_all_ranks(CollectiveOp.ALL_REDUCE, results), total_N.to(grad_dtype)
        )


@pytest.mark.parametrize(("n", "capacity"), [(4, None), (4, 1.0), (2, 0.5)])
@pytest.mark.parametrize("bits", list(QUANTISED))
@pytest.mark.parametrize("name", ["direct", "ssar_split_ag", "sparse_ring"])
def test_a_sums_owner_keeps_what_few_bits_lose(name, bits, n, capacity):
    """`sent + residual == sum + residual before`, bit for bit, where the sum is not zero.

    The slots of two ranks' sums together take less than one dense record.
    """
    if capacity is not None and not SCHEMES[name].takes_slots:
        pytest.skip("messages of fixed size only")
    results, sent, selected, after = run(
        name, n, CollectiveOp.ALL_REDUCE, "q4", capacity=capacity, sum_bits=bits
    )
    result_N = same_on_all_ranks(CollectiveOp.ALL_REDUCE, results)
    exact_N = torch.stack(sent).double().sum(0)
    bucket = Bucket("b", result_N, parameters(NUMEL), CollectiveOp.ALL_REDUCE, n)
    lost = 0.0
    for rank in range(n):
        changed = after[rank] != selected[rank]
        shard = bucket.shard(rank)
        assert not changed[: shard.start].any()
        assert not changed[shard.stop :].any()
        total = result_N[shard] + after[rank][shard]
        held = torch.where(result_N[shard] != 0, exact_N[shard] + selected[rank][shard], total)
        # The fp32 sum of four numbers below 16, in some order, plus a residual: 5 roundings.
        torch.testing.assert_close(total.double(), held, rtol=0, atol=5 * 2**-20)
        lost += float((result_N[shard] - exact_N[shard]).abs().sum())
    assert lost > 0
