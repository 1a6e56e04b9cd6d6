"""Every scheme on virtual ranks: exact on integers, bit-identical on floats."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse import collectives
from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.collectives.base import Subgroup
from tests.collectives.cases import (
    BY_FORM,
    DTYPES,
    NAMES,
    OPTIONS,
    Case,
    assert_exact,
    contribution,
    exact_sum,
    on_nodes,
    run_case,
)

RANKS = (1, 2, 3, 4, 5, 7, 8, 16)
IN_ROUNDS = Subgroup.in_rounds


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
        case = Case(name, n, op, dtype, wire, density, numel)
        assert_exact(case, run_case(case).results)


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
    for topology in (None, on_nodes((1, n - 1))):
        for dtype, wire in DTYPES:
            case = Case(name, n, op, dtype, wire, 0.3, 300, floats=True)
            in_one_call.clear()
            ran = run_case(case, topology)
            with pytest.MonkeyPatch.context() as apart:
                apart.setattr(Subgroup, "in_rounds", IN_ROUNDS)
                apart_ran = run_case(case, topology)
            assert in_one_call, case
            assert ran.sent == apart_ran.sent
            for result, wanted in zip(ran.results, apart_ran.results, strict=True):
                assert torch.equal(result, wanted), case


@settings(max_examples=60, derandomize=True)
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
    case = Case(name, n, op, *dtypes, density, numel)
    assert_exact(case, run_case(case).results)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, (n,)) for name in NAMES for n in (2, 3, 5, 8)),
        ("hierarchical", (2, 2)),
        ("hierarchical", (3, 1, 2)),
    ],
)
def test_all_ranks_hold_the_same_bits_and_the_sum_of_floats(name, sizes):
    n = sum(sizes)
    for dtype, wire in DTYPES:
        case = Case(name, n, CollectiveOp.ALL_REDUCE, dtype, wire, 0.3, 1000, floats=True)
        results = run_case(case, on_nodes(sizes)).results
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
    for result in run_case(case).results:
        assert torch.equal(result, expected.to(result.dtype))


NODES = [(1,), (5,), (1, 1, 1), (2, 2), (4, 4), (2, 2, 2), (3, 2), (1, 4), (3, 1, 2, 2)]
NODES += [(2, 3, 3, 3, 1)]


@pytest.mark.parametrize("op", list(CollectiveOp))
@pytest.mark.parametrize(("name", "density"), [("dense_hierarchical", 1), ("hierarchical", 0.2)])
def test_hierarchies_are_exact_on_nodes_of_any_size(name, density, op):
    """Parts of one element or none too."""
    for sizes in NODES:
        n = sum(sizes)
        for (dtype, wire), numel in itertools.product(DTYPES, (300, n, 1, 0)):
            case = Case(name, n, op, dtype, wire, density, numel)
            assert_exact(case, run_case(case, on_nodes(sizes)).results)


VARIANTS = [("omnireduce", {"block_size": size}) for size in (64, 256, 4096)] + [
    ("zen", {"hash_rounds": rounds}) for rounds in (0, 1)
]
AMOUNTS = [
    *itertools.product((1, 2, 5), DTYPES, (0, 0.02, 0.5), [700]),
    *itertools.product([3], DTYPES[1:2], (0.0005, 0.05), [30_000]),
]


@pytest.mark.parametrize(
    ("name", "options", "op"),
    [(*variant, op) for variant in VARIANTS for op in CollectiveOp if (variant[0], op) in BY_FORM],
)
def test_exact_with_every_block_size_and_way_to_split(name, options, op):
    """Both add in rank order, so even floats have the bits that they have by default."""
    for n, (dtype, wire), density, numel in AMOUNTS:
        others = replace(OPTIONS, **options)
        case = Case(name, n, op, dtype, wire, density, numel, options=others)
        assert_exact(case, run_case(case).results)
        floats = replace(case, floats=True)
        by_default = run_case(replace(floats, options=OPTIONS)).results
        for result, other in zip(run_case(floats).results, by_default, strict=True):
            assert torch.equal(result, other), case
