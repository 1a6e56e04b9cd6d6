"""Thresholds that are used for several steps, corrected by the number of elements they kept.

A threshold changes slowly from step to step. Ok-Topk (Li and Hoefler, PPoPP 2022, section 3.1.3)
computes it once in 32 to 128 steps and uses it in between; DGC (Lin et al., ICLR 2018, section 5)
adapts a threshold whose kept count is outside 0.8 to 1.3 of the target. Together:

- A bucket is sampled in the first step, `reuse_iters` steps later, when the target density has
  changed, after any step without a selection (dense, skipped), and when the last step kept less
  than half or more than twice of the target.
- Otherwise its thresholds are those of the last step. If that step kept less than 0.8 or more than
  1.3 of the target, all of them are multiplied by `correction`.
- A bucket is also sampled again, in every step, while more than `MOST_TIES` of the samples that a
  parameter sends equal its threshold. What ties and is not sent grows with every step: it would all
  exceed an old threshold at once.

The kept count is that of the bucket's last message (elements that may be pruned). The host knows it
already: it has read the sizes of records, or the reports of capacity mode, since. One factor serves
all parameters of a bucket, so with `threshold_scope=parameter` the selection depends on how
parameters are cut into buckets; that of `topk` does not.

Deviations: DGC multiplies by 0.8 or 1.3 and counts again, several times within a step, which would
be a pass each time. Here the factor is the right one for an exponential tail, within those bounds,
and is applied from the next step on.

Everything is a pure function of the steps so far: resume and repeated steps are bit-exact.

Cost: sampling in one step of `reuse_iters`, nothing in the others. Memory: a threshold and a tie
chance for each parameter. No host synchronisation: whether a bucket's samples tie is copied to the
host without waiting, and read in the next step, after the message's sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, Layout
from megatron_sparse.compression.method import SampledTopK
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.threshold import piece_limits, spread
from megatron_sparse.config.compression import REUSE_BAND, CompressionConfig
from megatron_sparse.cuda_ext.codec_cuda import on_device, to_device
from megatron_sparse.cuda_ext.record_spec import Limits
from megatron_sparse.errors import CheckpointError
from megatron_sparse.formats.message import Message

OUT_OF_REACH = (0.5, 2.0)
"""Kept counts over the target outside of which the bucket is sampled again."""
MOST_TIES = 1 - REUSE_BAND[0]
"""Of what is to be sent: so many ties may be sent or not without leaving the band."""


@dataclass(frozen=True)
class Served:
    """The limits of a bucket's last selection.

    Attributes:
        limits_P: of the bucket's pieces, on its device or, after a resume, on the CPU.
        tied: whether too many samples equal their threshold: a bool tensor on the CPU, whose
            content is there as soon as `kept_count` is known.
        parameters: names of the pruned ones, in order; if they change, the bucket is sampled anew.
        density: the target.
        sampled_step: the step that sampled them.
        step: the step that last used them.
        kept: the selection of that step: its message, or its count. None before it is known.
    """

    limits_P: Limits
    tied: torch.Tensor
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

    def limits(
        self,
        bucket: Bucket,
        layout: Layout,
        residual_N: torch.Tensor,
        density: float,
        step: int,
        agreed: Limits | None,
    ) -> Limits:
        """See `CompressionMethod`. `agreed` is always None: ranks share no limits here."""
        if self.residuals.outcome is Outcome.ASSUMED and bucket.name in self._pending:
            self._served[bucket.name] = self._pending.pop(bucket.name)
        served = self._next(bucket, layout, density, step)
        if served is None:
            limits_P = piece_limits(bucket, layout, residual_N, density, step, self.config)
            tied = self._tied(bucket, layout, limits_P, density)
            served = Served(limits_P, tied, _names(bucket), density, step, step)
        self._pending[bucket.name] = served
        return spread(served.limits_P, layout)

    def _tied(
        self, bucket: Bucket, layout: Layout, limits_P: Limits, density: float
    ) -> torch.Tensor:
        """Whether any parameter's samples tie too often; on its way to the CPU."""
        lengths = layout.piece_offsets.diff()
        if self.config.threshold_scope == "bucket":
            lengths.fill_(sum(p.stop - p.start for p in bucket.parameters if p.pruned))
        # A single sample ties with itself.
        most_P = (lengths.clamp(max=self.config.samples) * (density * MOST_TIES)).clamp(min=1)
        device = limits_P.ties.device
        return (limits_P.ties > on_device(most_P, device)).any().to("cpu", non_blocking=True)

    def _next(self, bucket: Bucket, layout: Layout, density: float, step: int) -> Served | None:
        """The last step's thresholds, corrected; None if the bucket must be sampled."""
        last = self._served.get(bucket.name)
        if (
            last is None
            or last.step != step - 1
            or last.density != density
            or last.parameters != _names(bucket)
            or last.limits_P.thresholds.numel() != len(layout.piece_parameter)
            or step - last.sampled_step >= self.config.reuse_iters
        ):
            return None
        pruned = sum(p.stop - p.start for p in bucket.parameters if p.pruned)
        factor = correction(last.kept_count, density * pruned, density)
        if factor is None or bool(last.tied):
            return None
        limits_P = Limits(*(to_device(each, bucket.grad_N.device) for each in last.limits_P))
        return replace(last, limits_P=_scaled(limits_P, factor), step=step, kept=None)

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
            self._served[name] = replace(served, limits_P=_scaled(served.limits_P, factor))

    def state_dict(self) -> dict[str, Any]:
        """See `CompressionMethod`: each bucket's limits by its name."""
        held = self._served
        if self.residuals.outcome is Outcome.ASSUMED:
            held = held | self._pending
        return {
            name: {
                "thresholds": served.limits_P.thresholds.cpu(),
                "tie_chances": served.limits_P.tie_chances.cpu(),
                "parameters": list(served.parameters),
                "density": served.density,
                "sampled_step": served.sampled_step,
                "step": served.step,
                "kept": served.kept_count,
                "tied": bool(served.tied),
            }
            for name, served in held.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `CompressionMethod`. Buckets with other parameters are sampled anew."""
        self._pending.clear()
        try:
            self._served = {
                name: Served(
                    _saved_limits(values),
                    torch.tensor(values.get("tied", False)),
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


def _scaled(limits_P: Limits, factor: float) -> Limits:
    """The limits in another unit. Thresholds of kept pieces are negative, and stay negative."""
    return limits_P._replace(thresholds=limits_P.thresholds * factor)


def _saved_limits(values: dict[str, Any]) -> Limits:
    """A bucket's limits from a checkpoint; older ones kept no element that ties."""
    thresholds_P = values["thresholds"]
    nothing_P = torch.zeros_like(thresholds_P)
    return Limits(thresholds_P, values.get("tie_chances", nothing_P), nothing_P.long())


def _names(bucket: Bucket) -> tuple[str, ...]:
    return tuple(p.name for p in bucket.parameters if p.pruned)
