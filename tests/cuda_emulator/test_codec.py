"""Messages made on CUDA tensors: the oracle's bytes, residuals and counts, on a GPU and emulated.

The same tests run on a GPU, if there is one, and in the emulator. `place` puts a tensor there.
`tests/formats/test_codec.py` compares the CPU's codec with the same oracle.
"""

import math
import random
from dataclasses import replace

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Pruning, RecordSpec, Segments
from megatron_sparse.errors import ExtensionError
from megatron_sparse.reference import prune as prune_oracle
from megatron_sparse.wire import FORMAT_RICE, HEADER_BYTES
from tests.codec import (
    FORMS,
    KEY,
    ORACLE,
    POISON,
    RICE_NAMES,
    RICE_TYPES,
    SLOTTED,
    STEP,
    Case,
    Ops,
    check,
    check_densities,
    pruned_already,
    pruning_of,
    rice_dtypes,
    rice_spec,
    segments_of,
    spec_of,
)
from tests.cuda_emulator.device import Place, to_gpu
from tests.cuda_emulator.emulator import (
    BLOCKS,
    COO,
    RANDOM,
    SCHEDULES,
    EmulatedDevice,
    Emulator,
)
from tests.cuda_ext import cases
from tests.cuda_ext.cases import scattered_grad as gradient

# Empty, one element, a tile and one more, a tile and three less, a kept one, another end.
SEGMENTS = segments_of([0, 0, 1, 4098, 8191, 8300, 9001], [0, 0, 0, 0, 1, 0])
NUMEL = 9001
# The same with some more tiles, in which a chunk of Rice ends anywhere.
LONG = segments_of([0, 0, 1, 4098, 9001, 23_001, 23_200], [0, 0, 0, 1, 0, 0])
TYPES = [
    (grad, residual, code, key)
    for grad in cases.DTYPES
    for residual in cases.RESIDUAL_DTYPES
    for code in range(3)
    for key in (-1, KEY)
]
RICE_CASES = [(*types, key) for types, key in zip(RICE_TYPES, (KEY, -1, -1, KEY, KEY), strict=True)]
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


@pytest.fixture
def device(place: Place) -> Ops:
    """The codec of the device."""
    return Ops("CUDA", place)


def hard_case(
    dtype: torch.dtype, residual_dtype: torch.dtype, key: int, spec: RecordSpec, *, seed: int = 0
) -> Case:
    """Ranges end inside tiles and segments; one keeps all, -0.0 and NaN too, one nothing finite.

    A fifth of the first and the third range ties.
    """
    segments = LONG if spec.record_format == FORMAT_RICE else SEGMENTS
    numel = int(segments.offsets[-1])
    grad_N = gradient(numel, 1.0, dtype, seed)
    residual_N = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.5
    grad_N[::97], residual_N[::97] = -0.0, -0.0
    grad_N[1::5], residual_N[1::5] = 1.5, 0
    ranges = torch.tensor([0, 3000, 3000, 8191, 8300, 8700, numel])
    thresholds_R = torch.tensor([1.5, 0.0, 1.5, -1.0, math.inf, 2.0])
    chances_R = torch.tensor([0.4, 1.0, 0.5, 0.5, 0.5, 0.1]) if seed % 3 else None
    pruning = Pruning(
        residual_N.to(residual_dtype), ranges, thresholds_R, 0.9, key, tie_chances_R=chances_R
    )
    return Case(grad_N, segments, spec, pruning, what=seed)


