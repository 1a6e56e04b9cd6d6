"""Arguments that encode and decode ops share: segments, record formats, pruning, expected headers.

A message has a record for each segment of a bucket. Shape suffixes as in `ops`. Tables of offsets
and flags are on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_sparse.wire import FORMAT_COO, RICE_SPANS

DEFAULT_BLOCK_SIZE = 256
"""Elements of a block; OmniReduce's own choice."""
KEEP_ALL = -1.0
"""A threshold below every magnitude: everything is sent."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The pieces of a bucket; each becomes a record.

    Attributes:
        offsets: int64, S+1 offsets from 0 to N; a segment has fewer than 2^31 elements.
        dense: uint8, 1 for kept segments, whose records are always dense.
        slots: int64, S+1 bytes of the message at which each record's slot (its fixed place) begins
            and the last one ends: ascending multiples of 16 from 0 on. Bytes of a slot after its
            record are cleared. None: records lie back to back.
    """

    offsets: torch.Tensor
    dense: torch.Tensor
    slots: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RecordSpec:
    """The dtype, step and format of a message's records.

    Attributes:
        value_dtype: dtype code of the values in the records.
        step: the training step; the header has its lower 32 bits.
        record_format: `FORMAT_DENSE`, `FORMAT_COO`, `FORMAT_PICI`, `FORMAT_BLOCKS`, `FORMAT_RICE`,
            or `FORMAT_ADAPTIVE` for the smallest of dense, COO and Pici in each segment, where COO
            wins a tie.
        paper_order: bits and values of Pici in the order of its paper instead of linear order.
        block_size: elements of a block: a power of two from 64 to 4096.
        log2_span: of `FORMAT_RICE`: the binary logarithm of a chunk's elements, `wire.rice_span` of
            the density.
        without_indices: of `FORMAT_RICE`: every element is sent; quantised to 8 or 4 bits.
        checksum: seal the records: the checksums in their headers cover the payloads.
    """

    value_dtype: int
    step: int
    record_format: int = FORMAT_COO
    paper_order: bool = False
    block_size: int = DEFAULT_BLOCK_SIZE
    log2_span: int = RICE_SPANS[0]
    without_indices: bool = False
    checksum: bool = False


class Limits(NamedTuple):
    """What `sample_threshold` finds for each range: which magnitudes to keep.

    Those above the threshold, and a random part of the ties, which equal it. All on one device.

    Attributes:
        thresholds: fp32; a negative one keeps everything, and so does NaN.
        tie_chances: fp32, 0 to 1: the probability that an element is kept whose magnitude equals
            the threshold.
        ties: int64, how many samples equal the threshold; 0 where nothing was sampled.
    """

    thresholds: torch.Tensor
    tie_chances: torch.Tensor
    ties: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pruning:
    """How a bucket is pruned: thresholds for `x = gradient + residual`, and the residual's leak.

    Attributes:
        residual_N: fp32 or bf16, on the gradient's device. Mutated by the ops.
        range_offsets: int64, R+1 offsets of consecutive ranges from 0 to N.
        thresholds_R: fp32, on the gradient's device; a negative one keeps all of its range, and so
            does NaN.
        leak: factor on dropped values, 0 to 1.
        key: of the random bits that choose among ties and round stochastically; negative for
            rounding to nearest.
        capacity_S: int64, the most non-zero elements of each segment; None for no limit.
        tie_chances_R: fp32, beside the thresholds, 0 to 1: the part of the elements with
            `|x| == threshold` that is kept, drawn by (key, index in the bucket). None keeps none of
            them. Zeros are never kept.
        old_residual_N: what `prune_encode` reads instead of `residual_N`, of the same dtype and
            size; only read. It then writes all of `residual_N`, whatever was there. None: the same
            tensor.
    """

    residual_N: torch.Tensor
    range_offsets: torch.Tensor
    thresholds_R: torch.Tensor
    leak: float
    key: int
    capacity_S: torch.Tensor | None = None
    tie_chances_R: torch.Tensor | None = None
    old_residual_N: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """The expected header values of a peer's message.

    Attributes:
        segment_offsets: int64, offsets in the bucket of the segments that the message must hold.
        value_dtype: dtype code that the values must have.
        step: the training step that the records must be of.
        rank: the sender, for the error's text.
        slots: as in `Segments`; the message is as long as all slots. The bytes after a record in
            its slot are ignored. None: records lie back to back.
        checksum: the records are sealed (`checksum_ops`).
    """

    segment_offsets: torch.Tensor
    value_dtype: int
    step: int
    rank: int
    slots: torch.Tensor | None = None
    checksum: bool = False
