"""Megatron's average_in_collective: the reducer divides before it selects."""

from __future__ import annotations

import torch

from megatron_sparse.megatron import cpu_mode
from megatron_sparse.megatron.small_gpt import SmallGPTConfig
from tests.ranks import run_ranks

WHOLE = {"warmup_iters": 0, "ramp_iters": 0, "keep_below_numel": 256, "density": 1.0}


def _losses(rank, world_size):
    cpu_mode.enable()
    from megatron_sparse.megatron import attach, detach
    from megatron_sparse.megatron.small_gpt import SmallGPT

    results = []
    for distributed in (False, True):
        for average, plugin in ((False, None), (True, "direct"), (True, "dense")):
            setting = SmallGPTConfig(
                distributed_optimizer=distributed, average_in_collective=average
            )
            toy = SmallGPT(setting)
            attachment = attach(toy.ddp, toy.optimizer, scheme=plugin, **WHOLE) if plugin else None
            losses = [toy.step()[0] for _ in range(3)]
            if attachment is not None:
                detach(attachment)
            results.append((losses, toy.weights()))
    return results


def test_the_average_is_that_of_megatron_without_the_plugin():
    """Two ranks: halves are exact and two numbers have one sum, so equal to the bit."""
    for results in run_ranks(_losses, 2, timeout_s=200):
        for form in (results[:3], results[3:]):
            losses, weights = form[0]
            for other, other_weights in form[1:]:
                assert other == losses
                assert torch.equal(other_weights, weights)
