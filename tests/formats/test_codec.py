"""The CPU's codec is its oracle, byte for byte, on every instruction set of this machine.

Messages, residuals and counts, of every format: encoded as they are, or pruned in the same pass,
with limits and in slots; decoded from zero and beside what is there. `tests/codec.py` compares.
`tests/cuda_emulator/test_codec.py` has the CUDA codec's cases.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Pruning, RecordSpec
from megatron_sparse.errors import ExtensionError
from tests.codec import (
    CPU,
    FORMS,
    KEY,
    ORACLE,
    QUANTISED,
    RICE,
    RICE_TYPES,
    SLOTTED,
    Case,
    check,
    check_densities,
    decoded,
    on_threads,
    one_nan,
    pruned_already,
    pruning_of,
    rice_dtypes,
    rice_spec,
    segments_of,
    spec_of,
)
from tests.cuda_ext import cases
from tests.cuda_ext.test_prune import check as check_prune

# A part of a tile, a tile and a part of it, a tile, and more than an encoder's chunk of 8 tiles.
SIZES = (0, 1, 15, 16, 17, 64, 65, 4095, 4096, 4097, 33_000)
LARGE = cases.SIZES[-1]
CHUNK = 8 * 4096
TYPES = [
    (torch.float32, torch.float32, 0),
    (torch.float32, torch.bfloat16, 2),
    (torch.float32, torch.float32, 1),
    (torch.bfloat16, torch.bfloat16, 1),
    (torch.bfloat16, torch.float32, 0),
    (torch.bfloat16, torch.float32, 2),
    (torch.float16, torch.bfloat16, 2),
    (torch.float16, torch.float32, 1),
]
SPECS = {
    **{form: spec_of(0, form) for form in FORMS},
    **{f"rice_{name}": rice_spec(code) for name, code in RICE.items()},
}
forms = pytest.mark.parametrize("form", FORMS)


@forms
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_encode(dtype, form):
    """Over the formats, values of each size and kind travel in every dtype."""
    for number, numel in enumerate(SIZES, list(FORMS).index(form)):
        segments = segments_of([0, numel // 3, numel // 3, numel], [0, 0, numel % 2])
        grads = [cases.pruned_grad(numel, p, dtype, seed=numel) for p in (0.0, 0.03, 0.6, 1.0)]
        grads.append(cases.make("special", numel, dtype))  # rounded to nearest even, or to infinity
        for kind, grad_N in enumerate(grads, number):
            check(Case(grad_N, segments, spec_of(kind % 3, form), what=f"{numel} {kind}"))


@forms
def test_clustered_values(form):
    """Runs of values and gaps of many words, tiles and the decoder's chunks of 32 tiles."""
    grad_N = torch.zeros(320_000)
    grad_N[70:90], grad_N[40_000:41_000], grad_N[181_000:181_100] = 1.0, 2.0, 4.0
    grad_N[319_999] = 3.0
    check(Case(grad_N, segments_of([0, 50_001, 320_000]), spec_of(0, form)))


def pruned_case(
    numel: int,
    kind: str,
    types: tuple[torch.dtype, torch.dtype],
    spec: RecordSpec,
    *,
    fifth: bool = False,
    limited: bool = False,
) -> Case:
    """Ranges and segments cut the bucket anywhere, ranges inside segments and across.

    Half of the cases leak, and round to nearest: those that are not `fifth`. Limits are a fifth of
    each segment, or a few elements.
    """
    offsets = cases.cut(numel, 3, seed=numel + 1)
    limits = offsets.diff() // 5 if fifth else torch.tensor([0, 7, 9])
    pruning = Pruning(
        cases.make(kind, numel, types[1], seed=2),
        cases.cut(numel, 5, seed=numel),
        torch.tensor([-1.0, math.inf, 1e-3, 1.0, math.nan]),
        1.0 if fifth else 0.9,
        KEY if fifth else -1,
        limits if limited else None,
        torch.linspace(0.2, 0.9, 5),
    )
    grad_N = cases.make(kind, numel, types[0], seed=1)
    what = f"{kind} {numel} {fifth}"
    return Case(grad_N, segments_of(offsets, [0, 1, 0]), spec, pruning, what=what)


