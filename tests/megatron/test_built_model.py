"""The number of parameters that the banner prints: each element once, whatever the layout."""

from __future__ import annotations

from tests.megatron.parallel_gpt import HIDDEN, SEQUENCE, VOCABULARY, Layout
from tests.ranks import run_ranks

LAYOUTS = {
    "data": Layout(tied=True),
    "tensor": Layout(tensor=2, tied=True),
    "pipeline, with a copy of the embedding on the last stage": Layout(pipeline=2, tied=True),
    "tensor and pipeline": Layout(tensor=2, pipeline=2, tied=True),
    "experts": Layout(experts=4),
    "experts on several ranks": Layout(experts=4, expert=2),
    "experts and tensor": Layout(experts=4, expert=2, tensor=2, expert_tensor=1),
}


def _counts(rank: int, world_size: int) -> dict[str, int]:
    from megatron_sparse.megatron import cpu_mode

    cpu_mode.enable()
    from megatron_sparse.megatron.built_model import count_parameters
    from tests.megatron.parallel_gpt import ParallelGPT, parallel_state_of

    counts = {}
    for name, layout in LAYOUTS.items():
        with parallel_state_of(layout):
            model = ParallelGPT(layout)
            counts[name] = count_parameters(model.chunks)
            del model
    return counts


def test_each_element_counts_once():
    """On four ranks, all of which get the same number."""
    ranks = run_ranks(_counts, 4)
    assert all(counts == ranks[0] for counts in ranks)
    attention = 4 * (HIDDEN * HIDDEN + HIDDEN)
    mlp = 8 * HIDDEN * HIDDEN + 5 * HIDDEN
    dense = (VOCABULARY + SEQUENCE) * HIDDEN + 2 * (attention + mlp + 4 * HIDDEN) + 2 * HIDDEN
    # Experts have no bias, nor has their attention; a router has a row for each of them.
    expert_layer = 4 * HIDDEN * HIDDEN + 4 * 8 * HIDDEN * HIDDEN + 4 * HIDDEN + 4 * HIDDEN
    experts = (2 * VOCABULARY + SEQUENCE) * HIDDEN + 2 * expert_layer + 2 * HIDDEN
    expected = {name: experts if layout.experts else dense for name, layout in LAYOUTS.items()}
    assert ranks[0] == expected
