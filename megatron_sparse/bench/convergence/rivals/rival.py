"""The interface of a rival: it sums one bucket over the ranks, with an error feedback of its own.

Shape suffix: N elements of the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket
from megatron_sparse.recording import BucketRecord


@dataclass(frozen=True)
class Contribution:
    """This rank's part of a bucket's sum in one step, and the means to synchronise it.

    Attributes:
        bucket: its `grad_N` holds the gradient; it is to be overwritten with the sum.
        parameters: each parameter of the bucket and its first element there, in ascending order.
        residual_N: fp32, what this rank has not sent yet; to be overwritten with what it leaves.
        group: the ranks.
        density: of this step, by `compression.density` and its ramp.
        record: of this bucket and step; receives the bytes.
    """

    bucket: Bucket
    parameters: list[tuple[torch.nn.Parameter, int]]
    residual_N: torch.Tensor
    group: dist.ProcessGroup
    density: float
    record: BucketRecord

    def count(self, numel: int, message_bytes: int, wire_bytes: int | None = None) -> None:
        """Notes what this rank sends.

        Args:
            numel: elements of its own message.
            message_bytes: of its own message.
            wire_bytes: that it sends in all; None for a ring all-reduce of the message.
        """
        n = self.group.size()
        self.record.nnz += numel
        self.record.message_bytes += message_bytes
        ring = 2 * (n - 1) * message_bytes // n
        self.record.wire_bytes += ring if wire_bytes is None else wire_bytes


class Rival(Protocol):
    """A way to compress. One object serves all buckets of a rank."""

    def bind(self, optimizer: Any) -> None:
        """Called once with Megatron's optimizer, before the first step."""
        ...

    def synchronise(self, given: Contribution) -> None:
        """Sums the bucket over all ranks; every rank calls it in the same order. Blocks."""
        ...
