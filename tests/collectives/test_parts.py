"""Long messages of `agsparse` in parts: the bits of whole ones."""

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import agsparse
from megatron_sparse.collectives.base import Subgroup
from megatron_sparse.transport import VirtualCluster
from tests.collectives import test_capacity
from tests.collectives.cases import DTYPES, Case, assert_exact, run_case

IN_ROUNDS = Subgroup.in_rounds


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exchanges of each rank's collective; parts may be as short as a test's buckets."""
    counts: list[int] = []

    def counted(self, rounds, *rest, **options):
        counts.append(len(rounds))
        return IN_ROUNDS(self, rounds, *rest, **options)

    monkeypatch.setattr(Subgroup, "in_rounds", counted)
    monkeypatch.setattr(agsparse, "PART_NUMEL", 100)
    monkeypatch.setattr(agsparse, "PART_BYTES", 64)
    monkeypatch.setattr(agsparse, "ALIGNMENT", 1)
    return counts


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (9, 4)])
def test_parts_give_the_exact_sum(n: int, expected: int, exchanges: list[int]) -> None:
    for density in (0.3, 1.0):
        case = Case("agsparse", n, CollectiveOp.ALL_REDUCE, "fp32", "fp32", density, 1001)
        exchanges.clear()
        assert_exact(case, run_case(case).results)
        assert exchanges == [expected if n > 1 else 0] * n


@pytest.mark.usefixtures("exchanges")
@pytest.mark.parametrize(("dtype", "wire"), DTYPES)
def test_floats_have_the_bits_of_whole_messages(
    dtype: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("agsparse", 4, CollectiveOp.ALL_REDUCE, dtype, wire, 0.3, 999, floats=True)
    got = run_case(case).results
    monkeypatch.setattr(agsparse, "MOST_PARTS", 1)
    wanted = run_case(case).results
    for each in got:
        assert torch.equal(each, wanted[0])


def test_messages_of_fixed_size_have_parts_too(exchanges: list[int]) -> None:
    case = Case("agsparse", 4, CollectiveOp.ALL_REDUCE, "fp32", "fp32", 0.3, 999)
    outcomes = VirtualCluster(4).run(lambda transport: test_capacity.steps_of(case, transport, 0.1))
    wanted = sum(test_capacity.selected(case, rank, 0.1)[0].double() for rank in range(4))
    for result, _, _ in outcomes:
        assert torch.equal(result.double(), wanted)
    assert exchanges == [4] * 4


def test_short_messages_travel_whole(exchanges: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agsparse, "PART_BYTES", 1 << 12)
    case = Case("agsparse", 4, CollectiveOp.ALL_REDUCE, "fp32", "fp32", 0.0, 1000)
    run_case(case)
    assert exchanges == [3] * 4  # one peer at a time


@pytest.mark.parametrize(
    ("longest", "expected"), [(0, 1), (100, 1), (2 * agsparse.PART_BYTES, 2), (99 << 20, 4)]
)
def test_longer_messages_have_more_parts(longest: int, expected: int) -> None:
    assert agsparse.parts_for(4, longest) == expected


def test_borders() -> None:
    def borders(numel: int, ranks: int, op: CollectiveOp = CollectiveOp.ALL_REDUCE) -> int:
        pieces = [ParameterSlice("w", 0, numel)]
        bucket = Bucket("0", torch.empty(numel, device="meta"), pieces, op, ranks)
        cuts = agsparse.part_borders(bucket)
        assert all(cut % agsparse.ALIGNMENT == 0 for cut in cuts)
        return len(cuts)

    least = agsparse.PART_NUMEL
    assert borders(4 * least, 4) == borders(40 * least + 1, 64) == 3
    assert borders(4 * least, 3) == borders(4 * least - 1, 4) == 1
    assert borders(4 * least, 1) == borders(2 * least - 1, 4) == borders(0, 4) == 0
    assert borders(4 * least, 4, CollectiveOp.REDUCE_SCATTER) == 0
