"""Predicts the seconds (*price*) of a raw and of an exact gather from the links and the codec.

For a bucket of N numbers of b bytes on n ranks, with shards of M = N / n:

    raw     (n - 1) (alpha + M b beta)
    exact   n alpha + (n - 1) (alpha + M r b beta) + M encode + (n - 1) M decode

alpha and beta are the backend's own on a ring: of `planner.cluster`, else measured by a few
all-gathers. encode and decode are seconds a number, timed on moves as training makes them. r is
assumed: `MOVE_BITS` over the bits of a number. The n alpha of the exact gather are its
announcement, once around the backend's ring. Decoding is priced as if it did not run beside the
exchange: on a GPU all records come in one call, and on a CPU, where it does, the exchange needs the
processor too.

On k nodes, at least one of them with m > 1 ranks, the exact gather crosses slow links (x) and fast
ones (i), and `per_node` is a second way. The ring crosses k times: the announcement takes
a = k alpha_x + (n - k) alpha_i. Where the ranks of a node share a port, s = m; else s = 1:

    flat        a + (n - 1) (alpha_x + s M r b beta_x) + M encode + (n - 1) M decode
    per node    a + (k - 1) (alpha_x + s M r b beta_x) + (m - 1) (alpha_i + k M b beta_i)
                + M encode + (k - 1) M decode

In each round of `flat` some ranks cross. That is for equal nodes and many ranks; the code counts
the ranks that share a port in each round, and prices unequal nodes at their slowest.

`exact` must be `MARGIN` shorter: it also costs memory, and the ranks' processors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import fmean

import torch

from megatron_sparse.formats.moves import decode_moves_, encode_moves
from megatron_sparse.planner.link_timing import (
    LinkSweep,
    Measuring,
    fit_link,
    gather_rows,
    host_clock,
    measure_topology,
    timed,
)
from megatron_sparse.transport import Link, Topology, Transport

MOVE_BITS: Mapping[torch.dtype, float] = {
    torch.bfloat16: 3.2,
    torch.float16: 6.2,
    torch.float32: 19.0,
}
"""Assumed bits of a number's move: for bf16 and fp32 the most that was measured on a GPT at a peak
learning rate of 3e-4, without directions; fp16's steps are 8 times finer than bf16's."""
MARGIN = 0.4
"""The part of a raw gather's time that an exact one must be predicted to save. With four ranks on
two cores, which prices do not know, 21 to 26 % were none (docs/results/testbed.md, `auto`)."""
GATHERED_BYTES = (8, 1024, 2**16, 2**18, 2**20, 2**23)
"""Sizes of the all-gathers that measure the links, from each rank. Fast links, and ranks that share
a processor, show their rate only in large ones."""
FEWEST_SIZES, LONG_S, MOST_GATHERED_BYTES = 4, 0.02, 2**28
"""So many sizes are always sent. Larger ones are left out once a gather takes so long, or where all
ranks together would send more."""
REPEATS = 3
SAMPLE_NUMEL = 2**16
SAMPLE_REPEATS = {"cpu": 16, "cuda": 64}
"""How often a sample repeats the same numbers. 2^22 are a shard of a usual bucket, 40 million
numbers, on 8 ranks: few numbers would show the time of launches, or that of a CPU's core which the
ranks of a machine will share."""
WINDOWS = 8
"""How often the codec is timed. Where ranks share cores a window either has a core to itself or
waits for one: so the mean counts, and not the median, which may be either."""


@dataclass(frozen=True)
class CoderSpeed:
    """Seconds that the codec takes for one number (parameter).

    Attributes:
        encode_s: of the sender.
        decode_s: of each receiver.
        bits: of a number's move; None for those of `MOVE_BITS`.
    """

    encode_s: float
    decode_s: float
    bits: float | None = None


@dataclass(frozen=True)
class Prices:
    """Predicted seconds of one gather.

    Attributes:
        raw_s: of the backend's own all-gather.
        exact_s: of the exact gather, by `per_node`: False is flat; True only on several nodes.
    """

    raw_s: float
    exact_s: Mapping[bool, float]

    def __add__(self, other: Prices) -> Prices:
        """The seconds of both gathers, one after the other in the same way."""
        exact_s = {way: self.exact_s[way] + other.exact_s[way] for way in self.exact_s}
        return Prices(self.raw_s + other.raw_s, exact_s)

    @property
    def per_node(self) -> bool:
        """Whether the exact gather takes less time once per node than flat."""
        return min(self.exact_s, key=self.exact_s.__getitem__)

    @property
    def exact_pays(self) -> bool:
        """Whether the exact gather is predicted to be clearly shorter."""
        return self.exact_s[self.per_node] < (1 - MARGIN) * self.raw_s


@dataclass(frozen=True)
class GatherLinks:
    """What a gather's messages cost.

    Attributes:
        dense: the backend's own all-gather as a ring.
        topology: nodes and their links; None where all links are alike: on one node, or with one
            rank on each.
    """

    dense: Link
    topology: Topology | None = None


def gather_prices(
    numel: int, dtype: torch.dtype, world_size: int, links: GatherLinks, speed: CoderSpeed
) -> Prices:
    """Predicts the seconds of one bucket's gather, by the formulas of the module's docstring.

    Example:
        A slow link (1 Mbyte/s) and a fast codec:
        >>> speed, links = CoderSpeed(1e-9, 1e-9), GatherLinks(Link(0.0, 1e-6))
        >>> prices = gather_prices(10**6, torch.bfloat16, 2, links, speed)
        >>> prices.per_node, prices.exact_pays, round(prices.raw_s, 3)
        (False, True, 1.0)
    """
    link, topology = links.dense, links.topology
    shard, others = numel / world_size, world_size - 1  # numbers of a shard, and other ranks
    raw_bytes = shard * dtype.itemsize
    raw_s = others * _message_s(link, raw_bytes)
    exact_s = {}  # by `per_node`
    record_bytes = shard * (speed.bits or MOVE_BITS[dtype]) / 8
    assert record_bytes <= raw_bytes
    # Before any record is sent, with or without `per_node`.
    begin_s = _announcement_s(links, world_size) + shard * speed.encode_s
    if topology is None:
        flat_s = [_message_s(link, record_bytes)] * others
    else:
        flat_s = _flat_s(topology, record_bytes)
        exact_s[True] = begin_s + _per_node_s(topology, record_bytes, raw_bytes, shard, speed)
    exact_s[False] = begin_s + sum(flat_s) + others * shard * speed.decode_s
    return Prices(raw_s, exact_s)


def _message_s(link: Link, nbytes: float) -> float:
    return link.alpha_s + nbytes * link.beta_s


def _announcement_s(links: GatherLinks, world_size: int) -> float:
    """Seconds of the announcement: a few words, once around the ring of all ranks."""
    topology = links.topology
    if topology is None:
        return world_size * links.dense.alpha_s
    crossings = len(topology.node_sizes)  # the ring enters each node once
    inside = world_size - crossings
    return crossings * topology.inter.alpha_s + inside * topology.intra.alpha_s


def _flat_s(topology: Topology, sent_bytes: float) -> list[float]:
    """Returns the seconds of each round of a flat exchange.

    In round i of n - 1 each rank sends to the i-th rank after it. Of a node's m ranks,
    min(i, n - i, m) send to another node, and the round takes as long as these slow messages.
    """
    n, largest_node = topology.world_size, max(topology.node_sizes)
    shares_port = topology.nic == "node"
    seconds = []
    for i in range(1, n):
        records_at_port = min(i, n - i, largest_node) if shares_port else 1
        seconds.append(_message_s(topology.inter, records_at_port * sent_bytes))
    return seconds


def _per_node_s(
    topology: Topology, sent_bytes: float, raw_bytes: float, shard: float, speed: CoderSpeed
) -> float:
    """Returns the seconds of messages and decoding with `per_node`, on the busiest rank.

    `sent_bytes` of a record cross nodes; `raw_bytes` of a whole shard are passed on inside a node.
    `shard`: numbers in a shard.
    """
    sizes, n = topology.node_sizes, topology.world_size
    largest, smallest = max(sizes), min(sizes)  # ranks of a node
    rounds = len(sizes) - 1
    # Records that the busiest port sends or receives in a round. Where each rank has a port, that
    # is a rank of the smallest node, to which several ranks of the largest node send.
    at_once = largest if topology.nic == "node" else ceil(largest / smallest)
    across_s = [_message_s(topology.inter, at_once * sent_bytes)] * rounds
    # A rank of the smallest node decodes the most: an equal part of n records, without its own.
    decoded = ceil(n / smallest) - 1
    # Each of a node's ranks sends an equal part of all n shards to the others.
    inside_s = max(
        (size - 1) * _message_s(topology.intra, ceil(n / size) * raw_bytes) for size in sizes
    )
    return sum(across_s) + shard * decoded * speed.decode_s + inside_s


def measure_gather_links(transport: Transport) -> Measuring[GatherLinks]:
    """Measures the links of a group, the same on all ranks; the host waits for ca. 40 messages."""
    sizes, times_s = yield from gather_times(transport)
    dense = fit_link(sizes, times_s)
    if not several_levels(transport.nodes):
        return GatherLinks(dense)
    sweep = LinkSweep(sizes, REPEATS, rounds=1)
    topology = yield from measure_topology(transport, sweep, host_clock(transport.device))
    return GatherLinks(dense, topology)


def several_levels(nodes: Sequence[int]) -> bool:
    """Whether `nodes`, the node of each rank, has several nodes and one of them several ranks."""
    return 1 < len(set(nodes)) < len(nodes)


def gather_times(transport: Transport) -> Measuring[tuple[list[int], list[float]]]:
    """Times the backend's all-gather for some sizes; the results are the same on all ranks.

    The host waits for some twenty all-gathers, of `GATHERED_BYTES` until one is slow or large.

    Returns:
        The sizes, in bytes from each rank; for each the seconds of one of a ring's n - 1 rounds.
    """
    n, sizes, times_s = transport.world_size, [], []
    for nbytes in GATHERED_BYTES:
        if len(sizes) >= FEWEST_SIZES:
            is_slow = times_s[-1] * (n - 1) > LONG_S
            if is_slow or n * nbytes > MOST_GATHERED_BYTES:
                break
        sent = torch.zeros(nbytes, dtype=torch.uint8, device=transport.device)
        gathered = sent.new_empty(n * nbytes)
        # Default arguments: a lambda would see the next size's tensors otherwise.
        spent_s = yield from timed(
            transport,
            REPEATS,
            host_clock(transport.device),
            lambda sent=sent, gathered=gathered: [transport.all_gather(gathered, sent)],
        )
        sizes.append(nbytes)
        times_s.append(spent_s / (n - 1))
    return sizes, times_s


def measure_coder(transport: Transport, dtype: torch.dtype) -> Measuring[CoderSpeed]:
    """Times the codec on all ranks at once, as in training; returns medians over the ranks."""
    rows = yield from gather_rows(coder_speed(dtype, transport.device), transport)
    return CoderSpeed(*rows.median(0).values.tolist())


def coder_speed(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Times the codec on this device; returns seconds per number of encoding and of decoding.

    The numbers imitate a step of Adam: normal weights (deviation 0.02), moved by about 1e-4.
    """
    generator = torch.Generator().manual_seed(SAMPLE_NUMEL)
    normal = partial(torch.randn, SAMPLE_NUMEL, generator=generator, dtype=torch.float32)
    weights = normal() * 0.02
    moved = weights + normal() * 1e-4
    repeats = SAMPLE_REPEATS[device.type]
    old, new = (values.to(device, dtype).repeat(repeats) for values in (weights, moved))
    clock = host_clock(device)
    record = encode_moves(old, new, epoch=0)
    decode_moves_([record], [old.clone()], epoch=0)  # not timed: the first calls may load the codec
    encode_s, decode_s = [], []
    for _ in range(WINDOWS):
        decoded, start_s = old.clone(), clock()
        encode_moves(old, new, epoch=0)
        encoded_s = clock()
        decode_moves_([record], [decoded], epoch=0)
        encode_s.append(encoded_s - start_s)
        decode_s.append(clock() - encoded_s)
    return fmean(encode_s) / old.numel(), fmean(decode_s) / old.numel()
