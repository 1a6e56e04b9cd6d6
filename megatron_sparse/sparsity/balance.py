"""How evenly servers share the load of Balanced Parallelism: ZEN's imbalance ratios.

ZEN (section 3.1, definition 8): with a mapping of elements to n servers, Push is as imbalanced as
the largest part that any rank sends to any server, over the mean one; Pull as the largest part of
the union, over the mean one. 1 is best, n is worst. This module compares contiguous shards, which
most schemes use, with a hash (`formats.hash_partition`), which ZEN uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from megatron_sparse.collectives.base import even_cuts
from megatron_sparse.formats.hash_partition import HASH_SEED, PermutationHash
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.sparsity.characteristics import counts_between, union_of


@dataclass(frozen=True)
class Loads:
    """Non-zero elements by server.

    Attributes:
        push_nP: int64, the number that each rank sends to each server.
        pull_P: int64, the union's elements on each server.
    """

    push_nP: np.ndarray
    pull_P: np.ndarray

    @classmethod
    def contiguous(cls, elements: Sequence[np.ndarray], numel: int) -> Self:
        """The loads with one even, contiguous shard for each rank.

        Args:
            elements: of each rank, int64, ascending.
            numel: of the bucket.
        """
        cuts = even_cuts(numel, len(elements))
        return cls(
            push_nP=np.array([counts_between(own_K, cuts) for own_K in elements]),
            pull_P=np.array(counts_between(union_of(elements, numel), cuts)),
        )

    @classmethod
    def hashed(cls, elements: Sequence[np.ndarray], numel: int) -> Self:
        """The loads with one partition of ZEN's hash h0 for each rank.

        Args:
            elements: of each rank, int64, ascending.
            numel: of the bucket, below 2^31.

        Raises:
            ConfigError: the bucket is too large.
        """
        h0 = PermutationHash(numel, len(elements), HASH_SEED)

        def counts(own_K: np.ndarray) -> np.ndarray:
            """Counts the elements that h0 puts into each partition."""
            partition_K = h0.partition_of(torch.from_numpy(own_K))
            return partition_K.bincount(minlength=h0.partitions).numpy()

        return cls(
            push_nP=np.array([counts(own_K) for own_K in elements]),
            pull_P=counts(union_of(elements, numel)),
        )

    def __add__(self, other: Loads) -> Loads:
        """The loads of two buckets that the same ranks share."""
        return Loads(self.push_nP + other.push_nP, self.pull_P + other.pull_P)

    @property
    def push(self) -> float:
        """The imbalance ratio of Push; 1 where nothing is sent."""
        return max(map(_imbalance, self.push_nP))

    @property
    def pull(self) -> float:
        """The imbalance ratio of Pull; 1 where nothing is sent."""
        return _imbalance(self.pull_P)


def _imbalance(counts_P: np.ndarray) -> float:
    total = int(counts_P.sum())
    return counts_P.size * int(counts_P.max()) / total if total else 1.0


@dataclass(frozen=True)
class Sample:
    """One bucket in one iteration, on all ranks of its group.

    Attributes:
        iteration: number of the iteration, as the training loop counts.
        bucket: name of the bucket; ends in `all` for all buckets of the group.
        numel: number of elements.
        elements: indices of each rank's non-zero elements: int64, ascending.
        profile: the exact profile.
        contiguous: loads of the servers if each owns a contiguous range.
        hashed: loads of the servers if a hash spreads the elements.
    """

    iteration: int
    bucket: str
    numel: int
    elements: Sequence[np.ndarray]
    profile: SparsityProfile
    contiguous: Loads
    hashed: Loads

    def line(self, kind: str) -> dict[str, Any]:
        """The sample as a JSON object; `kind` is the kind of its tensors in the gradient dump."""
        return {
            "iteration": self.iteration,
            "bucket": self.bucket,
            "kind": str(kind),
            "push": self.contiguous.push,
            "pull": self.contiguous.pull,
            "push_hashed": self.hashed.push,
            "pull_hashed": self.hashed.pull,
            "profile": self.profile.to_dict(),
        }
