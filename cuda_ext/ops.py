"""The ops of the native part, typed and checked: what the rest of the package calls.

Shape suffixes: N elements of a bucket (1-D, contiguous; fp32, bf16 or fp16), R ranges, S wire
segments, M elements of an accumulator. Dtype codes are those of the wire: 0 fp32, 1 bf16, 2 fp16.

A range or segment table is an int64 CPU tensor of ascending offsets: piece i is [i] to [i + 1].
CPU tensors are worked on by torch's own thread pool; results do not depend on the thread count.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from megatron_sparse.cuda_ext import load, threshold_torch
from megatron_sparse.errors import ConfigError, ExtensionError
from megatron_sparse.formats.header import (
    HEADER_BYTES,
    VALUE_BYTES,
    wrong_field,
)

PRUNE_BACKEND = "MEGATRON_SPARSE_PRUNE"
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RESIDUAL_DTYPES = (torch.float32, torch.bfloat16)
MESSAGE_FIELDS = (
    "size", "magic", "version", "checksum", "format", "dtype", "flags", "epoch", "offset",
    "numel", "nnz", "payload_bytes", "indices",
)  # fmt: skip
"""The field codes of `decode_add_`'s status (`csrc/decode.cpp`)."""


def prune_(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor,
    range_offsets: torch.Tensor,
    thresholds_R: torch.Tensor,
    leak: float,
    wire_dtype: int,
    key: int,
) -> torch.Tensor:
    """Leaky error feedback and pruning, fused, in place.

    For each element, in fp32: `x = g + e; drop = |x| <= t; g = drop ? 0 : round(x);
    e = drop ? leak * x : x - g`. NaN and infinity are never dropped; where x is one of them, e
    becomes 0. With fp32 throughout and leak 1, `g + e` afterwards is the fp32 sum before, bit for
    bit (but for the sign of a zero).

    `round` is to the values that both the gradient's dtype and `wire_dtype` hold, saturating at
    the largest finite one; what it cuts off goes to the residual. It is stochastic: up with the
    probability of the part cut off, by random bits that are a pure function of (key, index in the
    bucket). So is the rounding of a bf16 residual. With a negative key both go to nearest even.

    Args:
        grad_N: becomes what is sent. Mutated.
        residual_N: fp32 or bf16. Mutated.
        range_offsets: R+1 offsets of consecutive ranges from 0 to N; empty ones are allowed.
        thresholds_R: fp32, on the gradient's device; below 0 keeps all of a range, NaN too.
        leak: factor on what is dropped, 0 to 1.
        wire_dtype: dtype code in which values will travel.
        key: of the random bits; negative for rounding to nearest.

    Returns:
        int64 nnz_R on the gradient's device: stored values that are not zero. No host
        synchronisation; on CUDA everything is on the current stream, the kernel is Triton's, or
        the compiled one with MEGATRON_SPARSE_PRUNE=cuda.

    Raises:
        ExtensionError: arguments that do not fit together.
        ConfigError: MEGATRON_SPARSE_PRUNE is neither triton nor cuda.

    Example:
        >>> g, e = torch.tensor([3.0, 1.0]), torch.tensor([0.0, 0.5])
        >>> prune_(g, e, torch.tensor([0, 2]), torch.tensor([2.0]), 0.5, 0, 0), g, e
        (tensor([1]), tensor([3., 0.]), tensor([0.0000, 0.7500]))
    """
    _check_flat("prune_", "grad", grad_N, GRAD_DTYPES)
    _check_flat("prune_", "residual", residual_N, RESIDUAL_DTYPES, grad_N.numel(), grad_N.device)
    _check_offsets("prune_", "range_offsets", range_offsets, grad_N.numel())
    _check_flat(
        "prune_", "thresholds", thresholds_R, (torch.float32,), range_offsets.numel() - 1,
        grad_N.device,
    )  # fmt: skip
    _check_code("prune_", "wire_dtype", wire_dtype)
    if not 0 <= leak <= 1:
        raise _refusal("prune_", "leak is out of range", "0 to 1", leak)
    if grad_N.device.type == "cpu":
        return _call(
            "prune_", grad_N, residual_N, range_offsets, thresholds_R, leak, wire_dtype, key
        )
    offsets = range_offsets.to(grad_N.device, non_blocking=True)
    backend = os.environ.get(PRUNE_BACKEND, "triton")
    if backend == "triton":
        from megatron_sparse.triton_kernels import prune

        return prune.prune_(grad_N, residual_N, offsets, thresholds_R, leak, wire_dtype, key)
    if backend != "cuda":
        raise ConfigError(f"{PRUNE_BACKEND} is unknown", expected="triton | cuda", got=backend)
    load("cuda")
    return _call("prune_", grad_N, residual_N, offsets, thresholds_R, leak, wire_dtype, key)


