"""Selection: gradient + residual -> encoded message + new residual.

Leaky error feedback, for each element, with gradient g and residual e:

    x = g + e
    |x| above the threshold:   send x rounded to the wire's dtype; e becomes the rounding error
    |x| equal to it (a tie):   send x with a certain chance, drawn at random
    otherwise:                 send nothing; e becomes leak * x

`residual.ResidualStore` keeps e. `range_limits` finds the *limits* of each range of the bucket: its
threshold and the chance of ties, chosen so that the part `density` of a parameter is sent whatever
its distribution (`ops.sample_threshold` has the rule). A parameter's limits come from a sample of
its elements: `samples` of them, at positions that depend only on (seed, step, parameter), so not on
how buckets are cut. Stratum j of s holds the elements floor(j n / s) to floor((j + 1) n / s), and a
counter hash picks one of them.

Shape suffixes: N elements of the bucket, P pieces (parameters and paddings), S segments (records of
the message), R threshold ranges; the picture above `bucket.Layout` shows all of them.
"""

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
        wire_dtype: dtype of the values on the wire; None for the gradient's own.
        format: one of `formats.message.FORMAT_CODES`.
        block_size: elements of a block, for the formats that have blocks.
        sharded: whether the message is cut at the borders of the ranks' shards.
        extra_cuts: further elements at which the message is cut; see `Scheme.extra_cuts`.
        capacity: the most that a segment may send, as a multiple of the target density, which
            gives the message a fixed size ("capacity mode"); None for no limit.
        value_bits: bits of quantised values, with the format `rice`; None for values in full.
        whole: whether every element is sent, quantised to 8 or 4 bits; the density is then 1.
        checksum: whether the records' checksums cover their payload, not the header alone.
        by_shard: whether each shard is encoded only when the scheme asks for it.
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
    by_shard: bool = False

    def value_dtype(self, grad_dtype: torch.dtype) -> str:
        """The dtype of the values on the wire: fp32, bf16, fp16, or one of `QUANTISED`."""
        if self.value_bits is not None:
            return QUANTISED[self.value_bits]
        return wire_dtype_of(grad_dtype, self.wire_dtype)

    def record_spec(self, grad_dtype: torch.dtype, step: int) -> RecordSpec:
        """Settings of the codec for the records of a message."""
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
        self.config = config
        self.residuals = residuals
        self.rank = rank
        self.buffers = buffers

    def select(self, bucket: Bucket, spec: MessageSpec, *, step: int, timer: StageTimer) -> Message:
        """Selects from one bucket, and encodes the selected values as a message.

        One pass over gradient and residual, whose time is the stage `prune`. Updates the residual.
        With `spec.by_shard` that is left to `Message.records`.
        The gradient's content is undefined afterwards: the collective overwrites it. The host reads
        the record sizes, on CUDA a synchronisation for each bucket; with a capacity it need not.

        Args:
            bucket: the bucket to select from.
            spec: the message to make.
            step: the training step; a part of the random draws' keys, and of the message's headers.
            timer: receives the time of each stage.
        """
        layout = bucket.layout(spec.sharded, spec.extra_cuts)
        capacity_S = None
        if spec.capacity is not None:
            # If every element is sent, a factor below 1 would leave too little room.
            factor = max(spec.capacity, 1.0) if spec.whole else spec.capacity
            capacity_S = segment_capacity(layout, factor * spec.density)
        old_N, residual_N = self.residuals.begin_apart(bucket)
        with timer.stage("threshold"):
            limits_R = range_limits(bucket, layout, old_N, spec.density, step, self.config)
            pruning = Pruning(
                residual_N,
                layout.range_offsets,
                limits_R.thresholds,
                self.config.leak,
                self._key(bucket, step),
                capacity_S,
                limits_R.tie_chances,
                old_residual_N=None if old_N is residual_N else old_N,
            )
        with timer.stage("prune"):
            record_spec = spec.record_spec(bucket.grad_N.dtype, step)
            message = prune_encode(
                bucket, layout, pruning, record_spec, self.buffers, by_shard=spec.by_shard
            )
        message.residual_N = residual_N  # for schemes that round sums: it takes the rounding errors
        return message

    def take_whole(
        self, bucket: Bucket, wire_dtype: str | None, *, step: int, timer: StageTimer
    ) -> torch.Tensor:
        """Selects every element: adds the residual to the gradient, for a dense collective.

        Changes gradient and residual. With a `wire_dtype` narrower than the gradient's, returns a
        copy in that dtype, and the rounding errors become the new residual. Otherwise returns the
        gradient, and frees the residual: only rounding errors of 16-bit gradients are lost with it.
        """
        value_dtype = wire_dtype_of(bucket.grad_N.dtype, wire_dtype)
        is_narrower = VALUE_DTYPES[value_dtype] != bucket.grad_N.dtype
        if not is_narrower and bucket.name not in self.residuals:
            return bucket.grad_N  # no residual to add, and no rounding error to keep
        layout = bucket.layout(sharded=False)
        with timer.stage("prune"):
            residual_N = self.residuals.begin(bucket)
            # The pruning kernel selects every element, as each threshold is below all magnitudes.
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
    """Hashes its arguments to the key of random draws: 63 bits, which fit into int64.

    Unlike Python's salted `hash` it is the same in each process, so a resumed run draws the same.
    Sample positions have one key for each parameter, so they do not depend on how parameters are
    grouped into buckets; rounding and ties have one for each bucket and rank.

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
    """Finds the limits of every range of the layout, from samples. No host synchronisation.

    Args:
        bucket: the gradients.
        layout: how the bucket is cut.
        residual_N: the bucket's residual; only read.
        density: target density of the pruned parameters.
        step: the training step, a part of the key of random draws.
        config: number of samples, seed.

    Returns:
        Limits, each a tensor [R] on the bucket's device. Thresholds of ranges that are not pruned,
        and of all ranges at density 1, are `KEEP_ALL`.
    """
    device = bucket.grad_N.device
    # The index of each piece's parameter; -1 for padding, which is not pruned.
    indices_P = layout.piece_parameter
    pruned_P = [index >= 0 and bucket.parameters[index].pruned for index in indices_P]
    if density >= 1:
        zeros_P = torch.zeros(len(pruned_P), dtype=torch.float32, device=device)
        limits_P = Limits(torch.full_like(zeros_P, KEEP_ALL), zeros_P, ties=zeros_P.long())
    else:
        # Padding (index -1) takes the last parameter's key; its own density, 1, needs no samples.
        names = [bucket.parameters[index].name for index in indices_P]
        keys = [draw_key(config.seed, step, "sample", name) for name in names]
        # Density 1 gives pieces that are not pruned the threshold `KEEP_ALL`.
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
    """How many elements each segment may send: all if it is kept whole, else the part `density`.

    For capacity mode (`cuda_ext/slots.py`). The result is cached for the next step; do not write to
    it.

    Returns:
        int64 [S]; the same on every machine (one fp64 product, rounded up).
    """
    numel_S, keep_S = layout.segment_offsets.diff().tolist(), layout.segment_keep.tolist()
    capacities = []
    for numel, keep in zip(numel_S, keep_S, strict=True):
        capacities.append(numel if keep else min(math.ceil(density * numel), numel))
    return torch.tensor(capacities, dtype=torch.int64)
