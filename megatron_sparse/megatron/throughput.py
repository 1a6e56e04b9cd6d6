"""Tokens and floating-point operations per second of one iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TERA = 1e12


def throughput(
    arguments: Any,
    microbatches: int,
    iteration_s: float,
    operations_of: Callable[[Any, int], float] | None,
) -> dict[str, float]:
    """The rates of an iteration, as fields of its breakdown.

    Args:
        arguments: Megatron's.
        microbatches: of each rank in this iteration.
        iteration_s: its wall-clock seconds.
        operations_of: Megatron's `num_floating_point_operations`, which counts the operations of a
            global batch from the model's shape; None leaves their rate out, as on a CPU.

    Returns:
        `tokens_per_s` of all ranks together; `model_tflop_per_s` of each GPU.
    """
    samples = arguments.micro_batch_size * arguments.data_parallel_size * microbatches
    rates = {"tokens_per_s": samples * arguments.seq_length / iteration_s}
    if operations_of is not None:
        operations = operations_of(arguments, samples)
        rates["model_tflop_per_s"] = operations / (iteration_s * arguments.world_size * TERA)
    return rates
