"""The clusters of the papers as alpha-beta topologies: published link rates, stated latencies.

A rate is the hardware's peak in one direction. The papers state no latency for a single message; a
comment beside each latency names its source, and docs/results/figures.md lists the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_sparse.transport import Link, Topology

GB = 1e9
MIB, GIB = 2**20, 2**30
GBIT = 1e9 / 8

CODEC_FRACTION = 0.5
"""Fraction of the memory's peak rate at which codecs move bytes. An assumption: no GPU codec was
measured for these figures. Half is what a streaming kernel with some irregular access reaches."""


@dataclass(frozen=True)
class Machine:
    """A kind of cluster.

    Attributes:
        name: for titles.
        ranks_per_node: GPUs (on Frontier GCDs) of a node; 1 if the model leaves out the sum within
            a node.
        intra: between two ranks of a node.
        inter: between two ranks of different nodes.
        nic: see `Topology.nic`.
        memory_rate: peak bytes a second of a GPU's memory.
    """

    name: str
    ranks_per_node: int
    intra: Link
    inter: Link
    nic: str
    memory_rate: float

    def topology(self, world_size: int) -> Topology:
        """The machine's topology for a number of ranks."""
        return Topology.even(world_size, self.ranks_per_node, self.intra, self.inter, self.nic)

    @property
    def codec_rate(self) -> float:
        """Bytes a second, read and written together, that codecs move on a GPU (a model)."""
        return CODEC_FRACTION * self.memory_rate


PERLMUTTER_RING = Machine(
    "Perlmutter, A100 40 GB",
    ranks_per_node=4,
    # Four NVLink 3 links of 25 GB/s join each pair (SpCCL, section IV-C).
    intra=Link(2e-6, 1 / (100 * GB)),
    # A ring of NCCL is striped over the node's four 25 GB/s cards. Latency: SpCCL puts the
    # crossover of latency and bandwidth at 256 MiB on 64 GPUs and 64 channels, pieces of 64 KiB,
    # which take 2.6 us on one card.
    inter=Link(2.6e-6, 1 / (100 * GB)),
    nic="node",
    memory_rate=1555 * GB,
)
"""Perlmutter for one ring over all ranks: only one rank of a node sends to the next node."""

PERLMUTTER_LANES = Machine(
    "Perlmutter, A100",
    ranks_per_node=4,
    # The ring within the node is NCCL's; alpha: fitted, see `pccl`.
    intra=Link(8e-6, 1 / (100 * GB)),
    # A card for each GPU (PCCL, section 5.1). Alpha: fitted, see `pccl`.
    inter=Link(340e-6, 1 / (25 * GB)),
    nic="rank",
    memory_rate=1555 * GB,
)
"""Perlmutter for PCCL's hierarchical algorithms: all ranks send to other nodes at once."""

FRONTIER_LANES = Machine(
    "Frontier, MI250X",
    ranks_per_node=8,
    # 200 GB/s within a card, 50 to 100 GB/s between cards (OLCF's user guide).
    intra=Link(75e-6, 1 / (100 * GB)),
    # Four 25 GB/s cards serve eight GCDs. All GCDs send at once (PCCL, section 4.1): half a card
    # each. Alpha: fitted, see `pccl`.
    inter=Link(450e-6, 1 / (12.5 * GB)),
    nic="rank",
    memory_rate=1600 * GB,
)
"""Frontier for PCCL's hierarchical algorithms."""

AWS_25 = Machine(
    "AWS p3.16xlarge, 25 Gbit/s",
    ranks_per_node=1,
    intra=Link(0.0, 0.0),
    # TCP between two instances of a placement group; an assumption, below 1 % of any bar.
    inter=Link(30e-6, 1 / (25 * GBIT)),
    nic="rank",
    memory_rate=900 * GB,
)
"""ZEN's first test bed with a rank for each machine, which first sums its GPUs' gradients."""

AWS_25_NODES = Machine(
    "8 A100 a node, 25 Gbit/s",
    ranks_per_node=8,
    # NVLink 3 has 300 GB/s; an assumption: a ring of NCCL reaches two thirds, as `bench gather
    # --virtual` assumes too. Alpha as in StragglAR's section 4.3.
    intra=Link(3e-6, 1 / (200 * GB)),
    # One card for the eight GPUs; links between nodes are those of `AWS_25`.
    inter=AWS_25.inter,
    nic="node",
    memory_rate=1555 * GB,
)
"""Whole nodes, each behind one slow card: see docs/levels.md."""

DGX_H100 = Machine(
    "DGX H100",
    # A scale-up domain as large as the group: StragglAR's section 4.3 has up to 256 GPUs in one.
    ranks_per_node=256,
    # NVLink 4, point to point (section 4.1); alpha as in its section 4.3.
    intra=Link(3e-6, 1 / (450 * GB)),
    inter=Link(3e-6, 1 / (450 * GB)),
    nic="rank",
    memory_rate=3350 * GB,
)
"""StragglAR's larger server, of its simulated scaling figures."""

AWS_100 = replace(
    AWS_25,
    name="AWS p3dn.24xlarge, 100 Gbit/s",
    # EFA's RDMA between two instances of a placement group; an assumption: half of TCP's.
    inter=Link(15e-6, 1 / (100 * GBIT)),
)
"""ZEN's second test bed, a rank for each machine."""

BANDWIDTH_ONLY = Machine(
    "bandwidth only", 1, Link(0.0, 0.0), Link(0.0, 1 / (25 * GBIT)), "rank", float("inf")
)
"""ZEN's section 2.4: one GPU a node; neither latency nor local work counts."""
