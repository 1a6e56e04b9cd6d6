"""The lossy gather of one bucket, on virtual ranks: equal replicas, and a master that keeps what
was withheld. What it shares with the exact gather is tested there.
"""

import itertools

import pytest
import torch

from megatron_sparse.errors import CommunicationError
from megatron_sparse.parameters.lossy import LossyWay
from tests.parameters.gather_cases import LossyGroup, N

LIMITS = {4: 7, 8: 127}


@pytest.mark.parametrize("bits", [4, 8])
def test_replicas_are_equal_and_what_is_withheld_is_less_than_a_step_of_the_scale(bits):
    group = LossyGroup.started(bits)
    assert bool((group.withheld() == 0).all())
    before = group.replica()
    for _ in range(20):
        group.move()
        moved = torch.cat(group.masters) - before
        group.gather()
        assert group.methods == {"lossy"}
        # Half a step of the scale of the largest move in a shard, and the sum's rounding.
        most = float(moved.abs().max()) / LIMITS[bits] * 0.51 + 2**-25
        assert float(group.withheld().abs().max()) <= most
        before = group.replica()


def test_nothing_is_lost():
    """Without further moves what was withheld is sent until nothing is left of it."""
    group = LossyGroup.started(4)
    group.move()
    sizes = []
    for _ in range(12):
        group.gather()
        sizes.append(float(group.withheld().abs().max()))
        group.move(0.0)
    assert sizes[0] > 1e-6
    assert all(after < before / 5 or after == 0 for before, after in itertools.pairwise(sizes))
    assert sizes[-1] == 0.0


def test_without_the_feedback_it_would_be_lost():
    """Moves below half a step of the scale: the replica follows them all the same."""
    group = LossyGroup.started(4, shard=128)
    start = group.replica()
    for _ in range(100):
        with group.update():
            for rank, master in enumerate(group.masters):
                own = group.own(rank)
                own[0] += 1e-3 * (1 if torch.rand(1, generator=group.generator) < 0.5 else -1)
                own[1:] += 1e-5  # a hundredth of the largest, a fourteenth of a step
                master.copy_(own)
        group.gather()
    followed = (group.replica() - start).view(N, -1)[:, 1:]
    assert float((followed - 1e-3).abs().max()) < 1e-4


def test_bytes():
    group = LossyGroup.started(4, shard=12_800)
    group.advance()
    (record, *_) = group.last
    assert record.dense_bytes == 4 * 12_800 * (N - 1)
    assert record.wire_bytes == (N - 1) * (64 + 2 * 104 + 12_800 // 2)  # 100 scales are padded


def test_a_second_gather_of_a_step_sends_nothing():
    """So an evaluation or a save, before which Megatron gathers, changes nothing."""
    group = LossyGroup.started()
    group.advance()
    replica = group.replica()
    group.gather()
    assert torch.equal(group.replica(), replica)
    assert group.methods == {"lossy"}
    assert {record.wire_bytes for record in group.last} == {0}
    group.advance()
    assert group.last[0].wire_bytes > 0


def test_steps_without_a_gather_between_them():
    group = LossyGroup.started()
    group.move()
    group.move()
    group.move(accepted=False)
    assert torch.equal(group.own(2), group.masters[2])
    group.gather()
    assert float(group.withheld().abs().max()) < 1e-4
    group.move()


def test_a_skipped_step_leaves_the_replica_on_all_ranks():
    group = LossyGroup.started()
    group.advance()
    replica = group.replica()
    group.move(accepted=False)
    assert torch.equal(group.replica(), replica)
    group.gather()
    assert torch.equal(group.replica(), replica)
    assert group.last[0].wire_bytes == 0
    group.advance()


def test_a_raw_gather_of_the_host_gets_the_masters():
    """With `enabled=False`; then a raw gather of ours, then lossy ones."""
    group = LossyGroup.started()
    group.advance()
    for gather in group.gathers:
        gather.release()
        gather.release()
    for rank, master in enumerate(group.masters):
        assert torch.equal(group.own(rank), master)
        assert group.gathers[rank].nbytes == 0
    group.advance()
    assert group.methods == {"raw"}
    assert bool((group.withheld() == 0).all())
    group.advance()
    assert group.methods == {"lossy"}


def test_what_was_written_counts_after_forget():
    group = LossyGroup.started()
    group.advance()
    for rank, values in enumerate(group.values):
        values.fill_(rank)
        group.gathers[rank].forget()
        group.masters[rank] = group.own(rank).clone()
    group.gather()
    assert group.methods == {"raw"}
    assert group.replica().view(N, -1)[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    group.advance()
    assert group.methods == {"lossy"}


def test_going_on_from_saved_masters_is_bit_exact():
    group, other = LossyGroup(), LossyGroup()
    for each in (group, other):
        each.gather()
        each.advance()
    saved = [gather.settled_master().clone() for gather in group.gathers]
    assert all(map(torch.equal, saved, group.masters))
    for gather, master in zip(group.gathers, saved, strict=True):
        gather.forget()
        gather.restore(master)
    for each in (group, other):
        for _ in range(3):
            each.advance()
            assert each.methods == {"lossy"}
    assert torch.equal(group.replica(), other.replica())


def test_masters_are_settled_only_between_a_gather_and_a_step():
    group = LossyGroup()
    gather = group.gathers[0]
    assert gather.settled_master() is None
    group.gather()
    assert gather.settled_master() is not None
    group.move()
    assert gather.settled_master() is None
    group.gather()
    assert gather.settled_master() is not None
    gather.forget()
    assert gather.settled_master() is None


@pytest.mark.parametrize("nodes", [(2, 2), (3, 1)])
def test_once_per_node(nodes):
    group = LossyGroup.started(nodes=nodes, shard=300)
    for _ in range(3):
        group.advance()
        assert group.methods == {"lossy"}
        group.replica()
        group.gather()
        assert {record.wire_bytes for record in group.last} == {0}


def test_nan_reaches_every_rank():
    group = LossyGroup.started(verify_every=100)
    with group.update():
        group.own(1)[300] = float("nan")
    group.gather()
    for values in group.values:
        shard = values.view(N, -1)[1]
        assert bool(shard[256:384].isnan().all()), "the group of 128 numbers"
        assert int(values.isnan().sum()) == 128


def test_ranks_with_other_bits_are_told():
    group = LossyGroup.started(4)
    group.gathers[2]._way = LossyWay(8, verify_every=1)
    group.move()
    with pytest.raises(CommunicationError):
        group.gather()
