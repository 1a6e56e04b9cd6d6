"""Naturally sparse gradients in Megatron: an embedding that no output layer shares.

On 2 gloo ranks a sum has only one order, so results are compared bit for bit.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.megatron.parallel_gpt import HIDDEN, OVERLAP, SHARDED, Layout
from tests.megatron.train_ranks import AT_TARGET, equal, of_all_ranks, on_ranks, running

TIMEOUT_S = 600
"""Limit in seconds for a loaded machine; an idle one takes ten."""
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)
STEPS, VOCABULARY = 2, 512
NAME = "embedding.word_embeddings.weight"
PRUNED: dict[str, Any] = AT_TARGET | {"density": 0.02, "samples": 2000}
FORMS = {
    "all_reduce": Layout(vocabulary=VOCABULARY, ddp=OVERLAP),
    "reduce_scatter": Layout(vocabulary=VOCABULARY, ddp=SHARDED),
}


def _train(rank, layout, **options):
    """Weights, residuals and bytes sent; the first gradient of the embedding's summed part."""
    with running(layout, **(PRUNED | options)) as run:
        run.model.gradients()
        gradient = torch.cat(list(_own_parts(run.attachment, rank)))
        run.model.optimizer.step()
        for _ in range(STEPS - 1):
            run.step()
        return SimpleNamespace(
            gradient=gradient,
            weights=run.model.weights(),
            residuals=run.residuals(),
            wire_bytes=run.records.wire_bytes,
        )


def _own_parts(attachment, rank):
    """The part of the embedding's gradient that is summed on this rank."""
    for bucket in attachment.buckets:
        own = bucket.shard(rank) if bucket.op == "reduce_scatter" else slice(0, bucket.numel)
        for piece in bucket.parameters:
            if piece.name == NAME:
                yield bucket.grad_N[max(piece.start, own.start) : min(piece.stop, own.stop)]


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_the_embeddings_gradient_is_denses_and_costs_less(rank, form):
    """With everything lossless, training is dense training's, bit for bit."""
    layout, named = FORMS[form], ["word_embeddings"]
    dense = _train(rank, layout, scheme="dense")
    kept = _train(rank, layout, scheme="direct", keep_patterns=named)
    lossless = _train(rank, layout, scheme="direct", lossless_patterns=named)
    # With the distributed optimizer it may lie in one rank's shard alone.
    assert any(gradient.any() for gradient in of_all_ranks(dense.gradient))
    assert torch.equal(dense.gradient, lossless.gradient)
    assert not lossless.residuals.pop(NAME, torch.zeros(1)).any()
    assert any(view.any() for view in lossless.residuals.values()), "the others are pruned"
    # The batches of both ranks use about 34 of 512 rows; the rest of the messages is the same.
    embedding_bytes = 4 * VOCABULARY * HIDDEN
    there_and_back = 1 if form == "reduce_scatter" else 2
    saved = sum(of_all_ranks(kept.wire_bytes - lossless.wire_bytes))
    # Dense, each of two ranks sends half of it to the other, and half of the sum back.
    assert saved > 0.7 * STEPS * there_and_back * embedding_bytes
    everything = _train(rank, layout, scheme="direct", lossless_patterns=["."])
    assert equal(dense.weights, everything.weights)
    assert not any(view.any() for view in everything.residuals.values())
