"""Tokens and operations per second, from Megatron's arguments."""

import inspect
from types import SimpleNamespace

from megatron_sparse.megatron.plugin import throughput

ARGUMENTS = SimpleNamespace(micro_batch_size=2, data_parallel_size=4, seq_length=1024, world_size=8)


def test_tokens_are_those_of_all_ranks():
    """2 samples x 4 ranks x 3 micro-batches of 1024 tokens in half a second."""
    assert throughput(ARGUMENTS, 3, 0.5, None) == {"tokens_per_s": 49_152.0}


def test_operations_are_those_of_one_gpu():
    """Megatron counts those of the whole batch of 24 samples; 8 GPUs share them."""
    rates = throughput(ARGUMENTS, 3, 0.5, lambda arguments, samples: samples * 1e12)
    assert rates["model_tflop_per_s"] == 24 / 0.5 / 8


def test_megatron_has_the_function_that_counts_operations():
    """The plugin hands it in on GPUs."""
    import megatron.training.training as host

    parameters = inspect.signature(host.num_floating_point_operations).parameters
    assert list(parameters)[:2] == ["args", "batch_size"]
