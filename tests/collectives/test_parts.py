"""Messages of `agsparse` in parts: the bits of whole ones, and the predicted time."""

from dataclasses import replace

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import agsparse
from megatron_sparse.collectives.base import ALIGNMENT, Subgroup
from megatron_sparse.planner.prices import predict
from megatron_sparse.transport import VirtualCluster
from tests.collectives import test_capacity
from tests.collectives.cases import (
    DTYPES,
    Case,
    assert_exact,
    exact_sum,
    parameters,
    run_case,
    same_on_all_ranks,
)
from tests.planner.test_costs import BANDWIDTH, OPTIONS, cluster, shape, uniform
from tests.ranks import run_ranks
from tests.reduction.test_reducer_gloo import two_steps

POST = Subgroup.post


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Buckets of 100 elements have parts; the rank of each exchange that is posted."""
    ranks: list[int] = []

    def counted(self, sends, receives):
        ranks.append(self.rank)
        return POST(self, sends, receives)

    monkeypatch.setattr(Subgroup, "post", counted)
    monkeypatch.setattr(agsparse, "PARTS_NUMEL", 100)
    return ranks


@pytest.mark.parametrize(("n", "expected"), [(1, 0), (2, 2), (3, 3), (4, 4), (5, 4), (9, 4)])
def test_parts_give_the_exact_sum(n: int, expected: int, posts: list[int]) -> None:
    for density in (0.3, 1.0):
        case = Case("agsparse", n, CollectiveOp.ALL_REDUCE, "fp32", "fp32", density, 1001)
        posts.clear()
        assert_exact(case, run_case(case).results)
        assert sorted(posts) == sorted([*range(n)] * expected)


@pytest.mark.usefixtures("posts")
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


def test_messages_of_fixed_size_have_parts_too(posts: list[int]) -> None:
    case = Case("agsparse", 4, CollectiveOp.ALL_REDUCE, "fp32", "fp32", 0.3, 999)
    outcomes = VirtualCluster(4).run(lambda transport: test_capacity.steps_of(case, transport, 0.1))
    unsent = sum(residual.double() for _, residual, _ in outcomes)
    for result, _, _ in outcomes:
        assert torch.equal(result.double() + unsent, exact_sum(case))
    assert len(posts) == 4 * 4


def _train_in_parts(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns each step's sum on this rank, and what the rank sent."""
    agsparse.PARTS_NUMEL = 100
    op, gradient = CollectiveOp.ALL_REDUCE, test_capacity._gradient
    pieces = parameters(test_capacity.NUMEL)
    bucket = Bucket("b", gradient(rank, 0), pieces, op, world_size)
    assert len(agsparse.part_borders(bucket)) == world_size - 1
    steps = two_steps("agsparse", op, gradient, pieces, 0.5)
    return [(total, sent) for total, sent, _ in steps]


def test_parts_arrive_in_order_over_gloo() -> None:
    for by_rank in zip(*run_ranks(_train_in_parts, 3), strict=True):
        totals, sent = zip(*by_rank, strict=True)
        assert torch.equal(same_on_all_ranks(CollectiveOp.ALL_REDUCE, totals), sum(sent))


@pytest.mark.parametrize(("device", "parts"), [("cpu", 4), ("cuda", 1)])
@pytest.mark.parametrize("codec_s", [1e-11, 1e-7])
def test_the_price_hides_additions_or_network(codec_s: float, device: str, parts: int) -> None:
    numel, n = agsparse.PARTS_NUMEL, 4

    def price(codec_s: float) -> float:
        where = replace(cluster(BANDWIDTH, codec_s=codec_s), device=device)
        return predict("agsparse", shape(n, numel=numel), uniform(n, numel=numel), where, OPTIONS)

    network_s, selection_s, adding_s = price(0.0), numel * codec_s, n * numel * codec_s
    hidden_s = min(network_s, adding_s) * (parts - 1) / parts
    expected_s = selection_s + network_s + adding_s - hidden_s
    assert price(codec_s) == pytest.approx(expected_s, rel=1e-3)


def test_parts_begin_at_tiles_of_large_all_reduces() -> None:
    def borders(numel: int, ranks: int, op: CollectiveOp = CollectiveOp.ALL_REDUCE) -> int:
        pieces = [ParameterSlice("w", 0, numel)]
        bucket = Bucket("0", torch.empty(numel, device="meta"), pieces, op, ranks)
        cuts = agsparse.part_borders(bucket)
        assert all(cut % ALIGNMENT == 0 for cut in cuts)
        return len(cuts)

    least = agsparse.PARTS_NUMEL
    assert borders(least, 4) == borders(10 * least + 1, 64) == 3
    assert borders(least, 3) == 2
    assert borders(least, 1) == borders(least - 1, 4) == borders(0, 4) == 0
    assert borders(least, 4, CollectiveOp.REDUCE_SCATTER) == 0