def sample_threshold(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor | None,
    range_offsets: torch.Tensor,
    densities_R: torch.Tensor,
    samples: int,
    keys_R: torch.Tensor,
) -> torch.Tensor:
    """The magnitude that about `density` of each range exceeds, from a stratified sample.

    Of a range of n elements, s = min(n, samples) are looked at, one in each of s equal strata; with
    n <= samples that is all of them. The threshold is the magnitude `|g + e|` of descending rank
    floor(density * s), so about density * s samples are strictly greater, and at least one is:
    where nothing exceeds it, it becomes the next smaller float, so that equal gradients are sent
    too. NaN counts as infinite. A pure function of its arguments.

    Args:
        grad_N: only read.
        residual_N: fp32, bf16 or fp16; None for zeros. Only read.
        range_offsets: R+1 offsets of consecutive ranges from 0 to N.
        densities_R: fp32 on the CPU, above 0; 1 and more keeps all of a range.
        samples: elements to look at in each range.
        keys_R: int64 on the CPU; keys of the sample positions.

    Returns:
        fp32 thresholds_R on the gradient's device; -1 for a range that is empty or kept whole. No
        host synchronisation.

    Raises:
        ExtensionError: arguments that do not fit together.

    Example:
        >>> g = torch.tensor([1.0, -4.0, 2.0, 3.0])
        >>> sample_threshold(
        ...     g, None, torch.tensor([0, 4]), torch.tensor([0.5]), 10, torch.tensor([7])
        ... )
        tensor([2.])
    """
    _check_flat("sample_threshold", "grad", grad_N, GRAD_DTYPES)
    if residual_N is not None:
        _check_flat(
            "sample_threshold", "residual", residual_N, GRAD_DTYPES, grad_N.numel(), grad_N.device
        )
    _check_offsets("sample_threshold", "range_offsets", range_offsets, grad_N.numel())
    ranges, cpu = range_offsets.numel() - 1, torch.device("cpu")
    _check_flat("sample_threshold", "densities", densities_R, (torch.float32,), ranges, cpu)
    _check_flat("sample_threshold", "keys", keys_R, (torch.int64,), ranges, cpu)
    if not 1 <= samples < 2**31:
        raise _refusal("sample_threshold", "samples is out of range", "1 to 2^31 - 1", samples)
    if not bool((densities_R > 0).all()):
        raise _refusal(
            "sample_threshold", "a density is out of range", "above 0", densities_R.tolist()
        )
    arguments = (grad_N, residual_N, range_offsets, densities_R, samples, keys_R)
    if grad_N.device.type == "cpu":
        return _call("sample_threshold", *arguments)
    return threshold_torch.sample_threshold(*arguments)


