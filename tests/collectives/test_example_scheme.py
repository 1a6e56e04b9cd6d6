"""The exactness test for a scheme of one's own: docs/adding-a-scheme.md."""

from collections.abc import Iterator

import pytest
import torch

from examples.new_scheme.sparse_star import NAME, SCHEME
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.collectives.registry import register
from tests.collectives.cases import DTYPES, Case, assert_exact, contribution, run_case


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Other tests use all registered schemes, so this one is removed afterwards."""
    register(SCHEME, SCHEMES)
    yield
    del SCHEMES[NAME]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("density", "numel"), [(0.0, 300), (0.01, 5000), (1.0, 300), (1.0, 0)])
def test_every_rank_holds_the_exact_sum(n, dtypes, density, numel):
    """Of small integers that differ from rank to rank: their sums are exact even in bf16."""
    case = Case(NAME, n, dtype=dtypes[0], wire=dtypes[1], density=density, numel=numel)
    assert_exact(case, run_case(case).results)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_ranks_hold_the_same_bits_added_in_rank_order(n):
    case = Case(NAME, n, numel=2000, floats=True)
    expected = sum((contribution(case, rank) for rank in range(n)), torch.zeros(case.numel))
    for result in run_case(case).results:
        assert torch.equal(result, expected)


def test_the_bytes_are_those_of_the_header():
    n, numel = 4, 1000
    case = Case(NAME, n, numel=numel)
    sent = run_case(case).sent
    assert sent[0] == (n - 1) * numel * 4
    assert all(0 < count < numel * 8 for count in sent[1:])


def test_not_a_number_reaches_every_rank():
    case = Case(NAME, 3)
    for result in run_case(case, poisoned=1).results:
        assert result[7].isnan()
        assert result[100] == float("inf")
