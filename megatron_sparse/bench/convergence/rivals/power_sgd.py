"""PowerSGD: each gradient matrix as a product of two thin ones.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization" (NeurIPS 2019, arXiv 1905.13727), algorithms 1 and 2, with error feedback and warm
start. This is torch's own hook, `powerSGD_hook`, which is given Megatron's buckets in the place of
DDP's. It leaves vectors whole, and matrices that would not become half as small.

Bytes of a message: 4 r (n + m) for a matrix of n rows and m columns, 4 for each other element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from megatron_sparse.bench.convergence.rivals.rival import Contribution

_FIRST = 2
"""The earliest iteration that the hook allows: DDP's buckets change before it, Megatron's never."""


@dataclass(frozen=True)
class _GradBucket:
    """The part of DDP's `GradBucket` that the hook uses."""

    given: Contribution

    def buffer(self) -> torch.Tensor:
        return self.given.bucket.grad_N

    def gradients(self) -> list[torch.Tensor]:
        return [
            self.buffer()[start : start + parameter.numel()].view(parameter.shape)
            for parameter, start in self.given.parameters
        ]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class PowerSGDRival:
    """See the module's docstring.

    Args:
        rank: r, columns of the thin matrices.
        seed: of the first matrices Q, the same on every rank.
    """

    def __init__(self, rank: int, seed: int) -> None:
        self._rank = rank
        self._seed = seed
        self._states: dict[str, PowerSGDState] = {}

    def bind(self, optimizer: Any) -> None:
        """See `Rival`: ignored."""

    def synchronise(self, given: Contribution) -> None:
        """See `Rival`. The hook averages; both gradient and residual stay in the sum's unit."""
        bucket = given.bucket
        if bucket.name not in self._states:
            self._states[bucket.name] = self._state_of(given.group)
        state = self._states[bucket.name]
        state.error_dict[0] = given.residual_N
        before = state.total_numel_after_compression
        powerSGD_hook(state, cast(Any, _GradBucket(given))).wait()
        given.residual_N.copy_(state.error_dict[0])
        bucket.grad_N.mul_(given.group.size())
        numel = state.total_numel_after_compression - before
        given.count(numel, numel * bucket.grad_N.element_size())

    def _state_of(self, group: dist.ProcessGroup) -> PowerSGDState:
        state = PowerSGDState(group, self._rank, start_powerSGD_iter=_FIRST, random_seed=self._seed)
        state.iter = _FIRST
        return state