@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_encode(device: Ops, form: str, density: float) -> None:
    """Every pair of gradient and wire dtype, over the formats and densities."""
    turn = list(FORMS).index(form) + int(10 * density)
    dtype, code = cases.DTYPES[turn % 3], (turn // 3 + turn) % 3
    check(Case(gradient(NUMEL, density, dtype, turn), SEGMENTS, spec_of(code, form)), device)


@pytest.mark.parametrize("code", range(3))
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_encode_every_pair_of_dtypes(device: Ops, dtype: torch.dtype, code: int) -> None:
    grad_N, segments = gradient(2600, 0.1, dtype, code), segments_of([0, 2501, 2600])
    for form in FORMS:
        check(Case(grad_N, segments, spec_of(code, form)), device)


@pytest.mark.parametrize("block_size", [64, 256, 1024, 4096])
def test_block_sizes(device: Ops, block_size: int) -> None:
    values_N = torch.zeros(9000)
    values_N[[0, 63, 64, 1025, 4095, 8999]] = 1.5
    spec = replace(spec_of(0, "blocks64"), block_size=block_size)
    check(Case(values_N, segments_of([0, 9000]), spec), device)


@pytest.mark.parametrize(("dtype", "residual_dtype", "code", "key"), TYPES, ids=str)
def test_prune_encode(
    device: Ops, dtype: torch.dtype, residual_dtype: torch.dtype, code: int, key: int
) -> None:
    number = TYPES.index((dtype, residual_dtype, code, key))
    form = list(FORMS)[number % len(FORMS)]
    check(hard_case(dtype, residual_dtype, key, spec_of(code, form), seed=number), device)


@rice_dtypes
@pytest.mark.parametrize(("dtype", "residual_dtype", "key"), RICE_CASES, ids=str)
def test_prune_encode_to_rice(
    device: Ops, value_dtype: int, dtype: torch.dtype, residual_dtype: torch.dtype, key: int
) -> None:
    spec = rice_spec(value_dtype, 12 + value_dtype % 3)
    check(hard_case(dtype, residual_dtype, key, spec, seed=value_dtype + 1), device)


@rice_dtypes
def test_densities_and_spans(device: Ops, value_dtype: int) -> None:
    """From no entry to all of them, in chunks of one tile, of two, of some, and of all."""
    grad_N = torch.randn(23_200, generator=torch.Generator().manual_seed(value_dtype))
    segments, counts = segments_of([0, 200, 23_200]), (0, 1, 129, 230, 1160, 11_000, 23_200)
    nothing = torch.zeros(23_200)
    check_densities(grad_N, nothing, segments, counts, (12, 13, 14, 24), value_dtype, device)


@pytest.mark.parametrize(
    ("together", "numel", "value_dtype"),
    [(5000, 50_000, 5), (12_000, 33_000, 4), (24_000, 84_000, 0)],
)
def test_entries_that_lie_together(
    device: Ops, together: int, numel: int, value_dtype: int
) -> None:
    """More entries than a block lists at a time, then a gap, and one entry at the end.

    The unary code of the second and the third gap is longer than the block's window.
    """
    grad_N = torch.zeros(numel)
    grad_N[:together] = torch.randn(together, generator=torch.Generator().manual_seed(1))
    grad_N[-1] = 3.0
    pruning = pruning_of(torch.zeros(numel), 0.0)
    check(Case(grad_N, segments_of([0, numel]), rice_spec(value_dtype, 17), pruning), device)


def base_of(group: torch.Tensor, spec: RecordSpec) -> int:
    """The bits of the base of a group's levels."""
    record = ORACLE.encode(Case(group, segments_of([0, group.numel()]), spec)).bytes
    at = HEADER_BYTES + 16 + 16  # behind sub-header and table
    return int.from_bytes(record[at + 2 : at + 4], "little", signed=True)


@pytest.mark.parametrize("value_dtype", [5, 6], ids=RICE_NAMES.get)
def test_the_mean_is_added_up_in_the_order_of_the_format(device: Ops, value_dtype: int) -> None:
    """Groups whose base changes with the last bit of the sum."""
    spec = rice_spec(value_dtype)
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
    pruning = pruning_of(torch.zeros(33 * 128), 0.0)
    check(Case(grad_N, segments_of(torch.arange(34) * 128), spec, pruning), device)


# Gradients begin one element behind a border, residuals three: some segment of each lies on one.
ALIGNED = segments_of([0, 3, 4501, 13_003, 23_200], [0, 0, 0, 1])


@pytest.mark.parametrize("value_dtype", [3, 4], ids=RICE_NAMES.get)
@pytest.mark.parametrize(("dtype", "residual_dtype", "key"), RICE_CASES, ids=str)
def test_without_indices(
    device: Ops, value_dtype: int, dtype: torch.dtype, residual_dtype: torch.dtype, key: int
) -> None:
    """Also of elements that are not selected, with what is left of their residual."""
    spec = rice_spec(value_dtype, 12 + (key > 0), without_indices=True)
    case = hard_case(dtype, residual_dtype, key, spec, seed=4)
    check(case, device)
    assert case.pruning is not None
    whole = pruning_of(case.pruning.residual_N, -1.0, key=key)
    case = replace(case, grad_N=torch.randn(case.numel).to(dtype), pruning=whole, segments=ALIGNED)
    check(case, device)
    limit = replace(whole, capacity_S=ALIGNED.offsets.diff())
    check(replace(case, pruning=limit).with_slots(), device)


@pytest.mark.parametrize("value_dtype", [3, 4], ids=RICE_NAMES.get)
@pytest.mark.parametrize("segments", [LONG, ALIGNED], ids=["unaligned", "aligned"])
def test_sums_without_indices(device: Ops, value_dtype: int, segments: Segments) -> None:
    spec = rice_spec(value_dtype, 13, without_indices=True)
    for dtype in cases.DTYPES:
        values_N = gradient(23_200, 0.9, dtype, value_dtype) + 0.0  # a dense record has no -0.0
        for residual_N in (None, torch.randn(23_200)):
            check(Case(values_N, segments, spec, residual_N=residual_N, what=dtype), device)


@pruned_already
def test_encoding_what_is_pruned_already(
    device: Ops, value_dtype: int, with_residual: bool
) -> None:
    """`encode`: sums, whose quantisation error stays with their owner; packed and in slots."""
    for dtype in cases.DTYPES:
        values_N = gradient(23_200, 0.2, dtype, value_dtype) + 0.0  # a dense record has no -0.0
        residual_N = torch.randn(23_200) if with_residual else None
        spec = rice_spec(value_dtype, 12 + value_dtype % 3)
        case = Case(values_N, LONG, spec, residual_N=residual_N, what=dtype)
        check(case, device)
        check(case.with_slots(), device)


LIMITS = {
    "none stay": [0, 0, 0, 0, 0, 0],
    "some": [0, 1, 700, 4093, 50, 3],
    "a tile": [0, 1, 4096, 1, 109, 400],
    "all": SEGMENTS.offsets.diff().tolist(),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("key", [-1, KEY])
@pytest.mark.parametrize("residual_dtype", cases.RESIDUAL_DTYPES)
@pytest.mark.parametrize("code", range(3))
def test_capacity(
    device: Ops, code: int, residual_dtype: torch.dtype, key: int, limit: str
) -> None:
    number = 4 * code + 2 * (key < 0) + list(LIMITS).index(limit)
    spec = spec_of(code, SLOTTED[number % len(SLOTTED)])
    case = hard_case(cases.DTYPES[number % 3], residual_dtype, key, spec, seed=number)
    assert case.pruning is not None
    pruning = replace(case.pruning, capacity_S=torch.tensor(LIMITS[limit]))
    check(replace(case, pruning=pruning).with_slots(), device)


@rice_dtypes
@pytest.mark.parametrize("special", [False, True])
def test_capacity_of_rice(device: Ops, value_dtype: int, special: bool) -> None:
    """Segments that send less than they have, one of them nothing; with NaN among the rest."""
    case = hard_case(torch.float32, torch.bfloat16, KEY, rice_spec(value_dtype, 13), seed=8)
    pruning = case.pruning if special else pruning_of(torch.randn(case.numel), 1.0, leak=0.9)
    assert pruning is not None
    pruning = replace(pruning, capacity_S=torch.tensor([0, 1, 300, 4903, 2500, 0]))
    grad_N = case.grad_N if special else torch.randn(case.numel)
    case = replace(case, grad_N=grad_N, pruning=pruning)
    check(case, device)
    check(case.with_slots(), device)


@pytest.mark.parametrize("schedule", SCHEDULES[1:3], ids=str)
def test_more_segments_than_threads(
    emulated_gpu: EmulatedDevice, emulator: Emulator, schedule: tuple[int, int, int]
) -> None:
    """Tables are built 256 segments at a time."""
    emulator.schedule(*schedule)
    chance, offsets = random.Random(5), [0]
    for _ in range(600):
        offsets.append(offsets[-1] + chance.choice([0, 1, 16, 33]))
    segments = segments_of(offsets, [chance.randrange(3) // 2 for _ in range(600)])
    for form in ("coo", "adaptive"):
        grad_N = gradient(offsets[-1], 0.1, torch.float32)
        check(Case(grad_N, segments, spec_of(0, form)), Ops("CUDA", emulated_gpu.place))


def test_too_little_room_leaves_the_buffer_alone(place: Place) -> None:
    case = Case(gradient(9000, 0.1, torch.float32), segments_of([0, 5000, 9000]), spec_of(0))
    # One byte short; and so short that not even the values fit the scratch memory.
    for room in (len(ORACLE.encode(case).bytes) - 1, 400):
        out = place(torch.full((room,), POISON, dtype=torch.uint8))
        with pytest.raises(ExtensionError, match="the output buffer is too small"):
            ops.encode(place(case.grad_N), case.segments, None, case.spec, out)
        assert bool((out == POISON).all())


@pytest.mark.parametrize(
    ("segments", "kinds", "status"),
    [
        ([0, 50, 99], [COO, COO], [2, 1, 99, 100]),
        ([1, 50, 100], [COO, COO], [2, 0, 50, 100]),
        ([0, 60, 50, 100], [COO] * 3, [2, 1, 50, 100]),
        ([0, 200, 100], [COO] * 2, [2, 0, 200, 100]),
        ([0, 50, 100], [COO, 9], [3, 1, 9, 0]),
        ([0, 50, 100], [COO, BLOCKS], [3, 1, BLOCKS, 0]),  # no block size was given
    ],
)
def test_wrong_segments_are_reported(
    emulator: Emulator, segments: list[int], kinds: list[int], status: list[int]
) -> None:
    """What the typed op rules out, the kernels find too."""
    emulator.schedule(0)
    out = to_gpu(torch.zeros(40_000, dtype=torch.uint8))
    tables = to_gpu(torch.tensor(segments)), to_gpu(torch.tensor(kinds, dtype=torch.uint8))
    grad = to_gpu(gradient(100, 0.5, torch.float32))
    report = emulator.call("encode", grad, *tables, 0, STEP, 0, 0, False, out).tolist()
    assert report[: 4 + len(kinds)] == status + [0] * len(kinds)


SCHEDULED = {form: spec_of(number % 3, form) for number, form in enumerate(FORMS)} | {
    RICE_NAMES[code]: rice_spec(code) for code in (1, 4, 6)
}


@schedules
@pytest.mark.parametrize("name", SCHEDULED)
def test_the_bytes_do_not_depend_on_the_schedule(
    emulated_gpu: EmulatedDevice, emulator: Emulator, name: str, schedule: tuple[int, int, int]
) -> None:
    """More tiles than resident blocks, so that look-back meets every state.

    Empty, one element, exact and partial tiles, starts that no vector is aligned to.
    """
    emulator.schedule(*schedule, multiprocessors=2)
    numel = 40_000
    segments = segments_of([0, 0, 1, 4097, 8196, 12_293, 20_063, numel], [0, 0, 0, 0, 0, 1, 0])
    if name in FORMS:
        case = Case(gradient(numel, 0.1, torch.bfloat16), segments, SCHEDULED[name])
    else:
        pruning = pruning_of(torch.zeros(numel), 2.0, key=KEY)
        grad_N = gradient(numel, 1.0, torch.float32, seed=3)
        grad_N[-1] = math.inf  # a limit takes it back
        case = Case(grad_N, segments, SCHEDULED[name], pruning)
        capacity_S = segments.offsets.diff()
        capacity_S[::2] //= 50
        limited = replace(case, pruning=replace(pruning, capacity_S=capacity_S))
        check(limited, Ops("CUDA", emulated_gpu.place))
    check(case, Ops("CUDA", emulated_gpu.place))


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_of_every_kind_follow_each_other(
    emulated_gpu: EmulatedDevice, emulator: Emulator, dtype: torch.dtype, resident: int
) -> None:
    """Whole or partial, of one range or two: a tile's warps load the elements of the next one."""
    emulator.schedule(RANDOM, 3, resident)
    segments = segments_of([0, 8192, 8200, 20_488, 24_000, 28_096, 28_100, 36_292])
    numel = 36_292
    grad_N = gradient(numel, 1.0, dtype, seed=4)
    grad_N[8200:16_000] = 0
    residual_N = torch.randn(numel, generator=torch.Generator().manual_seed(5)).to(dtype) * 0.1
    ranges, thresholds_R = torch.tensor([0, 10_000, 22_000, numel]), torch.tensor([0.9, 0.05, 2.0])
    pruning = Pruning(residual_N, ranges, thresholds_R, 0.9, KEY)
    case = Case(grad_N, segments, spec_of(0), pruning)
    check(case, Ops("CUDA", emulated_gpu.place))


@pytest.mark.parametrize("begin", [2**32 - 1000, 2**40 - 4096, 2**33 + 5, 3 * 2**32 - 4090])
def test_pruning_far_into_a_bucket(emulator: Emulator, begin: int) -> None:
    """The random bits depend on the upper half of the index, which may change inside a tile."""
    emulator.schedule(RANDOM, 2)
    length, key, threshold, chance = 4096, 99, 0.75, 0.6
    grad_N = gradient(length, 1.0, torch.float32, seed=begin % 1000)
    residual_N = torch.randn(length, generator=torch.Generator().manual_seed(1)).bfloat16()
    grad_N[::3], residual_N[::3] = 0.5, 0.25
    rest = to_gpu(residual_N)
    found_N = emulator.call("prune_tile", to_gpu(grad_N), rest, begin, threshold, chance, 0.9, key)
    pruning = pruning_of(residual_N, threshold, 0.9, key, chance)
    out_N, wanted_N, _ = prune_oracle.prune(grad_N, pruning, 1, begin)
    cases.assert_same_bits(found_N.cpu(), out_N, "sent")
    cases.assert_same_bits(rest.cpu(), wanted_N, "residual")


@pytest.mark.parametrize("spec", [spec_of(0), rice_spec(4)], ids=["coo", "rice"])
def test_an_empty_bucket(device: Ops, spec: RecordSpec) -> None:
    nothing = Case(torch.zeros(0), segments_of([0]), spec)
    none = Pruning(torch.zeros(0), torch.tensor([0]), torch.zeros(0), 1.0, 1)
    for case in (nothing, replace(nothing, pruning=none)):
        made = device.encode(case)
        assert (made.records, made.nnz) == ([], [])
    device.decode_(torch.zeros(0), b"", nothing.expected())
