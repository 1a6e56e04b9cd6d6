"""Lossless parameters: exactly the non-zero elements are sent."""

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig, SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.wire_bytes import predicted_bytes
from tests.compression.rank import Rank

ROW, ROWS = 40, 50
NUMEL = 5000
EMBEDDING = slice(2000, 2000 + ROW * ROWS)
PIECES = (
    ParameterSlice("w0", 0, 2000),
    ParameterSlice("embedding", EMBEDDING.start, EMBEDDING.stop, lossless=True),
    ParameterSlice("b", 4010, 4100, keep=True),
    ParameterSlice("w1", 4100, NUMEL),
)
"""With padding after the embedding."""
PRUNED = (PIECES[0], ParameterSlice("embedding", EMBEDDING.start, EMBEDDING.stop), *PIECES[2:])
"""The same without `lossless_patterns`."""


def _gradient(step, rows=3, dtype=torch.float32):
    """Normal numbers, and an embedding in which only some rows are not zero."""
    draw = torch.Generator().manual_seed(step)
    gradient = torch.randn(NUMEL, generator=draw)
    asked = torch.randperm(ROWS, generator=draw)[:rows]
    whole = gradient[EMBEDDING].view(ROWS, ROW)
    gradient[EMBEDDING] = (
        torch.zeros_like(whole).index_copy_(0, asked, whole[asked] * 1e-6).flatten()
    )
    gradient[EMBEDDING.stop : 4010] = 0
    return gradient.to(dtype)


def _rank(pieces=PIECES, **options):
    return Rank(CompressionConfig(density=0.02, samples=500, **options), pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_non_zero_elements_are_sent_and_the_residual_is_empty(dtype):
    """The embedding's values are tiny: the threshold of the others would drop all of them."""
    rank = _rank()
    for step in range(3):
        gradient = _gradient(step, dtype=dtype)
        sent = rank.send(gradient, step)
        assert torch.equal(sent[EMBEDDING], gradient[EMBEDDING].float())
        assert not rank.residual[EMBEDDING].any()
        assert rank.residual[:2000].any()
        assert rank.residual[4100:].any()
        pruned = rank.message.nnz - 3 * ROW - 90
        assert pruned == sent[:2000].count_nonzero() + sent[4100:].count_nonzero()
        # 2 % of the pruned elements are 58, give or take three standard errors of 500 samples
        # (31 %): the embedding's zeros have not lowered a threshold.
        assert pruned < 2 * 58


def test_an_earlier_residual_is_sent_too():
    """For example, a resumed run has one more pattern."""
    rank = _rank(PRUNED)
    rank.send(_gradient(0), 0)
    before = rank.residual
    assert before[EMBEDDING].any()
    rank.pieces = PIECES
    assert torch.equal(rank.send(_gradient(1), 1)[EMBEDDING], (_gradient(1) + before)[EMBEDDING])
    assert not rank.residual[EMBEDDING].any()


@pytest.mark.parametrize(
    ("rows", "nbytes"),
    [
        (0, 48),
        # An index of 4 bytes beside each value.
        (2, 48 + 2 * ROW * 8),
        # The largest size, padding included: sent densely.
        (ROWS, 48 + 4 * (ROW * ROWS + 10) + 8),
    ],
)
def test_its_record_grows_with_the_non_zero_elements(rows, nbytes):
    rank = _rank()
    rank.send(_gradient(0, rows), 0, format="coo", block_size=64)
    message = rank.message
    assert message.layout.segment_offsets.tolist() == [0, 2000, 4010, 4100, NUMEL]
    assert message.layout.segment_keep.tolist() == [0, 0, 1, 0]
    assert message.segment_bytes[1] == nbytes


def test_messages_of_fixed_size_are_refused():
    """They would hold back elements that do not fit."""
    compression = CompressionConfig(lossless_patterns=["word_embeddings"])
    with pytest.raises(ConfigError, match="keep_patterns instead"):
        SparseConfig(compression=compression, scheme=SchemeConfig(capacity=2.0))


def test_the_plan_expects_the_density_of_pruned_parameters():
    buckets = [
        Bucket("b", torch.zeros(NUMEL), pieces, CollectiveOp.ALL_REDUCE, 4)
        for pieces in (PIECES, PRUNED)
    ]
    first, second = (predicted_bytes(bucket, 0.02, SchemeConfig()) for bucket in buckets)
    assert first == second