@forms
@pytest.mark.parametrize(("dtype", "residual_dtype", "wire"), TYPES)
def test_prune_encode(dtype, residual_dtype, wire, form):
    for numel in (0, 1, 100, 4097):
        for kind in cases.KINDS:
            for fifth in (False, True):
                types = (dtype, residual_dtype)
                check(pruned_case(numel, kind, types, spec_of(wire, form), fifth=fifth))


@rice_dtypes
@pytest.mark.parametrize(("dtype", "residual_dtype"), RICE_TYPES)
def test_prune_encode_to_rice(value_dtype, dtype, residual_dtype):
    for numel in (0, 1, 63, 64, 4095, 4096, 4097):
        for kind in cases.kinds(numel):
            for fifth in (False, True):
                whole = value_dtype in (3, 4) and not fifth
                for spec in {rice_spec(value_dtype), rice_spec(value_dtype, without_indices=whole)}:
                    check(pruned_case(numel, kind, (dtype, residual_dtype), spec, fifth=fifth))


@rice_dtypes
def test_densities_and_spans(value_dtype):
    """From no entry to all of them; every span meets every density with some dtype."""
    grad_N = cases.make("spread", 70_000, torch.float32, seed=value_dtype)
    residual_N = cases.make("spread", 70_000, torch.float32, seed=100)
    counts = (0, 1, 70, 700, 7000, 35_000, 70_000)
    whole = segments_of([0, 70_000])
    check_densities(grad_N, residual_N, whole, counts, range(12, 19), value_dtype)


CAPACITIES = [
    (0, "zero", False),
    (1, "special", False),
    (100, "special", False),
    (100, "spread", True),
    (4097, "special", True),
    (4097, "spread", False),
    (9000, "spread", True),
]


@forms
@pytest.mark.parametrize(("dtype", "residual_dtype", "wire"), TYPES[:6])
def test_capacity(dtype, residual_dtype, wire, form):
    for numel, kind, fifth in CAPACITIES:
        spec = spec_of(wire, form)
        case = pruned_case(numel, kind, (dtype, residual_dtype), spec, fifth=fifth, limited=True)
        made = check(case.with_slots() if form in SLOTTED else case)
        assert all(
            count <= most for count, most in zip(made.nnz, case.pruning.capacity_S, strict=True)
        )


@rice_dtypes
@pytest.mark.parametrize("in_slots", [False, True])
def test_capacity_of_rice(value_dtype, in_slots):
    for numel, kind, fifth in CAPACITIES:
        types, spec = (torch.float32, torch.float32), rice_spec(value_dtype)
        case = pruned_case(numel, kind, types, spec, fifth=fifth, limited=True)
        check(case.with_slots() if in_slots else case)


@forms
def test_enough_capacity_changes_no_byte(form):
    grad_N = cases.make("spread", 5000, torch.float32, seed=5)
    pruning = pruning_of(torch.zeros(5000), 1e-2, key=KEY)
    case = Case(grad_N, segments_of([0, 4500, 5000]), spec_of(0, form), pruning)
    made = check(case)
    for more in (0, 5):
        limits = replace(pruning, capacity_S=torch.tensor(made.nnz) + more)
        limited = check(replace(case, pruning=limits))
        assert limited.records == made.records
        assert torch.equal(limited.residual_N, made.residual_N)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_infinity_and_nan_are_not_held_back(poison):
    grad_N = torch.arange(1.0, 101)
    grad_N[90] = poison
    for most in (0, 3):
        pruning = replace(pruning_of(torch.zeros(100), 0.5), capacity_S=torch.tensor([most]))
        case = Case(grad_N, segments_of([0, 100]), spec_of(0), pruning)
        made = check(case)
        assert bool(decoded(CPU[-1], made.bytes, case)[2].isnan()) == (most == 3)
        assert bool(made.residual_N[90].isnan()) == (most == 0)
        assert torch.equal(made.residual_N[91:], grad_N[91:])


