"""Masks from the first moment of Adam, the same on all ranks, so that values need no indices.

After SCAPE (Zheng, Chen, Xie, Zhang 2026, arXiv 2607.01678), of which there is no code. The mask
holds the largest magnitudes of each parameter, chosen anew every `interval` steps, by

- Adam's first moment m. All ranks have the same one, so the mask costs nothing to agree on. Where
  nothing is sent, m decays, so an element that has left the mask hardly comes back.
- `owners`: the moment that a rank would have after its own gradient, with the residual,
  b1 m + (1 - b1) n (g + e). Each of n ranks decides about its part of the bucket, as with SCAPE's
  shards of the optimizer, and the parts of the mask are gathered.

Values at the mask are sent in full, or quantised as `dense_q` does it (`compression.value_bits`).
The residual keeps the rest, rounding included.

Deviations: Adam instead of AdamS; error feedback; owners' masks hold at once, not a step later.

Bytes of a message: 4 for each value, or those of `dense_q`'s records; with `owners` a bit for each
element of the rank's part, in steps that change the mask. Full values are counted as a ring
all-reduce on the wire, quantised ones as `dense_q`: an all-to-all, and a gather of fp32 sums.
Either runs as one all-reduce of the values that were sent, whose sums are the same.

Shape suffixes: N elements of the bucket, K elements of its mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.bench.convergence.rivals.rival import Contribution
from megatron_sparse.bucket import Bucket
from megatron_sparse.compression.method import SampledTopK
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.config.compression import dense_value_bits
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import MessageBuffers


@dataclass
class _Mask:
    """The mask of a bucket.

    Attributes:
        mask_N: bool.
        step: in which it was chosen.
        values: a bucket of the values at the mask.
        selector: quantises them.
    """

    mask_N: torch.Tensor
    step: int
    values: Bucket
    selector: Selector


class MomentMaskRival:
    """See the module's docstring.

    Args:
        config: `value_bits` and `seed` are read.
        interval: steps from one choice of the mask to the next.
        owners: see the module's docstring.
    """

    def __init__(self, config: CompressionConfig, *, interval: int, owners: bool) -> None:
        self._config = config
        self._interval = interval
        self._owners = owners
        self._masks: dict[str, _Mask] = {}
        self._adams: list[Any] = []

    def bind(self, optimizer: Any) -> None:
        """See `Rival`: the first moments are read from it."""
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        self._adams = [each.optimizer for each in chained]

    def synchronise(self, given: Contribution) -> None:
        """See `Rival`.

        Raises:
            ConfigError: the optimizer keeps no first moment of a parameter.
        """
        bucket, residual_N = given.bucket, given.residual_N
        residual_N.add_(bucket.grad_N)
        mask = self._masks.get(bucket.name)
        if mask is None or given.record.step >= mask.step + self._interval:
            mask = self._masks[bucket.name] = self._choose(given)
        sent_K = residual_N[mask.mask_N]
        left_K = self._round(mask, sent_K, given)
        residual_N[mask.mask_N] = left_K
        sent_K -= left_K
        dist.all_reduce(sent_K, group=given.group)
        bucket.grad_N.zero_()
        bucket.grad_N[mask.mask_N] = sent_K

    def _round(self, mask: _Mask, values_K: torch.Tensor, given: Contribution) -> torch.Tensor:
        """What is left of the values when they have been sent; counts their bytes."""
        count = values_K.numel()
        if self._config.given_value_bits is None:
            given.count(count, values_K.nbytes)
            return torch.zeros_like(values_K)
        mask.values.grad_N.copy_(values_K)
        bits = dense_value_bits(self._config.given_value_bits)
        spec = MessageSpec(1.0, format="rice", value_bits=bits, whole=True)
        message = mask.selector.select(
            mask.values, spec, step=given.record.step, timer=given.record.timer
        )
        n = given.group.size()
        given.count(count, message.nbytes, (n - 1) * (message.nbytes + values_K.nbytes) // n)
        assert message.residual_N is not None, "select has set it"
        left_K = message.residual_N.clone()
        message.residual_N.zero_()
        return left_K

    def _choose(self, given: Contribution) -> _Mask:
        bucket = given.bucket
        moment_N, beta = self._moment(given)
        if self._owners:
            n, rank = given.group.size(), given.group.rank()
            moment_N.mul_(beta).add_(given.residual_N, alpha=(1 - beta) * n)
            own = slice(bucket.numel * rank // n, bucket.numel * (rank + 1) // n)
            gathered_N = largest(bucket, moment_N, given.density, own).to(torch.uint8)
            dist.all_reduce(gathered_N, dist.ReduceOp.MAX, group=given.group)
            mask_N = gathered_N.bool()
            own_bytes = -(-(own.stop - own.start) // 8)
            given.count(0, own_bytes, (n - 1) * own_bytes)
        else:
            mask_N = largest(bucket, moment_N, given.density)
        values, start = [], 0
        for piece in bucket.parameters:
            stop = start + int(mask_N[piece.start : piece.stop].sum())
            values.append(replace(piece, start=start, stop=stop))
            start = stop
        compact = replace(
            bucket, grad_N=bucket.grad_N.new_zeros(start), parameters=values, layouts={}
        )
        residuals = ResidualStore(torch.float32, undo=False, outcome=Outcome.ASSUMED)
        method = SampledTopK(self._config, residuals)
        selector = Selector(method, given.group.rank(), MessageBuffers())
        return _Mask(mask_N, given.record.step, compact, selector)

    def _moment(self, given: Contribution) -> tuple[torch.Tensor, float]:
        """Adam's first moment of the bucket [N], fp32, and its decay."""
        moment_N = torch.zeros_like(given.residual_N)
        betas = {
            float(group["betas"][0])
            for adam in self._adams
            for group in adam.param_groups
            if "betas" in group
        }
        for parameter, start in given.parameters:
            states = [adam.state[parameter] for adam in self._adams if parameter in adam.state]
            if len(states) != 1 or "exp_avg" not in states[0] or len(betas) != 1:
                raise ConfigError(
                    "masks from the first moment need Adam's",
                    expected="Adam in fp32 with one beta1, after one step at least",
                    got="an optimizer without a first moment of a parameter",
                    remedy="leave out megatron.optimizer, and use a warm-up of 1 iteration or more",
                )
            moment_N[start : start + parameter.numel()] = states[0]["exp_avg"].view(-1)
        return moment_N, betas.pop()


def largest(
    bucket: Bucket, statistic_N: torch.Tensor, density: float, part: slice | None = None
) -> torch.Tensor:
    """The mask [N] of each parameter's largest magnitudes; parameters sent whole are all in it.

    Padding is not. Of equal magnitudes torch chooses, on all ranks alike.

    Args:
        bucket: its parameters are read.
        statistic_N: the magnitudes.
        density: fraction of each parameter, rounded, but one element at least.
        part: chooses from these elements of the bucket only; None for all.
    """
    part = slice(0, bucket.numel) if part is None else part
    mask_N = torch.zeros(bucket.numel, dtype=torch.bool)
    for piece in bucket.parameters:
        own = slice(max(piece.start, part.start), min(piece.stop, part.stop))
        numel = own.stop - own.start
        if numel > 0:
            count = max(round(density * numel), 1) if piece.pruned else numel
            mask_N[own][statistic_N[own].abs().topk(count).indices] = True
    return mask_N