def threshold_of_samples(magnitudes_K: torch.Tensor, density: float) -> torch.Tensor:
    """The threshold of one sample that was already taken; the rule of `sample_threshold`.

    Args:
        magnitudes_K: fp32 `|g + e|` of K samples, on any device. Only read.
        density: above 0; 1 and more keeps all.

    Returns:
        fp32, 0-D, on the same device; -1 for no samples. No host synchronisation.

    Raises:
        ExtensionError: wrong shape, dtype or density.

    Example:
        >>> threshold_of_samples(torch.tensor([1.0, 4.0, 2.0, 3.0]), 0.5)
        tensor(2.)
    """
    _check_flat("threshold_of_samples", "magnitudes", magnitudes_K, (torch.float32,))
    if not density > 0:
        raise _refusal("threshold_of_samples", "density is out of range", "above 0", density)
    return threshold_torch.threshold_of_samples(magnitudes_K, density)


def message_capacity(segment_offsets: torch.Tensor, value_dtype: int) -> int:
    """The most bytes that a message of these segments takes: dense values, headers, padding.

    Example:
        >>> message_capacity(torch.tensor([0, 5, 8]), 0)  # 48 + 32 and 48 + 16
        144
    """
    _check_code("message_capacity", "value_dtype", value_dtype)
    padded = (segment_offsets.diff() * VALUE_BYTES[value_dtype] + 15) // 16 * 16
    return int(padded.sum()) + HEADER_BYTES * padded.numel()


