"""Every kind of fault at every operation of every scheme.

The outcome is a typed error or the exact sum, never another number and never a hang: the virtual
cluster reports a deadlock.
"""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.checksummed import (
    checksummed_row,
    checksummed_size,
    verified_row,
    verified_size,
)
from megatron_sparse.errors import CommunicationError, MegatronSparseError, WireFormatError
from megatron_sparse.transport import Link, Topology, VirtualCluster
from tests.collectives.cases import (
    BY_FORM,
    OPTIONS,
    SPARSE,
    Case,
    exact_sum,
    steps_of,
    whole_sums,
)
from tests.collectives.faults import Fault, FaultyTransport, Killed, die_virtually

N = 3
# In this case messages and sums have different sizes, so a repeated message is detected by its
# size or by its header.
DENSITY = 0.2
PASSING_ON = ("sparse_ring", "adaptive_ring", "straggler_direct")
"""Their ranks pass on records, which name their maker."""


def _run(name, op, fault):
    """(error or None, whether every rank has the exact sum, whether the fault found a target)."""
    options = replace(OPTIONS, checksum=fault.kind == "payload")
    case = Case(name, N, op, density=DENSITY, numel=900, options=options)
    cluster = VirtualCluster(N, Topology((2, 1), Link(1e-6, 1e-9), Link(1e-5, 1e-8)))
    faulty = {}

    def start(transport):
        acts = {"kill": die_virtually, "slow": lambda: transport.charge(10.0)}
        wrapped = faulty[transport.rank] = FaultyTransport(transport, fault, acts)
        try:
            return (yield from steps_of(case, wrapped))
        except Killed:
            return None

    try:
        results = cluster.run(start)
    except MegatronSparseError as error:
        return error, False, faulty
    exact = None not in results and all(
        torch.equal(whole.double(), exact_sum(case))
        for whole in whole_sums(case, (result for result, _ in results))
    )
    return None, exact, faulty


@cache
def _posts(name, op):
    """How many operations each rank posts."""
    _, exact, faulty = _run(name, op, Fault("none", 0, 0))
    assert exact
    return [faulty[rank].posted for rank in range(N)]


def _outcomes(name, op, kind):
    """Outcomes of the fault at every operation of every rank that it can damage."""
    outcomes = []
    for victim, posts in enumerate(_posts(name, op)):
        for at in range(posts):
            error, exact, faulty = _run(name, op, Fault(kind, victim, at))
            if faulty[victim].struck:
                outcomes.append((victim, at, error, exact))
    return outcomes


@pytest.mark.parametrize(("name", "op"), BY_FORM)
def test_a_slow_rank_changes_nothing(name, op):
    posts = _posts(name, op)
    for at in range(max(posts)):
        # Not every rank at every operation: a slow rank is never refused, so each run takes its
        # full time. The rank that posts most is one that others wait for.
        victim = posts.index(max(posts)) if at % 2 else at % N
        error, exact, _ = _run(name, op, Fault("slow", victim, at))
        assert error is None, (victim, at)
        assert exact, (victim, at)


RECORDS = [(name, op) for name, op in BY_FORM if name in SPARSE]
# The all-reduces contain every phase of the reduce-scatters.
ALL_REDUCES = [(name, op) for name, op in RECORDS if op is CollectiveOp.ALL_REDUCE]
AGREEING = [*ALL_REDUCES, *((name, CollectiveOp.ALL_REDUCE) for name in ("dense", "straggler"))]
KINDS = {
    "kill": (BY_FORM, CommunicationError, r"rank VICTIM\b|ranks \[VICTIM\]"),
    "truncate": (BY_FORM, CommunicationError, "rank VICTIM's message"),
    "header": (RECORDS, WireFormatError, r"^rank VICTIM: field (magic|version|checksum) "),
    # Of the maker: others pass it on.
    "payload": (ALL_REDUCES, WireFormatError, r"^rank \d: field checksum "),
    "size": (AGREEING, WireFormatError, "rank VICTIM: field"),
}
"""What is wrong: where it is tried, and the error; payloads have a checksum."""


@pytest.mark.parametrize(
    ("kind", "name", "op"), [(kind, *form) for kind in KINDS for form in KINDS[kind][0]]
)
def test_a_fault_at_any_operation_is_an_error_that_names_the_rank(kind, name, op):
    _, expected, words = KINDS[kind]
    outcomes = _outcomes(name, op, kind)
    # Only the backend's own reduction has no messages of the plugin.
    assert bool(outcomes) == ((kind, name) != ("truncate", "dense"))
    for victim, at, error, _ in outcomes:
        assert isinstance(error, expected), (victim, at)
        named = r"\d" if kind == "header" and name in PASSING_ON else str(victim)
        assert re.search(words.replace("VICTIM", named), str(error)), (victim, at, str(error))


@pytest.mark.parametrize(("name", "op"), ALL_REDUCES)
def test_a_message_out_of_order_is_never_taken_for_another(name, op):
    for victim, at, error, exact in _outcomes(name, op, "replay"):
        assert error is not None or exact, (victim, at)


def test_every_bit_of_a_checksummed_size_is_covered():
    for size in (0, 1, 48, 4096, 2**47 + 12345):
        word = checksummed_size(size)
        assert verified_size(word, rank=0) == size
        assert 0 <= word < 2**63
        for bit in range(64):
            damaged = (word ^ 1 << bit) - (2**64 if bit == 63 else 0)
            with pytest.raises(WireFormatError, match="rank 3: field size"):
                verified_size(damaged, rank=3)


def test_every_bit_of_a_checksummed_row_is_covered():
    row = checksummed_row(0xDEADBEEF, [5, 0, 2**40])
    assert verified_row([*row, 0, 0], rank=0) == (0xDEADBEEF, [5, 0, 2**40])
    for place in range(len(row)):
        for bit in range(63):
            damaged = [word ^ (1 << bit) * (i == place) for i, word in enumerate(row)]
            with pytest.raises(WireFormatError, match="rank 3: field agreement"):
                verified_row(damaged, rank=3)
