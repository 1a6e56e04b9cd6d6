"""ZEN's partition hash h0 (section 3.2): which server an element belongs to.

h0 assigns every element of a segment to one of n partitions, the same on all ranks; partition i
goes to server i. There are two such hashes:

- `PermutationHash` (ours, the default): equal blocks of a keyed permutation. It can be inverted:
  an element gives its (partition, position), and the pair gives the element, in O(1) time and
  without memory. Partition sizes differ by one element at most.
- `IndexSetHash` (the paper's): a general hash. It needs the sorted elements of each partition,
  computed beforehand: 4 bytes for each element of the segment, as much as its fp32 gradient, and
  about 32 bytes an element during the computation.

`hierarchical_hash` uses them for the Push, `hash_bitmap` for the Pull.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from megatron_sparse.config.checks import in_range
from megatron_sparse.cuda_ext import hash_ops
from megatron_sparse.errors import ExtensionError

HASH_SEED = 1234
"""What the hashes that cut messages are a function of: any number, the same on all ranks."""
MAX_PARTITIONS = 2**16
HASH_PERMUTATION, HASH_INDEX_SETS = range(2)
"""The codes of the two hashes in a hash bitmap's sub-header."""


@dataclass(frozen=True)
class PartitionHash(ABC):
    """A hash h0. Tensors are int64, 1-D, on any device; so are results but for `index_set`.

    Attributes:
        numel: elements of the segment, below 2^31.
        partitions: n, 1 to 2^16; may exceed numel, which leaves some empty.
        seed: the same on all ranks, 0 to 2^63 - 1.
        code: which hash it is, on the wire.

    Raises:
        ConfigError: a value is out of range.
    """

    code: ClassVar[int]

    numel: int
    partitions: int
    seed: int

    def __post_init__(self) -> None:
        in_range("numel", self.numel, 0, 2**31 - 1, integer=True)
        in_range("partitions", self.partitions, 1, MAX_PARTITIONS, integer=True)
        in_range("seed", self.seed, 0, 2**63 - 1, integer=True)

    def partition_of(self, elements_K: torch.Tensor) -> torch.Tensor:
        """The partition of each element.

        Raises:
            ExtensionError: an element is not in [0, numel), or the tensor does not fit.
        """
        general = self.code == HASH_INDEX_SETS  # the paper's general hash, not a permutation
        return hash_ops.partition_of(
            elements_K, self.numel, self.partitions, self.seed, general=general
        )

    @abstractmethod
    def locate(self, partition: int, elements_K: torch.Tensor) -> torch.Tensor:
        """Where each element stands in one partition, which exists; -1 where it is of another.

        Raises:
            ExtensionError: an element is not in [0, numel).
        """

    @abstractmethod
    def element_at(self, partition: int, positions_K: torch.Tensor) -> torch.Tensor:
        """The elements at positions of one partition; both exist."""

    def partition_numel(self, partition: int) -> int:
        """Elements of one partition.

        Raises:
            ExtensionError: there is no such partition.
        """
        if not 0 <= partition < self.partitions:
            raise ExtensionError(
                "there is no such partition", expected=f"0 to {self.partitions - 1}", got=partition
            )
        return self._begin(partition + 1) - self._begin(partition)

    @abstractmethod
    def _begin(self, partition: int) -> int:
        """How many elements are in the partitions before this one."""

    @abstractmethod
    def index_set(self, partition: int, device: torch.device) -> torch.Tensor | None:
        """int32 elements of one partition by position, or None where nothing is stored."""


@dataclass(frozen=True)
class PermutationHash(PartitionHash):
    """Equal blocks of a keyed permutation of the segment's elements.

    Partition p holds the permuted positions ceil(p numel / n) up to ceil((p + 1) numel / n).

    Example:
        >>> h = PermutationHash(numel=10, partitions=3, seed=1)
        >>> [h.partition_numel(p) for p in range(3)]
        [4, 3, 3]
        >>> elements = torch.arange(10)
        >>> mine = elements[h.partition_of(elements) == 0]
        >>> bool((h.element_at(0, h.locate(0, mine)) == mine).all())
        True
    """

    code = HASH_PERMUTATION

    def locate(self, partition: int, elements_K: torch.Tensor) -> torch.Tensor:
        """Where each element stands in the partition's block; -1 where it is of another."""
        size = self.partition_numel(partition)
        position_K = hash_ops.permute(elements_K, self.numel, self.seed)
        position_K.sub_(self._begin(partition))
        return position_K.masked_fill_((position_K < 0) | (position_K >= size), -1)

    def element_at(self, partition: int, positions_K: torch.Tensor) -> torch.Tensor:
        """The elements at positions of the partition's block: the permutation's inverse."""
        return hash_ops.unpermute(positions_K + self._begin(partition), self.numel, self.seed)

    def index_set(self, partition: int, device: torch.device) -> None:
        """See `PartitionHash`: nothing is stored."""

    def _begin(self, partition: int) -> int:
        # ceil(partition * numel / partitions): floor division of the negative rounds up.
        return -(-partition * self.numel // self.partitions)


@dataclass(frozen=True)
class IndexSetHash(PartitionHash):
    """The paper's general hash (murmur3's finaliser, scaled), with its index sets.

    Made once for a segment on the CPU, in O(numel log numel) time. Holds 4 bytes an element on the
    CPU, and as many on every other device that uses them. Partition sizes follow the hash, so they
    differ by a few standard deviations, sqrt(numel / n).
    """

    code = HASH_INDEX_SETS

    _elements: torch.Tensor = field(init=False, repr=False, compare=False)
    _offsets: list[int] = field(init=False, repr=False, compare=False)
    _copies: dict[torch.device, torch.Tensor] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        """Hashes every element and sorts them by partition, ascending in each."""
        super().__post_init__()
        partition_N = self.partition_of(torch.arange(self.numel))
        counts = partition_N.bincount(minlength=self.partitions)
        order = torch.sort(partition_N, stable=True).indices  # stable: ascending in each
        # The class is frozen: its own fields are set past it.
        object.__setattr__(self, "_elements", order.to(torch.int32))
        object.__setattr__(self, "_offsets", [0, *counts.cumsum(0).tolist()])

    def locate(self, partition: int, elements_K: torch.Tensor) -> torch.Tensor:
        """Where each element stands in the partition's index set; -1 where it is of another."""
        is_elsewhere_K = self.partition_of(elements_K) != partition
        index_set = self.index_set(partition, elements_K.device)
        position_K = torch.searchsorted(index_set, elements_K.to(torch.int32))
        return position_K.masked_fill_(is_elsewhere_K, -1)

    def element_at(self, partition: int, positions_K: torch.Tensor) -> torch.Tensor:
        """The elements at positions of the partition's index set, int64."""
        return self.index_set(partition, positions_K.device)[positions_K].long()

    def _begin(self, partition: int) -> int:
        return self._offsets[partition]

    def index_set(self, partition: int, device: torch.device) -> torch.Tensor:
        """The partition's elements, int32 and ascending: a view of a copy cached for the device."""
        if device not in self._copies:
            self._copies[device] = self._elements.to(device)
        elements = self._copies[device]
        return elements[self._offsets[partition] : self._offsets[partition + 1]]
