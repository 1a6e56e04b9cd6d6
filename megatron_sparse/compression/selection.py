"""Selection: gradient + residual -> encoded message + new residual.

Leaky error feedback, for each element, with gradient g and residual e:

    x = g + e
    |x| above the threshold:   send x rounded to the wire's dtype; e becomes the rounding error
    |x| equal to it:           a part of these elements is drawn, and sent likewise
    otherwise:                 send nothing; e becomes leak * x

`residual.ResidualStore` keeps e. `range_limits` finds the limits, one for each range of the bucket
(a parameter, or the part of it in one shard; see the picture above `bucket.Layout`). A limit is a
threshold and the chance of what ties with it, so that `density` of a parameter is sent whatever its
distribution: `ops.sample_threshold` has the rule. The limit of a parameter comes from a sample:
`samples` elements by count, not by percentage, at positions that are a pure function of (seed,
step, parameter), so it does not depend on how buckets are cut. Stratum j of s holds the elements
floor(j n / s) to floor((j + 1) n / s), and a counter hash picks one of them.

Shape suffixes: N elements of the bucket, P parameters and paddings, S segments of the message,
R threshold ranges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import torch

from megatron_sparse.bucket import Bucket, Cuts, Layout
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.cuda_ext import codec_cuda, ops
from megatron_sparse.cuda_ext.record_spec import KEEP_ALL, Limits, Pruning, RecordSpec
from megatron_sparse.cuda_ext.slots import TABLES
from megatron_sparse.formats.message import (
    QUANTISED,
    VALUE_DTYPES,
    WIRE_CODES,
    Message,
    MessageBuffers,
    prune_encode,
    record_spec,
    wire_dtype_of,
)
from megatron_sparse.formats.rounding import round_into
from megatron_sparse.recording import StageTimer


@dataclass(frozen=True)
class MessageSpec:
    """The kind of message to make from a bucket.

    Attributes:
        density: target density of the pruned parameters.
        wire_dtype: dtype of the values on the wire; null for the gradient's own.
        format: one of `formats.message.FORMAT_CODES`.
        block_size: elements of a block, for the formats that have blocks.
        sharded: whether the message is cut at the borders of the ranks' shards.
        extra_cuts: further elements at which it is cut; see `Scheme.extra_cuts`.
        capacity: the most that a segment may send, as a multiple of the target density, which
            gives the message a fixed size; null for no limit.
        value_bits: bits of quantised values, with the format `rice`; null for values in full.
        whole: every element is sent, quantised to 8 or 4 bits; the density is then 1.
        checksum: the records are sealed.
    """

    density: float
    wire_dtype: str | None = None
    format: str = "auto"
    block_size: int = SchemeConfig.block_size
    sharded: bool = False
    extra_cuts: Cuts = ()
    capacity: float | None = None
    value_bits: int | None = None
    whole: bool = False
    checksum: bool = False

    def value_dtype(self, grad_dtype: torch.dtype) -> str:
        """The dtype of the values on the wire: fp32, bf16, fp16, or one of `QUANTISED`."""
        if self.value_bits is not None:
            return QUANTISED[self.value_bits]
        return wire_dtype_of(grad_dtype, self.wire_dtype)

    def record_spec(self, grad_dtype: torch.dtype, step: int) -> RecordSpec:
        """How the records of a bucket's message in a step are written, for the codec."""
        return record_spec(
            self.value_dtype(grad_dtype),
            step,
            self.format,
            self.block_size,
            self.density,
            whole=self.whole,
            checksum=self.checksum,
        )


