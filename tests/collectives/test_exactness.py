"""Every scheme on virtual ranks: exact on integers, bit-identical on floats."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse import collectives
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.collectives.base import Subgroup
from megatron_sparse.transport import Topology, VirtualCluster
from megatron_sparse.transport.topology import NO_TIME
from tests.collectives.cases import Case, contribution, exact_sum, numel_for, steps_of

RANKS = (1, 2, 3, 4, 5, 7, 8, 16)
DTYPES = (("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"))
IN_ROUNDS = Subgroup.in_rounds
BY_FORM = [(name, op) for name in SCHEMES for op in CollectiveOp if op in SCHEMES[name].ops]


def _run(case, topology=None):
    cluster = VirtualCluster(case.n, topology)
    outcomes = cluster.run(lambda transport: steps_of(case, transport))
    return [result for result, _ in outcomes], [sent for _, sent in outcomes], cluster


def _assert_exact(case, results):
    expected = exact_sum(case)
    if case.op is CollectiveOp.ALL_REDUCE:
        for rank, result in enumerate(results):
            assert torch.equal(result.double(), expected), (case, rank)
    else:
        assert torch.equal(torch.cat(results).double(), expected), case


def test_every_file_with_a_scheme_is_in_the_registry():
    folder = Path(collectives.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if "\nSCHEME = " in path.read_text("utf-8")}
    assert files == set(SCHEMES)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(("name", "op"), BY_FORM)
def test_exact_on_small_integers(name, op, n):
    sizes = [(0, 300), (0.01, 300), (1, 300), (1, 0), (1, 1), (0.5, n), (0.5, n + 1)]
    kinds = [(*size, *DTYPES[i % 3]) for i, size in enumerate(sizes)]
    kinds += [(0.3, 300, *dtypes) for dtypes in DTYPES]
    for density, numel, dtype, wire in kinds:
        count = numel_for(n, numel, op)
        case = Case(name, n, op, dtype, wire, density, count)
        _assert_exact(case, _run(case)[0])


@pytest.fixture
def in_one_call(monkeypatch):
    """Posts independent rounds as on CUDA: all in one exchange."""
    joined = []

    def posted_at_once(self, rounds, meanwhile=None, *, independent=False, last=False):
        if independent and len(rounds) > 1:
            joined.append(self)
            return self._in_one(rounds, meanwhile, last=last)
        return IN_ROUNDS(self, rounds, meanwhile, last=last)

    monkeypatch.setattr(Subgroup, "in_rounds", posted_at_once)
    return joined


@pytest.mark.parametrize("n", [4, 5, 8])
@pytest.mark.parametrize(
    ("name", "op"),
    [
        (name, op)
        for name, op in BY_FORM
        if name in ("agsparse", "direct", "zen", "hierarchical", "straggler", "straggler_direct")
    ],
)
def test_independent_rounds_may_be_one_call(name, op, n, in_one_call):
    """Buffers hold garbage until a message arrives, so an early read would be found."""
    for topology in (None, Topology((1, n - 1), NO_TIME, NO_TIME)):
        for dtype, wire in DTYPES:
            case = Case(name, n, op, dtype, wire, 0.3, numel_for(n, 300, op), floats=True)
            in_one_call.clear()
            results, sent, _ = _run(case, topology)
            with pytest.MonkeyPatch.context() as apart:
                apart.setattr(Subgroup, "in_rounds", IN_ROUNDS)
                expected, expected_sent, _ = _run(case, topology)
            assert in_one_call, case
            assert sent == expected_sent
            for result, wanted in zip(results, expected, strict=True):
                assert torch.equal(result, wanted), case


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    which=st.sampled_from(BY_FORM),
    n=st.integers(1, 9),
    numel=st.integers(0, 5000),
    density=st.sampled_from((0.0, 0.001, 0.05, 0.2, 0.6, 1.0)),
    dtypes=st.sampled_from((*DTYPES, ("fp16", "fp16"))),
)
def test_exact_for_any_size_and_density(which, n, numel, density, dtypes):
    """Over a tile of 4096 elements too, and in fp16; no case here was chosen by hand."""
    name, op = which
    case = Case(name, n, op, *dtypes, density, numel_for(n, numel, op))
    _assert_exact(case, _run(case)[0])


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("name", SCHEMES)
def test_all_ranks_hold_the_same_bits_and_the_sum_of_floats(name, n):
    for dtype, wire in DTYPES:
        case = Case(name, n, CollectiveOp.ALL_REDUCE, dtype, wire, 0.3, 1000, floats=True)
        results, _, _ = _run(case)
        for result in results[1:]:
            assert torch.equal(result, results[0]), (case, "not bit-identical")
        # At most n additions of numbers up to sum |x|, each off by half a unit in the last place
        # of the dtype that partial sums are rounded to (a backend's own bf16 sum and a narrowed
        # fp32 one: bf16's), and one rounding at the end.
        magnitude = sum(contribution(case, r).double().abs() for r in range(n))
        narrow = wire == "bf16" and (dtype == "fp32" or name == "dense")
        unit = torch.finfo(torch.bfloat16 if narrow else torch.float32).eps
        last = torch.finfo(results[0].dtype).eps
        bound = magnitude * (n * unit + last) / 2
        assert ((results[0].double() - exact_sum(case)).abs() <= bound).all(), case


IN_RANK_ORDER = (
    "agsparse",
    "direct",
    "ssar_split_ag",
    "dsar_split_ag",
    "sparse_ps",
    "dense_allpairs",
    "omnireduce",
    "zen",
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", IN_RANK_ORDER)
def test_schemes_that_add_in_rank_order_agree_bit_for_bit(name, dtype):
    """Their sums have the bits of an addition in rank order."""
    case = Case(name, 5, CollectiveOp.ALL_REDUCE, dtype, dtype, 0.5, 2000, floats=True)
    expected = torch.zeros(case.numel)
    for rank in range(case.n):
        expected += contribution(case, rank).float()
    for result in _run(case)[0]:
        assert torch.equal(result, expected.to(result.dtype))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "op"), BY_FORM)
def test_not_a_number_and_infinity_reach_every_rank(name, op, dtype):
    n, numel = 3, 240
    case = Case(name, n, op, dtype, dtype, 0.3, numel)
    cluster = VirtualCluster(n)

    def start(transport):
        return steps_of(case, transport, poison=transport.rank == 1)

    results = [result for result, _ in cluster.run(start)]
    whole = results if op is CollectiveOp.ALL_REDUCE else [torch.cat(results)]
    for result in whole:
        assert result[7].isnan()
        assert result[100] == float("inf")
        assert result.isnan().sum() == 1


UNEVEN = [(3, 2), (1, 4), (4, 4), (2, 2, 2), (3, 1, 2, 2), (5,), (1, 1, 1), (2, 3, 3, 3, 1), (2, 2)]


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize("sizes", UNEVEN)
def test_the_hierarchy_is_exact_on_nodes_of_any_size(sizes, op):
    n = sum(sizes)
    topology = Topology(sizes, NO_TIME, NO_TIME)
    for (dtype, wire), numel in itertools.product(DTYPES, (300, 1, 0)):
        count = numel_for(n, numel, op)
        case = Case("dense_hierarchical", n, op, dtype, wire, 1, count)
        _assert_exact(case, _run(case, topology)[0])
