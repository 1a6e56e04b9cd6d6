"""Triton's kernels without a GPU: right in the interpreter, and compiled for GPUs."""

import sys
from typing import Any

import pytest
import torch

from tests.programs import ended, with_variables

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernel to test")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression import selection
from megatron_sparse.compression.selection import range_limits
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.cuda_ext import ops, threshold_triton
from megatron_sparse.triton_kernels import prune, threshold

ARCHS = (80, 90, 100)
RAW = {0: "*i32", 1: "*i16", 2: "*i16"}
"""Signatures of pointers to raw values, by dtype code."""


def compiled_ptx(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], arch: int, num_warps: int = 4
) -> str:
    """The PTX of a kernel, compiled to machine code for an architecture.

    Pointers are taken as aligned to 16 bytes. Fails if denormals are flushed or registers spill.

    Args:
        kernel: the function that Triton has compiled just in time.
        signature: types of its arguments, without the constants.
        constants: its constants.
        arch: of `ARCHS`.
        num_warps: warps of a program.
    """
    pointers = [place for place, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        kernel,
        signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in pointers},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps}
    )
    assert len(compiled.asm["cubin"]) > 0
    ptx = compiled.asm["ptx"]
    assert ".ftz" not in ptx, "denormals must not be flushed"
    assert ".local" not in ptx, "registers spill to local memory"
    return ptx


def test_equal_oracles_and_cpu_codec_in_the_interpreter() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    command = [sys.executable, "-m", "tests.triton_kernels.interpreted"]
    variables = with_variables(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = ended(command, 200, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "108 prunings and 30 samplings are equal\n"


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


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("grad", "residual"), [(0, -1), (0, 1), (1, 0), (2, 2)])
def test_sampling_compiles(arch: int, grad: int, residual: int) -> None:
    signature = {
        "grad": RAW[grad],
        "residual": RAW[max(residual, 0)],
        "plan": "*i64",
        "magnitudes": "*i32",
        "blocks": "i32",
    }
    constants = {"GRAD": grad, "RESIDUAL": residual, "BLOCK": threshold.SAMPLE_BLOCK}
    ptx = compiled_ptx(threshold._sample_kernel, signature, constants, arch)
    assert "mul.lo.s64" in ptx or "mad.lo.s64" in ptx, "positions are 64 bits wide"


@pytest.mark.parametrize("arch", ARCHS)
def test_selecting_compiles(arch: int) -> None:
    signature = {
        "plan": "*i64",
        "magnitudes": "*i32",
        "thresholds": "*fp32",
        "chances": "*fp32",
        "ties": "*i64",
    }
    constants = {"BLOCK": threshold.SELECT_BLOCK}
    ptx = compiled_ptx(threshold._select_kernel, signature, constants, arch, num_warps=8)
    assert "div.rn.f64" in ptx, "chances are rounded as the CPU rounds them"


@pytest.mark.parametrize("compiled", [False, True])
def test_selection_takes_triton_where_the_library_is_not_there(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    taken = []

    def note(name: str):
        return lambda *arguments: taken.append(name) or ops_sample(*arguments)

    ops_sample = ops.sample_threshold
    monkeypatch.setattr(ops, "sample_threshold", note("compiled"))
    monkeypatch.setattr(threshold_triton, "sample_threshold", note("Triton"))
    monkeypatch.setattr(selection, "is_compiled", lambda device: compiled)
    bucket = Bucket(
        "b", torch.randn(100), [ParameterSlice("w", 0, 100)], CollectiveOp.ALL_REDUCE, 1
    )
    range_limits(
        bucket, bucket.layout(False), torch.zeros(100), 0.1, 0, CompressionConfig(samples=10)
    )
    assert taken == ["compiled" if compiled else "Triton"]