class Selector:
    """Selects from the buckets of one group of ranks.

    Args:
        config: density, samples, leak, seed.
        residuals: error feedback, which is mutated; shared with the selectors of other groups.
        rank: this rank in the group; part of the key of random draws, so that ranks neither round
            alike nor draw the same ties.
        buffers: where messages live.
    """

    def __init__(
        self,
        config: CompressionConfig,
        residuals: ResidualStore,
        rank: int,
        buffers: MessageBuffers,
    ) -> None:
        """Stores the arguments."""
        self.config = config
        self.residuals = residuals
        self.rank = rank
        self.buffers = buffers

    def select(
        self,
        bucket: Bucket,
        spec: MessageSpec,
        *,
        step: int,
        timer: StageTimer,
    ) -> Message:
        """Prunes and encodes one bucket.

        One pass, whose time is the stage `prune`. The gradient's content is undefined afterwards:
        the collective overwrites it. Mutates the residual. Reads the record sizes on the host,
        which on CUDA is one synchronisation a bucket; with a capacity there is none.

        Args:
            bucket: the bucket to select from.
            spec: the message to make.
            step: the training step; keys the random draws and stands in the message.
            timer: receives the time of each stage.
        """
        layout = bucket.layout(spec.sharded, spec.extra_cuts)
        capacity_S = None
        if spec.capacity is not None:
            # A message of every element has room for all, whatever the factor.
            factor = max(spec.capacity, 1.0) if spec.whole else spec.capacity
            capacity_S = segment_capacity(layout, factor * spec.density)
        with timer.stage("prune"):
            residual_N = self.residuals.begin(bucket)
        with timer.stage("threshold"):
            limits_R = range_limits(bucket, layout, residual_N, spec.density, step, self.config)
            pruning = Pruning(
                residual_N,
                layout.range_offsets,
                limits_R.thresholds,
                self.config.leak,
                self._key(bucket, step),
                capacity_S,
                limits_R.tie_chances,
            )
        with timer.stage("prune"):
            message = prune_encode(
                bucket, layout, pruning, spec.record_spec(bucket.grad_N.dtype, step), self.buffers
            )
        message.residual_N = residual_N
        return message

    def take_whole(
        self, bucket: Bucket, wire_dtype: str | None, *, step: int, timer: StageTimer
    ) -> torch.Tensor:
        """Adds the residual to the gradient and clears it, for a dense collective.

        Mutates gradient and residual. With a narrower `wire_dtype` the rounding error becomes the
        new residual and the result is a copy in that dtype. Otherwise the result is the gradient,
        and the residual is dropped, which is 0, or with 16-bit gradients one rounding.
        """
        value_dtype = wire_dtype_of(bucket.grad_N.dtype, wire_dtype)
        is_narrower = VALUE_DTYPES[value_dtype] != bucket.grad_N.dtype
        if not is_narrower and bucket.name not in self.residuals:
            return bucket.grad_N
        layout = bucket.layout(sharded=False)
        with timer.stage("prune"):
            residual_N = self.residuals.begin(bucket)
            # The sparse kernel, with thresholds below every magnitude: it selects everything.
            thresholds_R = torch.full(
                layout.range_piece.shape, KEEP_ALL, dtype=torch.float32, device=bucket.grad_N.device
            )
            pruning = Pruning(
                residual_N,
                layout.range_offsets,
                thresholds_R,
                self.config.leak,
                self._key(bucket, step),
            )
            ops.prune_(bucket.grad_N, pruning, WIRE_CODES[value_dtype])
        if not is_narrower:
            self.residuals.drop_later(bucket)
            return bucket.grad_N
        with timer.stage("encode"):
            values_N = self.buffers.take_own(
                "narrow", bucket, bucket.numel, VALUE_DTYPES[value_dtype]
            )
            return round_into(values_N, bucket.grad_N)

    def _key(self, bucket: Bucket, step: int) -> int:
        return draw_key(self.config.seed, step, "round", bucket.name, self.rank)


def draw_key(seed: int, step: int, *names: object) -> int:
    """A non-negative 63-bit key for the random draw that `names` names in step `step`.

    A draw must not depend on the process or on Python's salted `hash`, so that a resumed run
    repeats it. Sample positions are drawn by parameter, so they do not depend on how parameters are
    grouped into buckets; rounding and ties are drawn by bucket, rank and element.

    Example:
        >>> draw_key(1, 2, "w") == draw_key(1, 2, "w") != draw_key(1, 3, "w")
        True
    """
    text = "\0".join([str(seed), str(step), *map(str, names)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def range_limits(
    bucket: Bucket,
    layout: Layout,
    residual_N: torch.Tensor,
    density: float,
    step: int,
    config: CompressionConfig,
) -> Limits:
    """The limits of every range of the layout.

    Args:
        bucket: the gradients.
        layout: how the bucket is cut.
        residual_N: of the bucket; only read.
        density: target density of the pruned parameters.
        step: keys the samples.
        config: number of samples, seed.

    Returns:
        Limits_R on the bucket's device; thresholds of ranges that are not pruned, and all of them
        at density 1, are `KEEP_ALL`. No host synchronisation.
    """
    device = bucket.grad_N.device
    # A piece is a parameter, or padding, whose owner is -1. All pieces but those of pruned
    # parameters are sampled at density 1, which gives them the threshold `KEEP_ALL`.
    pruned_P = [owner >= 0 and bucket.parameters[owner].pruned for owner in layout.piece_parameter]
    if density >= 1:
        no_chances_P = torch.zeros(len(pruned_P), dtype=torch.float32, device=device)
        keep_all_P = torch.full_like(no_chances_P, KEEP_ALL)
        limits_P = Limits(keep_all_P, no_chances_P, ties=no_chances_P.long())
    else:
        # Padding (-1) takes the last parameter's name: at density 1 the key does not matter.
        names = [bucket.parameters[owner].name for owner in layout.piece_parameter]
        keys = [draw_key(config.seed, step, "sample", name) for name in names]
        densities_P = [density if pruned else 1.0 for pruned in pruned_P]
        limits_P = ops.sample_threshold(
            bucket.grad_N,
            residual_N,
            layout.piece_offsets,
            torch.tensor(densities_P, dtype=torch.float32),
            config.samples_at(density),
            torch.tensor(keys, dtype=torch.int64),
        )
    # Each range takes the limits of its piece.
    piece_R = codec_cuda.on_device(layout.range_piece, device)
    return Limits(*(values_P[piece_R] for values_P in limits_P))


@lru_cache(TABLES)
def segment_capacity(layout: Layout, density: float) -> torch.Tensor:
    """How many elements each segment may send: all of a kept one, this density of the others.

    For capacity mode (`cuda_ext/slots.py`). The result is cached for the next step; do not write to
    it.

    Returns:
        int64; the numbers are the same on every machine (one fp64 product, rounded up).
    """
    numel_S, keep_S = layout.segment_offsets.diff().tolist(), layout.segment_keep.tolist()
    capacities = []
    for numel, keep in zip(numel_S, keep_S, strict=True):
        capacities.append(numel if keep else min(math.ceil(density * numel), numel))
    return torch.tensor(capacities, dtype=torch.int64)
