"""Tokens and operations per second, from Megatron's arguments."""

from types import SimpleNamespace

import pytest

from megatron_sparse.megatron.plugin import throughput

ARGUMENTS = SimpleNamespace(micro_batch_size=2, data_parallel_size=4, seq_length=1024, world_size=8)


def test_tokens_are_those_of_all_ranks():
    """2 samples x 4 ranks x 3 micro-batches of 1024 tokens in half a second."""
    assert throughput(ARGUMENTS, 3, 0.5, None) == {"tokens_per_s": 49_152.0}


def test_operations_are_those_of_one_gpu():
    """Megatron counts those of the whole batch of 24 samples; 8 GPUs share them."""
    rates = throughput(ARGUMENTS, 3, 0.5, lambda arguments, samples: samples * 1e12)
    assert rates["model_tflop_per_s"] == 24 / 0.5 / 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_megatron_counts_the_operations_of_a_batch(monkeypatch):
    """The function that the plugin hands in on GPUs: twice the batch, twice the operations."""
    import megatron.training.training as host
    from megatron.training.arguments import parse_args

    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    monkeypatch.setattr("sys.argv", ["pretrain", *words.split()])
    arguments = parse_args()
    # What Megatron's own validation fills in.
    derived = {"padded_vocab_size": 128, "num_query_groups": 4, "kv_channels": 16}
    for name, value in (derived | {"ffn_hidden_size": 256}).items():
        setattr(arguments, name, value)
    one, two = (host.num_floating_point_operations(arguments, batch) for batch in (4, 8))
    # Forward and backward of all weights: 6 operations for each weight and token at least.
    assert two == 2 * one > 6 * 2 * 12 * 64**2 * 4 * 32
