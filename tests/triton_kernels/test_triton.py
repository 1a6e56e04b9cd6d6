"""Triton's kernel without a GPU: right in the interpreter, and compiled for GPUs."""

import sys

import pytest

from tests.programs import ended, with_variables

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernel to test")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_sparse.triton_kernels import prune

ARCHS = (80, 90, 100)
RAW = {0: "*i32", 1: "*i16", 2: "*i16"}
"""Signatures of pointers to raw values, by dtype code."""


def test_equals_the_oracle_in_the_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "tests.triton_kernels.interpreted"]
    variables = with_variables(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = ended(command, 200, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "108 prunings are equal\n"


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
def test_pruning_compiles(grad, residual, wire, stochastic, numel_type, arch):
    """To machine code, with pointers that are aligned to 16 bytes."""
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
    pointers = [place for place, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        prune._prune_kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in pointers},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    assert len(compiled.asm["cubin"]) > 0
    ptx = compiled.asm["ptx"]
    assert ".ftz" not in ptx, "denormals must not be flushed"
    assert ".local" not in ptx, "registers spill to local memory"
    # Offsets of elements are 64 bits wide.
    assert "ld.global" in ptx
    assert ".v4.b32" in ptx or ".v2.b32" in ptx, "loads are not vectorised"
