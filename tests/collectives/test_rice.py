"""Messages of kind Rice in every sparse scheme: sums are exact over what the ranks have sent."""

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.formats.message import QUANTISED
from megatron_sparse.planner import Planner
from tests.collectives.cases import numel_for
from tests.collectives.test_dense_q import gradients, step_of
from tests.reduction.virtual_level import VirtualRanks, settings
from tests.straggler.settings import section_for

DENSITY, NUMEL = 0.2, 9000
TAKING = [
    name
    for name, scheme in SCHEMES.items()
    if scheme.takes is Input.SPARSE and scheme.own_format is None
]
OPS = list(CollectiveOp)
BITS = (None, *QUANTISED)
"""Of values; None for fp32."""


def ranks_of(
    name, value_bits, sizes=(4,), op=OPS[0], *, numel=NUMEL, dtype=torch.float32, **options
):
    """Ranks on nodes of these sizes, whose messages are of this kind."""
    n = sum(sizes)
    kind = {"scheme": name, "format": "rice", "value_bits": value_bits, "sum_bits": None}
    usual = {"level": "rank", "density": DENSITY, "straggler": section_for(name, rank=1)}
    config = settings(**kind | usual | options)
    return VirtualRanks(config, sizes, op, numel_for(n, numel, op), dtype)


def first_step(run):
    bucket = run.buckets[0]
    given = gradients(run.n, bucket.numel, 0)
    return step_of(run, 0, [grad_N.to(bucket.grad_N.dtype) for grad_N in given])


@pytest.mark.parametrize(
    ("name", "n", "capacity"),
    [
        *((name, n, None) for name in TAKING for n in (2, 3, 4, 5, 8)),
        *((name, 4, 0.9) for name in TAKING if SCHEMES[name].takes_slots),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_sums_are_exact_over_what_was_sent(name, n, op, capacity):
    """Of messages of fixed size too, of which some elements are left out."""
    if op not in SCHEMES[name].ops:
        pytest.skip("an all-reduce only")
    for bits in BITS:
        sent_nN, sum_N, records = first_step(ranks_of(name, bits, (n,), op, capacity=capacity))
        assert records[0].scheme == name
        # fp32 sums of at most 8 numbers below 16, in some order: 8 roundings of half a unit of 16.
        exact_N = sent_nN.double().sum(0)
        torch.testing.assert_close(sum_N.double(), exact_N, rtol=0, atol=8 * 2**-20)
        if capacity is not None and name != "dense_q":
            kept = 0.02  # always sent whole
            assert sent_nN.count_nonzero() / sent_nN.numel() <= capacity * DENSITY + kept


@pytest.mark.parametrize("name", TAKING)
def test_records_of_few_bits_may_be_longer_than_their_values_in_fp32(name):
    for bits in QUANTISED:
        sent_nN, sum_N, _ = first_step(ranks_of(name, bits, (5,), numel=7))
        torch.testing.assert_close(sum_N, sent_nN.sum(0), rtol=0, atol=8 * 2**-20)


def test_ranks_whose_sums_are_dense_gather_them_in_few_bits_too():
    """All ranks get the same bits, which `step_of` checks; only rank 0's sum is dense."""
    run = ranks_of("adaptive_ring", 4, density=0.3, sum_bits=8, ring_gather_density=0.8)
    given = gradients(4, NUMEL, 0)
    for grad_N in given:
        grad_N[: NUMEL // 4] += 100
    step_of(run, 0, given)


def test_the_adaptive_rings_sums_have_chunks_of_the_messages_density():
    """Where `scheme.format` names Rice, as where the messages alone do."""
    sent_bytes = set()
    for wire_format in ("auto", "rice"):
        run = ranks_of("adaptive_ring", 4, density=0.002, format=wire_format, numel=1 << 16)
        sent_bytes.add(first_step(run)[2][0].wire_bytes)
    assert len(sent_bytes) == 1


def test_a_lanes_sums_are_not_rounded():
    """No residual would keep the rest; `auto` may choose the hierarchy all the same."""
    run = ranks_of("auto", 4, (2, 2), sum_bits=8)
    compression = CompressionConfig(density=DENSITY, value_bits=4, warmup_iters=0, ramp_iters=0)
    for reducer in run.reducers:
        reducer.planner = Planner(compression, SchemeConfig(name="hierarchical"))
    sent_nN, sum_N, records = first_step(run)
    assert records[0].scheme == "hierarchical"
    torch.testing.assert_close(sum_N, sent_nN.sum(0), rtol=0, atol=8 * 2**-20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_a_narrower_gradient_are_rounded_once(dtype):
    for bits in (None, 4):
        sent_nN, sum_N, _ = first_step(ranks_of("direct", bits, dtype=dtype))
        total_N = torch.zeros(NUMEL)
        for values_N in sent_nN:
            total_N += values_N
        assert torch.equal(sum_N, total_N.to(dtype))


@pytest.mark.parametrize(("n", "capacity"), [(4, None), (4, 1.0), (2, 0.5)])
@pytest.mark.parametrize("bits", list(QUANTISED))
@pytest.mark.parametrize("name", ["direct", "dense_q", "ssar_split_ag", "sparse_ring"])
def test_a_sums_owner_keeps_what_few_bits_lose(name, bits, n, capacity):
    """The slots of two ranks' sums together take less than one dense record."""
    if capacity is not None and not SCHEMES[name].takes_slots:
        pytest.skip("messages of fixed size only")
    few, full = (
        ranks_of(name, 4, (n,), capacity=capacity, sum_bits=sum_bits) for sum_bits in (bits, None)
    )
    (_, few_N, _), (_, full_N, _) = first_step(few), first_step(full)
    assert not torch.equal(few_N, full_N)
    kept_N = torch.zeros(NUMEL)
    for rank in range(n):
        own_N = few.residual(rank) - full.residual(rank)
        shard = few.buckets[rank].shard(rank)
        assert not own_N[: shard.start].any()
        assert not own_N[shard.stop :].any()
        kept_N += own_N
    # Of four numbers below 16 in some order, and of residuals: 5 roundings of half a unit of 16.
    torch.testing.assert_close(few_N + kept_N, full_N, rtol=0, atol=5 * 2**-20)
