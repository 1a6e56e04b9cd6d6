"""Lossless parameters: exactly the non-zero elements are sent, with every method."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression.methods import METHODS, method_of
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig, SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.planner.wire_bytes import predicted_bytes
from megatron_sparse.recording import StageTimer
from megatron_sparse.sparsity.sampling import selected_values

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


def _selector(method="topk", **options):
    config = CompressionConfig(method=method, density=0.02, samples=500, **options)
    store = ResidualStore(torch.float32, undo=False, outcome=Outcome.ASSUMED)
    return Selector(method_of(config, store), 0, MessageBuffers())


def _select(selector, gradient, step, pieces=PIECES, form="auto"):
    bucket = Bucket("b", gradient.clone(), pieces, CollectiveOp.ALL_REDUCE, 1)
    message = selector.select(
        bucket, MessageSpec(0.02, format=form, block_size=64), step=step, timer=StageTimer()
    )
    return selected_values(bucket, message, selector.buffers).clone(), message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scope", ["parameter", "bucket"])
@pytest.mark.parametrize("method", METHODS)
def test_all_non_zero_elements_are_sent_and_the_residual_is_empty(method, scope, dtype):
    """The embedding's values are tiny: the threshold of the others would drop all of them."""
    selector = _selector(method, threshold_scope=scope, momentum=0.0)
    for step in range(3):
        gradient = _gradient(step, dtype=dtype)
        sent, message = _select(selector, gradient, step)
        residual = selector.method.stores["residual"]["b"]
        assert torch.equal(sent[EMBEDDING], gradient[EMBEDDING].float())
        assert not residual[EMBEDDING].any()
        assert residual[:2000].any()
        assert residual[4100:].any()
        assert message.nnz == message.pruned_nnz + 3 * ROW + 90
        if step == 0:
            # 2 % of the pruned elements are 58, give or take three standard errors of 500 samples
            # (31 %): the embedding's zeros have not lowered a threshold. Reused ones let more pass.
            assert message.pruned_nnz < 2 * 58


def test_with_momentum_it_is_the_velocity_that_is_sent():
    selector, velocity = _selector("dgc", momentum=0.5), torch.zeros(ROW * ROWS)
    for step in range(3):
        gradient = _gradient(step)
        velocity = 0.5 * velocity + gradient[EMBEDDING]
        sent, _ = _select(selector, gradient, step)
        assert torch.equal(sent[EMBEDDING], velocity)
        assert not selector.method.stores["residual"]["b"][EMBEDDING].any()


@pytest.mark.parametrize("method", METHODS)
def test_an_earlier_residual_is_sent_too(method):
    """For example, a resumed run has one more pattern."""
    selector = _selector(method, momentum=0.0)
    _select(selector, _gradient(0), 0, PRUNED)
    before = selector.method.stores["residual"]["b"].clone()
    assert before[EMBEDDING].any()
    sent, _ = _select(selector, _gradient(1), 1)
    assert torch.equal(sent[EMBEDDING], (_gradient(1) + before)[EMBEDDING])
    assert not selector.method.stores["residual"]["b"][EMBEDDING].any()


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
    _, message = _select(_selector(), _gradient(0, rows), 0, form="coo")
    assert message.layout.segment_offsets.tolist() == [0, 2000, 4010, 4100, NUMEL]
    assert message.layout.segment_lossless.tolist() == [0, 1, 0, 0]
    assert message.layout.segment_keep.tolist() == [0, 0, 1, 0]
    assert message.segment_bytes[1] == nbytes


def test_the_filter_takes_the_name_whatever_the_size():
    chosen = ParameterFilter(
        CompressionConfig(keep_patterns=["router"], lossless_patterns=["word_", r"^bias$"])
    )
    assert chosen.slice_of("word_embeddings.weight", 3, 9, (2, 3), True) == ParameterSlice(
        "word_embeddings.weight", 3, 9, lossless=True
    )
    assert chosen.slice_of("bias", 0, 7, (7,), False).lossless
    assert chosen.slice_of("mlp.router", 0, 8192, (2, 4096), False).keep
    assert chosen.slice_of("mlp.weight", 0, 8192, (2, 4096), False).pruned
    with pytest.raises(ConfigError, match="not by both"):
        chosen.slice_of("router.word_embeddings", 0, 6, (2, 3), False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lossless_patterns": ["("]}, "compression.lossless_patterns is not a regular expression"),
        ({"lossless_patterns": "word_embeddings"}, "compression.lossless_patterns is not a list"),
        ({"lossless_patterns": ["a", "b"], "keep_patterns": ["c", "b"]}, "'b' in both"),
    ],
)
def test_wrong_patterns_are_refused(options, text):
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        CompressionConfig(**options)


def test_messages_of_fixed_size_are_refused():
    """They would hold back elements that do not fit."""
    compression = CompressionConfig(lossless_patterns=["word_embeddings"])
    with pytest.raises(ConfigError, match="keep_patterns instead"):
        SparseConfig(compression=compression, scheme=SchemeConfig(capacity=2.0))


def test_other_patterns_sample_reused_thresholds_anew():
    """The threshold that pruned the parameter must not be used any longer."""
    selector = _selector("threshold_reuse")
    for step, pieces in enumerate([PRUNED, PRUNED, PIECES]):
        _select(selector, _gradient(step), step, pieces)
    (served,) = selector.method.state_dict().values()
    assert served["parameters"] == ["w0", "w1"]
    assert served["sampled_step"] == 2


def test_the_plan_expects_the_density_of_pruned_parameters():
    buckets = [
        Bucket("b", torch.zeros(NUMEL), pieces, CollectiveOp.ALL_REDUCE, 4)
        for pieces in (PIECES, PRUNED)
    ]
    first, second = (predicted_bytes(bucket, 0.02, SchemeConfig()) for bucket in buckets)
    assert first == second
