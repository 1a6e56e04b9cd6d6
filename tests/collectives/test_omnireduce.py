"""OmniReduce: only non-zero blocks travel.

Legend: n ranks, N elements of the bucket.
"""

from __future__ import annotations

import torch

from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.wire import FORMAT_BLOCKS, FORMAT_DENSE
from tests.collectives.cases import run_gradients
from tests.headers import read_headers

BLOCK = 256


def _run(gradients):
    return run_gradients("omnireduce", gradients, SchemeConfig())


def _headers(data):
    return read_headers(data.numpy().tobytes(), rank=0)


def test_only_non_zero_blocks_travel_there_and_back():
    """Two ranks, shards of 8 blocks: rank 0 has two of rank 1's, which has one of them too."""
    gradients = [torch.zeros(16 * BLOCK) for _ in range(2)]
    gradients[0][10 * BLOCK + 7] = 1
    gradients[0][13 * BLOCK : 14 * BLOCK] = 2
    gradients[1][13 * BLOCK + 5] = 3
    results, sent, messages = _run(gradients)
    for result in results:
        assert torch.equal(result, gradients[0] + gradients[1])
    # Header 48, sub-header 16, block numbers padded to 16, 1024 for each block: two blocks only.
    empty, two = 48 + 16, 48 + 16 + 16 + 2 * 1024
    assert [(peer, data.numel()) for peer, data in sent[0]] == [(1, two), (1, empty)]
    assert [(peer, data.numel()) for peer, data in sent[1]] == [(0, empty), (0, two)]
    for data in [data for rank in sent for _, data in rank]:
        assert [header.format for header in _headers(data)] == [FORMAT_BLOCKS]
    for rank, message in enumerate(messages):
        storage = message.buffer.untyped_storage().data_ptr()
        pushed = sent[rank][0][1]
        assert pushed.untyped_storage().data_ptr() == storage, "the message is encoded once only"


def test_a_block_whose_sum_is_zero_does_not_come_back():
    ones = torch.zeros(16 * BLOCK)
    ones[10 * BLOCK : 11 * BLOCK] = 1
    results, sent, _ = _run([ones, -ones])
    assert not results[0].any()
    assert not results[1].any()
    assert sent[0][0][1].numel() == 48 + 16 + 16 + 1024
    assert sent[1][1][1].numel() == 48 + 16


def test_scattered_values_travel_dense_and_never_cost_more():
    generator = torch.Generator().manual_seed(5)
    gradients = [(torch.rand(16 * BLOCK, generator=generator) < 0.1).float() for _ in range(2)]
    results, sent, _ = _run(gradients)
    assert torch.equal(results[0], gradients[0] + gradients[1])
    for data in [data for rank in sent for _, data in rank]:
        assert [header.format for header in _headers(data)] == [FORMAT_DENSE]
        assert data.numel() == 48 + 8 * BLOCK * 4
