"""Row-sparse gradients: sums in order, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import row_sparse_ops
from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats import row_sparse
from megatron_sparse.formats.row_sparse import RowSparse
from tests.cuda_ext import cases
from tests.oracles import row_sparse as oracle


def _pairs(num_rows, count, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(max(num_rows, 1), (count,), generator=generator)
    rows = torch.randn(count, width, generator=generator).to(dtype)
    return indices, rows


@settings(max_examples=60)
@given(
    st.integers(0, 80),
    st.integers(0, 20),
    st.integers(1, 30),
    st.sampled_from(cases.DTYPES),
    st.integers(0, 1000),
)
def test_coalesce_equals_the_oracle(count, width, num_rows, dtype, seed):
    indices, rows = _pairs(num_rows, count, width, dtype, seed)
    got = row_sparse.coalesce(indices, rows, num_rows)
    expected_indices, expected_rows = oracle.coalesce(indices, rows)
    assert got.indices_K.tolist() == expected_indices
    cases.assert_same_bits(got.rows_KD.view(-1), expected_rows.view(-1), "rows")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_single_rows_keep_their_bits(dtype):
    special = cases.make("special", 64, dtype).view(16, 4)
    indices = torch.arange(16).flip(0)
    got = row_sparse.coalesce(indices, special, 16)
    cases.assert_same_bits(got.rows_KD.view(-1), special.flip(0).reshape(-1), "coalesce")


def test_coo_there_and_back():
    indices, rows = _pairs(40, 30, 5, torch.bfloat16, 3)
    once = row_sparse.coalesce(indices, rows, 40)
    again = RowSparse.from_coo(once.to_coo())
    assert torch.equal(again.indices_K, once.indices_K)
    assert torch.equal(again.rows_KD, once.rows_KD)
    assert again.num_rows == 40
    torch.sparse_coo_tensor(
        once.indices_K.unsqueeze(0), once.rows_KD, (40, 5), is_coalesced=True, check_invariants=True
    )


@pytest.mark.parametrize("width", [0, 3])
def test_empty(width):
    none = torch.empty(0, dtype=torch.int64)
    empty = row_sparse.coalesce(none, torch.empty(0, width), 0)
    assert empty.rows_KD.shape == (0, width)


I = torch.tensor([0, 2])  # noqa: E741 - the paper's name
R = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: row_sparse.coalesce(I, R, 2), "0 to 1"),
        (lambda: row_sparse.coalesce(I - 1, R, 5), "out of range"),
        (lambda: row_sparse.check_coo(RowSparse(I, R.double(), 5).to_coo()), "float32"),
        (lambda: row_sparse.check_coo(RowSparse(I, R, 2**40 + 1).to_coo()), "at most 2"),
        (lambda: row_sparse.check_coo(R), "sparse=True"),
        (lambda: row_sparse.check_coo(R.to_sparse()), "sparse=True"),
        (lambda: row_sparse_ops.sum_rows(R, torch.tensor([0, 2]), torch.tensor([0, 2])), "order"),
        (lambda: row_sparse_ops.sum_rows(R, I[:1], torch.tensor([0, 0, 1])), "empty"),
        (lambda: row_sparse_ops.sum_rows(R, I[:1], torch.tensor([0, 2])), "offsets"),
    ],
)
def test_arguments_that_do_not_match_are_one_typed_error(call, words):
    with pytest.raises(ExtensionError, match=words):
        call()
