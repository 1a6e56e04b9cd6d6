"""`prune_encode` is byte for byte `prune_` followed by `encode`, and only reads the gradient."""

from __future__ import annotations

import math
import os
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Pruning, RecordSpec, Segments
from megatron_sparse.errors import ExtensionError
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import prune as prune_oracle
from tests.cuda_ext import cases
from tests.formats.test_formats import FORMS

KEY = 0x1234_5678_9ABC_DEF0
STEP = 7


def chances_of(thresholds):
    """Some tie chance for each threshold."""
    return torch.linspace(0.2, 0.9, thresholds.numel())


def check(grad, residual, ranges, thresholds, segments, dense, leak, wire, key, form, what):
    """On every instruction set, with poisoned buffers, on unaligned views."""
    chances = chances_of(thresholds)
    pruned, rest, _ = prune_oracle.prune(
        grad, Pruning(residual, ranges, thresholds, leak, key, tie_chances_R=chances), wire
    )
    nnz = cases.count_nonzero(pruned, segments)
    records = message_oracle.encode(
        pruned, Segments(segments, dense), nnz, RecordSpec(wire, STEP, **FORMS[form])
    )
    capacity = ops.message_capacity(segments, wire)
    for isa in cases.ISAS:
        with mock.patch.dict(os.environ, MEGATRON_SPARSE_ISA=isa):
            got_grad, got_rest = cases.unaligned(grad), cases.unaligned(residual)
            out = torch.full((capacity + 64,), 0xFF, dtype=torch.uint8)
            room = ops.scratch_capacity(segments, wire)
            scratch = torch.full((room + 64,), 0xFF, dtype=torch.uint8)
            sizes, got_nnz = ops.prune_encode(
                got_grad,
                Pruning(got_rest, ranges, thresholds, leak, key, tie_chances_R=chances),
                Segments(segments, dense),
                RecordSpec(wire, STEP, **FORMS[form]),
                out[:capacity],
                scratch[:room],
            )
        where = f"{isa} {form} {what}"
        used = int(sizes.sum())
        assert sizes.tolist() == [len(record) for record in records], where
        assert out[:used].numpy().tobytes() == b"".join(records), where
        assert bool((out[used:] == 0xFF).all()), where
        assert bool((scratch[room:] == 0xFF).all()), where
        assert torch.equal(got_nnz, nnz), where
        cases.assert_same_bits(got_rest, rest, f"{where}: residual")
        cases.assert_same_bits(got_grad, grad, f"{where}: gradient")
        for buffer in (got_grad, got_rest):
            assert buffer._base[0].isnan(), where
            assert buffer._base[-1].isnan(), where


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "residual_dtype", "wire"),
    [
        (torch.float32, torch.float32, 0),
        (torch.float32, torch.bfloat16, 2),
        (torch.float32, torch.float32, 1),
        (torch.bfloat16, torch.bfloat16, 1),
        (torch.bfloat16, torch.float32, 0),
        (torch.bfloat16, torch.float32, 2),
        (torch.float16, torch.bfloat16, 2),
        (torch.float16, torch.float32, 1),
    ],
)
def test_equals_the_oracles(dtype, residual_dtype, wire, form):
    for numel in (0, 1, 100, 4097):
        # Ranges and segments cut the bucket anywhere, ranges inside segments and across.
        ranges, segments = cases.cut(numel, 5, seed=numel), cases.cut(numel, 3, seed=numel + 1)
        thresholds = torch.tensor([-1.0, math.inf, 1e-3, 1.0, math.nan])
        dense = torch.tensor([0, 1, 0], dtype=torch.uint8)
        for kind in cases.KINDS:
            grad = cases.make(kind, numel, dtype, seed=1)
            residual = cases.make(kind, numel, residual_dtype, seed=2)
            for leak, key in ((1.0, KEY), (0.9, -1)):
                check(
                    grad,
                    residual,
                    ranges,
                    thresholds,
                    segments,
                    dense,
                    leak,
                    wire,
                    key,
                    form,
                    f"{kind} {numel} {key}",
                )


