"""Selection: gradient + residual -> encoded message + new residual.

Leaky error feedback: `x = g + e`; what exceeds its range's threshold is sent, and the residual
becomes `leak * x` where it does not and the rounding error where it does. What e is when a step
begins, and the thresholds, are the method's (`method.py`).
"""

from __future__ import annotations

import torch

from megatron_sparse.bucket import Bucket, Cuts
from megatron_sparse.compression.keys import draw_key
from megatron_sparse.compression.method import CompressionMethod
from megatron_sparse.compression.methods import method_of
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.threshold import KEEP_ALL
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.cuda_ext import ops
from megatron_sparse.formats.capacity import segment_capacity
from megatron_sparse.formats.message import (
    VALUE_DTYPES,
    WIRE_CODES,
    Message,
    MessageBuffers,
    prune_encode,
    wire_dtype_of,
)
from megatron_sparse.recording import StageTimer


class Selector:
    """Selects from the buckets of one group of ranks.

    Args:
        config: what to select.
        residuals: where the rest goes; mutated.
        rank: keys the stochastic rounding, so that ranks do not round alike.
        buffers: where messages live.
        method: shared with the selectors of other groups; None makes the configured one, for who
            needs no more of its state than `residuals`.

    Attributes:
        thresholds_R: of the last selection, for telemetry; fp32 on the device, None before it.
    """

    def __init__(
        self,
        config: CompressionConfig,
        residuals: ResidualStore,
        rank: int,
        buffers: MessageBuffers,
        method: CompressionMethod | None = None,
    ) -> None:
        self.config = config
        self.residuals = residuals
        self.method = method or method_of(config, residuals)
        self.rank = rank
        self.buffers = buffers
        self.thresholds_R: torch.Tensor | None = None

    def begin(self, bucket: Bucket, timer: StageTimer) -> torch.Tensor:
        """The bucket's residual with all that the method adds to the gradient; mutates it.

        For who must see it before `select`, which is then given it as `agreed`.
        """
        with timer.stage("prune"):
            return self.method.begin(bucket)

    def select(
        self,
        bucket: Bucket,
        density: float,
        wire_dtype: str | None,
        *,
        form: str,
        block_size: int,
        sharded: bool,
        step: int,
        timer: StageTimer,
        extra_cuts: Cuts = (),
        capacity: float | None = None,
        agreed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Message:
        """Prunes and encodes one bucket.

        One pass, whose time is the stage `prune`. What the gradient holds afterwards is for no one
        to use: the collective overwrites it. Mutates the residual. Reads the record sizes on the
        host, which on CUDA is one synchronisation a bucket; with a capacity there is none.

        Args:
            bucket: what to select from.
            density: target density of its pruned parameters.
            wire_dtype: dtype of the values on the wire, null for the gradient's own.
            form: format of the message, one of `formats.message.FORMAT_CODES`.
            block_size: of blocks.
            sharded: cut the message at the borders of the ranks' shards.
            step: keys the random draws and is the message's epoch.
            timer: receives the time of each stage.
            extra_cuts: cut it at these elements too; see `Scheme.finer`.
            capacity: the most that a segment may send, as a multiple of the target density; null
                for no limit.
            agreed: the residual, begun already, and the threshold that ranks have agreed upon with
                it; None begins and samples here.
        """
        layout = bucket.layout(sharded, extra_cuts)
        capacity_S = None
        if capacity is not None:
            capacity_S = segment_capacity(layout, capacity * density)
        value_dtype = wire_dtype_of(bucket.grad_N.dtype, wire_dtype)
        residual_N, threshold = agreed or (self.begin(bucket, timer), None)
        with timer.stage("threshold"):
            thresholds_R = self.method.thresholds(
                bucket, layout, residual_N, density, step, threshold
            )
        self.thresholds_R = thresholds_R
        key = self._rounding_key(bucket, step)
        with timer.stage("prune"):
            message = prune_encode(
                bucket,
                layout,
                residual_N,
                thresholds_R,
                self.config.leak,
                value_dtype,
                key,
                step,
                self.buffers,
                form,
                block_size,
                capacity_S,
            )
        self.method.selected(bucket, message)
        return message

    def take_whole(
        self, bucket: Bucket, wire_dtype: str | None, *, step: int, timer: StageTimer
    ) -> torch.Tensor:
        """Adds the residual to the gradient and clears it: for dense plans, which select nothing.

        Mutates the gradient. With a narrower `wire_dtype` the rounding error becomes the new
        residual and the result is a copy in that dtype; else it is the gradient itself.
        """
        value_dtype = wire_dtype_of(bucket.grad_N.dtype, wire_dtype)
        narrow = VALUE_DTYPES[value_dtype] != bucket.grad_N.dtype
        if not narrow and not self.method.has_addend(bucket):
            return bucket.grad_N
        layout = bucket.layout(sharded=False)
        residual_N = self.begin(bucket, timer)
        with timer.stage("prune"):
            thresholds_R = torch.full(
                layout.range_piece.shape, KEEP_ALL, device=bucket.grad_N.device
            )
            ops.prune_(
                bucket.grad_N,
                residual_N,
                layout.range_offsets,
                thresholds_R,
                self.config.leak,
                WIRE_CODES[value_dtype],
                self._rounding_key(bucket, step),
            )
        if not narrow:
            return bucket.grad_N
        with timer.stage("encode"):
            values_N = self.buffers.take(
                f"narrow:{bucket.name}",
                bucket.numel,
                bucket.grad_N.device,
                VALUE_DTYPES[value_dtype],
            )
            return values_N.copy_(bucket.grad_N)

    def _rounding_key(self, bucket: Bucket, step: int) -> int:
        return draw_key(self.config.seed, step, "round", bucket.name, self.rank)
