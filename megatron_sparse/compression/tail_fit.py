"""Thresholds from a tail that is fitted to the samples, in several stages.

Abdelmoniem, Elzanaty, Alouini, Canini, "An Efficient Statistical-based Gradient Compression
Technique for Distributed Training Systems" (SIDCo, MLSys 2021). Magnitudes of gradients fall off
like a generalised Pareto distribution. Its parameters follow from moments in closed form (section
2.3, corollary 1.3), and so does the threshold of a density. One fit does not reach far into a tail,
so there are several stages (section 2.4): each fits what exceeds the last stage's threshold.

With magnitudes x of mean m and variance var, the threshold that a part r of them exceeds is

    b (r^-a - 1) / a,  a = (1 - m^2 / var) / 2,  b = m (m^2 / var + 1) / 2

Why: all samples above the last stage's threshold take part in a fit; a quantile uses only the
samples next to it. At density 0.1 % of 40,000 samples a quantile depends on 40 of them, and the
kept count is off by 16 % (one standard deviation); with the fit by some 12 %. The price is a bias
where the tail has another shape: tests/compression/test_tail_fit.py states how large it is.

The fit assumes a continuous distribution. The sample shows where it misses: of s samples k =
density * s are wanted, with a standard error of e = sqrt(k (1 - density)). If more than e samples
equal the sample's quantile, or the fitted threshold leaves a count further than 2 e from k, the
limit is that quantile with its tie chance, as for top-k.

Deviations: the paper fits exponential and gamma distributions too; on the tails of that test the
Pareto fit has the smallest bias. Moments are those of the sample that top-k takes, not of the whole
gradient, which would need a pass of its own. A stage counts how many samples the last one has left
and shares the rest of the reduction evenly among the stages to come, so errors do not add up; the
paper fixes the first stage's ratio to 0.25 and adapts the number of stages to the kept counts of
the last steps, which is not needed then. Where the fit would send nothing, its threshold is the
next smaller float under the largest sample.

Cost: that of sampling, some ten operations a stage on the samples, in fp64, and a sort of them, for
the quantile. Nothing is kept. No host synchronisation; one small copy to the device for the
sample's positions.
"""

from __future__ import annotations

import math

import torch

from megatron_sparse.bucket import Bucket, Layout
from megatron_sparse.compression.method import SampledTopK
from megatron_sparse.compression.threshold import pruned_pieces, sampled_rows, spread
from megatron_sparse.cuda_ext.codec_cuda import to_device
from megatron_sparse.cuda_ext.record_spec import Limits

STAGE_RATIO = 0.1
"""The least that a stage leaves of the last one's samples."""
ALMOST_EXPONENTIAL = 1e-6
"""A Pareto shape nearer to zero is taken for zero, which it must not be divided by."""
FAR = 2
"""Standard errors by which a fit's kept count may differ from the wanted one."""
SMALLEST = 1e-12
"""Of variances, so that equal magnitudes divide by something."""


class SIDCo(SampledTopK):
    """See the module's docstring. Error feedback is that of sampled top-k."""

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
        device = bucket.grad_N.device
        limits_P = Limits.keep_all((len(layout.piece_parameter),), device)
        rows = sampled_rows(bucket, residual_N, step, self.config) if density < 1 else []
        if rows:
            padded_RS = torch.nn.utils.rnn.pad_sequence(
                rows, batch_first=True, padding_value=float("nan")
            )
            pieces = [p for p, pruned in enumerate(pruned_pieces(bucket, layout)) if pruned]
            index = to_device(torch.tensor(pieces), device)
            for all_P, fitted_R in zip(limits_P, fit_limits(padded_RS, density), strict=True):
                all_P.index_copy_(0, index, fitted_R.expand(len(pieces)))
        return spread(limits_P, layout)


def stages_of(density: float) -> int:
    """How many stages lead to `density`.

    Example:
        >>> [stages_of(d) for d in (0.25, 0.05, 0.01, 0.001)]
        [1, 2, 2, 3]
    """
    # A power of the ratio, but for the rounding of the logarithms, takes no stage more.
    return max(math.ceil(math.log(density) / math.log(STAGE_RATIO) - 1e-9), 1)


