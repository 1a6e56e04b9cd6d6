"""Large buckets on a GPU are synchronised in pieces."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice, Reduction
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.megatron.pieces import in_pieces

MILLION = 1_000_000
ENDS = [10, 11, 50, 52, 97, 130]
"""Of the parameters, in millions; a million of padding follows."""


def bucket(device: str = "cuda", op: CollectiveOp = CollectiveOp.ALL_REDUCE, ranks: int = 2):
    with FakeTensorMode():
        grad_N = torch.empty((ENDS[-1] + 2) * MILLION, device=device)
    starts = [0, *ENDS[:-1]]
    parameters = tuple(
        ParameterSlice(f"w{end}", start * MILLION, end * MILLION, keep=end == 11)
        for start, end in zip(starts, ENDS, strict=True)
    )
    return Bucket("group0.0", grad_N, parameters, op, ranks, Reduction.AVG)


def cut(whole: Bucket, **overrides: Any) -> list[Bucket]:
    return in_pieces(whole, SparseConfig.from_overrides(**({"scheme": "direct"} | overrides)))


@pytest.mark.parametrize("scheme", ["direct", "auto"])
def test_pieces_end_with_the_parameter_that_fills_them(scheme: str) -> None:
    whole = bucket()
    pieces = cut(whole, scheme=scheme)
    assert [piece.numel for piece in pieces] == [50 * MILLION, 47 * MILLION, 35 * MILLION]
    assert [piece.name for piece in pieces] == ["group0.0.0", "group0.0.1", "group0.0.2"]
    assert [piece.grad_N.storage_offset() for piece in pieces] == [0, 50 * MILLION, 97 * MILLION]
    found, base = [], 0
    for piece in pieces:
        assert (piece.op, piece.world_size, piece.reduction) == (whole.op, 2, Reduction.AVG)
        assert piece.layout(sharded=False).segment_offsets[-1] == piece.numel
        found += [(p.name, p.start + base, p.stop + base, p.keep) for p in piece.parameters]
        base += piece.numel
    assert found == [(p.name, p.start, p.stop, p.keep) for p in whole.parameters]


def test_many_ranks_have_larger_pieces() -> None:
    assert [piece.numel // MILLION for piece in cut(bucket(ranks=60))] == [97, 35]


def test_what_stays_whole() -> None:
    for whole, overrides in (
        (bucket("cpu"), {}),
        (bucket(op=CollectiveOp.REDUCE_SCATTER), {}),
        (bucket(), {"scheme": "dense"}),
        (bucket(), {"scheme": "dense_ring"}),
        (bucket(), {"enabled": False}),
    ):
        assert cut(whole, **overrides) == [whole]
