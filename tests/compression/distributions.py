"""Gradients of many distributions: with ties, with zeros, with tails, and in awkward orders."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

type Draw = Callable[[int, torch.Generator], torch.Tensor]


def _two_levels(large: float) -> Draw:
    return lambda n, g: torch.where(torch.rand(n, generator=g) < large, 3.0, 0.1)


def _outlier(numel: int, generator: torch.Generator) -> torch.Tensor:
    gradient_N = torch.full((numel,), 0.1)
    gradient_N[int(torch.randint(numel, (), generator=generator))] = 10.0
    return gradient_N


def _mostly_zero(zeros: float) -> Draw:
    def draw(numel: int, generator: torch.Generator) -> torch.Tensor:
        values_N = torch.randn(numel, generator=generator)
        return values_N.where(torch.rand(numel, generator=generator) >= zeros, 0)

    return draw


def _blocks(numel: int, generator: torch.Generator) -> torch.Tensor:
    """Runs of a thousand elements, each with a scale of its own."""
    scale = torch.randn(math.ceil(numel / 1000), generator=generator).exp()
    return torch.randn(numel, generator=generator) * scale.repeat_interleave(1000)[:numel]


def _not_finite(numel: int, generator: torch.Generator) -> torch.Tensor:
    gradient_N = torch.randn(numel, generator=generator)
    gradient_N[:2] = torch.tensor([math.nan, math.inf])
    return gradient_N


DISTRIBUTIONS: dict[str, Draw] = {
    "constant": lambda n, g: torch.full((n,), 0.1),
    "outlier": _outlier,
    "two_levels_0.002": _two_levels(0.002),
    "two_levels_0.02": _two_levels(0.02),
    "two_levels_0.3": _two_levels(0.3),
    "integers": lambda n, g: torch.randint(-8, 9, (n,), generator=g).float(),
    "half_zeros": _mostly_zero(0.5),
    "zeros_0.999": _mostly_zero(0.999),
    "normal": lambda n, g: torch.randn(n, generator=g),
    "bf16": lambda n, g: torch.randn(n, generator=g).bfloat16(),
    "heavy_tail": lambda n, g: torch.randn(n, generator=g) / torch.randn(n, generator=g),
    "sorted": lambda n, g: torch.randn(n, generator=g).sort().values,
    "blocks": _blocks,
    "alternating": lambda n, g: 0.1 - 0.2 * (torch.arange(n) % 2),
    "denormals": lambda n, g: torch.randint(-99, 100, (n,), generator=g).float() * 1e-44,
    "not_finite": _not_finite,
}
"""Makes the gradient of one step, fp32 or bf16, from its length and a generator. The two levels are
0.1 and, in the named part of the elements, 3; the integers are those from -8 to 8."""
