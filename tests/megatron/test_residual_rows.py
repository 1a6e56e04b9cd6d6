"""Slices and rows of residuals, without processes."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.megatron.checkpoint_layout import HeldSlice, ResidualRow, add_rows, part_of_sum

NUMEL = 11


def _held(start, stop, row=0, count=2):
    piece = ParameterSlice("w", 0, stop - start, offset=start)
    bucket = Bucket("0", torch.zeros(stop - start), [piece], CollectiveOp.ALL_REDUCE, 1)
    return HeldSlice(bucket, piece, stop - start, NUMEL, False, ResidualRow("node", row, count))


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_parts_of_a_sum_do_not_depend_on_how_rows_are_cut(count):
    total_P = torch.arange(1.0, NUMEL + 1)
    rows = []
    for row in range(count):
        parts = [
            part_of_sum(total_P[start:stop], _held(start, stop, row, count))
            for start, stop in [(0, 3), (3, 4), (4, 11)]
        ]
        rows.append(torch.cat(parts))
        assert torch.equal(rows[-1], part_of_sum(total_P, _held(0, NUMEL, row, count)))
    assert torch.equal(torch.stack(rows).sum(0), total_P)
    assert (torch.stack(rows) != 0).sum() == NUMEL


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 5), (1, 3), (5, 1)])
def test_every_row_is_taken_over_once(before, after):
    taken = [old for row in range(after) for old in ResidualRow("rank", row, after).takes(before)]
    assert sorted(taken) == list(range(before))


def test_a_single_row_keeps_its_dtype():
    row = torch.ones(2, dtype=torch.bfloat16)
    assert add_rows([row]) is row
    assert add_rows([row, row]).dtype == torch.float32
