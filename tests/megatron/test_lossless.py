"""Naturally sparse gradients in Megatron: an embedding that no output layer shares.

On 2 gloo ranks a sum has only one order, so results are compared bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron.small_gpt import SmallGPTConfig
from tests.megatron.train_ranks import AT_TARGET, running, train_ranks

TIMEOUT_S = 600
"""Limit in seconds for a loaded machine; an idle one takes ten."""
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)
STEPS, VOCABULARY = 2, 512
NAME = "embedding.word_embeddings.weight"
PRUNED: dict[str, Any] = AT_TARGET | {"density": 0.02, "samples": 2000}
FORMS = {
    "all_reduce": SmallGPTConfig(vocabulary=VOCABULARY, overlap=True),
    "reduce_scatter": SmallGPTConfig(vocabulary=VOCABULARY, distributed_optimizer=True),
}


def _train(rank, setting, **options):
    """The embedding's gradient after the first synchronisation (its own shard's part), and so on.

    Returns:
        That gradient, the weights after all steps, the embedding's residual, whether any other
        residual is not zero, and the bytes sent.
    """
    with running(setting, **(PRUNED | options)) as run:
        gradient = None
        for _ in range(STEPS):
            run.model.gradients(run.model.batch())
            if gradient is None:
                gradient = torch.cat(list(_own_parts(run.attachment, rank))).clone()
            run.model.optimizer.step()
        residuals = run.residuals()
    embedding = residuals.pop(NAME, torch.zeros(0))
    return (
        gradient,
        run.model.weights(),
        int(embedding.count_nonzero()),
        any(bool(view.any()) for view in residuals.values()),
        run.records.wire_bytes,
    )


def _own_parts(attachment, rank):
    """The part of the embedding's gradient that is summed on this rank."""
    for bucket in attachment.buckets:
        own = bucket.shard(rank) if bucket.op == "reduce_scatter" else slice(0, bucket.numel)
        for piece in bucket.parameters:
            if piece.name == NAME:
                yield bucket.grad_N[max(piece.start, own.start) : min(piece.stop, own.stop)]


def _body(rank):
    results: dict[str, Any] = {}
    for form, setting in FORMS.items():
        results[form] = {
            "dense": _train(rank, setting, scheme="dense"),
            "kept": _train(rank, setting, scheme="direct", keep_patterns=["word_embeddings"]),
            "lossless": _train(
                rank, setting, scheme="direct", lossless_patterns=["word_embeddings"]
            ),
            "all": _train(rank, setting, scheme="direct", lossless_patterns=["."]),
        }
    both = {"keep_patterns": ["word_"], "lossless_patterns": ["embedding"]}
    with pytest.raises(ConfigError) as refused, running(setting, **both):
        pass
    results["refused"] = str(refused.value)
    return results


@pytest.fixture(scope="module")
def ranks():
    return train_ranks(_body, 2, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("form", FORMS)
def test_the_embeddings_gradient_is_denses_and_costs_less(ranks, form):
    found = [results[form] for results in ranks]
    # With the distributed optimizer it may lie in one rank's shard alone.
    assert any(rank["dense"][0].any() for rank in found)
    for rank in found:
        assert torch.equal(rank["dense"][0], rank["lossless"][0])
        assert rank["lossless"][2] == 0, "what the embedding's residual holds"
        assert rank["lossless"][3], "the others are pruned"
    # The batches of both ranks use about 34 of 512 rows; the rest of the messages is the same.
    embedding_bytes = 4 * VOCABULARY * 64
    there_and_back = 1 if form == "reduce_scatter" else 2
    saved = sum(rank["kept"][4] - rank["lossless"][4] for rank in found)
    # Dense, each of two ranks sends half of it to the other, and half of the sum back.
    assert saved > 0.7 * STEPS * there_and_back * embedding_bytes


@pytest.mark.parametrize("form", FORMS)
def test_with_everything_lossless_training_is_denses_bit_for_bit(ranks, form):
    for results in ranks:
        dense, everything = results[form]["dense"], results[form]["all"]
        assert torch.equal(dense[1], everything[1])
        assert not everything[2]
        assert not everything[3]


def test_a_name_that_both_lists_find_is_refused(ranks):
    for results in ranks:
        assert NAME in results["refused"]
        assert "not by both" in results["refused"]