@pytest.mark.parametrize("form", ["coo", "linear"])
def test_overflow_in_any_chunk_with_any_number_of_threads(form):
    numel = 3 * CHUNK + 100
    grad_N, residual_N = (cases.make("spread", numel, torch.float32, seed=s) for s in (3, 4))
    segments = segments_of([0, 3 * CHUNK, numel])
    # The first and the last value of the first chunk, a border of chunks, the last chunk.
    for number, most in enumerate((0, 1, CHUNK // 4, 3 * CHUNK // 2, 3 * CHUNK)):
        pruning = replace(pruning_of(residual_N, 1.0, key=KEY), capacity_S=torch.tensor([most, 3]))
        case = Case(grad_N, segments, spec_of(0, form), pruning, what=most).with_slots()
        with on_threads(1 + number % 2):
            made = check(case)
        # Leak 1, fp32: nothing is lost, to the bit.
        sent_N = decoded(CPU[-1], made.message(case), case)
        assert torch.equal(sent_N + made.residual_N, grad_N + residual_N)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=150),
    st.floats(-1, 2.0**126, width=32),
    st.integers(1, 4),
    st.integers(0, 60),
    st.sampled_from(["coo", "linear", "paper", "adaptive", "dense"]),
)
@settings(max_examples=100)
def test_nothing_is_lost(values, threshold, pieces, most, form):
    grad_N, residual_N = torch.tensor(values) / 4, torch.tensor(values[::-1]) / 4
    segments = segments_of(cases.cut(len(values), pieces, seed=len(values)))
    pruning = replace(pruning_of(residual_N, threshold), capacity_S=torch.full((pieces,), most))
    case = Case(grad_N, segments, spec_of(0, form), pruning).with_slots()
    made = check(case)
    sent_N = decoded(ORACLE, made.bytes, replace(case, segments=segments))
    assert torch.equal(sent_N + made.residual_N, grad_N + residual_N)


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_the_bytes_do_not_depend_on_the_thread_count(name, pruned):
    spec, segments = SPECS[name], segments_of(cases.cut(LARGE, 3), [0, 0, 1])
    grad_N, pruning = cases.pruned_grad(LARGE, 0.1, torch.float32), None
    if pruned:
        grad_N, residual_N = (cases.make("spread", LARGE, torch.float32, seed=s) for s in (3, 4))
        thresholds_R = torch.rand(40, generator=torch.Generator().manual_seed(0)) * 100
        pruning = Pruning(residual_N, cases.cut(LARGE, 40), thresholds_R, 1.0, KEY)
    for threads in (1, 3):
        with on_threads(threads):
            check(Case(grad_N + 0.0, segments, spec, pruning, what=f"{threads} threads"))


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=200),
    st.sampled_from(cases.DTYPES),
    st.sampled_from(cases.RESIDUAL_DTYPES),
    st.integers(0, 2),
    st.floats(-1, 2.0**126, width=32),
    st.floats(0, 1, width=32),
    st.sampled_from([1.0, 0.9]),
    st.integers(-1, 2**63 - 1),
    st.integers(1, 4),
    st.integers(0, 15),
    st.sampled_from(list(SPECS)),
)
@settings(max_examples=300)
def test_any_floats(
    values, dtype, residual_dtype, wire, threshold, chance, leak, key, pieces, dense, name
):
    """Also `prune_` and `encode` themselves."""
    grad_N = torch.tensor(values).to(dtype)
    residual_N = torch.tensor(values[::-1]).to(residual_dtype)
    if threshold < 1:  # every second time it is one of the magnitudes
        threshold = float((grad_N.float() + residual_N.float())[0].abs())
    offsets = cases.cut(len(values), pieces, seed=len(values))
    segments = segments_of(offsets, [dense >> s & 1 for s in range(pieces)])
    pruning = pruning_of(residual_N, threshold, leak, key, chance)
    spec = SPECS[name] if name.startswith("rice") else replace(SPECS[name], value_dtype=wire)
    case = Case(grad_N, segments, spec, pruning)
    fused = check(case)
    pruned_N, rest_N, _ = check_prune(grad_N, pruning, wire, "any floats")
    if not case.is_rice:
        assert CPU[-1].encode(Case(pruned_N, segments, spec)).records == fused.records
        cases.assert_same_bits(fused.residual_N, rest_N, "residual")