def encode(
    grad_N: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_dense: torch.Tensor,
    nnz_S: torch.Tensor,
    value_dtype: int,
    epoch: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Writes the wire message of a pruned bucket: one record for each segment, back to back.

    A segment becomes COO, or dense where that is not larger. Values are converted to
    `value_dtype`, to nearest even where they do not fit, which pruned ones do. Wire cost: 48 bytes
    and the padding of each record, and 4 bytes more than its value for each COO entry.

    Args:
        grad_N: on the CPU; only read.
        segment_offsets: S+1 offsets from 0 to N; a segment has fewer than 2^31 elements.
        segment_dense: uint8, 1 for segments that are dense whatever they hold.
        nnz_S: int64, the non-zero elements of each segment, as `prune_` counts them.
        value_dtype: dtype code of the values.
        epoch: the step; its lower 32 bits travel.
        out: uint8, at least as long as the message (`message_capacity` always is). Mutated; what
            lies behind the message is left alone.

    Returns:
        int64 bytes of each record, on the CPU.

    Raises:
        ExtensionError: arguments that do not fit together, `out` too small, or counts that are not
            what the gradient holds.
    """
    _check_flat("encode", "grad", grad_N, GRAD_DTYPES, device=torch.device("cpu"))
    _check_offsets("encode", "segment_offsets", segment_offsets, grad_N.numel())
    segments, cpu = segment_offsets.numel() - 1, torch.device("cpu")
    _check_flat("encode", "segment_dense", segment_dense, (torch.uint8,), segments, cpu)
    _check_flat("encode", "nnz", nnz_S, (torch.int64,), segments, cpu)
    _check_flat("encode", "out", out, (torch.uint8,), device=cpu)
    _check_code("encode", "value_dtype", value_dtype)
    return _call("encode", grad_N, segment_offsets, segment_dense, nnz_S, value_dtype, epoch, out)


def decode_add_(
    acc_M: torch.Tensor,
    message: torch.Tensor,
    segment_offsets: torch.Tensor,
    value_dtype: int,
    epoch: int,
    base: int,
    *,
    rank: int,
) -> None:
    """Adds the records of one peer's message to an fp32 accumulator.

    Nothing in the message is trusted: every header field and every index is checked before the
    first addition, and a bad message leaves `acc_M` as it was.

    Args:
        acc_M: fp32 on the CPU; element 0 is the bucket's element `base`. Mutated.
        message: uint8 on the CPU, exactly the records of these segments.
        segment_offsets: offsets in the bucket of the segments that the message must hold.
        value_dtype: dtype code that the values must have.
        epoch: the step that the records must be of.
        base: the bucket's element that `acc_M` begins with.
        rank: the sender, for the error's text.

    Raises:
        WireFormatError: names the rank and the field of the message that is wrong.
        ExtensionError: the other arguments do not fit together.
    """
    cpu = torch.device("cpu")
    _check_flat("decode_add_", "acc", acc_M, (torch.float32,), device=cpu)
    _check_flat("decode_add_", "message", message, (torch.uint8,), device=cpu)
    _check_code("decode_add_", "value_dtype", value_dtype)
    status = _call("decode_add_", acc_M, message, segment_offsets, value_dtype, epoch, base)
    code, segment, field, value = status.tolist()
    if code == 0:
        return
    name = MESSAGE_FIELDS[field]
    first, last = (*segment_offsets.tolist(), 0)[segment : segment + 2]
    numel = last - first
    expected: dict[str, object] = {
        "size": "as many bytes as its records announce",
        "magic": "MSPG", "version": 1, "checksum": "the CRC-32 of the header",
        "format": "0 (dense) or 1 (COO)", "dtype": value_dtype, "flags": 0,
        "epoch": epoch % 2**32, "offset": first, "numel": numel, "nnz": f"at most {numel}",
        "payload_bytes": f"what its format, nnz and {numel} elements demand",
        "indices": f"strictly ascending, from 0 to {numel - 1}",
    }  # fmt: skip
    got = f"{value} in segment {segment}"
    raise wrong_field(rank, name, expected[name], got)


def supported_isas() -> list[str]:
    """What MEGATRON_SPARSE_ISA may name on this machine, slowest first.

    The best is taken when the variable is not set. It is read at every call of an op.
    """
    return _call("supported_isas").split(",")


def _call(name: str, *arguments: Any) -> Any:
    """Calls an op; its refusal, "what | expected | got" in C++, becomes an `ExtensionError`."""
    op = _overload(name)
    try:
        return op(*arguments)
    except RuntimeError as error:
        parts = str(error).split("\n", 1)[0].split(" | ")
        if len(parts) != 3:
            raise
        raise ExtensionError(parts[0], expected=parts[1], got=parts[2]) from error


@cache
def _overload(name: str) -> Callable[..., Any]:
    """The op itself, past the look-up that costs as much as the call of a small one."""
    load()
    return getattr(torch.ops.megatron_sparse, name).default


def _refusal(op: str, what: str, expected: object, got: object) -> ExtensionError:
    return ExtensionError(f"{op}: {what}", expected=expected, got=got)


def _check_flat(
    op: str,
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    numel: int | None = None,
    device: torch.device | None = None,
) -> None:
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise _refusal(op, f"{name} has the wrong dtype", names, tensor.dtype)
    if tensor.dim() != 1 or not tensor.is_contiguous():
        got = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        raise _refusal(op, f"{name} has the wrong shape", "a contiguous 1-D tensor", got)
    if numel is not None and tensor.numel() != numel:
        raise _refusal(op, f"{name} has the wrong length", numel, tensor.numel())
    if device is not None and tensor.device != device:
        raise _refusal(op, f"{name} is on the wrong device", device, tensor.device)


def _check_offsets(op: str, name: str, offsets: torch.Tensor, numel: int) -> None:
    _check_flat(op, name, offsets, (torch.int64,), device=torch.device("cpu"))
    if (
        offsets.numel() == 0
        or int(offsets[0]) != 0
        or int(offsets[-1]) != numel
        or bool((offsets.diff() < 0).any())
    ):
        raise _refusal(
            op, f"{name} does not cut the bucket", f"ascending offsets from 0 to {numel}",
            offsets.tolist()[:8],
        )  # fmt: skip


def _check_code(op: str, name: str, code: int) -> None:
    if code not in (0, 1, 2):
        raise _refusal(op, f"{name} is unknown", "0 (fp32), 1 (bf16) or 2 (fp16)", code)
