"""ZEN's Balanced Parallelism, where contiguous shards are not balanced; OmniReduce's blocks.

Legend: n ranks, K non-zero elements, N elements of the bucket.
"""

import dataclasses
import math

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES, Exchange, zen
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.formats.header import Header
from megatron_sparse.formats.hierarchical_hash import entries
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.recording import StageTimer
from tests.collectives.cases import OPTIONS, Case, make_bucket, make_message, run_gradients

ROUNDS = [dataclasses.replace(OPTIONS, hash_rounds=rounds) for rounds in (3, 0)]


def _skewed(n, numel):
    """Two fifths of the first sixteenth of the elements, and one in 500 of the others."""
    generator = torch.Generator().manual_seed(2)
    chances = torch.full((numel,), 0.002)
    chances[: numel // 16] = 0.4
    return [
        torch.where(torch.rand(numel, generator=generator) < chances, 1.0 + rank, 0.0)
        for rank in range(n)
    ]


def _nnz_to(sent, n):
    """Non-zero elements in the records that a rank sent in its first n - 1 rounds, by peer."""
    return {
        peer: Header.unpack(records[:48].numpy().tobytes(), rank=0).nnz
        for peer, records in sent[: n - 1]
    }


def _imbalances(scheme, gradients, options):
    """Definition 8: the ratios of Push and of Pull, from the records' headers; bytes by rank."""
    n, total = len(gradients), torch.stack(gradients).sum(0)
    results, sent, messages = run_gradients(scheme, gradients, options)
    for result in results:
        assert torch.equal(result, total)
    push, pull, received = 0.0, [], [0] * n
    for rank in range(n):
        counts = _nnz_to(sent[rank], n)
        counts[rank] = messages[rank].nnz - sum(counts.values())
        push = max(push, n * max(counts.values()) / messages[rank].nnz)
        pull += set(_nnz_to(sent[rank][n - 1 :], n).values())
        for peer, records in sent[rank]:
            received[peer] += records.numel()
    assert len(pull) == n
    assert sum(pull) == int(total.count_nonzero())
    sent_bytes = [sum(records.numel() for _, records in mine) for mine in sent]
    return push, n * max(pull) / sum(pull), max(sent_bytes + received) / min(sent_bytes + received)


@pytest.mark.parametrize("options", ROUNDS, ids=lambda options: str(options.hash_rounds))
def test_push_and_pull_are_balanced_where_direct_is_not(options):
    """Theorem 2's bound, 1 + Theta(sqrt(n log n / K)).

    The constant here is 2; sqrt 2 is the leading one of the largest of n bins with many balls.
    """
    n, numel = 8, 2**17
    gradients = _skewed(n, numel)
    fewest = min(int(gradient.count_nonzero()) for gradient in gradients)
    bound = 1 + 2 * math.sqrt(n * math.log(n) / fewest)
    assert bound < 1.2
    push, pull, bytes_ = _imbalances("zen", gradients, options)
    assert 1 <= push <= bound
    assert 1 <= pull <= bound
    # Busiest over least busy rank, sent and received; padding counts too, so a little above 1.
    assert bytes_ < 1.1
    push, pull, bytes_ = _imbalances("direct", gradients, options)
    assert push > 5
    assert pull > 2, "the sum has filled in, and is skewed all the same"
    assert bytes_ > 5


def test_entries_are_what_the_message_holds():
    case = Case("zen", 1, density=0.1, dtype="bf16", wire="bf16", numel=900)
    bucket = make_bucket(case, 0)
    bucket.grad_N[5] = -0.0
    bucket.grad_N[6] = float("nan")
    indices, values = entries(make_message(bucket, case, MessageBuffers()))
    assert indices.tolist() == bucket.grad_N.nonzero().squeeze(1).tolist()
    assert values.dtype is torch.bfloat16
    assert torch.equal(values.view(torch.int16), bucket.grad_N[indices].view(torch.int16))


def test_a_bucket_that_is_too_large_is_refused_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(zen, "MAX_SEGMENT_NUMEL", 9)
    pieces = [ParameterSlice("w", 0, 10)]
    bucket = Bucket("7", torch.zeros(10), pieces, CollectiveOp.ALL_REDUCE, 1)
    exchange = Exchange(bucket, None, MessageBuffers(), StageTimer(), OPTIONS)  # type: ignore
    with pytest.raises(ConfigError, match="bucket 7 is too large for"):
        next(SCHEMES["zen"].run(exchange, None))


# -- OmniReduce: only non-zero blocks travel


BLOCK = 256


def _by_blocks(gradients):
    return run_gradients("omnireduce", gradients, SchemeConfig())


def test_only_non_zero_blocks_travel_there_and_back():
    """Two ranks, shards of 8 blocks: rank 0 has two of rank 1's, which has one of them too."""
    gradients = [torch.zeros(16 * BLOCK) for _ in range(2)]
    gradients[0][10 * BLOCK + 7] = 1
    gradients[0][13 * BLOCK : 14 * BLOCK] = 2
    gradients[1][13 * BLOCK + 5] = 3
    results, sent, messages = _by_blocks(gradients)
    for result in results:
        assert torch.equal(result, gradients[0] + gradients[1])
    # Header 48, sub-header 16, block numbers padded to 16, 1024 for each block: two blocks only.
    empty, two = 48 + 16, 48 + 16 + 16 + 2 * 1024
    assert [(peer, data.numel()) for peer, data in sent[0]] == [(1, two), (1, empty)]
    assert [(peer, data.numel()) for peer, data in sent[1]] == [(0, empty), (0, two)]
    for rank, message in enumerate(messages):
        storage = message.buffer.untyped_storage().data_ptr()
        pushed = sent[rank][0][1]
        assert pushed.untyped_storage().data_ptr() == storage, "the message is encoded once only"


def test_a_block_whose_sum_is_zero_does_not_come_back():
    ones = torch.zeros(16 * BLOCK)
    ones[10 * BLOCK : 11 * BLOCK] = 1
    results, sent, _ = _by_blocks([ones, -ones])
    assert not results[0].any()
    assert not results[1].any()
    assert sent[0][0][1].numel() == 48 + 16 + 16 + 1024
    assert sent[1][1][1].numel() == 48 + 16
