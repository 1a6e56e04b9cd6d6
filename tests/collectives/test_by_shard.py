"""Messages whose shards are encoded while they are sent: the bits of those encoded before."""

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.collectives.records import shard_cuts
from megatron_sparse.compression.schedule import Phase
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.formats.message import MessageBuffers, prune_encode, record_spec
from megatron_sparse.planner import plan
from tests.collectives import test_capacity
from tests.collectives.cases import (
    BY_FORM,
    Case,
    layout_of,
    make_bucket,
    parameters,
    same_on_all_ranks,
)
from tests.ranks import run_ranks
from tests.reduction.test_reducer_gloo import two_steps
from tests.reduction.virtual_level import VirtualRanks, gradients, settings

CAPABLE = [
    (name, op)
    for name, op in BY_FORM
    if SCHEMES[name].sends_by_shard and SCHEMES[name].is_sharded(op)
]
CASES = [(*case, None) for case in CAPABLE]
CASES += [(*case, 4) for case in CAPABLE if case[0] != "omnireduce"]  # blocks have values in full


@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize(("scheme", "op", "bits"), CASES)
def test_sums_residuals_and_sizes_are_the_same(scheme, op, n, bits, monkeypatch):
    found = []
    for least in (2**40, 1):
        monkeypatch.setattr(plan, "BY_SHARD_NUMEL", least)
        given = {"level": "rank", "density": 0.3, "checksum": True}
        run = VirtualRanks(settings(scheme=scheme, value_bits=bits, **given), (n,), op)
        found.append([run.step(gradients(run, step), step) for step in range(2)])
    for before, now in zip(*found, strict=True):
        for rank in range(n):
            parts = [run.part_of_result(rank, each.results[rank]) for each in (before, now)]
            assert torch.equal(*parts)
            assert torch.equal(before.sent[rank], now.sent[rank])
            old, new = before.records[rank], now.records[rank]
            assert (old.nnz, old.message_bytes) == (new.nnz, new.message_bytes)
            assert old.wire_bytes + 8 * (n - 1) == new.wire_bytes


def test_all_records_may_be_asked_for_first():
    """A step that samples or dumps a selection does so, before the collective."""
    case, made = Case("direct", 4, dtype="bf16", wire="bf16"), []
    for all_first in (True, False):
        bucket, rest = make_bucket(case, 0), torch.zeros(case.numel)
        layout = layout_of("direct", bucket)
        limits = torch.ones(layout.range_piece.numel())
        pruning, spec = Pruning(rest, layout.range_offsets, limits, 0.5, 7), record_spec("bf16", 3)
        message = prune_encode(bucket, layout, pruning, spec, MessageBuffers(), by_shard=True)
        assert message.nbytes == 0
        if all_first:
            message.records()
        cuts = shard_cuts(layout)
        shards = [message.records(cut.segments).clone() for cut in reversed(cuts)][::-1]
        made.append([torch.cat(shards).tolist(), rest.tolist(), message.nnz, message.nbytes])
    assert made[0] == made[1]


def test_only_long_messages_on_a_cpu():
    def is_by_shard(numel, ranks=4, device="cpu", scheme="direct"):
        grad_N = torch.empty(numel, dtype=torch.bfloat16, device=device)
        bucket = Bucket("b", grad_N, [], CollectiveOp.REDUCE_SCATTER, ranks)
        planned = plan.Plan(scheme, Phase.TARGET, 0.25, None, sharded=True, reason="")
        return planned.message_spec(bucket, SchemeConfig()).by_shard

    least = 4 * plan.BY_SHARD_NUMEL
    assert is_by_shard(least)
    assert not is_by_shard(least - 4)
    assert not is_by_shard(least, ranks=1)
    assert not is_by_shard(least, device="meta")
    assert not is_by_shard(least, scheme="sparse_ring")


def _train(rank, world_size, scheme, op, alone):
    """Two steps; on the rank `alone` messages are encoded before."""
    plan.BY_SHARD_NUMEL = 2**40 if rank == alone else 1
    pieces = parameters(test_capacity.NUMEL)
    steps = two_steps(scheme, op, test_capacity._gradient, pieces, 0.5)
    return [(total, sent) for total, sent, _ in steps]


@pytest.mark.parametrize(("scheme", "op"), CAPABLE)
def test_over_gloo(scheme, op):
    for by_rank in zip(*run_ranks(_train, 4, scheme, op, None), strict=True):
        totals, sent = zip(*by_rank, strict=True)
        assert torch.equal(same_on_all_ranks(op, totals), sum(sent))


def test_ranks_that_encode_otherwise_are_refused():
    with pytest.raises(AssertionError, match="of the group is not in the same collective"):
        run_ranks(_train, 2, "direct", CollectiveOp.REDUCE_SCATTER, 1)
