"""Encoding Rice records on CUDA: the CPU's bytes, residuals and errors, on a GPU and emulated.

The same tests run on a GPU, if there is one, and in the emulator. `place` puts a tensor there. The
CPU's encoder is compared with the oracle in `tests/cuda_ext/test_rice_encode.py`.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Pruning, RecordSpec, Segments
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.errors import ExtensionError
from megatron_sparse.wire import FORMAT_DENSE, FORMAT_RICE, HEADER_BYTES, RICE_BITS
from tests.cuda_emulator.codec_cases import STEP, Place, gradient
from tests.cuda_emulator.device import sync_debug_error, to_gpu
from tests.cuda_emulator.emulated import DTYPE_CODES, IN_ORDER, RANDOM, REVERSED, Codecs
from tests.cuda_emulator.op_calls import EmulatedDevice
from tests.cuda_emulator.op_cases import FILL, assert_same_message
from tests.cuda_emulator.test_no_waiting import torch_sync_debug_error

DTYPES = {"fp32": 0, "bf16": 1, "fp16": 2, "q8": 3, "q4": 4, "q3": 5, "q2": 6}
# Empty, one element, a tile and one more, a kept one, some tiles, a few elements.
OFFSETS = torch.tensor([0, 0, 1, 4098, 9001, 23001, 23200])
KEEP = torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.uint8)
NUMEL = int(OFFSETS[-1])
KEY = 0x1234_5678_9ABC_DEF0
value_dtypes = pytest.mark.parametrize("value_dtype", DTYPES.values(), ids=DTYPES)


def spec_of(value_dtype: int, log2_span: int = 12, *, without_indices: bool = False) -> RecordSpec:
    return RecordSpec(
        value_dtype, STEP, FORMAT_RICE, log2_span=log2_span, without_indices=without_indices
    )


def room(segments: Segments, spec: RecordSpec) -> torch.Tensor:
    """The buffer of the message, and 32 bytes behind it that nothing may touch."""
    nbytes = ops.rice_capacity(segments.offsets, spec.value_dtype)
    if segments.slots is not None:
        nbytes = int(segments.slots[-1])
    return torch.full((nbytes + 32,), FILL, dtype=torch.uint8)


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.equal(got.cpu().view(torch.uint8), wanted.view(torch.uint8))


def compare(
    place: Place, grad_N: torch.Tensor, pruning: Pruning, segments: Segments, spec: RecordSpec
) -> torch.Tensor:
    """Prunes and encodes on the CPU and on the device; returns the message. Changes nothing."""
    wanted_rest, got_rest = pruning.residual_N.clone(), place(pruning.residual_N, 3)
    out, got = room(segments, spec), place(room(segments, spec))
    sizes, nnz = ops.rice_prune_encode(
        grad_N, replace(pruning, residual_N=wanted_rest), segments, spec, out[:-32]
    )
    chances_R, grad = pruning.tie_chances_R, place(grad_N, 1)
    there = replace(
        pruning,
        residual_N=got_rest,
        thresholds_R=place(pruning.thresholds_R),
        tie_chances_R=None if chances_R is None else place(chances_R),
    )
    got_sizes, got_nnz = ops.rice_prune_encode(grad, there, segments, spec, got[:-32])
    if segments.slots is None:
        assert_same_message(got, got_sizes, out, sizes)
    else:
        assert got_sizes.tolist() == sizes.tolist()
        assert torch.equal(got.cpu(), out)
    assert got_nnz.tolist() == nnz.tolist()
    assert same_bits(got_rest, wanted_rest)
    assert same_bits(grad, grad_N), "only read"
    return out


def pruning_of(
    residual_N: torch.Tensor, threshold: float, leak: float = 1.0, key: int = -1
) -> Pruning:
    whole = torch.tensor([0, residual_N.numel()])
    return Pruning(residual_N, whole, torch.tensor([threshold]), leak, key)


def hard_pruning(dtype: torch.dtype, key: int, seed: int) -> Pruning:
    """Ranges end inside tiles and segments; one keeps all, -0.0 and NaN too, one nothing finite."""
    generator = torch.Generator().manual_seed(seed)
    residual_N = (torch.randn(NUMEL, generator=generator) * 0.5).to(dtype)
    residual_N[::97], residual_N[1::5] = -0.0, 0
    ranges = torch.tensor([0, 3000, 3000, 8191, 8300, 16000, NUMEL])
    thresholds_R = torch.tensor([1.5, 0.0, 1.2, -1.0, math.inf, 2.0])
    chances_R = torch.tensor([0.4, 1.0, 0.5, 0.5, 0.5, 0.1])
    return Pruning(residual_N, ranges, thresholds_R, 0.9, key, tie_chances_R=chances_R)


def hard_gradient(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Special values, and ties in the first range."""
    grad_N = gradient(NUMEL, 1.0, dtype, seed=seed)
    grad_N[::97], grad_N[1::5] = -0.0, 1.5
    return grad_N


