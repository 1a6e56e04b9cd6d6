"""Every scheme by name through the plugin, on megatron.core with 2 gloo ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, over_groups
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.small_gpt import SmallGPTConfig
from tests.megatron.train_ranks import train, train_ranks
from tests.straggler.settings import section_for

STEPS, LEARNING_RATE = 2, 1e-2
WHOLE = {"density": 1.0, "warmup_iters": 0, "ramp_iters": 0}


def _weights(setting, **options):
    """After some steps; the error where the scheme is refused."""
    try:
        return train(setting, STEPS, **options)["weights"]
    except ConfigError as error:
        return str(error)


def _all_schemes(rank):
    results = {}
    for op in CollectiveOp:
        setting = SmallGPTConfig(
            overlap=True, distributed_optimizer=op is CollectiveOp.REDUCE_SCATTER
        )
        results[op, None] = _weights(setting)
        for scheme in over_groups():
            options = WHOLE | {"scheme": scheme, "straggler": section_for(scheme)}
            results[op, scheme] = _weights(setting, **options)
    results["windows"] = _refused_at_attach()
    return results


def _refused_at_attach():
    """The error of a scheme that needs windows of peer memory, in a group without GPUs."""
    from megatron_sparse.megatron import attach
    from megatron_sparse.megatron.small_gpt import SmallGPT

    toy = SmallGPT(SmallGPTConfig(overlap=True, distributed_optimizer=False))
    with pytest.raises(ConfigError, match="peer_two_shot needs the memory of GPUs") as caught:
        attach(toy.ddp, toy.optimizer, scheme="peer_two_shot")
    return caught.value.got


def test_every_scheme_trains_a_megatron_model_to_the_same_bits():
    """At density 1 residuals stay empty, and the sum of two numbers has only one rounding."""
    for results in train_ranks(_all_schemes, 2, timeout_s=280):
        assert results.pop("windows") == "a group of 2 ranks on cpu"
        for (op, scheme), weights in results.items():
            if scheme is not None and op not in SCHEMES[scheme].ops:
                assert f"{scheme} cannot do the {op}" in weights
                continue
            if scheme is not None and SCHEMES[scheme].sends_whole:
                # Rounded gradients: where they become 0, weights lag behind by a step of Adam.
                lag = float((weights - results[op, None]).abs().mean())
                assert lag < 0.5 * LEARNING_RATE, (op, scheme, lag)
                continue
            assert torch.equal(weights, results[op, None]), (op, scheme, weights)
