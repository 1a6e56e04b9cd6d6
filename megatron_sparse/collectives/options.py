"""What a collective takes from the configuration, beside the bucket and its message.

Made once for each group of ranks; a collective whose `Scheme.takes_options` is set gets it as its
last argument. The same on every rank: what the wire depends on is part of a collective's
fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron_sparse.config.sparse import FORMAT_OF_SCHEME, SchemeConfig
from megatron_sparse.transport.peer_memory import PeerMemory


@dataclass(frozen=True)
class SchemeOptions:
    """The fields of `SchemeConfig` that collectives look at; described there.

    Attributes:
        format: `scheme.format`.
        capacity: `scheme.capacity`.
        block_size: `scheme.block_size`.
        partition_hash: `scheme.partition_hash`.
        hash_seed: `scheme.hash_seed`.
        hash_rounds: `scheme.hash_rounds`.
        ring_densities: `scheme.ring_intra_density`, `ring_inter_density`, `ring_gather_density`.
        inner: `scheme.inner`.
        straggler: the rank of the group that is known to come last to this bucket, None where none
            is. No part of the configuration: whoever decides sets it by `with_straggler`.
        peers: the windows of the group's buckets, None where none were made. No part of the
            configuration either: see `with_peers`.
    """

    format: str
    capacity: float | None
    block_size: int
    partition_hash: str
    hash_seed: int
    hash_rounds: int
    ring_densities: tuple[float, float, float]
    inner: str
    straggler: int | None
    peers: PeerMemory | None = field(default=None, compare=False)

    @classmethod
    def of(cls, config: SchemeConfig) -> SchemeOptions:
        """The options of a configuration."""
        return cls(
            format=config.format,
            capacity=config.capacity,
            block_size=config.block_size,
            partition_hash=config.partition_hash,
            hash_seed=config.hash_seed,
            hash_rounds=config.hash_rounds,
            ring_densities=config.ring_densities(),
            inner=config.inner,
            straggler=None,
        )

    def with_straggler(self, straggler: int | None) -> SchemeOptions:
        """The options for a bucket and step whose straggler has been agreed on."""
        return self if straggler == self.straggler else replace(self, straggler=straggler)

    def with_peers(self, peers: PeerMemory) -> SchemeOptions:
        """The options for a group whose buckets have windows of peer memory."""
        return replace(self, peers=peers)

    def message_format(self, scheme: str) -> str:
        """The format in which selection encodes the messages of a scheme.

        Example:
            >>> options = SchemeOptions.of(SchemeConfig())
            >>> options.message_format("omnireduce"), options.message_format("direct")
            ('blocks', 'auto')
        """
        return FORMAT_OF_SCHEME.get(scheme, self.format)
