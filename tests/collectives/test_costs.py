"""The costs in the schemes' headers, compared with the bytes on every link."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.collectives.records import message_parts, shard_cuts
from megatron_sparse.formats.hash_partition import HASH_SEED, PermutationHash
from megatron_sparse.formats.message import WIRE_CODES, MessageBuffers
from megatron_sparse.transport import Link, Topology
from megatron_sparse.wire import HEADER_BYTES, VALUE_BYTES, blocks_payload_bytes, pad16
from tests.collectives.cases import (
    DTYPES,
    SPARSE,
    Case,
    contribution,
    make_bucket,
    make_message,
    record_bytes,
    run_case,
)

RANKS = (1, 2, 3, 4, 5, 8)
DENSE = ("dense_ring", "dense_rhd", "dense_allpairs", "dense_hierarchical")
ONE_ROUND_A_SECOND = Link(1.0, 0.0)


class Oracle:
    """Sizes of all messages and sums of a case, from the format's specification."""

    def __init__(self, case):
        self.case, self.n = case, case.n
        buckets = [make_bucket(case, rank) for rank in range(case.n)]
        messages = [make_message(b, case, MessageBuffers()) for b in buckets]
        self.whole = [m.nbytes for m in messages]
        self.layout = messages[0].layout
        cuts = shard_cuts(self.layout)
        self.shards = [[each.numel() for each in message_parts(m, cuts)] for m in messages]
        self.partial = "bf16" if (case.dtype, case.wire) == ("fp32", "bf16") else "fp32"
        self.final = case.wire

    def sum(self, ranks, dtype, shard=None, *, part=None, dense=False, blocks=False):
        """Bytes of the records of the sum of some ranks: the smallest format for each segment.

        With `blocks` that is dense or blocks. Of a shard, or of the segments `part`, or of all.
        """
        total = sum(contribution(self.case, r).double() for r in ranks)
        cuts, keeps = self.layout.segment_offsets.tolist(), self.layout.segment_keep.tolist()
        segments = list(zip(pairwise(cuts), keeps, strict=True))
        if shard is not None:
            first, last = self.layout.shard_segments[shard : shard + 2]
            segments = segments[first:last]
        if part is not None:
            segments = segments[part]
        size = 0
        for (start, stop), keep in segments:
            values = total[start:stop]
            if blocks:
                size += self._blocks(values, dtype, keep)
            else:
                nnz = int(values.count_nonzero())
                size += record_bytes(len(values), nnz, dtype, dense=keep or dense)
        return size

    def sums(self, **op):
        """The same for each shard's complete sum."""
        return [self.sum(range(self.n), self.final, s, **op) for s in range(self.n)]

    def _blocks(self, values, dtype, keep):
        """Bytes of a segment's record in blocks, or dense where that is not longer."""
        size, dense = self.case.options.block_size, record_bytes(len(values), 0, dtype, dense=True)
        if keep:
            return dense
        held = sum(bool(block.any()) for block in values.split(size))
        return min(dense, HEADER_BYTES + blocks_payload_bytes(held, size, WIRE_CODES[dtype]))

    def partitions(self, values):
        """For each of ZEN's partitions: elements, and the number of non-zero ones."""
        h0 = PermutationHash(values.numel(), self.n, HASH_SEED)
        owner = h0.partition_of(torch.arange(values.numel()))
        return [
            (int((owner == p).sum()), int(values[owner == p].count_nonzero()))
            for p in range(self.n)
        ]


def _split(o, r):
    return sum(o.shards[r]) - o.shards[r][r]


def _doubling(sizes, r):
    """Bytes that rank r sends in an all-gather by doubling of records of these sizes."""
    n, held, sent = len(sizes), 1, 0
    while held < n:
        more = min(held, n - held)
        sent += sum(sizes[(r + i) % n] for i in range(more))
        held += more
    return sent


def _direct(o, r, reduce, **form):
    return _split(o, r) + ((o.n - 1) * o.sums(**form)[r] if reduce else 0)


