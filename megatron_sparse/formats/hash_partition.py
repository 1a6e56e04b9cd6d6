"""ZEN's partition hash h0 (section 3.2): which server an element belongs to.

h0 assigns every element of a segment to one of n partitions, the same on all ranks; partition i
goes to server i. The paper's is a general hash, which needs the sorted elements of each partition,
computed beforehand: 4 bytes for each element of the segment, as much as its fp32 gradient. Ours
(deviation) is equal blocks of a keyed permutation. It can be inverted: an element gives its
(partition, position), and the pair gives the element, in O(1) time and without memory. Partition
sizes differ by one element at most. `hierarchical_hash` uses h0 for the Push (each rank sends its
entries to the servers), `hash_bitmap` for the Pull (all ranks fetch the servers' sums).
"""

from dataclasses import dataclass

import torch

from megatron_sparse.config.checks import in_range
from megatron_sparse.cuda_ext import hash_ops
from megatron_sparse.errors import ExtensionError

HASH_SEED = 1234
"""What the hashes that cut messages are a function of: any number, the same on all ranks."""
MAX_PARTITIONS = 2**16


@dataclass(frozen=True)
class PermutationHash:
    """Equal blocks of a keyed permutation of the segment's elements.

    Partition p holds the permuted positions ceil(p numel / n) up to ceil((p + 1) numel / n).
    Tensors are int64, 1-D, on any device; so are results.

    Attributes:
        numel: elements of the segment, below 2^31.
        partitions: n, 1 to 2^16; may exceed numel, which leaves some empty.
        seed: the same on all ranks, 0 to 2^63 - 1.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> h = PermutationHash(numel=10, partitions=3, seed=1)
        >>> [h.partition_numel(p) for p in range(3)]
        [4, 3, 3]
        >>> elements = torch.arange(10)
        >>> mine = elements[h.partition_of(elements) == 0]
        >>> bool((h.element_at(0, h.locate(0, mine)) == mine).all())
        True
    """

    numel: int
    partitions: int
    seed: int

    def __post_init__(self) -> None:
        """Refuses values that are out of range."""
        in_range("numel", self.numel, 0, 2**31 - 1, integer=True)
        in_range("partitions", self.partitions, 1, MAX_PARTITIONS, integer=True)
        in_range("seed", self.seed, 0, 2**63 - 1, integer=True)

    def partition_of(self, elements_K: torch.Tensor) -> torch.Tensor:
        """The partition of each element.

        Raises:
            ExtensionError: an element is not in [0, numel), or the tensor is not int64 and 1-D.
        """
        return hash_ops.partition_of(elements_K, self.numel, self.partitions, self.seed)

    def locate(self, partition: int, elements_K: torch.Tensor) -> torch.Tensor:
        """The position of each element in a partition; -1 for an element of another partition.

        Raises:
            ExtensionError: there is no such partition, or an element is not in [0, numel).
        """
        size = self.partition_numel(partition)
        position_K = hash_ops.permute(elements_K, self.numel, self.seed)
        position_K.sub_(self._begin(partition))
        return position_K.masked_fill_((position_K < 0) | (position_K >= size), -1)

    def element_at(self, partition: int, positions_K: torch.Tensor) -> torch.Tensor:
        """The elements at positions of one partition; both exist."""
        return hash_ops.unpermute(positions_K + self._begin(partition), self.numel, self.seed)

    def partition_numel(self, partition: int) -> int:
        """How many elements a partition has.

        Raises:
            ExtensionError: there is no such partition.
        """
        if not 0 <= partition < self.partitions:
            raise ExtensionError(
                "there is no such partition", expected=f"0 to {self.partitions - 1}", got=partition
            )
        return self._begin(partition + 1) - self._begin(partition)

    def _begin(self, partition: int) -> int:
        """How many elements are in the partitions before this one."""
        # ceil(partition * numel / partitions): floor division of the negative rounds up.
        return -(-partition * self.numel // self.partitions)
