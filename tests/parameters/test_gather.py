"""The exact gather of one bucket, on virtual ranks: the bits of a raw gather, and every refusal.

With `kind`, the same of the lossy gather.
"""

import pytest
import torch

from megatron_sparse.errors import CommunicationError, ReplicaError, WireFormatError
from megatron_sparse.parameters import gather, lossy
from megatron_sparse.parameters.lossy import SWAPPED_NUMEL
from tests.parameters.gather_cases import DTYPES, SHARD, Group, LossyGroup, N, bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_gets_the_bits_of_a_raw_gather(dtype):
    group = Group(dtype)
    group.check()
    assert group.methods == {"raw"}
    for size in (1e-4, 1e-2, 0.0, 10.0):
        group.move(size)
        group.check()
        assert group.methods == {"exact"}


both_kinds = pytest.mark.parametrize("kind", [Group, LossyGroup])


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("shard", [1, 7, 130, SWAPPED_NUMEL + 7])
@both_kinds
def test_any_number_of_ranks_and_elements(n, shard, kind):
    group = kind.started(n=n, shard=shard)
    for _ in range(3):
        group.move()
        group.check()


@pytest.mark.parametrize(
    "nodes", [(2, 2), (3, 1), (1, 3), (1, 2, 3), (4,), (1, 1, 1), (2, 2, 2, 2), (5, 2)], ids=str
)
def test_once_per_node(nodes):
    """Every rank gets all bits, and a record crosses to each other node once."""
    n = sum(nodes)
    group, flat = (Group(n=n, shard=300, nodes=way) for way in (nodes, None))
    for each in (group, flat):
        each.check()
        each.move()
    links = dict(group.cluster.link_bytes)
    for each in (group, flat):
        each.check()
    place = group.cluster.topology.nodes
    announced = 8 * (2 + n)
    sent = {True: 0, False: 0}
    for (source, target), nbytes in group.cluster.link_bytes.items():
        inside = place[source] == place[target]
        sent[inside] += nbytes - links.get((source, target), 0) - announced
    records = sum(record.wire_bytes for record in flat.last) // (n - 1)
    assert sent[False] == (len(nodes) - 1) * records
    assert sent[True] == sum((size - 1) * n * 2 * 300 for size in nodes)
    assert sum(record.wire_bytes for record in group.last) == sum(sent.values())
    group.move()
    group.check()  # whoever decodes a rank's records knows the directions of its last moves


def test_special_bits_travel():
    """NaN, infinities, both zeros, denormals."""
    group = Group(torch.float32)
    group.check()
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42])
    for turn in range(3):
        for rank in range(N):
            group.own(rank)[:6] = special.roll(turn + rank)
        group.check()


def test_an_exact_gather_sends_fewer_bytes():
    group = Group.started(shard=20_000)
    raw = group.last[0]
    assert raw.wire_bytes == raw.dense_bytes == 2 * 20_000 * (N - 1)
    before = group.cluster.sent_bytes(0)
    group.move()
    group.gather()
    assert 0 < group.last[0].wire_bytes < raw.wire_bytes / 2
    announced = 8 * (2 + N) * (N - 1)
    assert group.cluster.sent_bytes(0) - before == group.last[0].wire_bytes + announced


def test_gathering_twice_a_step_adds_nothing_twice():
    group = Group.started()
    group.move()
    group.check()
    group.check()
    group.move()
    group.move()
    group.check()


def test_after_forget_the_gather_is_raw():
    group = Group.started()
    # As a load of a checkpoint does: every rank holds something else everywhere.
    for rank, values in enumerate(group.values):
        values.fill_(rank)
        group.gathers[rank].forget()
    assert group.gathers[0].nbytes == 0
    group.check()
    assert group.methods == {"raw"}
    group.move()
    group.check()
    assert group.methods == {"exact"}
    assert group.gathers[0].nbytes == 2 * SHARD + N * -(-SHARD // 32) * 4


@both_kinds
def test_ranks_that_disagree_about_raw_or_not_are_told(kind):
    group = kind.started()
    group.gathers[2].forget()
    group.move(0.0)
    with pytest.raises(CommunicationError) as caught:
        group.gather()
    text = str(caught.value)
    assert "in another manner" in text
    assert "raw, gather number 1" in text
    assert ("exact" if kind is Group else "lossy") + ", gather number 1" in text


def test_ranks_that_disagree_about_the_number_of_gathers_are_told():
    group = Group.started()
    group.gathers[1]._number += 1
    with pytest.raises(CommunicationError, match="gather number 2"):
        group.gather()


def test_ranks_that_disagree_about_the_step_are_told():
    group = Group()
    with pytest.raises(CommunicationError) as caught:
        group.gather([0, 0, 1, 0])
    assert "bucket group0.0" in str(caught.value)
    assert "step" in str(caught.value)


@both_kinds
def test_a_replica_that_was_written_is_found_before_the_next_step(kind):
    group = kind.started()
    group.values[3].view(N, -1)[1, 5] += 1
    group.move()
    told = "rank 3 of the group holds other parameters than their owner, rank 1"
    with pytest.raises(ReplicaError, match=told):
        group.gather()


def test_hashes_are_compared_every_so_many_gathers():
    group = Group.started(verify_every=3)
    group.values[3].view(N, -1)[1, 5] += 1
    group.gather()  # number 1
    group.gather()  # number 2
    with pytest.raises(ReplicaError):
        group.gather()


def test_a_wrong_result_of_the_codec_is_found(monkeypatch):
    original = gather.apply_moves_

    def wrong(records, held, *others):
        statuses = original(records, held, *others)
        held[0][0] += 1
        return statuses

    group = Group.started()
    monkeypatch.setattr(gather, "apply_moves_", wrong)
    with pytest.raises(ReplicaError, match="after gather number 1"):
        group.gather()


@pytest.mark.parametrize("place", [0, 17, -1])
@both_kinds
def test_a_damaged_record_names_its_field_and_changes_nothing(monkeypatch, place, kind):
    at = (gather, "encode_moves") if kind is Group else (lossy, "encode_difference")
    original = getattr(*at)
    group = kind.started(verify_every=100)
    group.move()
    mine = group.own(1).clone()

    def damaged(*values, **options):
        record = original(*values, **options).clone()
        if any(torch.equal(bits(each), bits(mine)) for each in values):
            record[place] ^= 0x40
        return record

    before = [values.view(N, -1)[1].clone() for values in group.values]
    monkeypatch.setattr(*at, damaged)
    with pytest.raises(WireFormatError, match="rank 1: field" if kind is Group else "field"):
        group.gather()
    for rank in (0, 2, 3):
        assert torch.equal(bits(group.values[rank].view(N, -1)[1]), bits(before[rank]))


def test_a_replayed_record_is_refused(monkeypatch):
    original = gather.encode_moves
    group = Group.started(verify_every=100)

    def replayed(old, new, *, epoch, **options):
        return original(old, new, epoch=epoch - 1, **options)

    monkeypatch.setattr(gather, "encode_moves", replayed)
    with pytest.raises(WireFormatError, match=r"rank \d: field step"):
        group.gather()


def test_a_size_that_no_record_has_is_refused_before_memory_is_taken(monkeypatch):
    group = Group.started()
    monkeypatch.setattr(gather, "most_bytes", lambda numel, dtype: 10)
    with pytest.raises(WireFormatError, match="field size is out of range"):
        group.gather()
