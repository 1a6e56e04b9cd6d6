"""The Triton kernels of the sampled threshold: interpreted here, and compiled for GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.triton_kernels.compiling import ARCHS, RAW, compiled_ptx
from tests.triton_kernels.interpreting import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernel to test")

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression import selection
from megatron_sparse.compression.selection import range_limits
from megatron_sparse.config.compression import CompressionConfig
from megatron_sparse.cuda_ext import ops, threshold_triton


def test_equals_oracle_and_cpu_codec_in_the_interpreter() -> None:
    assert run_interpreted("threshold_cases") == "30 cases are equal\n"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("grad", "residual"), [(0, -1), (0, 1), (1, 0), (2, 2)])
def test_sampling_compiles(arch: int, grad: int, residual: int) -> None:
    from megatron_sparse.triton_kernels import threshold

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
    from megatron_sparse.triton_kernels import threshold

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
