"""Megatron's average_in_collective: the reducer divides before it selects."""

from __future__ import annotations

import torch

from megatron_sparse.megatron.small_gpt import SmallGPTConfig
from tests.megatron.train_ranks import AT_TARGET, train, train_ranks

WHOLE = AT_TARGET | {"density": 1.0}
DENSE = {"scheme": "dense"}


def _losses(rank):
    results = []
    for distributed in (False, True):
        for average, options in ((False, {}), (True, {"scheme": "direct"}), (True, DENSE)):
            setting = SmallGPTConfig(
                distributed_optimizer=distributed, average_in_collective=average
            )
            run = train(setting, 3, **(WHOLE | options if options else {}))
            results.append((run["losses"], run["weights"]))
    return results


def test_the_average_is_that_of_megatron_without_the_plugin():
    """Two ranks: halves are exact and two numbers have one sum, so equal to the bit."""
    for results in train_ranks(_losses, 2):
        for form in (results[:3], results[3:]):
            losses, weights = form[0]
            for other, other_weights in form[1:]:
                assert other == losses
                assert torch.equal(other_weights, weights)
