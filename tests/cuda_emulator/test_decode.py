"""Messages decoded on CUDA: the CPU's sums, statuses and errors, on a GPU and emulated.

A decoder on CUDA checks everything, names the damage and adds nothing of a bad message. Guards
surround what it writes. `tests/damage.py` has the damages, `tests/formats/test_corrupt.py` the
fields that they are.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.arguments import call
from megatron_sparse.cuda_ext.record_spec import Expected
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.errors import WireFormatError
from tests import damage
from tests.codec import (
    CPU,
    FORMS,
    ORACLE,
    STEP,
    Case,
    Ops,
    check_sums,
    one_nan,
    rice_spec,
    segments_of,
    spec_of,
)
from tests.cuda_emulator.device import Place, to_gpu
from tests.cuda_emulator.emulator import IN_ORDER, RANDOM, REVERSED, Emulator
from tests.cuda_emulator.ledger import Ledger, counting
from tests.cuda_ext import cases
from tests.cuda_ext.fuzz_records import damaged, make_message
from tests.damage import RICE_FORMS, RICE_IDS, put
from tests.formats.test_decode_sum import (
    test_arguments_that_do_not_fit_are_refused,  # noqa: F401 - runs here too
)

FINE = [0, 0, 0, 0]
OUTSIDE = 2
ELSEWISE = (14, 15, 17)
"""Fields of which a kernel reports another number than the CPU: words, block_size, padding."""
SEGMENTS = segments_of([0, 40, 9000, 13_096, 13_097, 15_000], [0, 0, 0, 1, 0])
"""Less than a tile, several, exactly one, one element, and an end that is no multiple of 64."""
NUMEL = 15_000
SPECS = {
    **{form: spec_of(number % 3, form) for number, form in enumerate(FORMS)},
    **{
        name: rice_spec(code, (12, 13, 15)[number % 3], without_indices=whole)
        for number, ((code, whole), name) in enumerate(zip(RICE_FORMS, RICE_IDS, strict=True))
    },
}
rice_forms = pytest.mark.parametrize("form", RICE_FORMS, ids=RICE_IDS)


def bytes_of(message: bytes) -> torch.Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)


def case_of(name: str, density: float, seed: int) -> Case:
    values_N = cases.scattered_grad(NUMEL, density, torch.float32, seed)
    if name in RICE_IDS:  # NaN somewhere, not in every group
        values_N[4098:] = values_N[4098:].nan_to_num(1, 2, -2)
    return Case(values_N, SEGMENTS, SPECS[name], what=seed)


def status_of(
    to: Place, acc: torch.Tensor, message: bytes, case: Case, *, base: int = 0, fresh: bool = False
) -> list[int]:
    """Adds to `acc`, where `to` puts tensors; what the op itself returns."""
    data, offsets = to(bytes_of(message)), to(case.segments.offsets)
    return call(
        "decode_", acc, [data], offsets, case.spec.value_dtype, STEP, base, fresh, False
    ).tolist()


def sum_statuses(acc: torch.Tensor, messages: Sequence[bytes], case: Case) -> list[list[int]]:
    """Those of all messages, added up in one pass on the emulated GPU."""
    data = [to_gpu(bytes_of(message)) for message in messages]
    offsets, code = to_gpu(case.segments.offsets), case.spec.value_dtype
    states = call("decode_", acc, data, offsets, code, STEP, 0, True, True)
    return states.view(-1, 4).tolist()


def compare_statuses(
    emulator: Emulator, message: bytes, case: Case, number: int, good: bytes
) -> bool:
    """A message alone, and between good ones in a sum, in one of three schedules.

    Returns whether it is refused; then nothing of it may have been added.
    """
    acc = torch.ones(case.numel)
    wanted = status_of(torch.clone, acc, message, case)
    emulator.schedule(number % 3, number, multiprocessors=1 + number % 2)
    got = to_gpu(torch.ones(case.numel))
    alone = status_of(to_gpu, got, message, case)
    assert alone[:3] == wanted[:3], number
    assert alone[2] in ELSEWISE or alone == wanted, number
    cases.assert_same_bits(one_nan(got.cpu()), one_nan(acc), f"{number}: the sum")
    states = sum_statuses(got, [good, message, good], case)
    assert states == [FINE, alone, FINE], number
    return wanted[0] != 0


def check_sum(place: Place, sent: Sequence[Case], shift: int) -> None:
    """Messages in one pass have the same bits as one after the other on the CPU."""
    made = [CPU[-1].encode(case).bytes for case in sent]
    acc_M, base, expected = torch.randn(NUMEL + 20), 5, sent[0].expected()
    got = place(acc_M, shift)
    for number, message in enumerate(made):
        ops.decode_add_(acc_M[base:], bytes_of(message), expected, 0, fresh=number == 0)
    messages = [place(bytes_of(message)) for message in made]
    ops.decode_sum_(got[base:], messages, expected, 0, range(len(made)))
    cases.assert_same_bits(one_nan(got.cpu()), one_nan(acc_M), "the sum")


@pytest.mark.parametrize("ranks", [1, 5, 18])
@pytest.mark.parametrize("name", SPECS)
def test_decode_sum(place: Place, name: str, ranks: int) -> None:
    """18 take two passes."""
    four = [case_of(name, density, seed) for seed, density in enumerate((0.05, 0.01, 0.6, 0.0))]
    check_sum(place, [four[rank % 4] for rank in range(ranks)], 3)


@pytest.mark.parametrize(("ranks", "schedule"), [(3, REVERSED), (9, RANDOM), (17, RANDOM)])
def test_formats_of_ranks_differ(
    emulated_gpu, emulator: Emulator, ranks: int, schedule: int
) -> None:
    """More ranks than warps, and more than one launch takes; each has a format of its own."""
    chance, sent = random.Random(ranks), []
    emulator.schedule(schedule, ranks)
    for rank in range(ranks):
        name, density = chance.choice(
            [("coo", 0.02), ("dense", 0.9), ("blocks64", 0.01), ("rice", 0.1)]
        )
        spec = rice_spec(0) if name == "rice" else spec_of(0, name)
        sent.append(Case(case_of("coo", density, rank).grad_N, SEGMENTS, spec))
    check_sum(to_gpu, sent, ranks % 4)


@pytest.mark.parametrize("schedule", [REVERSED, RANDOM])
def test_ranks_with_and_without_indices(emulated_gpu, emulator: Emulator, schedule: int) -> None:
    """Records without indices are added several at a time, between others."""
    emulator.schedule(schedule, 2)
    sent = [
        replace(case_of("q8", 0.3, rank), spec=rice_spec(3, 12, without_indices=whole))
        for rank, whole in enumerate((True, False, False, True, True, True, False, True, False))
    ]
    check_sum(to_gpu, sent, 3)


@pytest.mark.parametrize("density", [0.001, 0.3, 1.0])
@pytest.mark.parametrize("name", ["coo", "linear", "paper"])
def test_tiles_from_empty_to_full(place: Place, name: str, density: float) -> None:
    """Entries of a tile from fewer than lanes to more than threads; words that are crowded."""
    values_N = cases.scattered_grad(9000, density, torch.float32)
    case = Case(values_N, segments_of([0, 9000]), spec_of(0, name))
    check_sums(case, ORACLE.encode(case), Ops("CUDA", place))


@pytest.mark.parametrize("name", ["coo", "linear"])
def test_more_tiles_than_warps(emulated_gpu, emulator: Emulator, name: str) -> None:
    """In place a warp takes a tile: some warps take two, and some find none."""
    emulator.schedule(RANDOM, 3, multiprocessors=1)
    values_N = cases.scattered_grad(150_000, 0.002, torch.float32)
    case = Case(values_N, segments_of([0, 9000, 9001, 150_000]), spec_of(0, name))
    check_sums(case, ORACLE.encode(case), Ops("CUDA", to_gpu))


@pytest.mark.parametrize("block_size", [1, 37, 64, 4096, 5000])
def test_blocks_of_any_size(place: Place, block_size: int) -> None:
    """Blocks that lie across tiles, fill one, or are longer than a tile: of another encoder."""
    values_N = torch.zeros(14_001)
    values_N[[0, 3, 4095, 12_300, 14_000]] = torch.arange(1.0, 6.0)
    if block_size < 4096:
        values_N[[4096, 4999, 8191]] = 7
    spec = replace(spec_of(0, "blocks64"), block_size=block_size)
    case = Case(values_N, segments_of([0, 14_001]), spec)
    made = ORACLE.encode(case)
    assert made.bytes[5] == spec.record_format
    check_sums(case, made, Ops("CUDA", place))
    acc = place(torch.zeros(14_001))
    ops.decode_sum_(acc, [place(bytes_of(made.bytes))] * 2, case.expected(), 0, range(2))
    assert torch.equal(acc.cpu(), 2 * values_N)


@pytest.mark.parametrize("schedule", [IN_ORDER, REVERSED, RANDOM])
@pytest.mark.parametrize("log2_span", [12, 14, 16, 24])
@pytest.mark.parametrize("value_dtype", [0, 2, 4, 6])
def test_long_chunks_and_clusters(
    emulated_gpu, emulator: Emulator, value_dtype: int, log2_span: int, schedule: int
) -> None:
    """Runs that fill tiles; gaps of tiles, before and behind all entries; a single last entry."""
    emulator.schedule(schedule, log2_span, multiprocessors=2)
    values_N = torch.zeros(70_001)
    values_N[5000:9500] = torch.randn(4500, generator=torch.Generator().manual_seed(1))
    values_N[21_000:21_040] = 1.5
    values_N[40_000::997] = -2.5
    values_N[-1] = 3.0
    case = Case(values_N, segments_of([0, 70_001]), rice_spec(value_dtype, log2_span))
    check_sums(case, CPU[-1].encode(case), Ops("CUDA", to_gpu))


@pytest.mark.parametrize("entries", [1, 31, 32, 33, 127, 128, 129, 1365, 1366, 4096])
@pytest.mark.parametrize("value_dtype", [1, 3, 5])
def test_numbers_of_entries(place: Place, value_dtype: int, entries: int) -> None:
    """Around whole planes and groups, and where the unary part becomes a bitmap."""
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(entries))
    values_N = torch.zeros(8192)
    values_N[order[:entries]] = torch.arange(1.0, 1 + entries)
    values_N[4096 + order[:entries]] = -torch.arange(1.0, 1 + entries)
    for log2_span in (12, 13):
        case = Case(values_N, segments_of([0, 8192]), rice_spec(value_dtype, log2_span))
        check_sums(case, ORACLE.encode(case), Ops("CUDA", place))


FIVE = segments_of([0, 40, 340, 5000, 9999, 12_000])


def five_records() -> tuple[Case, bytes, list[int]]:
    """Dense, COO, Pici in both orders, blocks: the case, the message, where records begin."""
    values_N = cases.scattered_grad(12_000, 0.05, torch.float32, 4)
    values_N[9999:] = 0
    values_N[[11_005, 11_999]] = 1
    forms = ("dense", "coo", "linear", "paper", "blocks64")
    made = [ORACLE.encode(Case(values_N, FIVE, spec_of(0, form))) for form in forms]
    records = [each.records[number] for number, each in enumerate(made)]
    assert [record[5] for record in records] == [0, 1, 2, 2, 3]
    starts = torch.tensor([0, *map(len, records[:-1])]).cumsum(0).tolist()
    return Case(values_N, FIVE, spec_of(0)), b"".join(records), starts


@pytest.mark.parametrize("segment", range(5))
def test_statuses_of_damaged_headers(emulated_gpu, emulator: Emulator, segment: int) -> None:
    """In any record of a message."""
    case, good, starts = five_records()
    assert not compare_statuses(emulator, good, case, segment, good)
    refused = 0
    for number, found in enumerate(damage.headers(good, 12_000, starts[segment])):
        refused += compare_statuses(emulator, found.message, case, number, good)
    assert refused >= 29  # a dense record's count is not looked at


@pytest.mark.parametrize("form", ["coo", "linear", "paper", "blocks64"])
def test_statuses_of_damaged_sections(emulated_gpu, emulator: Emulator, form: str) -> None:
    case, good = damage.plain(form)
    for number, found in enumerate(damage.sections(form, good)):
        refused = compare_statuses(emulator, found.message, case, number, good)
        assert refused or found.fields is None, found.what


@rice_forms
def test_statuses_of_damaged_rice(emulated_gpu, emulator: Emulator, form: tuple[int, bool]) -> None:
    """Of damages that only change values a third, another one for each form."""
    case, good = damage.rice(*form)
    turn = RICE_FORMS.index(form) % 3
    found = [
        each
        for number, each in enumerate(damage.rice_damages(good, *form))
        if each.fields is not None or number % 3 == turn
    ]
    refused = sum(
        compare_statuses(emulator, each.message, case, n, good) for n, each in enumerate(found)
    )
    assert refused > (40 if form[1] else 90)


def test_random_damage_never_writes_outside(emulated_gpu, emulator: Emulator) -> None:
    """Messages of the fuzzer, in all formats and in slots: alone, and between others in a sum."""
    refused = 0
    for seed in range(120):
        rng = random.Random(seed)
        made, places, expected = make_message(rng)
        message, _ = damaged(rng, made, places)
        emulator.schedule(seed % 3, seed, multiprocessors=1 + seed % 2)
        outcomes = []
        for place in (torch.clone, to_gpu):
            alone, total = place(torch.ones(2, int(expected.segment_offsets[-1])))
            data, errors = [place(each) for each in (made, message, message)], ["", ""]
            try:
                ops.decode_add_(alone, data[1], expected, 0)
            except WireFormatError as error:
                errors[0] = error.what
            try:
                ops.decode_sum_(total, data, expected, 0, range(3))
            except WireFormatError as error:
                errors[1] = error.what
                total.zero_()  # on CUDA it is undefined
            outcomes.append((errors, one_nan(torch.stack([alone, total]).cpu()).flatten()))
        (wanted, sums), (found, got) = outcomes
        assert found == wanted, seed
        cases.assert_same_bits(got, sums, f"{seed}: the sums")
        refused += wanted[0] != ""
    assert 40 < refused < 100


@pytest.mark.parametrize("name", ["coo", "linear", "q4", "q8-whole"])
def test_a_bad_message_has_the_same_error(place: Place, name: str) -> None:
    """Also in slots, and with slots that do not fit it."""
    case = case_of(name, 0.05, 1)
    slotted = case.with_slots()
    assert slotted.segments.slots is not None
    narrow, wide = slotted.segments.slots.clone(), slotted.segments.slots.clone()
    narrow[1:] -= 16
    wide[3:] += 16
    good, spread = ORACLE.encode(case).bytes, ORACLE.encode(slotted).message(slotted)
    code = case.spec.value_dtype
    tried = [(found.message, case.expected(6)) for found in damage.headers(good, NUMEL)]
    tried += [(found.message, slotted.expected(6)) for found in damage.headers(spread, NUMEL)]
    tried += [
        (spread[: int(slots[-1])], Expected(SEGMENTS.offsets, code, STEP, 6, slots))
        for slots in (narrow, wide)
    ]
    for message, expected in tried:
        outcomes = []
        for codec in (CPU[-1], Ops("CUDA", place)):
            try:
                codec.decode_(torch.ones(NUMEL), message, expected)
                outcomes.append("no error")
            except WireFormatError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_decode_sum_names_the_first_bad_rank(place: Place) -> None:
    case, good = damage.rice(4)
    bad = put(good, damage.TABLE + 8, 4)  # the first chunk's entries
    unsealed = bytes([*good[:40], good[40] ^ 1, *good[41:]])
    acc, reports = place(torch.zeros(case.numel)), Reports()
    for broken, field in ((bad, "rice"), (unsealed, "checksum")):
        messages = [place(bytes_of(each)) for each in (good, broken, broken)]
        with pytest.raises(WireFormatError, match=f"rank 8: field {field}"):
            ops.decode_sum_(acc, messages, case.expected(), 0, [6, 8, 9])
        ops.decode_sum_(acc, messages, case.expected(), 0, [6, 8, 9], reports=reports)
        with pytest.raises(WireFormatError, match=f"rank 8: field {field}"):
            reports.read()


def test_segments_outside_acc_leave_it_alone(emulated_gpu, emulator: Emulator) -> None:
    """What the typed ops rule out, the kernels find too."""
    emulator.schedule(IN_ORDER)
    case, good, _ = five_records()
    acc = to_gpu(torch.full((11_999,), 3.0))
    assert status_of(to_gpu, acc, good, case) == [OUTSIDE, 4, 0, 12_000]
    assert sum_statuses(acc, [good] * 3, case) == [[OUTSIDE, 4, 0, 12_000]] * 3
    assert bool((acc.cpu() == 3).all())
    whole = to_gpu(torch.zeros(12_000))
    assert status_of(to_gpu, whole, good, case, base=1) == [OUTSIDE, 0, 0, 40]


def test_fresh_takes_acc_for_zero(emulated_gpu, emulator: Emulator) -> None:
    """Elements outside the segments keep their values; a bad message changes nothing."""
    case, good, starts = five_records()
    part = good[starts[1] :]
    case = Case(case.grad_N, segments_of(FIVE.offsets[1:]), case.spec)
    emulator.schedule(RANDOM, 4)
    acc, wanted = to_gpu(torch.full((12_100,), math.nan)), torch.zeros(12_100)
    assert status_of(to_gpu, acc, part, case, fresh=True) == FINE
    assert status_of(torch.clone, wanted, part, case) == FINE
    found = acc.cpu()
    cases.assert_same_bits(one_nan(found[40:12_000]), one_nan(wanted[40:12_000]), "the sum")
    assert bool(found[:40].isnan().all() & found[12_000:].isnan().all())
    acc = to_gpu(torch.full((12_100,), math.nan))
    status = status_of(to_gpu, acc, put(part, 48, 2**31), case, fresh=True)
    assert status[:2] == [1, 0]
    assert bool(acc.cpu().isnan().all())


def test_base_and_part_of_a_message(place: Place) -> None:
    """A shard's records decode into the shard's accumulator."""
    values_N = cases.scattered_grad(9000, 0.05, torch.float16, 9)
    case = Case(values_N, segments_of([0, 4000, 7000, 9000]), spec_of(2, "adaptive"))
    part = place(bytes_of(b"".join(ORACLE.encode(case).records[1:])))
    acc = place(torch.ones(5000), 3)
    ops.decode_add_(acc, part, Expected(case.segments.offsets[1:], 2, STEP, 0), 4000)
    wanted = torch.ones(5000) + values_N[4000:].float()
    cases.assert_same_bits(one_nan(acc.cpu()), one_nan(wanted), "the shard")


@pytest.mark.parametrize("name", ["coo", "q4"])
def test_launches(emulated_gpu, emulator: Emulator, name: str) -> None:
    """Walk, check, sum; and all messages of a sum together need no check."""
    emulator.schedule(IN_ORDER)
    case = case_of(name, 0.05, 1)
    message, acc = ORACLE.encode(case).bytes, to_gpu(torch.zeros(NUMEL))
    with counting(ledger := Ledger()):
        status_of(to_gpu, acc, message, case)
    assert (ledger.kernels, ledger.memsets) == (3, 0)
    with counting(ledger := Ledger()):
        sum_statuses(acc, [message] * 5, case)
    assert (ledger.kernels, ledger.memsets) == (2, 0)
