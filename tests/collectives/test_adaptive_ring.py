"""SpCCL's adaptive ring: where it sends densely, exact sums, and bytes.

Legend: n ranks.
"""

import dataclasses
import itertools

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.records import shard_cuts
from megatron_sparse.config.scheme import RING_DENSITIES
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.wire import FORMAT_COO, FORMAT_DENSE, FORMAT_PICI
from tests.collectives import cases
from tests.collectives.cases import (
    DTYPES,
    OPTIONS,
    Case,
    Changing,
    Forwarding,
    assert_exact,
    contribution,
    on_nodes,
    run_case,
)
from tests.collectives.test_costs import Oracle
from tests.headers import read_headers

NEVER = 2.0
"""No density reaches it."""
SPCCL = RING_DENSITIES["pici"]


def _case(
    n, densities, op=CollectiveOp.ALL_REDUCE, kinds=DTYPES[0], density=0.2, numel=1000, **more
):
    intra, inter, gather = densities
    options = dataclasses.replace(
        OPTIONS, ring_intra_density=intra, ring_inter_density=inter, ring_gather_density=gather
    )
    return Case("adaptive_ring", n, op, *kinds, density, numel, options=options, **more)


def _run(case, sizes=None, nodes=None):
    """(results, the bytes of each rank's pairwise messages, the cluster)."""
    sent = [[] for _ in range(case.n)]

    def tapped(transport):
        def kept(values, peer):
            if peer is not None:
                sent[transport.rank].append(values.clone())
            return values

        return Changing(Forwarding(transport, nodes=nodes or transport.nodes), kept)

    ran = run_case(case, on_nodes(sizes or (case.n,)), tapped)
    assert ran.sent == [sum(values.nbytes for values in messages) for messages in sent]
    return ran.results, sent, ran.cluster


def _kinds(sent):
    """A rank's transfers without the size rounds: `sparse` for records, else `dense`."""
    kinds = {torch.uint8: "sparse", torch.float32: "dense", torch.bfloat16: "dense"}
    return [kinds[values.dtype] for values in sent if values.dtype != torch.int64]


def _format(records):
    """The format of the longest segment of some records."""
    headers = read_headers(records.numpy().tobytes(), rank=0)
    return max(headers, key=lambda header: header.numel).format


def test_thresholds_come_from_the_paper_unless_given():
    for form, expected in (("auto", SPCCL), ("pici", SPCCL), ("coo", (0.3, 0.4, 0.5))):
        assert SchemeConfig(format=form).ring_densities() == expected
    given = SchemeConfig(format="coo", ring_inter_density=0.0)
    assert given.ring_densities() == (0.3, 0.0, 0.5)


THRESHOLDS = [
    SPCCL,
    (0, 0, 0),
    (NEVER, NEVER, NEVER),
    (0, NEVER, 0),
    (NEVER, 0, NEVER),
    (0.3, 0.6, 1),
]


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 1, 1), (2, 2), (3, 2), (1, 4), (3, 1, 2, 2)])
def test_exact_for_any_thresholds(sizes, op):
    n = sum(sizes)
    kinds = itertools.cycle(DTYPES)
    amounts = ((0.02, 1001), (0.3, 1001), (1, n), (1, 0))
    for densities, (density, numel) in itertools.product(THRESHOLDS, amounts):
        case = _case(n, densities, op, next(kinds), density, numel)
        assert_exact(case, _run(case, sizes)[0])


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize("wire_format", ["coo", "pici", "dense"])
def test_exact_in_every_format_and_sums_are_in_it(wire_format, op):
    case = _case(4, (NEVER,) * 3, op, density=0.05, numel=40_000)
    case = dataclasses.replace(case, options=dataclasses.replace(case.options, format=wire_format))
    results, sent, _ = _run(case)
    assert_exact(case, results)
    codes = {"coo": FORMAT_COO, "pici": FORMAT_PICI, "dense": FORMAT_DENSE}
    for messages in sent:
        records = [values for values in messages if values.dtype == torch.uint8]
        for values in records[1:]:  # The first is the contribution, as selection encoded it.
            assert _format(values) == codes[wire_format]


def test_the_ring_runs_node_by_node():
    """With nodes (0, 1, 0, 1) it is 0, 2, 1, 3: two of the four links cross nodes."""
    nodes = (0, 1, 0, 1)
    for op in CollectiveOp:
        case = _case(4, (0, NEVER, NEVER), op)
        results, sent, cluster = _run(case, nodes=nodes)
        assert_exact(case, results)
        after = {0: 2, 2: 1, 1: 3, 3: 0}
        kinds = {rank: _kinds(sent[rank]) for rank in range(4)}
        for rank, successor in after.items():
            is_inside = nodes[rank] == nodes[successor]
            assert kinds[rank][1:3] == ["dense" if is_inside else "sparse"] * 2
        agreements = 8 * (2 + 4) * (2 if op is CollectiveOp.ALL_REDUCE else 1)
        for (a, b), size in cluster.link_bytes.items():
            assert (size > agreements) == (after[a] == b)


