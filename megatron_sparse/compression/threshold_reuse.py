"""Thresholds that are used for several steps, corrected by the number of elements they kept.

A threshold changes slowly from step to step. Ok-Topk (Li and Hoefler, PPoPP 2022, section 3.1.3)
computes it once in 32 to 128 steps and uses it in between; DGC (Lin et al., ICLR 2018, section 5)
adapts a threshold whose kept count is outside 0.8 to 1.3 of the target. Together:

- A bucket is sampled in the first step, `reuse_iters` steps later, when the target density has
  changed, after any step without a selection (dense, skipped), and when the last step kept less
  than half or more than twice of the target.
- Otherwise its thresholds are those of the last step. If that step kept less than 0.8 or more than
  1.3 of the target, all of them are multiplied by `correction`.

The kept count is that of the bucket's last message (elements that may be pruned). The host knows it
already: it has read the sizes of records, or the reports of capacity mode, since. One factor serves
all parameters of a bucket, so with `threshold_scope=parameter` the selection depends on how
parameters are cut into buckets; that of `topk` does not.

Deviations: DGC multiplies by 0.8 or 1.3 and counts again, several times within a step, which would
be a pass each time. Here the factor is the right one for an exponential tail, within those bounds,
and is applied from the next step on.

Everything is a pure function of the steps so far: resume and repeated steps are bit-exact.

Cost: sampling in one step of `reuse_iters`, nothing in the others. Memory: one number for each
parameter. No host synchronisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, Layout
from megatron_sparse.compression.method import SampledTopK
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.threshold import piece_thresholds, spread
from megatron_sparse.config.compression import REUSE_BAND, CompressionConfig
from megatron_sparse.cuda_ext.codec_cuda import to_device
from megatron_sparse.errors import CheckpointError
from megatron_sparse.formats.message import Message

OUT_OF_REACH = (0.5, 2.0)
"""Kept counts over the target outside of which the bucket is sampled again."""


@dataclass(frozen=True)
class Served:
    """The thresholds of a bucket's last selection.

    Attributes:
        thresholds_P: fp32, of the bucket's pieces, on its device or, after a resume, on the CPU.
        parameters: names of the pruned ones, in order; if they change, the bucket is sampled anew.
        density: the target.
        sampled_step: the step that sampled them.
        step: the step that last used them.
        kept: the selection of that step: its message, or its count. None before it is known.
    """

    thresholds_P: torch.Tensor
    parameters: tuple[str, ...]
    density: float
    sampled_step: int
    step: int
    kept: Message | int | None = None

    @property
    def kept_count(self) -> int:
        """The number of elements that could have been pruned and were sent."""
        assert self.kept is not None, "a selection that counts has ended"
        return self.kept.pruned_nnz if isinstance(self.kept, Message) else self.kept


class ThresholdReuse(SampledTopK):
    """See the module's docstring."""

    def __init__(self, config: CompressionConfig, residuals: ResidualStore) -> None:
        super().__init__(config, residuals)
        self._served: dict[str, Served] = {}
        self._pending: dict[str, Served] = {}

    def thresholds(
        self,
        bucket: Bucket,
        layout: Layout,
        residual_N: torch.Tensor,
        density: float,
        step: int,
        agreed: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `CompressionMethod`. `agreed` is always None: ranks share no thresholds here."""
        if self.residuals.outcome is Outcome.ASSUMED and bucket.name in self._pending:
            self._served[bucket.name] = self._pending.pop(bucket.name)
        served = self._next(bucket, layout, density, step)
        if served is None:
            thresholds_P = piece_thresholds(bucket, layout, residual_N, density, step, self.config)
            served = Served(thresholds_P, _names(bucket), density, step, step)
        self._pending[bucket.name] = served
        return spread(served.thresholds_P, layout)

    def _next(self, bucket: Bucket, layout: Layout, density: float, step: int) -> Served | None:
        """The last step's thresholds, corrected; None if the bucket must be sampled."""
        last = self._served.get(bucket.name)
        if (
            last is None
            or last.step != step - 1
            or last.density != density
            or last.parameters != _names(bucket)
            or last.thresholds_P.numel() != len(layout.piece_parameter)
            or step - last.sampled_step >= self.config.reuse_iters
        ):
            return None
        pruned = sum(p.stop - p.start for p in bucket.parameters if p.pruned)
        factor = correction(last.kept_count, density * pruned, density)
        if factor is None:
            return None
        thresholds_P = to_device(last.thresholds_P, bucket.grad_N.device)
        if factor != 1:
            # Thresholds of kept pieces are negative, and stay negative.
            thresholds_P = thresholds_P * factor
        return replace(last, thresholds_P=thresholds_P, step=step, kept=None)

    def selected(self, bucket: Bucket, message: Message) -> None:
        """See `CompressionMethod`."""
        self._pending[bucket.name] = replace(self._pending[bucket.name], kept=message)

    def commit(self) -> None:
        """See `CompressionMethod`."""
        self._served |= self._pending
        self._pending.clear()

    def rollback(self) -> None:
        """See `CompressionMethod`."""
        self._pending.clear()

    def rescale(self, factor: float) -> None:
        """See `CompressionMethod`."""
        for name, served in self._served.items():
            self._served[name] = replace(served, thresholds_P=served.thresholds_P * factor)

    def state_dict(self) -> dict[str, Any]:
        """See `CompressionMethod`: each bucket's thresholds by its name."""
        held = self._served
        if self.residuals.outcome is Outcome.ASSUMED:
            held = held | self._pending
        return {
            name: {
                "thresholds": served.thresholds_P.cpu(),
                "parameters": list(served.parameters),
                "density": served.density,
                "sampled_step": served.sampled_step,
                "step": served.step,
                "kept": served.kept_count,
            }
            for name, served in held.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `CompressionMethod`. Buckets with other parameters are sampled anew."""
        self._pending.clear()
        try:
            self._served = {
                name: Served(
                    values["thresholds"],
                    tuple(values["parameters"]),
                    values["density"],
                    values["sampled_step"],
                    values["step"],
                    values["kept"],
                )
                for name, values in state.items()
            }
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                "the saved thresholds are damaged",
                expected="what compression.method=threshold_reuse saved",
                got=repr(error),
                remedy="resume with the method that the checkpoint was made with, or start with "
                "zero residuals",
            ) from error


def correction(kept: int, target: float, density: float) -> float | None:
    """The factor for thresholds that have kept `kept` elements instead of `target`.

    If the magnitudes' tail falls as exp(-x / b), the threshold of density d is b ln(1 / d), and one
    that keeps r times too many is b ln(1 / (r d)): it must grow by ln(1 / d) / ln(1 / (r d)).

    Returns:
        1 if kept / target is inside `REUSE_BAND`; else a factor within that band, or None if the
        ratio is so far off that the bucket must be sampled again.

    Example:
        >>> correction(100, 100.0, 0.01), round(correction(150, 100.0, 0.01), 3)
        (1, 1.097)
        >>> correction(300, 100.0, 0.01) is None
        True
    """
    ratio = kept / target if target else 1.0
    low, high = REUSE_BAND
    if low <= ratio <= high:
        return 1
    if not OUT_OF_REACH[0] <= ratio <= OUT_OF_REACH[1]:
        return None
    if ratio * density >= 1:
        return high
    return min(max(math.log(density) / math.log(ratio * density), low), high)


def _names(bucket: Bucket) -> tuple[str, ...]:
    return tuple(p.name for p in bucket.parameters if p.pruned)