@value_dtypes
@pytest.mark.parametrize(
    ("dtype", "residual_dtype", "key"),
    [
        (torch.float32, torch.float32, KEY),
        (torch.float32, torch.bfloat16, -1),
        (torch.bfloat16, torch.float32, -1),
        (torch.bfloat16, torch.bfloat16, KEY),
        (torch.float16, torch.bfloat16, KEY),
    ],
    ids=str,
)
def test_prune_encode(
    place: Place, value_dtype: int, dtype: torch.dtype, residual_dtype: torch.dtype, key: int
) -> None:
    """Special values, ties, ranges that end anywhere, kept and tiny segments."""
    grad_N, pruning = hard_gradient(dtype, value_dtype), hard_pruning(residual_dtype, key, 9)
    spec = spec_of(value_dtype, 12 + value_dtype % 3)
    compare(place, grad_N, pruning, Segments(OFFSETS, KEEP), spec)


@value_dtypes
def test_densities_and_spans(place: Place, value_dtype: int) -> None:
    """From no entry to all of them, in chunks of one tile, of some, and of all."""
    grad_N = torch.randn(NUMEL, generator=torch.Generator().manual_seed(value_dtype))
    ordered = grad_N.abs().sort().values
    segments = Segments(torch.tensor([0, 200, NUMEL]), torch.zeros(2, dtype=torch.uint8))
    for i, kept in enumerate((0, 1, 129, 230, 1160, 11_000, NUMEL)):
        threshold = -1.0 if kept == NUMEL else float(ordered[NUMEL - kept - 1])
        spec = spec_of(value_dtype, (12, 14, 24)[(i + value_dtype) % 3])
        compare(place, grad_N, pruning_of(torch.zeros(NUMEL), threshold), segments, spec)


@pytest.mark.parametrize("value_dtype", [0, 4, 5], ids=["fp32", "q4", "q3"])
def test_entries_that_lie_together(place: Place, value_dtype: int) -> None:
    """A gap whose unary code has more words than a warp has lanes, and one entry at the end."""
    grad_N = torch.zeros(50_000)
    grad_N[:5000] = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    grad_N[-1] = 3.0
    segments = Segments(torch.tensor([0, 50_000]), torch.zeros(1, dtype=torch.uint8))
    compare(place, grad_N, pruning_of(torch.zeros(50_000), 0.0), segments, spec_of(value_dtype, 17))


def base_of(group: torch.Tensor, spec: RecordSpec) -> int:
    """The bits of the base of a group's levels."""
    segments = Segments(torch.tensor([0, group.numel()]), torch.zeros(1, dtype=torch.uint8))
    out = room(segments, spec)
    ops.rice_encode(group, segments, spec, out)
    words = out[HEADER_BYTES + 16 + 16 :]  # behind sub-header and table
    return int(words[:4].clone().view(torch.int32)) >> 16


