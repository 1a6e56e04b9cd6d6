"""Every scheme by name through the plugin, on megatron.core with 2 gloo ranks."""

from __future__ import annotations

import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES
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
        for scheme in SCHEMES:
            options = WHOLE | {"scheme": scheme, "straggler": section_for(scheme)}
            results[op, scheme] = _weights(setting, **options)
    return results


def test_every_scheme_trains_a_megatron_model_to_the_same_bits():
    """At density 1 residuals stay empty, and the sum of two numbers has only one rounding."""
    for results in train_ranks(_all_schemes, 2):
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
