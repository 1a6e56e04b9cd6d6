"""Deep Gradient Compression: momentum correction and momentum factor masking.

Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression" (ICLR 2018, arXiv 1712.01887), sections 3.1
and 3.2, equations 4 and 5. Error feedback delays a gradient; applying momentum after the sum, as an
optimizer does, discounts what was delayed differently from what was not. DGC keeps the momentum on
each rank, before the selection, and accumulates velocities instead of gradients:

    u = momentum * u + g;  v = v + u;  sent = v where |v| > threshold;  v = 0 and u = 0 where sent

(and of the |v| that equal the threshold those that are drawn). Here v is the residual. The
optimizer must then have no momentum of its own: it is SGD's rule alone, and `check_optimizer`
refuses others (with Adam, whose steps are not linear in the gradient, it is not defined).

Parameters that are always sent whole, and every dense step (warm-up, dense plans, compression
switched off), send u and v and mask nothing. Momentum is linear, so the ranks' velocities add up to
the velocity of the summed gradient: such steps are those of SGD with momentum, up to rounding.

Deviations: v is computed as (v + momentum * u) + g, so that the gradient is only read (a bf16 one
loses nothing), which may differ from v + (momentum * u + g) in the last bit. Elements that capacity
mode could not send are masked too, although their v stays. No Nesterov form. No local gradient
clipping (section 3.3): it needs the norm of a rank's whole gradient before the first bucket starts,
which would end the overlap with the backward pass.

Cost: nothing on the wire. Memory: an fp32 velocity, as large as the residual, and its undo copy
where the residual has one. Time: two passes over the bucket, in chunks that stay in a CPU's cache:
one that reads gradient and updates velocity and residual, one that reads gradient and residual and
clears velocities. The draws of ties are repeated in torch: on a CPU only for chunks that have a
tie, on CUDA, where that is not known, for all. No host synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, Layout
from megatron_sparse.compression.method import SampledTopK
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.threshold import pruned_pieces
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.cuda_ext.record_spec import Pruning
from megatron_sparse.cuda_ext.threshold_torch import drawn_ties
from megatron_sparse.errors import ConfigError

CHUNK = 2**18
"""Elements: three fp32 chunks fit a CPU core's second-level cache, or half of it."""
LARGEST_THRESHOLD = torch.finfo(torch.float32).max
"""Above it lies infinity, which is sent whatever the threshold."""


class DGC(SampledTopK):
    """See the module's docstring. Thresholds are those of sampled top-k."""

    def __init__(self, config: CompressionConfig, residuals: ResidualStore) -> None:
        super().__init__(config, residuals)
        self.velocities = ResidualStore(
            torch.float32, undo=residuals.undo, outcome=residuals.outcome
        )
        self.stores["momentum"] = self.velocities

    def begin(self, bucket: Bucket) -> torch.Tensor:
        """See `CompressionMethod`: the residual with the old velocity in it.

        Mutates the velocity too: it becomes this step's.
        """
        residual_N, velocity_N = super().begin(bucket), self.velocities.begin(bucket)
        for part in _chunks(0, bucket.numel):
            velocity_N[part].mul_(self.config.momentum)
            residual_N[part].add_(velocity_N[part])
            velocity_N[part].add_(bucket.grad_N[part])
        return residual_N

    def has_addend(self, bucket: Bucket) -> bool:
        """See `CompressionMethod`: a velocity grows from the first step on."""
        return True

    def selecting(self, bucket: Bucket, layout: Layout, pruning: Pruning, density: float) -> None:
        """See `CompressionMethod`: clears the velocities of the elements that will be sent."""
        if not self.config.momentum_masking or density >= 1:
            return
        velocity_N = self.velocities[bucket.name]
        thresholds_R = pruning.thresholds_R.clamp(max=LARGEST_THRESHOLD)
        pruned_P = pruned_pieces(bucket, layout)
        borders = pairwise(layout.range_offsets.tolist())
        for r, ((start, stop), piece) in enumerate(
            zip(borders, layout.range_piece.tolist(), strict=True)
        ):
            for part in _chunks(start, stop) if pruned_P[piece] else ():
                # The kernel compares in the same way: NaN is sent.
                x = (bucket.grad_N[part].float() + pruning.residual_N[part]).abs_()
                sent = x.le(thresholds_R[r]).logical_not_()
                tied = x.eq(thresholds_R[r])
                if pruning.tie_chances_R is not None and (tied.is_cuda or bool(tied.any())):
                    draws = drawn_ties(part.start, len(x), pruning.key, x.device)
                    sent |= tied.logical_and_(draws < pruning.tie_chances_R[r])
                velocity_N[part].masked_fill_(sent, 0)


def check_optimizer(config: CompressionConfig, optimizer: Any) -> None:
    """Refuses an optimizer that `compression.method=dgc` cannot be combined with.

    Args:
        config: names the method; the others work with every optimizer.
        optimizer: torch's, Apex's or Megatron's; all of them have `param_groups`.

    Raises:
        ConfigError: it is not SGD, or has a momentum of its own.
    """
    if config.method != "dgc":
        return
    momenta = [group.get("momentum") for group in getattr(optimizer, "param_groups", [{}])]
    if None in momenta:
        raise ConfigError(
            "compression.method=dgc is defined for SGD only",
            expected="an SGD optimizer without momentum",
            got="an optimizer whose parameter groups have no momentum, such as Adam",
            remedy="set megatron.optimizer=sgd megatron.sgd_momentum=0, or compression.method=topk",
        )
    if any(momenta):
        raise ConfigError(
            "compression.method=dgc and the optimizer would both apply a momentum",
            expected="an optimizer with momentum 0",
            got=f"momentum {max(momenta):g}",
            remedy="set megatron.sgd_momentum=0 (SGD(momentum=0) in a script of your own); "
            f"compression.momentum={config.momentum:g} takes its place",
        )


def _chunks(start: int, stop: int) -> Iterator[slice]:
    for begin in range(start, stop, CHUNK):
        yield slice(begin, min(begin + CHUNK, stop))
