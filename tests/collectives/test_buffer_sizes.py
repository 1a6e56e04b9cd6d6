"""Each scheme's declared buffers are those that it takes, on every rank of the virtual cluster."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES, Exchange, Input
from megatron_sparse.collectives.buffer_sizes import BufferSizes, MessagePlaces
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.formats.message import MessageBuffers, record_spec
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import VirtualCluster
from tests.collectives.cases import (
    BY_FORM,
    DTYPES,
    OPTIONS,
    STEP,
    Case,
    content_of,
    contribution,
    make_bucket,
    on_nodes,
    summed,
)

INNERS = [name for name, scheme in SCHEMES.items() if scheme.runs_across_nodes]
MOST = {
    *("dense_rhd", "dense_broadcast", "dense_hierarchical", "straggler"),
    *("adaptive_ring", "zen", "hierarchical", "straggler_direct"),
}
"""Ranks differ, or the data decides: these declare the most that a rank takes."""


def taken(case: Case, transport):
    """One rank's collective, on the same data on every rank: its buffers' bytes, and the declared.

    Messages of equal size, so that the sizes of a rank's own records are those of its peers'.
    """
    scheme, rank, buffers = SCHEMES[case.scheme], transport.rank, MessageBuffers()
    bucket = make_bucket(case, rank)
    bucket.grad_N.copy_(contribution(case, 0))
    exchange = Exchange(bucket, transport, buffers, StageTimer(), case.options, case.straggler)
    places, content = None, content_of(case, bucket, MessageBuffers())
    if scheme.takes is Input.SPARSE:
        (message,) = content
        nothing = torch.zeros(1, dtype=torch.int64)
        ends = torch.tensor(message.segment_bytes).cumsum(0)
        slots = Slots(message.layout.segment_offsets.diff(), torch.cat([nothing, ends]))
        records = record_spec(case.wire, STEP, scheme.own_format or "coo")
        places = MessagePlaces(message.layout, slots, fixed=False, records=records)
    yield from summed(case.scheme, exchange, *content)
    assert scheme.buffers is not None
    sizes = BufferSizes(bucket, rank, transport.nodes, case.options, case.wire, places)
    declared = scheme.buffers(sizes)
    return buffers.by_purpose(), declared


@pytest.mark.parametrize(("name", "op"), BY_FORM)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_declared_buffers_are_those_that_are_taken(name, op, dtypes):
    for n in (1, 2, 3, 5, 8, 16) if dtypes == DTYPES[0] else (3, 4):
        compare(Case(name, n, op, dtype=dtypes[0], wire=dtypes[1], numel=16 * n), (n,))


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("op", list(CollectiveOp))
def test_buffers_of_hierarchies(op, inner):
    """Of each inner scheme, and of the dense hierarchy."""
    for nodes in ((2, 2), (3, 2, 2), (1, 1, 1)):
        n, options = sum(nodes), replace(OPTIONS, inner=inner)
        for dtype, wire in DTYPES:
            compare(Case("hierarchical", n, op, dtype, wire, numel=48 * n, options=options), nodes)
            compare(Case("dense_hierarchical", n, op, dtype, wire, numel=48 * n), nodes)


def compare(case: Case, nodes: tuple[int, ...]) -> None:
    """Every rank's buffers with those that its scheme declares."""
    case = replace(case, straggler=1 if case.n > 1 else None)
    cluster = VirtualCluster(case.n, on_nodes(nodes))
    for found, declared in cluster.run(lambda transport: taken(case, transport)):
        # The account adds the scratch memory with which messages are encoded.
        found.pop("scratch", None), declared.pop("scratch", None)
        declared = {purpose: nbytes for purpose, nbytes in declared.items() if nbytes}
        found = {purpose: nbytes for purpose, nbytes in found.items() if nbytes}
        if case.scheme in MOST:
            assert found.keys() <= declared.keys(), case
            assert all(nbytes <= declared[purpose] for purpose, nbytes in found.items()), case
        else:
            assert found == declared, case


@pytest.mark.parametrize("op", list(CollectiveOp))
def test_fp16_on_the_wire_of_a_dense_bucket(op):
    """Its partial sums would overflow: all-pairs takes over, with its buffers."""
    compare(Case("dense", 3, op, wire="fp16"), (3,))


def test_on_a_gpu_all_buckets_share_what_the_collectives_take():
    """Their work follows in order there; on a CPU several buckets are on their way."""
    for device, expected in (("cuda", 100), ("cpu", 160)):
        buffers = MessageBuffers()
        with FakeTensorMode():
            for name, numel in (("0", 60), ("1", 100)):
                grad_N = torch.empty(8, device=device)
                bucket = Bucket(name, grad_N, (), CollectiveOp.ALL_REDUCE, 2)
                nobody: Any = None
                exchange = Exchange(bucket, nobody, buffers, StageTimer(), SchemeConfig())
                exchange.take("received", numel)
        assert buffers.by_purpose() == {"received": expected}