@pytest.mark.parametrize("form", ["coo", "linear", "blocks64", "adaptive"])
def test_the_bytes_do_not_depend_on_the_thread_count(form):
    numel = cases.SIZES[-1]
    grad = cases.make("spread", numel, torch.float32, seed=3)
    residual = cases.make("spread", numel, torch.float32, seed=4)
    ranges, segments = cases.cut(numel, 40), cases.cut(numel, 3)
    thresholds = torch.rand(40, generator=torch.Generator().manual_seed(0)) * 100
    dense = torch.zeros(3, dtype=torch.uint8)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            check(
                grad,
                residual,
                ranges,
                thresholds,
                segments,
                dense,
                1.0,
                0,
                KEY,
                form,
                f"{threads} threads",
            )
    finally:
        torch.set_num_threads(before)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=150),
    st.sampled_from(cases.DTYPES),
    st.sampled_from(cases.RESIDUAL_DTYPES),
    st.integers(0, 2),
    st.floats(-1, 2.0**126, width=32),
    st.integers(-1, 2**63 - 1),
    st.integers(1, 4),
    st.integers(0, 15),
    st.sampled_from(list(FORMS)),
)
@settings(deadline=None, max_examples=150)
def test_any_floats(values, dtype, residual_dtype, wire, threshold, key, pieces, dense, form):
    """Also against `prune_` and `encode` themselves."""
    grad, residual = torch.tensor(values).to(dtype), torch.tensor(values[::-1]).to(residual_dtype)
    ranges = torch.tensor([0, len(values)])
    segments = cases.cut(len(values), pieces, seed=len(values))
    dense_S = torch.tensor([dense >> s & 1 for s in range(pieces)], dtype=torch.uint8)
    thresholds = torch.tensor([threshold])
    check(grad, residual, ranges, thresholds, segments, dense_S, 1.0, wire, key, form, "hypothesis")
    capacity = ops.message_capacity(segments, wire)
    fused, apart = (
        torch.zeros(capacity, dtype=torch.uint8),
        torch.zeros(capacity, dtype=torch.uint8),
    )
    fused_rest, rest, chances = residual.clone(), residual.clone(), chances_of(thresholds)
    ops.prune_encode(
        grad,
        Pruning(fused_rest, ranges, thresholds, 1.0, key, tie_chances_R=chances),
        Segments(segments, dense_S),
        RecordSpec(wire, STEP, **FORMS[form]),
        fused,
    )
    ops.prune_(grad, Pruning(rest, ranges, thresholds, 1.0, key, tie_chances_R=chances), wire)
    nnz = cases.count_nonzero(grad, segments)
    ops.encode(grad, Segments(segments, dense_S), nnz, RecordSpec(wire, STEP, **FORMS[form]), apart)
    assert torch.equal(fused, apart)
    cases.assert_same_bits(fused_rest, rest, "residual")


BAD_CALLS = {
    "grad has the wrong dtype": {"grad": torch.zeros(8, dtype=torch.float64)},
    "residual has the wrong length": {"residual": torch.zeros(7)},
    "residual has the wrong dtype": {"residual": torch.zeros(8, dtype=torch.float16)},
    "thresholds has the wrong length": {"thresholds": torch.zeros(2)},
    "range_offsets does not cut": {"ranges": torch.tensor([0, 7])},
    "segment_offsets does not cut": {"segments": torch.tensor([0, 9])},
    "segment_dense has the wrong length": {"dense": torch.zeros(2, dtype=torch.uint8)},
    "leak is out of range": {"leak": -0.1},
    "value_dtype is unknown": {"wire": 3},
    "the output buffer is too small": {"out": torch.zeros(79, dtype=torch.uint8)},
}


@pytest.mark.parametrize("problem", BAD_CALLS)
def test_a_refused_call_changes_nothing(problem):
    residual = torch.full((8,), 0.5)
    call = {
        "grad": torch.ones(8),
        "residual": residual,
        "ranges": torch.tensor([0, 8]),
        "thresholds": torch.zeros(1),
        "segments": torch.tensor([0, 8]),
        "dense": torch.zeros(1, dtype=torch.uint8),
        "leak": 1.0,
        "wire": 0,
        "key": 0,
        "step": 0,
        "out": torch.zeros(80, dtype=torch.uint8),
    } | BAD_CALLS[problem]
    with pytest.raises(ExtensionError, match=problem):
        ops.prune_encode(
            call["grad"],
            Pruning(
                call["residual"], call["ranges"], call["thresholds"], call["leak"], call["key"]
            ),
            Segments(call["segments"], call["dense"]),
            RecordSpec(call["wire"], call["step"]),
            call["out"],
        )
    assert bool((residual == 0.5).all())