@pytest.mark.parametrize("value_dtype", [5, 6], ids=["q3", "q2"])
def test_the_mean_is_added_up_in_the_order_of_the_format(place: Place, value_dtype: int) -> None:
    """Groups whose base changes with the last bit of the sum."""
    spec = spec_of(value_dtype)
    group = torch.rand(128, generator=torch.Generator().manual_seed(value_dtype)) * 0.25 + 1
    bits = group.view(torch.int32)
    low, high = (int(torch.tensor(x).view(torch.int32)) for x in (32.0, 64.0))
    bits[77] = low
    first = base_of(group, spec)
    while high - low > 1:
        bits[77] = middle = (low + high) // 2
        low, high = (middle, high) if base_of(group, spec) == first else (low, middle)
    bits_GK = bits.repeat(33, 1)
    bits_GK[:, 77] = torch.arange(low - 16, low + 17)
    grad_N = bits_GK.view(torch.float32).flatten()
    offsets = torch.arange(34) * 128
    segments = Segments(offsets, torch.zeros(33, dtype=torch.uint8))
    compare(place, grad_N, pruning_of(torch.zeros(33 * 128), 0.0), segments, spec)


@pytest.mark.parametrize("value_dtype", [3, 4], ids=["q8", "q4"])
def test_without_indices(place: Place, value_dtype: int) -> None:
    """Also of elements that are not selected, with what is left of their residual."""
    for residual_dtype, key, span in ((torch.float32, -1, 12), (torch.bfloat16, KEY, 13)):
        spec = spec_of(value_dtype, span, without_indices=True)
        pruning, segments = hard_pruning(residual_dtype, key, 4), Segments(OFFSETS, KEEP)
        compare(place, hard_gradient(torch.float32, 5), pruning, segments, spec)
        compare(
            place, torch.randn(NUMEL), pruning_of(pruning.residual_N, -1.0, key=key), segments, spec
        )


def slots_of(segments: Segments, capacity_S: torch.Tensor, spec: RecordSpec) -> torch.Tensor:
    return Slots.of(
        segments.offsets,
        segments.dense,
        capacity_S,
        spec.value_dtype,
        spec.record_format,
        spec.log2_span,
        without_indices=spec.without_indices,
    ).offsets


@value_dtypes
@pytest.mark.parametrize("special", [False, True])
def test_capacity_and_slots(place: Place, value_dtype: int, special: bool) -> None:
    """Segments that send less than they have, one of them nothing; with NaN among the rest."""
    spec = spec_of(value_dtype, 13)
    if special:
        grad_N, pruning = hard_gradient(torch.float32, 7), hard_pruning(torch.bfloat16, KEY, 8)
    else:
        grad_N, pruning = torch.randn(NUMEL), pruning_of(torch.randn(NUMEL), 1.0, leak=0.9)
    capacity_S = torch.tensor([0, 1, 300, 4903, 2500, 0])
    pruning = replace(pruning, capacity_S=capacity_S)
    segments = Segments(OFFSETS, KEEP)
    compare(place, grad_N, pruning, segments, spec)
    slots = slots_of(segments, capacity_S, spec)
    compare(place, grad_N, pruning, Segments(OFFSETS, KEEP, slots), spec)


