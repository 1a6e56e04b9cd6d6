"""The Triton kernel of `prune_`: right in the interpreter, and compiled for a GPU without one."""

from __future__ import annotations

import pytest

from tests.triton_kernels.compiling import ARCHS, RAW, compiled_ptx
from tests.triton_kernels.interpreting import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernel to test")


def test_equals_the_oracle_in_the_interpreter():
    assert run_interpreted("triton_cases") == "108 cases are equal\n"


CASES = [
    (0, 0, 0, True),
    (0, 1, 1, True),
    (0, 0, 2, False),
    (1, 1, 1, True),
    (1, 0, 2, True),
    (2, 1, 1, False),
    (2, 0, 2, True),
]


@pytest.mark.parametrize(
    ("grad", "residual", "wire", "stochastic", "numel_type", "arch"),
    [
        *((*case, numel_type, 90) for case in CASES for numel_type in ("i32", "i64")),
        *((*case, "i64", arch) for case in CASES[:4] for arch in ARCHS if arch != 90),
    ],
)
def test_compiles(grad, residual, wire, stochastic, numel_type, arch):
    from megatron_sparse.triton_kernels import prune

    cut, fixed_below, limit = prune._GRIDS[frozenset({grad, wire}) - {0}]
    constants = {
        "GRAD": grad,
        "RESIDUAL": residual,
        "CUT": cut,
        "FIXED_BELOW": fixed_below,
        "LIMIT": limit,
        "STOCHASTIC": stochastic,
        "TIES": stochastic,
        "BLOCK": prune.BLOCK,
    }
    signature = {
        "grad": RAW[grad],
        "residual": RAW[residual],
        "range_offsets": "*i64",
        "thresholds": "*fp32",
        "tie_chances": "*fp32",
        "nnz": "*i64",
        "numel": numel_type,
        "range_count": "i32",
        "leak": "fp32",
        "seed_a": "i32",
        "seed_b": "i32",
        "residual_seed_a": "i32",
        "residual_seed_b": "i32",
        "tie_seed_a": "i32",
        "tie_seed_b": "i32",
    }
    ptx = compiled_ptx(prune._prune_kernel, signature, constants, arch)
    # Offsets of elements are 64 bits wide.
    assert "ld.global" in ptx
    assert ".v4.b32" in ptx or ".v2.b32" in ptx, "loads are not vectorised"
