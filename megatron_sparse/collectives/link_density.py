"""The density of the sums that cross one link of a ring: measured if possible, else extrapolated.

SpCCL (section IV-C) lets a rank forward a sum dense once its density passes a threshold of the link
that it crosses. The non-zeros of a dense sum are not counted, so its density is extrapolated by
equation (7),

    next = 1 - (1 - previous) (1 - initial),

for positions that are uniform and independent across ranks; the next sum that is encoded
calibrates it again.

Deviations: `initial` is the density of the rank whose contribution was added last (the ranks
announce their densities before they start), not this rank's own. The threshold is compared with the
density of the next sum to send, one step ahead of the last measurement; the paper compares that
measurement itself. Both ends of a link compute the density from the headers of the records that
cross it, so they come to the same decisions without a message.
"""

from collections.abc import Sequence

import torch

from megatron_sparse.collectives.records import Cut
from megatron_sparse.formats.header import Header
from megatron_sparse.wire import HEADER_BYTES


def prunable_numel(cut: Cut) -> int:
    """Elements of the segments that are not always sent whole."""
    return int(cut.own_offsets.diff()[cut.keep == 0].sum())


def prunable_nnz(records: torch.Tensor, cut: Cut) -> int:
    """Counts the non-zero elements of records outside the segments that are always sent whole.

    Reads the records' headers, on CUDA with a copy to the CPU for each. It checks no checksum: this
    rank has encoded or decoded the records itself. `records`: uint8, one for each segment of `cut`.
    """
    total = position = 0
    for is_sent_whole in cut.keep.tolist():
        packed = records[position : position + HEADER_BYTES].cpu().numpy().tobytes()
        header = Header.unpack(packed, rank=None, payload_sum=None)
        position += HEADER_BYTES + header.payload_bytes
        total += 0 if is_sent_whole else header.nnz
    return total


class LinkDensity:
    """The density of the sums that one rank of a ring sends to its successor, step by step.

    In step s (counted from 1) that is a sum over the sender and the s - 1 ranks before it.

    Attributes:
        density: of the latest sum; nnz / numel outside the segments that are always sent whole.

    Args:
        sender: its place in the ring.
        initial: density of each rank's own contribution, in the ring's order.
        threshold: density from which a sum goes dense.

    Example:
        >>> link = LinkDensity(0, [0.5, 0.5, 0.5], threshold=0.7)
        >>> link.extrapolate()
        >>> link.density, link.is_dense
        (0.5, False)
        >>> link.extrapolate()
        >>> link.density, link.is_dense
        (0.75, True)
    """

    def __init__(self, sender: int, initial: Sequence[float], threshold: float) -> None:
        self.density = 0.0
        self._joining = sender
        self._initial = initial
        self._threshold = threshold

    @property
    def is_dense(self) -> bool:
        """Whether the latest sum goes dense."""
        return self.density >= self._threshold

    def extrapolate(self) -> None:
        """Goes on to the next sum, by equation (7)."""
        joining = self._initial[self._joining % len(self._initial)]
        self.density = 1 - (1 - self.density) * (1 - joining)
        self._joining -= 1

    def calibrate(self, records: torch.Tensor, cut: Cut) -> None:
        """Takes the density from the latest sum's records, unless all of it is always sent."""
        numel = prunable_numel(cut)
        if numel:
            self.density = prunable_nnz(records, cut) / numel
