"""Sparse sums inside a hierarchy: bytes between nodes, order of addition, sockets.

Legend: n ranks, m ranks of a node, k nodes.
"""

import itertools

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.dense_hierarchical import Lanes
from megatron_sparse.collectives.hierarchical import LaneParts
from megatron_sparse.recording import StageTimer
from megatron_sparse.reduction.job import Pending
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.transport import ProcessGroupTransport
from tests.collectives.cases import (
    DTYPES,
    Case,
    Forwarding,
    assert_exact,
    contribution,
    exact_sum,
    make_bucket,
    on_nodes,
    parameters,
    record_bytes,
    run_case,
    steps_of,
)
from tests.ranks import on_ranks


@pytest.mark.parametrize("op", list(CollectiveOp))
def test_ranks_need_not_be_numbered_node_by_node(op):
    nodes = (1, 0, 1, 0, 1)
    case = Case("hierarchical", 5, op)
    assert_exact(case, run_case(case, wrap=lambda t: Forwarding(t, nodes=nodes)).results)


@pytest.mark.parametrize("op", list(CollectiveOp))
def test_a_lane_keeps_its_layout_for_the_next_step(op):
    """Else what is computed from layouts would pile up: the caches' keys are layouts."""
    bucket, nodes = make_bucket(Case("hierarchical", 4, op), 0), (0, 0, 1, 1)
    whole = bucket.layout(sharded=op is CollectiveOp.REDUCE_SCATTER)

    def lane_layout(rank):
        lane = LaneParts(bucket, whole, Lanes(nodes, rank)).lane_bucket(bucket.grad_N)
        return lane.layout(sharded=True)

    assert lane_layout(0) is lane_layout(0) is not lane_layout(1)


def test_a_bf16_gradient_is_rounded_once_at_the_end():
    """Neither the node's sums nor the sum over the nodes is rounded on its way."""
    case = Case("hierarchical", 4, dtype="bf16", wire="bf16", density=0.7, numel=1000, floats=True)
    parts = [contribution(case, rank).float() for rank in range(4)]
    # Rank order within the pairs and between them, in fp32.
    expected = ((parts[0] + parts[1]) + (parts[2] + parts[3])).bfloat16()
    for result in run_case(case, on_nodes((2, 2))).results:
        assert torch.equal(result, expected)


def _records(values, start, stop, dtype):
    """Bytes of the records of a part of a vector, each segment in its smallest format."""
    pieces = parameters(values.numel())
    # Padding travels with the parameter before it.
    borders = [*(piece.start for piece in pieces), values.numel()]
    size = 0
    for (first, last), piece in zip(itertools.pairwise(borders), pieces, strict=True):
        first, last = max(first, start), min(last, stop)
        if first < last:
            nnz = int(values[first:last].count_nonzero())
            size += record_bytes(last - first, nnz, dtype, dense=piece.keep)
    return size


def _shards(case, m, k, lane):
    """The elements of a lane's part that each node's rank owns, for equal nodes."""
    if case.op is CollectiveOp.REDUCE_SCATTER:
        size = case.numel // case.n
        return [((node * m + lane) * size, (node * m + lane + 1) * size) for node in range(k)]
    start, stop = case.numel * lane // m, case.numel * (lane + 1) // m
    size = (stop - start) // k
    return [(start + j * size, stop if j == k - 1 else start + (j + 1) * size) for j in range(k)]


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize(("m", "k"), [(1, 3), (2, 2), (4, 2), (2, 3)])
def test_bytes_are_those_of_the_header(m, k, op):
    n, reduce = m * k, op is CollectiveOp.ALL_REDUCE
    for (dtype, wire), density in zip(DTYPES, (0.05, 0.2, 0.02), strict=True):
        case = Case("hierarchical", n, op, dtype, wire, density, 1001)
        ran = run_case(case, on_nodes((m,) * k))
        partial = "bf16" if (dtype, wire) == ("fp32", "bf16") else "fp32"
        value_bytes = 4 if dtype == "fp32" else 2
        inputs = [contribution(case, rank).double() for rank in range(n)]
        node_sums = [sum(inputs[node * m : (node + 1) * m]) for node in range(k)]
        total = sum(node_sums)
        agreed = 8 * (2 + n)
        for (a, b), got in ran.cluster.link_bytes.items():
            (node_a, lane_a), (node_b, lane_b) = divmod(a, m), divmod(b, m)
            expected = agreed
            if node_a == node_b:
                numels = [
                    sum(hi - lo for lo, hi in _shards(case, m, k, x)) for x in (lane_a, lane_b)
                ]
                expected += 4 * numels[1] + (value_bytes * numels[0] if reduce else 0)
            elif lane_a == lane_b:
                shards = _shards(case, m, k, lane_a)
                expected += 8 * (2 + k) * (2 if reduce else 1)
                expected += _records(node_sums[node_a], *shards[node_b], partial)
                expected += _records(total, *shards[node_a], partial) if reduce else 0
            assert got == expected, (case, a, b)
        rounds_of_sizes = (2 if reduce else 1) * 8 * (2 + k) * (k - 1)
        unreported = agreed * (n - 1) + rounds_of_sizes
        assert ran.sent_bytes() == [sent + unreported for sent in ran.sent]


@pytest.mark.parametrize(
    ("nodes", "n"), [((0, 0, 1, 1), 4), pytest.param((0, 0, 1), 3, marks=pytest.mark.slow)]
)
@on_ranks("n")
def test_exact_over_sockets(rank, nodes, n):
    """The ranks say that they are on these nodes."""
    cpu = torch.device("cpu")
    transport, progress = ProcessGroupTransport(range(n), 20, cpu), ProgressThread(cpu, 20)
    seen = Forwarding(transport, nodes=nodes)
    for name, op in itertools.product(("hierarchical", "adaptive_ring"), CollectiveOp):
        case = Case(name, n, op, density=0.2, numel=1000)
        pending = progress.submit(Pending("b", steps_of(case, seen), StageTimer()))
        result, _ = pending.wait()
        own = slice(None)
        if op is CollectiveOp.REDUCE_SCATTER:
            own = make_bucket(case, rank).shard(rank)
        assert torch.equal(result.double(), exact_sum(case)[own]), case
    progress.close()
    transport.close()