@pytest.mark.parametrize(
    ("value_dtype", "with_residual"),
    [*((code, False) for code in DTYPES.values()), *((code, True) for code in RICE_BITS)],
)
def test_encoding_what_is_pruned_already(
    place: Place, value_dtype: int, with_residual: bool
) -> None:
    """`rice_encode`: sums, whose quantisation error stays with their owner."""
    segments, spec = Segments(OFFSETS, KEEP), spec_of(value_dtype, 12 + value_dtype % 3)
    for dtype in DTYPE_CODES:
        values_N = gradient(NUMEL, 0.2, dtype, seed=value_dtype)
        residual_N = torch.randn(NUMEL) if with_residual else None
        got_rest = None if residual_N is None else place(residual_N, 2)
        for given in (segments, Segments(OFFSETS, KEEP, whole_slots(spec))):
            out, got = room(given, spec), place(room(given, spec))
            sizes, nnz = ops.rice_encode(values_N, given, spec, out[:-32], residual_N=residual_N)
            got_sizes, got_nnz = ops.rice_encode(
                place(values_N, 3), given, spec, got[:-32], residual_N=got_rest
            )
            assert (got_sizes.tolist(), got_nnz.tolist()) == (sizes.tolist(), nnz.tolist())
            if given.slots is None:
                assert_same_message(got, got_sizes, out, sizes)
            else:
                assert torch.equal(got.cpu(), out)
            if got_rest is not None and residual_N is not None:
                assert same_bits(got_rest, residual_N)


def whole_slots(spec: RecordSpec) -> torch.Tensor:
    return slots_of(Segments(OFFSETS, KEEP), OFFSETS.diff(), spec)


def test_the_report_comes_later(place: Place) -> None:
    """With `reports` sizes and counts stay on the device, and errors wait for `read`."""
    segments, spec = Segments(OFFSETS, KEEP), spec_of(4)
    values_N, reports = gradient(NUMEL, 0.1, torch.float32), Reports()
    out = place(room(segments, spec))
    sizes, nnz = ops.rice_encode(place(values_N), segments, spec, out, reports=reports)
    reports.read()
    assert sizes.device.type == nnz.device.type == "cuda"
    assert nnz.tolist() == [int((values_N[a:b] != 0).sum()) for a, b in pairwise(OFFSETS.tolist())]
    ops.rice_encode(place(values_N), segments, spec, out[:1024], reports=reports)
    with pytest.raises(ExtensionError, match="the output buffer is too small"):
        reports.read()


def test_in_capacity_mode_the_host_does_not_wait(place: Place) -> None:
    not_waiting = sync_debug_error if place is to_gpu else torch_sync_debug_error
    spec, capacity_S = spec_of(4, 13), torch.full((6,), 5000)
    segments = Segments(OFFSETS, KEEP, slots_of(Segments(OFFSETS, KEEP), capacity_S, spec))
    grad = place(gradient(NUMEL, 0.1, torch.float32))
    out = place(room(segments, spec))[:-32]
    pruning = replace(
        pruning_of(place(torch.zeros(NUMEL)), 1.0),
        thresholds_R=place(torch.ones(1)),
        capacity_S=capacity_S,
    )
    for waits in (nullcontext, not_waiting):  # in the first call torch itself may wait
        reports = Reports()
        with waits():
            ops.rice_prune_encode(grad, pruning, segments, spec, out, reports=reports)
            ops.rice_encode(grad, segments, spec, out, reports=reports)
        reports.read()


BAD_SPECS = {
    "value_dtype is unknown": {"value_dtype": 7},
    "log2_span is out of range": {"log2_span": 11},
    "a value of every element needs other values": {"value_dtype": 5, "without_indices": True},
    "step is out of range": {"step": -1},
}


@pytest.mark.parametrize("problem", BAD_SPECS)
def test_a_refused_spec_changes_nothing(place: Place, problem: str) -> None:
    spec = replace(spec_of(4), **BAD_SPECS[problem])
    residual = place(torch.full((8,), 0.5))
    pruning = replace(pruning_of(residual, 0.0), thresholds_R=place(torch.zeros(1)))
    segments = Segments(torch.tensor([0, 8]), torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ExtensionError, match=problem):
        ops.rice_prune_encode(
            place(torch.ones(8)), pruning, segments, spec, place(room(segments, spec_of(4)))
        )
    assert bool((residual.cpu() == 0.5).all())


