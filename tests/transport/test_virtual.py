"""The virtual cluster: messages, byte counts, times and errors."""

import pytest
import torch

from megatron_sparse.collectives import POSTED
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.transport import Link, Topology, VirtualCluster


def _bytes(numel, value=1):
    return torch.full((numel,), value, dtype=torch.uint8)


def _ring_step(numel):
    """A rank's steps: passes `numel` bytes of its number to the next rank; returns what came."""

    def step(transport):
        n, rank = transport.world_size, transport.rank
        got = _bytes(numel, 0)
        work = transport.exchange(
            [((rank + 1) % n, _bytes(numel, rank))], [((rank - 1) % n, got)], tag=3
        )
        assert (got == 0xFF).all(), "a posted receive buffer is poisoned"
        yield POSTED
        yield work
        return got.tolist()

    return step


def test_messages_arrive_and_every_byte_is_counted_on_its_link():
    cluster = VirtualCluster(3)
    assert cluster.run(_ring_step(5)) == [[2] * 5, [0] * 5, [1] * 5]
    assert dict(cluster.link_bytes) == {(0, 1): 5, (1, 2): 5, (2, 0): 5}
    assert cluster.sent_bytes(1) == 5
    assert cluster.link_messages[0, 1] == 1


def test_a_sent_buffer_is_read_when_the_message_is_delivered():
    def step(transport):
        own, got = _bytes(1, 7), _bytes(1, 0)
        if transport.rank == 0:
            work = transport.exchange([(1, own)], [], tag=0)
            own.fill_(9)  # wrong on any transport: the work is not finished
        else:
            work = transport.exchange([], [(0, got)], tag=0)
        yield work
        return got.item()

    assert VirtualCluster(2).run(step)[1] == 9


def test_tags_and_order_match_messages():
    def step(transport):
        if transport.rank == 0:
            posted = [
                transport.exchange([(1, _bytes(1, v))], [], tag=t)
                for t, v in ((5, 1), (6, 2), (5, 3))
            ]
            got = []
        else:
            got = [_bytes(1, 0) for _ in range(3)]
            posted = [
                transport.exchange([], [(0, b)], tag=t) for t, b in zip((6, 5, 5), got, strict=True)
            ]
        yield from posted
        return [buffer.item() for buffer in got]

    assert VirtualCluster(2).run(step)[1] == [2, 1, 3]


@pytest.mark.parametrize("n", [1, 3])
def test_the_backends_collectives(n):
    def step(transport):
        rank = transport.rank
        own = torch.full((2 * n,), float(rank + 1))
        gathered, shard = torch.empty(n), torch.empty(2)
        yield transport.all_gather(gathered, torch.tensor([float(rank)]))
        yield transport.reduce_scatter(shard, own)
        yield transport.all_reduce_(own)
        return gathered.tolist(), shard.tolist(), own.tolist()

    cluster = VirtualCluster(n)
    total = n * (n + 1) / 2
    for gathered, shard, own in cluster.run(step):
        assert gathered == list(range(n))
        assert shard == [total] * 2
        assert own == [total] * 2 * n
    # all-gather: 4 B to each other rank; ring: 8 B pieces, n - 1 and 2 (n - 1).
    assert cluster.sent_bytes(0) == (n - 1) * (4 + 8 + 16)


INTRA, INTER = Link(1.0, 0.5), Link(10.0, 2.0)


def test_the_clock_is_alpha_plus_beta_m_of_the_link():
    topology = Topology((2, 1), INTRA, INTER)
    cluster = VirtualCluster(3, topology)
    cluster.run(_ring_step(4))
    # 0 -> 1 inside the node: 1 + 0.5 * 4. 1 -> 2 and 2 -> 0 between nodes: 10 + 2 * 4. A sender is
    # done when its last byte is out.
    assert cluster.clock_s == [18.0, 8.0, 18.0]
    assert cluster.modelled_s == 18.0


def test_messages_queue_for_a_port_in_the_order_of_their_times():
    """All send 4 bytes to rank 0, each later by 1/8 s than the one before."""

    def step(transport):
        if transport.rank == 0:
            yield transport.exchange([], [(peer, _bytes(4, 0)) for peer in (1, 2, 3)], tag=0)
        else:
            transport.charge(transport.rank / 8)
            yield transport.exchange([(0, _bytes(4))], [], tag=0)

    cluster = VirtualCluster(4, Topology((4,), INTRA, INTER))
    cluster.run(step)
    # Each occupies rank 0's incoming port for 2 s; the first starts at 1/8.
    assert cluster.clock_s == [0.125 + 6 + 1, 2.125, 4.125, 6.125]


@pytest.mark.parametrize(("nic", "expected"), [("rank", 8.0), ("node", 16.0)])
def test_ranks_of_a_node_may_share_its_network_card(nic, expected):
    topology = Topology.even(4, 2, INTRA, Link(0.0, 2.0), nic)

    def step(transport):
        peer = (transport.rank + 2) % 4
        got = _bytes(4, 0)
        yield transport.exchange([(peer, _bytes(4))], [(peer, got)], tag=0)

    cluster = VirtualCluster(4, topology)
    cluster.run(step)
    assert cluster.modelled_s == expected


def test_a_deadlock_names_ranks_and_peers():
    def step(transport):
        if transport.rank < 2:
            yield transport.exchange([], [(1 - transport.rank, _bytes(1))], tag=0)

    with pytest.raises(CommunicationError, match="deadlock") as caught:
        VirtualCluster(3).run(step)
    text = str(caught.value)
    assert "rank 0 (exchange) for rank 1 to send" in text
    assert "rank 1 (exchange) for rank 0 to send" in text
    assert "ranks [2] have ended" in text


def test_reductions_of_different_length_are_refused():
    def step(transport):
        yield transport.all_reduce_(torch.ones(3 + transport.rank))

    with pytest.raises(CommunicationError, match="not in the same collective"):
        VirtualCluster(2).run(step)


def test_a_message_without_a_receiver_is_an_error():
    def step(transport):
        if transport.rank == 0:
            transport.exchange([(1, _bytes(1))], [], tag=0)
        return
        yield

    with pytest.raises(CommunicationError, match="left operations behind") as caught:
        VirtualCluster(2).run(step)
    assert "rank 0 waits for rank 1 to receive" in str(caught.value)


def test_posting_after_the_marker_is_a_bug():
    def step(transport):
        yield POSTED
        transport.exchange([], [], tag=0)

    with pytest.raises(AssertionError, match="after it said"):
        VirtualCluster(1).run(step)


def test_the_last_node_may_have_fewer_ranks_and_a_nic_has_two_kinds():
    with pytest.raises(ConfigError, match=r"topology\.nic"):
        Topology((2,), INTRA, INTER, "socket")
    assert Topology.even(7, 3, INTRA, INTER).node_sizes == (3, 3, 1)