def test_measured_densities_correct_extrapolated_ones(monkeypatch):
    """All ranks select the same positions: sums are no denser, and none goes dense.

    By equation (7) alone the sum of 3 contributions would have a density of 0.27.
    """
    real = cases.contribution
    monkeypatch.setattr(cases, "contribution", lambda case, _: real(case, 0))
    case = _case(8, (0.25, NEVER, NEVER), CollectiveOp.REDUCE_SCATTER, density=0.1, numel=8000)
    results, sent, _ = _run(case)
    assert torch.equal(torch.cat(results), 8 * real(case, 0))
    for messages in sent:
        assert _kinds(messages) == ["sparse"] * 7


def _prunable(oracle, shard):
    """Which of a bucket's elements may be pruned, as indices; of one shard of it."""
    layout = oracle.layout
    first, last = layout.shard_segments[shard : shard + 2]
    offsets, keeps = layout.segment_offsets.tolist(), layout.segment_keep.tolist()
    return [i for s in range(first, last) if not keeps[s] for i in range(*offsets[s : s + 2])]


def _sent_bytes(case, nodes):
    """What each rank sends according to the header, from the sums themselves."""
    n, oracle = case.n, Oracle(case)
    intra, inter, gather = case.options.ring_densities()
    inputs = [contribution(case, rank).double() for rank in range(n)]
    free = [_prunable(oracle, shard) for shard in range(n)]
    everywhere = list(itertools.chain(*free))
    initial = [int(x[everywhere].count_nonzero()) / len(everywhere) for x in inputs]
    offsets = [cut.elements.start for cut in shard_cuts(oracle.layout)] + [case.numel]
    partial_bytes = 2 if oracle.partial == "bf16" else 4
    sent, last = [0] * n, [0.0] * n
    for rank in range(n):
        threshold = intra if nodes[rank] == nodes[(rank + 1) % n] else inter
        density = 0.0
        for step in range(1, n):
            shard, ranks = (rank - step) % n, [(rank - i) % n for i in range(step)]
            density = 1 - (1 - density) * (1 - initial[ranks[-1]])
            if step > 1 and density >= threshold:
                sent[rank] += partial_bytes * (offsets[shard + 1] - offsets[shard])
                continue
            is_own = step == 1
            size = (
                oracle.shards[rank][shard] if is_own else oracle.sum(ranks, oracle.partial, shard)
            )
            sent[rank] += 8 + size
            if free[shard]:
                total = sum(inputs[r] for r in ranks)[free[shard]]
                density = int(total.count_nonzero()) / len(free[shard])
        last[rank] = density
    if case.op is CollectiveOp.ALL_REDUCE:
        sums = []
        for rank in range(n):
            density = 1 - (1 - last[rank - 1]) * (1 - initial[rank])
            everyone = range(n)
            sums.append(oracle.sum(everyone, oracle.final, rank, dense=density >= gather))
        for rank in range(n):
            sent[rank] += sum(sums) - sums[(rank + 1) % n]
    return sent


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 2), (1, 1, 1), (4, 4)])
def test_bytes_are_those_of_the_header(sizes, op):
    n, nodes = sum(sizes), on_nodes(sizes).nodes
    agreement = (n - 1) * 8 * (2 + n) * (2 if op is CollectiveOp.ALL_REDUCE else 1)
    for kinds, density, densities in itertools.product(
        DTYPES, (0.05, 0.15, 0.4), (SPCCL, (0.2, 0.4, 0.6))
    ):
        case = _case(n, densities, op, kinds, density, 1001)
        _, sent, cluster = _run(case, sizes)
        expected = _sent_bytes(case, nodes)
        assert [sum(values.nbytes for values in messages) for messages in sent] == expected, case
        assert [cluster.sent_bytes(rank) - agreement for rank in range(n)] == expected, case


def test_without_thresholds_it_is_the_sparse_ring():
    for op in CollectiveOp:
        case = _case(5, (NEVER,) * 3, op, floats=True)
        plain = dataclasses.replace(case, scheme="sparse_ring")
        for ours, theirs in zip(_run(case)[0], _run(plain)[0], strict=True):
            assert torch.equal(ours, theirs)
        assert _run(case)[2].link_bytes == _run(plain)[2].link_bytes
