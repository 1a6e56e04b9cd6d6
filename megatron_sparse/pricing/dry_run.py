"""A collective without data; the cost models run their rounds on it.

Added to the papers' equations, in all models alike: local work by operation, format and density;
what the CPU adds to each message and bucket; the agreement's all-gathers; headers; and every
rank's own clock, so that the busiest rank, not the mean one, decides where shards or nodes differ.

Left out: rounding to a narrower gradient at the end, padding of sections, and chance (all ranks'
contributions are taken to have the same density).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.config.compression import dense_value_bits
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.pricing.clocks import RankClocks
from megatron_sparse.pricing.cluster import ClusterModel, CodecOp
from megatron_sparse.pricing.densities import SumDensities
from megatron_sparse.pricing.records import BlockFormat, PerRank, Piece, RecordFormat
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.transport.topology import Link, Topology

WORD_BYTES = 8


@dataclass
class DryRun:
    """One collective on one bucket, without data: the clocks of its ranks, and what moves them on.

    Attributes:
        shape: the bucket.
        densities: of the ranks' contributions and their sums.
        cluster: the costs.
        options: of the scheme; `capacity` is its factor, or null.
        topology: the ranks' nodes and links.
        n: ranks.
        b: bytes of a value.
        p: bytes of a value of a partial sum.
        scatter: whether it is a reduce-scatter.
        clocks: of all ranks. Mutated.
        has_slots: message sizes are fixed beforehand (capacity mode), and nothing is agreed upon.
    """

    shape: BucketShape
    densities: SumDensities
    cluster: ClusterModel
    options: SchemeConfig
    topology: Topology

    def __post_init__(self) -> None:
        """Sets the attributes that follow from the arguments."""
        self.n = self.topology.world_size
        self.b, self.p = self.shape.element_bytes, self.shape.partial_bytes
        self.scatter = self.shape.op is CollectiveOp.REDUCE_SCATTER
        self.clocks = RankClocks(self.topology, self.cluster.host_s_per_message)
        self.has_slots = self.options.given_capacity is not None

    def piece(self, parts: int = 1) -> Piece:
        """One of equal parts of the bucket."""
        return Piece(self.shape.pruned_numel / parts, self.shape.kept_numel / parts)

    def sum_format(self, name: str = "auto") -> RecordFormat:
        """The format of the records in which `SparseSum` sends sums, with values in full.

        Args:
            name: of the format; `auto` is Rice if messages are; quantised messages always are.
        """
        if name == "blocks":
            return BlockFormat(name, self.cluster, block_size=self.options.block_size)
        messages_are_rice = self.options.format == "rice" or self.shape.value_bits is not None
        if name == "auto" and messages_are_rice:
            name = "rice"
        return RecordFormat(name, self.cluster, fixed=self.has_slots)

    def gathered_sums(self, name: str = "auto") -> RecordFormat:
        """Records of complete sums that their owners send to every rank; see `scheme.sum_bits`."""
        form = self.sum_format(name)
        if self.options.given_sum_bits is None or isinstance(form, BlockFormat):
            return form
        return replace(form, value_bits=self.options.given_sum_bits)

    def messages(self, name: str) -> RecordFormat:
        """Records of a rank's own message in a format, as `Message` has them."""
        if name == "blocks":
            return self.sum_format(name)
        return RecordFormat(name, self.cluster, self.shape.value_bits, self.has_slots)

    def whole_messages(self) -> RecordFormat:
        """Records of a message that holds every element, quantised."""
        return RecordFormat("dense", self.cluster, dense_value_bits(self.shape.value_bits))

    def whole_sums(self) -> RecordFormat:
        """Records of complete sums of such messages."""
        bits = self.options.given_sum_bits
        return RecordFormat("dense", self.cluster, None if bits is None else dense_value_bits(bits))

    def message_density(self, parts: int = 1) -> np.ndarray:
        """Densities of a message's shards, or in capacity mode of their slots."""
        density_P = self.densities.shards(1, parts)
        return self._with_slots(density_P, self.densities.whole(1))

    def sum_density(self, parts: int = 1) -> np.ndarray:
        """Densities of the sum over all ranks by shard, or in capacity mode of their slots."""
        density_P = self.densities.shards(self.n, parts)
        return self._with_slots(density_P, self.n * self.densities.whole(1))

    def _with_slots(self, density_P: np.ndarray, target: float) -> np.ndarray:
        """In capacity mode all shards have the density of full slots, made for `target`."""
        factor = self.options.given_capacity
        return density_P if factor is None else np.full_like(density_P, min(factor * target, 1.0))

    def select(self, form: RecordFormat) -> None:
        """Adds the seconds of threshold, error feedback, pruning and encoding to all clocks."""
        density = self.densities.whole(1)
        if isinstance(form, BlockFormat):  # its densities are those of blocks, not of elements
            density = float(self.densities.block_density(1, 1, self.options.block_size)[0])
        self.work(form.seconds(CodecOp.SELECT, self.piece(), density, self.b))

    def work(self, seconds: PerRank) -> None:
        """Local work of every rank."""
        self.clocks.work(seconds)

    def plain(self, op: CodecOp, numel: float) -> float:
        """Seconds of an addition or a copy of fp32 values."""
        return self.cluster.codec_s(op, "dense", numel, 1.0)

    def part(
        self, shape: BucketShape, topology: Topology, densities: SumDensities | None = None
    ) -> DryRun:
        """A dry run on some of the ranks, with clocks of its own that start at 0."""
        return DryRun(shape, densities or self.densities, self.cluster, self.options, topology)

    def node(self, ranks: int) -> Topology:
        """Some ranks of one node."""
        return Topology((ranks,), self.topology.intra, self.topology.inter)

    def lane(self, sharing: float) -> Topology:
        """The topology of a lane: one rank of each node.

        Args:
            sharing: bytes that all lanes of a node send to other nodes, divided by this lane's; it
                slows this lane down where the lanes share a network card.
        """
        topology = self.topology
        shared = sharing if topology.nic == "node" else 1.0
        inter = Link(topology.inter.alpha_s, shared * topology.inter.beta_s)
        return Topology((1,) * len(topology.node_sizes), topology.intra, inter)

    def clearing_s(self, numel: float) -> float:
        """Seconds to make fp32 values zero: a copy that reads nothing."""
        return self.plain(CodecOp.COPY, numel) / 2

    def exchange(self, target_n: np.ndarray, nbytes: PerRank) -> None:
        """One round of messages to these ranks, -1 for none; bytes are by sender."""
        self.exchanges([(target_n, nbytes)])

    def exchanges(self, rounds: Sequence[tuple[np.ndarray, PerRank]]) -> None:
        """Exchanges of (target, bytes by sender) that follow one another without local work."""
        self.clocks.in_rounds([(*each, 0.0) for each in rounds])

    def shift(self, step: int, nbytes: PerRank) -> None:
        """A round in which rank r sends to rank r - step, so that no rank's port is shared."""
        self.shifts([(step, nbytes, 0.0)])

    def shifts(self, rounds: Sequence[tuple[int, PerRank, PerRank]]) -> None:
        """Runs rounds, each (step, bytes sent, seconds of work meanwhile): r sends to r - step.

        Bytes and seconds are one number for all ranks r, or an array with one for each rank.
        """
        ranks_n = self.clocks.ranks_n
        targeted = [((ranks_n - step) % self.n, sent, local) for step, sent, local in rounds]
        self.clocks.in_rounds(targeted)

    def agree(self) -> None:
        """The agreement: an all-gather of identity and sizes, 8 (2 + n) bytes from each to each."""
        self.clocks.everybody_at_once(WORD_BYTES * (2 + self.n))
