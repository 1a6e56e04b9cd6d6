"""`prune_` equals its oracle on any floats; machines without hypothesis run test_prune.py alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext.record_spec import Pruning
from tests.cuda_ext import cases
from tests.cuda_ext.test_prune import check


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=70),
    st.sampled_from(cases.DTYPES),
    st.sampled_from(cases.RESIDUAL_DTYPES),
    st.integers(0, 2),
    st.floats(-1, 2.0**126, width=32),
    st.floats(0, 1, width=32),
    st.sampled_from([1.0, 0.9]),
    st.integers(-1, 2**63 - 1),
)
@settings(max_examples=100)
def test_any_floats_equal_the_oracle(
    values, dtype, residual_dtype, wire, threshold, chance, leak, key
):
    grad = torch.tensor(values).to(dtype)
    residual = torch.tensor(values[::-1]).to(residual_dtype)
    offsets = torch.tensor([0, len(values)])
    # Every second time the threshold is one of the magnitudes.
    if threshold < 1:
        threshold = float((grad.float() + residual.float())[0].abs())
    ties = torch.tensor([chance])
    limit = torch.tensor([threshold])
    pruning = Pruning(residual, offsets, limit, leak, key, tie_chances_R=ties)
    check(grad, pruning, wire, "hypothesis")
