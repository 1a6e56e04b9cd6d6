"""One rank that selects from gradients, step by step."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.formats.message import Message, MessageBuffers
from megatron_sparse.recording import StageTimer
from megatron_sparse.sparsity.sampling import selected_values


class Rank:
    """A selector with its residual; `message` is the last one.

    `config.density` is that of each selection, unless `send` gets another. `residuals` have undo
    copies; with `is_reported` selections are left pending.
    """

    message: Message

    def __init__(
        self,
        config: CompressionConfig,
        pieces: Sequence[ParameterSlice],
        rank: int = 0,
        is_reported: bool = False,
    ) -> None:
        self.config = config
        self.pieces = pieces
        self.residuals = ResidualStore(torch.float32)
        self.residuals.undo, self.residuals.is_reported = True, is_reported
        self.selector = Selector(config, self.residuals, rank, MessageBuffers())

    def bucket(self, gradient_N: torch.Tensor) -> Bucket:
        return Bucket("b", gradient_N.clone(), self.pieces, CollectiveOp.ALL_REDUCE, 1)

    def send(self, gradient_N: torch.Tensor, step: int, **spec: Any) -> torch.Tensor:
        """Selects; the values that are sent, fp32, zero elsewhere. `spec`: of `MessageSpec`.

        On the CPU selection only reads the gradient, and measures its time.
        """
        bucket, timer = self.bucket(gradient_N), StageTimer()
        given = MessageSpec(**{"density": self.config.density} | spec)
        self.message = self.selector.select(bucket, given, step=step, timer=timer)
        assert torch.equal(bucket.grad_N.view(torch.uint8), gradient_N.view(torch.uint8))
        assert timer.times_us()["prune"] > 0
        return selected_values(bucket, self.message, self.selector.buffers).clone()

    def send_whole(self, gradient_N: torch.Tensor, step: int) -> torch.Tensor:
        bucket = self.bucket(gradient_N)
        return self.selector.take_whole(bucket, None, step=step, timer=StageTimer()).clone()

    @property
    def residual(self) -> torch.Tensor:
        """After the last step; zeros before the first one."""
        if "b" not in self.residuals:
            return torch.zeros(max(piece.stop for piece in self.pieces))
        return self.residuals["b"].clone()
