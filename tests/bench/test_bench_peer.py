"""`bench peer` where there is no GPU: its numbers, and its refusal."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bench.peer.command import PeerRow, even_layout, floor_bytes, run
from megatron_sparse.bench.peer.options import PeerOptions
from megatron_sparse.errors import DependencyError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu() -> None:
    with pytest.raises(DependencyError, match="there is no GPU"):
        run(PeerOptions(), None, torch.device("cuda"))


def test_the_floor_counts_every_byte_once() -> None:
    """Two ranks, 8192 elements, one non-zero element each in the first shard."""
    layout = even_layout(8192, 2)
    grads = [torch.zeros(8192) for _ in range(2)]
    grads[0][5], grads[1][9] = 1, 2
    one, none, two = 48 + 32, 48, 48 + 32
    gradients_and_outputs = 2 * 2 * 4 * 8192
    messages = 2 * 2 * (one + none)
    sums = 3 * (two + none)
    assert floor_bytes(grads, grads[0] + grads[1], layout) == (
        gradients_and_outputs + messages + sums
    )


def test_a_wrong_row_shows_no_times() -> None:
    row = PeerRow(
        world_size=2, density=0.01, count=1, bytes=4, bytes_moved=8, window_bytes=1, wrong=3
    )
    assert row.line().split()[4:8] == ["-"] * 4
    row.time_us, row.copy_us, row.host_us = 20.0, 10.0, 5.0
    assert "50%" in row.line()
