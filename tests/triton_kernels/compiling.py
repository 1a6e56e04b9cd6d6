"""Compiles Triton's kernels for GPUs that are not there."""

from __future__ import annotations

from typing import Any

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
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

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
