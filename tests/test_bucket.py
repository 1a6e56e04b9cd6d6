"""How buckets are cut into segments and ranges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse import bucket as bucket_module
from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.errors import ConfigError


def _bucket(sizes, keeps, world_size=1, op=CollectiveOp.ALL_REDUCE, padding=0):
    pieces, start = [], 0
    for index, (size, keep) in enumerate(zip(sizes, keeps, strict=True)):
        pieces.append(ParameterSlice(f"p{index}", start, start + size, keep))
        start += size + padding
    numel = -(-start // world_size) * world_size
    return Bucket("b", torch.zeros(numel), pieces, op, world_size)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_segments_and_ranges_tile_the_bucket(parameters, world_size, padding):
    sizes, keeps = zip(*parameters, strict=True)
    bucket = _bucket(sizes, keeps, world_size, CollectiveOp.REDUCE_SCATTER, padding)
    layout = bucket.layout(sharded=True)
    segments = layout.segment_offsets.tolist()
    ranges = layout.range_offsets.tolist()
    assert segments[0] == ranges[0] == 0
    assert segments[-1] == ranges[-1] == bucket.numel
    assert segments == sorted(set(segments))
    assert set(segments) <= set(ranges)
    shards = {r * bucket.numel // world_size for r in range(world_size)}
    assert shards <= set(segments)
    pieces = layout.piece_offsets.tolist()
    for index in range(len(ranges) - 1):
        piece = int(layout.range_piece[index])
        assert pieces[piece] <= ranges[index] < ranges[index + 1] <= pieces[piece + 1]
    owners = _owners(bucket)
    for element in range(bucket.numel):
        piece = max(i for i, start in enumerate(pieces[:-1]) if start <= element)
        segment = max(i for i, start in enumerate(segments[:-1]) if start <= element)
        inside, before = owners[element]
        assert layout.piece_parameter[piece] == inside
        assert bool(layout.segment_keep[segment]) == bucket.parameters[before].keep


def _owners(bucket):
    """Element -> (parameter that holds it or -1, last parameter at or before it), brute force."""
    owners, before = {}, 0
    for element in range(bucket.numel):
        inside = -1
        for index, piece in enumerate(bucket.parameters):
            if piece.start <= element:
                before = index
                inside = index if element < piece.stop else -1
        owners[element] = inside, before
    return owners


def test_adjacent_parameters_of_one_kind_share_a_segment():
    layout = _bucket([4, 4, 2, 2, 8], [False, False, True, True, False]).layout(sharded=False)
    assert layout.segment_offsets.tolist() == [0, 8, 12, 20]
    assert layout.segment_keep.tolist() == [0, 1, 0]
    assert layout.range_offsets.tolist() == [0, 4, 8, 10, 12, 20]


def test_shard_segments_are_the_segments_of_each_shard():
    bucket = _bucket([5, 3], [False, True], 2, CollectiveOp.REDUCE_SCATTER)
    layout = bucket.layout(sharded=True)
    assert layout.segment_offsets.tolist() == [0, 4, 5, 8]
    assert layout.shard_segments == (0, 1, 3)


def test_long_segments_are_split(monkeypatch):
    monkeypatch.setattr(bucket_module, "MAX_SEGMENT_NUMEL", 7)
    layout = _bucket([20], [False]).layout(sharded=False)
    assert layout.segment_offsets.tolist() == [0, 7, 14, 20]


def test_empty_bucket_has_no_segments():
    layout = Bucket("b", torch.zeros(0), (), CollectiveOp.REDUCE_SCATTER, 3).layout(sharded=True)
    assert layout.segment_offsets.tolist() == [0]
    assert layout.shard_segments == (0, 0, 0, 0)


def test_a_bucket_that_cannot_be_sharded_is_refused():
    with pytest.raises(ConfigError, match="equal shards"):
        Bucket("b", torch.zeros(7), (), CollectiveOp.REDUCE_SCATTER, 2)


def test_a_gradient_that_is_not_contiguous_is_refused():
    with pytest.raises(ConfigError, match="contiguous 1-D"):
        Bucket("b", torch.zeros(8)[::2], (), CollectiveOp.ALL_REDUCE, 1)
