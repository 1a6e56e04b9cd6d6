"""Gradients at the two limits of overlap between ranks, at uniform positions; exact profiles."""

import numpy as np
import torch

from megatron_sparse.simulate.gradients import GradientModel
from megatron_sparse.sparsity.characteristics import nonzero_elements, profile_of


def exact_profile(gradients):
    """The profile of all ranks' gradients of one bucket, dense or sparse, all of one shape."""
    return profile_of([nonzero_elements(each) for each in gradients], gradients[0].numel())


class FullyOverlapping(GradientModel):
    """All ranks have the same elements: the sum is no denser than its parts."""

    def __init__(self, numel, density):
        super().__init__(numel, 1, np.full(numel, density))

    def gradient(self, rank):
        return super().gradient(0)

    def sum_density(self, n):
        return self.density


class HardlyOverlapping(FullyOverlapping):
    """No two ranks share an element until all are taken: n ranks' sum is n times as dense."""

    def gradient(self, rank):
        each = max(round(self.density * self.numel), 1)
        order = np.random.default_rng(0).permutation(self.numel)
        grad = torch.zeros(self.numel)
        grad[order[np.arange(rank * each, (rank + 1) * each) % self.numel]] = 1.0 + rank
        return grad

    def sum_density(self, n):
        return min(n * self.density, 1.0)