def test_too_little_room_is_refused_before_the_residual_changes(place: Place) -> None:
    residual, grad = place(torch.full((NUMEL,), 0.5)), place(torch.ones(NUMEL))
    pruning = replace(pruning_of(residual, 0.0), thresholds_R=place(torch.zeros(1)))
    segments, spec = Segments(OFFSETS, KEEP), spec_of(4)
    small = place(torch.zeros(4096, dtype=torch.uint8))
    with pytest.raises(ExtensionError, match="the output buffer is too small"):
        ops.rice_prune_encode(grad, pruning, segments, spec, small)
    with pytest.raises(ExtensionError, match="the output buffer is too small"):
        ops.rice_encode(grad, segments, spec, small, residual_N=residual)
    slots = whole_slots(spec).clone()
    slots[5:] -= 16
    tight = Segments(OFFSETS, KEEP, slots)
    with pytest.raises(ExtensionError, match="the slot of segment 4 is too small"):
        ops.rice_prune_encode(grad, pruning, tight, spec, place(room(tight, spec)))
    with pytest.raises(ExtensionError, match="capacity is out of range"):
        ops.rice_prune_encode(
            grad,
            replace(pruning, capacity_S=torch.full((6,), -1)),
            segments,
            spec,
            place(room(segments, spec)),
        )
    with pytest.raises(ExtensionError, match="scratch is not used on CUDA"):
        ops.rice_encode(grad, segments, spec, place(room(segments, spec)), torch.zeros(8))
    assert bool((residual.cpu() == 0.5).all())
    tiny = slots_of(Segments(OFFSETS, KEEP), torch.ones(6, dtype=torch.int64), spec)
    with pytest.raises(ExtensionError, match="the slot of segment 2 is too small"):
        ops.rice_encode(
            grad, Segments(OFFSETS, KEEP, tiny), spec, place(torch.zeros(int(tiny[-1])).byte())
        )


def test_an_empty_bucket(place: Place) -> None:
    nothing, offsets = torch.zeros(0), torch.tensor([0])
    segments = Segments(offsets, torch.zeros(0, dtype=torch.uint8))
    out = place(torch.full((16,), FILL, dtype=torch.uint8))
    pruning = Pruning(place(nothing), offsets, place(nothing), 1.0, 1)
    for result in (
        ops.rice_encode(place(nothing), segments, spec_of(4), out),
        ops.rice_prune_encode(place(nothing), pruning, segments, spec_of(4), out),
    ):
        assert [each.tolist() for each in result] == [[], []]
    assert bool((out == FILL).all())


def test_a_raw_record_that_is_not_smaller_is_dense(place: Place) -> None:
    segments, spec = (
        Segments(torch.tensor([0, 9000]), torch.zeros(1, dtype=torch.uint8)),
        spec_of(0),
    )
    for threshold, wanted in ((-1.0, FORMAT_DENSE), (1.0, FORMAT_RICE)):
        grad_N = torch.randn(9000, generator=torch.Generator().manual_seed(1))
        out = compare(place, grad_N, pruning_of(torch.zeros(9000), threshold), segments, spec)
        assert out[5] == wanted


@pytest.mark.parametrize(
    "schedule", [(IN_ORDER, 0, 4), (REVERSED, 0, 4), (RANDOM, 1, 3), (RANDOM, 2, 8)], ids=str
)
@pytest.mark.parametrize("value_dtype", [1, 4, 6], ids=["bf16", "q4", "q2"])
def test_the_bytes_do_not_depend_on_the_schedule(
    emulated_gpu: EmulatedDevice, codecs: Codecs, value_dtype: int, schedule: tuple[int, int, int]
) -> None:
    """More chunks than resident blocks, so that look-back meets every state."""
    codecs.schedule(*schedule, multiprocessors=2)
    numel = 62_000
    segments = Segments(torch.tensor([0, 30_001, numel]), torch.zeros(2, dtype=torch.uint8))
    grad_N = gradient(numel, 1.0, torch.float32, seed=3)
    pruning = pruning_of(torch.zeros(numel), 2.0, key=KEY)
    compare(emulated_gpu.place, grad_N, pruning, segments, spec_of(value_dtype))