@given(
    st.lists(st.floats(width=16) | st.just(0.0), max_size=150),
    st.integers(1, 5),
    st.sampled_from(range(3)),
    st.sampled_from(list(FORMS)),
    st.integers(0, 31),
)
@settings(max_examples=250)
def test_round_trip(values, pieces, value_dtype, form, dense):
    grad_N = torch.tensor(values, dtype=torch.float32).to(cases.DTYPES[value_dtype])
    offsets = cases.cut(len(values), pieces, seed=len(values))
    segments = segments_of(offsets, [dense >> s & 1 for s in range(pieces)])
    case = Case(grad_N, segments, spec_of(value_dtype, form))
    got_N = decoded(CPU[-1], CPU[-1].encode(case).bytes, case)
    # 0.0 + -0.0 is 0.0: only the sign of zero is lost.
    cases.assert_same_bits(one_nan(got_N), one_nan(grad_N.float() + 0.0), form)


@pruned_already
def test_encoding_what_is_pruned_already(value_dtype, with_residual):
    """`encode`: sums, whose quantisation error stays with their owner."""
    for numel in (0, 1, 63, 64, 4095, 4096, 4097):
        segments = segments_of(cases.cut(numel, 3, seed=numel), [0, 1, 0])
        for dtype in cases.DTYPES:
            # A dense record of Rice has 0.0 for -0.0.
            values_N = cases.pruned_grad(numel, 0.2, dtype, seed=numel) + 0.0
            rest_N = cases.make("spread", numel, torch.float32) if with_residual else None
            spec = rice_spec(value_dtype)
            check(Case(values_N, segments, spec, residual_N=rest_N, what=f"{numel} {dtype}"))


@pytest.mark.parametrize("value_dtype", QUANTISED)
def test_a_residual_and_slots_need_the_room_of_the_slots_only(value_dtype):
    """A slot that is too small is refused before the residual changes."""
    values_N = cases.pruned_grad(5000, 0.05, torch.float32, seed=1) + 0.0
    residual_N = cases.make("spread", 5000, torch.float32)
    segments = segments_of(cases.cut(5000, 3, seed=1), [0, 1, 0])
    packed = Case(values_N, segments, rice_spec(value_dtype), residual_N=residual_N)
    case = packed.with_slots(cases.count_nonzero(values_N, segments.offsets))
    slots = case.segments.slots
    out = torch.empty(case.room, dtype=torch.uint8)
    assert out.numel() < packed.room
    smaller = replace(segments, slots=slots - torch.tensor([0, 0, 0, 16]))
    got_N = residual_N.clone()
    for places, room in ((smaller, out), (case.segments, out[:-16])):
        with pytest.raises(ExtensionError, match=r"slot|too small"):
            ops.encode(values_N, places, None, case.spec, room, residual_N=got_N)
        cases.assert_same_bits(got_N, residual_N, "a refused call")
    check(case)


def test_a_narrow_gradient_loses_nothing():
    """The rounding to bf16 and the quantisation both stay in an fp32 residual."""
    grad_N, residual_N = torch.randn(5000).bfloat16(), torch.randn(5000)
    for value_dtype in QUANTISED:
        pruning = pruning_of(residual_N, 1.0, key=KEY)
        case = Case(grad_N, segments_of([0, 5000]), rice_spec(value_dtype), pruning)
        made = CPU[-1].encode(case)
        sent_N = decoded(CPU[-1], made.bytes, case)
        assert torch.equal(sent_N + made.residual_N, grad_N.float() + residual_N)