def _zen(o, r, reduce):
    """80 bytes of headers; sections padded to 16; the smallest of the record's forms."""
    value_bytes = VALUE_BYTES[WIRE_CODES[o.final]]

    def record(positions, nnz, *, pairs):
        """Bytes of the smallest record of so many positions and non-zero elements."""
        bitmap = pad16(8 * -(-positions // 64)) + pad16(nnz * value_bytes)
        sizes = [pad16(positions * value_bytes), bitmap]
        if pairs:
            sizes.append(pad16(4 * nnz) + pad16(nnz * value_bytes))
        return 80 + min(sizes)

    push = [record(*part, pairs=True) for part in o.partitions(contribution(o.case, r))]
    total = sum(contribution(o.case, rank).double() for rank in range(o.n))
    return sum(push) - push[r] + (o.n - 1) * record(*o.partitions(total)[r], pairs=False)


def _sparse_ring(o, r, reduce):
    """Bytes that rank r sends: a size and the records of a sum in each step, then whole sums."""
    sent = 8 * (o.n - 1)
    for s in range(1, o.n):
        shard = (r - s) % o.n
        ranks = [(r - i) % o.n for i in range(s)]
        sent += o.shards[r][shard] if s == 1 else o.sum(ranks, o.partial, shard)
    if reduce:
        sums = o.sums()
        sent += sum(sums) - sums[(r + 1) % o.n]
    return sent


def _ssar_rd(o, r, reduce):
    """Bytes that rank r sends: its growing sum to each peer; folded ranks only their message."""
    active = 2 ** int(math.log2(o.n))
    if r >= active:
        return 8 + o.whole[r]
    sent, distance = 0, 1
    while distance < active:
        base = r // distance * distance
        group = [x for x in range(base, base + distance)]
        group += [x + active for x in group if x + active < o.n]
        sent += 8 + (o.whole[r] if group == [r] else o.sum(group, o.partial))
        distance *= 2
    return sent + (8 + o.sum(range(o.n), o.final) if r + active < o.n else 0)


def _sparse_ps(o, r, reduce):
    """Bytes that rank r sends: its message, or the server's answers to all others."""
    return o.whole[r] if r else (o.n - 1) * (8 + o.sum(range(o.n), o.final))


def _levels(n):
    return math.ceil(math.log2(n))


def _rd_rounds(n):
    active = 2 ** int(math.log2(n))
    return 2 * (int(math.log2(active)) + (2 if n > active else 0))


def _agreement_words(n, reduce):
    """Of an agreement before each half."""
    return (2 + n) * (2 if reduce else 1)


def _paced_rounds(n, reduce):
    return n + (n if reduce else 0)


# scheme: (pairwise bytes of a rank, words that it all-gathers, rounds), for n > 1.
COSTS = {
    "agsparse": (
        lambda o, r, reduce: (o.n - 1) * o.whole[r] if reduce else _split(o, r),
        lambda n, _: 2 + n,
        lambda n, _: n,
    ),
    "direct": (_direct, _agreement_words, _paced_rounds),
    "dense_q": (partial(_direct, dense=True), _agreement_words, _paced_rounds),
    "omnireduce": (partial(_direct, blocks=True), _agreement_words, _paced_rounds),
    "zen": (_zen, lambda n, _: 2 * (2 + n), lambda n, _: 2 * n),
    "ssar_split_ag": (
        lambda o, r, _: _split(o, r) + _doubling(o.sums(), r),
        lambda n, _: 2 * (2 + n),
        lambda n, _: n + 1 + _levels(n),
    ),
    "dsar_split_ag": (
        lambda o, r, _: _split(o, r) + _doubling(o.sums(dense=True), r),
        lambda n, _: 2 + n,
        lambda n, _: n + _levels(n),
    ),
    "sparse_ring": (
        _sparse_ring,
        _agreement_words,
        lambda n, reduce: 2 * n - 1 + (n if reduce else 0),
    ),
    "ssar_rd": (_ssar_rd, lambda n, _: 2 + n, lambda n, _: 1 + _rd_rounds(n)),
    "sparse_ps": (_sparse_ps, lambda n, _: 2 + n, lambda *_: 4),
}


IN_THEIR_OWN_FILES = {"adaptive_ring", "hierarchical", "straggler_direct"}
"""Schemes whose cost depends on the topology or on the late rank."""


def test_every_sparse_scheme_has_its_cost_checked():
    assert set(SPARSE) == set(COSTS) | IN_THEIR_OWN_FILES


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize("name", COSTS)
def test_bytes_and_rounds_are_those_of_the_header(name, op):
    if op not in SCHEMES[name].ops:
        op = CollectiveOp.ALL_REDUCE
    pairwise_bytes, words, rounds = COSTS[name]
    reduce = op is CollectiveOp.ALL_REDUCE
    for n in RANKS:
        topology = Topology((n,), ONE_ROUND_A_SECOND, ONE_ROUND_A_SECOND)
        for (dtype, wire), density in zip(DTYPES, (0.05, 0.4, 0.02), strict=True):
            case = Case(name, n, op, dtype, wire, density, 1001)
            ran = run_case(case, topology)
            oracle = Oracle(case)
            expected = [pairwise_bytes(oracle, rank, reduce) for rank in range(n)]
            agreement = (n - 1) * 8 * words(n, reduce)
            assert ran.sent == expected, case
            assert ran.sent_bytes() == [bytes_ + agreement for bytes_ in expected], case
            assert ran.cluster.modelled_s == (rounds(n, reduce) if n > 1 else 0), case


def test_in_the_paced_exchanges_no_port_is_ever_shared():
    """With equal messages a paced exchange takes its rounds' time and no queueing."""
    n, size = 8, 8 * 4096
    link = Link(0.0, 1.0)
    case = Case("direct", n, CollectiveOp.REDUCE_SCATTER, density=1, numel=size)
    cluster = run_case(case, Topology((n,), link, link)).cluster
    agreement = (n - 1) * 8 * (2 + n)
    longest = max(Oracle(case).shards[0])
    shortest = min(Oracle(case).shards[0])
    assert (n - 1) * shortest <= cluster.modelled_s - agreement <= (n - 1) * longest
    assert torch.tensor(cluster.clock_s).min() > 0


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize("name", DENSE)
def test_dense_schemes_report_what_they_send(name, op):
    """How much that is, and in how many rounds: `tests/planner/test_costs.py`."""
    if op not in SCHEMES[name].ops:
        op = CollectiveOp.ALL_REDUCE
    for n in (*RANKS, 7, 16):
        totals = []
        for dtype, wire in DTYPES:
            ran = run_case(Case(name, n, op, dtype, wire, 1, 1008 * n, straggler=None))
            assert ran.sent_bytes() == ran.sent, (n, dtype, wire)
            totals.append(sum(ran.sent))
        fp32, bf16, narrowed = totals
        assert n == 1 or fp32 / 2 <= narrowed < fp32, n
        assert fp32 / 2 <= bf16 <= fp32, n
