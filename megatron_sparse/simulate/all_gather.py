"""The all-gathers of the figures, built from the phases of the registered all-reduces.

The registry has only all-reduce and reduce-scatter, because gradients need no others; SpCCL and
PCCL measure the all-gather alone. Rank r contributes shard r of the bucket. `seconds_of_ring`
prices a dense ring without running it.
"""

from __future__ import annotations

import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import Exchange, Identity, Steps, Subgroup, even_cuts
from megatron_sparse.collectives.dense_hierarchical import Lanes
from megatron_sparse.collectives.dense_rhd import Folding, double
from megatron_sparse.collectives.dense_ring import ring_all_gather
from megatron_sparse.collectives.records import shard_cuts
from megatron_sparse.collectives.sparse_ring import ring_gather_sums, ring_order
from megatron_sparse.collectives.sparse_sum import SparseSum
from megatron_sparse.formats.message import FORMAT_CODES, Message
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Link, Transport


def hierarchical(bucket: Bucket, transport: Transport, timer: StageTimer) -> Steps:
    """Dense (PCCL, section 4.1): recursive doubling between the nodes, rings inside, a shuffle.

    The second half of `dense_hierarchical`, plus a reordering that an all-reduce does not need.

    Args:
        bucket: its shards in the order of the ranks; filled.
        transport: nodes of equal size, and a power of two of them, as in the paper's figures.
        timer: receives the shuffle's time.
    """
    lanes = Lanes(transport.nodes, transport.rank)
    n, k = transport.world_size, len(lanes.members)  # k nodes
    # The buffer is gathered lane by lane, in the order of `owners`; the shuffle makes it by rank.
    # Nodes have equal size, so each lane of a node has one owner.
    owners = [owner for (owner,) in lanes.order()]
    cuts = even_cuts(bucket.numel, n)
    place = owners.index(transport.rank)
    gathered_N = torch.empty_like(bucket.grad_N)
    gathered_N[cuts[place] : cuts[place + 1]] = bucket.grad_N[bucket.shard(transport.rank)]
    tag = Identity("hierarchical_all_gather", bucket, str(gathered_N.dtype), 0).tag
    # This rank's lane on every node, then the ranks of its own node.
    across = Subgroup(transport, [members[lanes.lane] for members in lanes.members], tag)
    inside = Subgroup(transport, lanes.members[lanes.node], tag)
    folding = Folding(across)
    own_lane = cuts[lanes.lane * k : (lanes.lane + 1) * k + 1]  # around its k pieces
    assert not folding.folds, "a power of two of nodes"
    yield from double(gathered_N, own_lane, folding, last=lanes.count == 1)
    yield from ring_all_gather(gathered_N, cuts[::k], inside, last=True)
    with timer.stage("decode"):
        by_rank = torch.tensor(sorted(range(n), key=owners.__getitem__))
        shape = (n, bucket.numel // n)
        torch.index_select(gathered_N.view(shape), 0, by_rank, out=bucket.grad_N.view(shape))
    return across.sent_bytes + inside.sent_bytes


def sparse_ring(exchange: Exchange) -> Steps:
    """Sparse (SpCCL, section IV-B): each rank encodes its shard once; records go round the ring.

    The second half of `adaptive_ring`.

    Args:
        exchange: its bucket holds this rank's shard and is filled with all shards. Records have the
            format of its options if that is smaller than dense.
    """
    layout = exchange.bucket.layout(sharded=True)
    # Only its layout is used, to cut the bucket; this message is not sent.
    message = Message(torch.empty(0, dtype=torch.uint8), layout, [0], "fp32", 0, 0)
    transport = exchange.transport
    sums = SparseSum(exchange, message, form=FORMAT_CODES[exchange.options.format])
    identity = Identity.of_message("sparse_all_gather", exchange, message)
    group = Subgroup(transport, ring_order(transport), identity.tag)
    cuts = shard_cuts(layout, transport.world_size)
    yield from ring_gather_sums(identity, cuts, sums, group)
    return group.sent_bytes


def seconds_of_ring(
    world_size: int, nbytes: float, links: tuple[Link, ...], seconds_a_byte: float = 0.0
) -> float:
    """The virtual cluster's time for a dense ring's all-gather or reduce-scatter, in closed form.

    A rank starts a step when it has sent and received the messages of the step before. So all ranks
    keep the pace of the slowest link, and n - 1 pieces cross that link one after another. A
    simulation of thousands of ranks would take millions of messages; this formula takes none.

    Args:
        world_size: ranks n; the ring passes each rank once.
        nbytes: of the whole buffer.
        links: the kinds of links in the ring; no two ranks use a link at once.
        seconds_a_byte: of local work on each piece that arrives.

    Example:
        >>> seconds_of_ring(4, 400.0, (Link(1.0, 0.01), Link(0.5, 0.01)))
        6.0
    """
    piece = nbytes / world_size
    step_s = max(link.alpha_s + link.beta_s * piece for link in links)
    return (world_size - 1) * (step_s + seconds_a_byte * piece)
