"""The number of parameters that the banner prints: each element once, whatever the layout."""

from __future__ import annotations

from tests.megatron.parallel_gpt import HIDDEN, SEQUENCE, VOCABULARY, Layout, ParallelGPT
from tests.megatron.train_ranks import in_each_layout, train_ranks

LAYOUTS = {
    "data": Layout(tied=True),
    "tensor": Layout(tensor=2, tied=True),
    "pipeline, with a copy of the embedding on the last stage": Layout(pipeline=2, tied=True),
    "tensor and pipeline": Layout(tensor=2, pipeline=2, tied=True),
    "experts": Layout(experts=4),
    "experts on several ranks": Layout(experts=4, expert=2),
    "experts and tensor": Layout(experts=4, expert=2, tensor=2, expert_tensor=1),
}


def _count(layout: Layout) -> int:
    from megatron_sparse.megatron.built_model import count_parameters

    model = ParallelGPT(layout)  # takes its chunks apart when it goes
    return count_parameters(model.chunks)


def _counts(rank: int) -> dict[str, int]:
    return in_each_layout(LAYOUTS, _count)


def test_each_element_counts_once():
    """On four ranks, all of which get the same number."""
    ranks = train_ranks(_counts, 4)
    assert all(counts == ranks[0] for counts in ranks)
    attention = 4 * (HIDDEN * HIDDEN + HIDDEN)
    mlp = 8 * HIDDEN * HIDDEN + 5 * HIDDEN
    dense = (VOCABULARY + SEQUENCE) * HIDDEN + 2 * (attention + mlp + 4 * HIDDEN) + 2 * HIDDEN
    # Experts have no bias, nor has their attention; a router has a row for each of them.
    expert_layer = 4 * HIDDEN * HIDDEN + 4 * 8 * HIDDEN * HIDDEN + 4 * HIDDEN + 4 * HIDDEN
    experts = (2 * VOCABULARY + SEQUENCE) * HIDDEN + 2 * expert_layer + 2 * HIDDEN
    expected = {name: experts if layout.experts else dense for name, layout in LAYOUTS.items()}
    assert ranks[0] == expected
