"""The costs in the dense schemes' headers, compared with the bytes on every link."""

from __future__ import annotations

import itertools
import math

import pytest

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.base import even_cuts
from megatron_sparse.transport import Link, Topology
from tests.collectives.cases import DTYPES, Case, numel_for, run_case

RANKS = (1, 2, 3, 4, 5, 7, 8, 16)
BYTES = {"fp32": 4, "bf16": 2}
ONE_ROUND_A_SECOND = Link(1.0, 0.0)


def _pieces(case):
    cuts = even_cuts(case.numel, case.n)
    return [b - a for a, b in itertools.pairwise(cuts)]


def _ring(case, p, b):
    pieces, total = _pieces(case), case.numel
    sent = [(total - own) * p for own in pieces]
    rounds = case.n - 1
    if case.op is CollectiveOp.ALL_REDUCE:
        sent = [s + (total - pieces[(r + 1) % case.n]) * b for r, s in enumerate(sent)]
        rounds *= 2
    return sent, rounds


def _rhd(case, p, b):
    n, total, pieces = case.n, case.numel, _pieces(case)
    active = 2 ** int(math.log2(n))
    surplus, levels = n - active, int(math.log2(active))
    lead_of = [2 * j if j < surplus else j + surplus for j in range(active)] + [n]
    block = [sum(pieces[lead_of[j] : lead_of[j + 1]]) for j in range(active)]
    reduce = case.op is CollectiveOp.ALL_REDUCE
    sent = [total * p] * n  # the folded ranks'
    for j, lead in enumerate(lead_of[:-1]):
        sent[lead] = (total - block[j]) * p
        if reduce:
            for d in (2**level for level in range(levels)):
                sent[lead] += sum(block[j // d * d : (j // d + 1) * d]) * b
        if j < surplus:
            sent[lead] += total * b if reduce else pieces[lead + 1] * p
    return sent, levels * (2 if reduce else 1) + (2 if surplus else 0)


def _allpairs(case, p, b):
    pieces, n = _pieces(case), case.n
    sent = [(case.numel - own) * b for own in pieces]
    if case.op is CollectiveOp.ALL_REDUCE:
        sent = [s + (n - 1) * own * b for s, own in zip(sent, pieces, strict=True)]
    rounds = 2 if case.op is CollectiveOp.ALL_REDUCE else 1
    return sent, rounds if n > 1 else 0


def _broadcast(case, p, b):
    n, total = case.n, case.numel
    if n == 1:
        return [0], 0
    cuts = even_cuts(total, n - 1)
    ring = [y - x for x, y in itertools.pairwise(cuts)]
    sent = [(total - ring[r]) * p + (total - ring[(r + 1) % (n - 1)]) * 4 for r in range(n - 1)]
    sent = [*sent, 0] if n > 2 else [0, 0]
    sent[0] += total * p
    sent[n - 1] += total * p
    order, holders, rounds = [0, n - 1, *range(1, n - 1)], 2, 0
    while holders < n:
        for sender in order[: min(holders, n - holders)]:
            sent[sender] += total * b
        holders, rounds = 2 * holders, rounds + 1
    assert rounds == math.ceil(math.log2(n)) - 1
    return sent, 2 * (n - 2) + 1 + rounds


COSTS = {
    "dense_ring": _ring,
    "dense_rhd": _rhd,
    "dense_allpairs": _allpairs,
    "dense_broadcast": _broadcast,
}


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize("name", COSTS)
def test_bytes_and_rounds_are_those_of_the_header(name, op):
    if name == "dense_broadcast" and op is CollectiveOp.REDUCE_SCATTER:
        op = CollectiveOp.ALL_REDUCE
    for n in RANKS:
        topology = Topology((n,), ONE_ROUND_A_SECOND, ONE_ROUND_A_SECOND)
        for dtype, wire in DTYPES:
            count = numel_for(n, 1001, op)
            case = Case(name, n, op, dtype, wire, 1, count, straggler=None)
            partial = 2 if (dtype, wire) == ("fp32", "bf16") else 4
            expected, rounds = COSTS[name](case, partial, BYTES[wire])
            ran = run_case(case, topology)
            assert ran.sent_bytes() == ran.sent == expected, case
            if name == "dense_broadcast" and n & (n - 1):
                # In the last round only ranks that sent in the round before may have to send, and
                # in the model a sender does not wait for its message to arrive.
                assert rounds - 1 <= ran.cluster.modelled_s <= rounds, case
            else:
                assert ran.cluster.modelled_s == rounds, case


@pytest.mark.parametrize(("n", "closed"), [(4, 2 * 3 / 4), (8, 2 * 7 / 8)])
@pytest.mark.parametrize("name", ["dense_ring", "dense_rhd", "dense_allpairs"])
def test_equal_pieces_send_twice_n_minus_one_nths(name, n, closed):
    assert run_case(Case(name, n, numel=800)).sent_bytes() == [closed * 800 * 4] * n


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize(("m", "k"), [(2, 4), (3, 2), (4, 1), (1, 8), (4, 4)])
def test_the_hierarchy_sends_the_headers_bytes_between_nodes(m, k, op):
    n, total = m * k, 3 * 4 * 4 * 16
    inner, outer = Link(1.0, 0.0), Link(1000.0, 0.0)
    case = Case("dense_hierarchical", n, op, density=1, numel=total)
    ran = run_case(case, Topology((m,) * k, inner, outer))
    assert ran.sent_bytes() == ran.sent
    cluster = ran.cluster
    halves = 2 if op is CollectiveOp.ALL_REDUCE else 1
    node = cluster.topology.nodes
    for rank in range(n):
        links = {key: size for key, size in cluster.link_bytes.items() if key[0] == rank}
        between = sum(size for (a, b), size in links.items() if node[a] != node[b])
        within = sum(size for (a, b), size in links.items() if node[a] == node[b])
        assert within == halves * (m - 1) * total * 4 // m
        assert between == halves * (k - 1) * total * 4 // (m * k)
    assert cluster.modelled_s == halves * ((m - 1) * 1.0 + math.log2(k) * 1000.0)