def fit_limits(magnitudes_RS: torch.Tensor, density: float) -> Limits:
    """The limits that select about `density` of each row's distribution, ties included.

    Args:
        magnitudes_RS: as for `fit_thresholds`.
        density: in (0, 1).

    Returns:
        Limits_R on the same device: the fitted threshold, and chance 0, or those of the sample's
        quantile where the fit misses (see the module). No host synchronisation.

    Example:
        >>> fit_limits(torch.tensor([[2.0, 2.0, 2.0, 2.0]]), 0.25)
        Limits(thresholds=tensor([2.]), tie_chances=tensor([0.2500]), ties=tensor([4]))
    """
    finite = magnitudes_RS.isfinite()
    count_R, last = finite.sum(1), magnitudes_RS.shape[1] - 1
    wanted_R = count_R * density
    rank_R = torch.minimum(wanted_R.long(), count_R - 1).clamp(min=0)
    x_RS = magnitudes_RS.where(finite, -1)
    quantile_R = x_RS.sort(1).values.gather(1, last - rank_R[:, None]).squeeze(1).clamp(min=0)
    above_R = (x_RS > quantile_R[:, None]).sum(1)
    ties_R = (x_RS == quantile_R[:, None]).sum(1)
    chance_R = ((wanted_R - above_R) / ties_R).where((quantile_R > 0) & (ties_R > 0), 0)

    fitted_R = fit_thresholds(magnitudes_RS, density)
    kept_R = (x_RS > fitted_R[:, None]).sum(1)
    error_R = (wanted_R * (1 - density)).sqrt()
    misses_R = (ties_R > error_R.clamp(min=1)) | ((kept_R - wanted_R).abs() > FAR * error_R)
    return Limits(
        quantile_R.where(misses_R, fitted_R),
        chance_R.float().where(misses_R, 0),
        ties_R.where(misses_R, 0),
    )


def fit_thresholds(magnitudes_RS: torch.Tensor, density: float) -> torch.Tensor:
    """The thresholds that about `density` of each row's distribution exceeds.

    Args:
        magnitudes_RS: fp32 samples, S for each of R rows; what is not finite is left out, so NaN
            pads a row that has fewer. Only read.
        density: in (0, 1).

    Returns:
        fp32 thresholds_R on the same device; 0 for a row of zeros. No host synchronisation.

    Example:
        >>> x = -torch.linspace(0, 1, 10_001)[1:].log()[None]  # exponential: -ln(uniform)
        >>> fit_thresholds(x, 0.01)  # exactly: ln(100) = 4.605
        tensor([4.5920])
    """
    finite = magnitudes_RS.isfinite()
    x_RS = magnitudes_RS.double().where(finite, 0)
    wanted_R = (finite.sum(1) * density).clamp(min=1)
    threshold_R = torch.zeros_like(wanted_R, dtype=torch.float64)
    stages = stages_of(density)
    for stage in range(stages):
        excess_RS = (x_RS - threshold_R[:, None]).clamp(min=0)
        count_R = (excess_RS > 0).sum(1)
        ratio_R = (wanted_R / count_R).clamp(max=1) ** (1 / (stages - stage))
        raised_R = threshold_R + _exceeded(excess_RS, count_R.clamp(min=1), ratio_R)
        threshold_R = raised_R.where(count_R > 0, threshold_R)
    largest_R = x_RS.amax(1).float()
    below_R = largest_R.nextafter(torch.zeros_like(largest_R))
    return torch.minimum(threshold_R.float(), below_R)


def _exceeded(
    excess_RS: torch.Tensor, count_R: torch.Tensor, ratio_R: torch.Tensor
) -> torch.Tensor:
    """What a part `ratio_R` of the Pareto distribution that fits `excess_RS` exceeds."""
    mean_R = excess_RS.sum(1) / count_R
    square_R = mean_R.square()
    variance_R = excess_RS.square().sum(1) / count_R - square_R
    dispersion_R = square_R / torch.maximum(variance_R, square_R * SMALLEST).clamp(min=1e-300)
    shape_R, scale_R = (1 - dispersion_R) / 2, mean_R * (dispersion_R + 1) / 2
    log_R = -ratio_R.log()
    curved_R = scale_R * (shape_R * log_R).expm1() / shape_R
    return curved_R.where(shape_R.abs() > ALMOST_EXPONENTIAL, scale_R * log_R)
