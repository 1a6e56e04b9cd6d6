"""`ops` on CUDA tensors with messages of fixed size (capacity mode); see `test_ops.py`."""

from __future__ import annotations

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.wire import (
    FORMAT_COO,
)
from tests.cuda_emulator.codec_cases import STEP, Place, gradient
from tests.cuda_emulator.emulated import DTYPE_CODES
from tests.cuda_emulator.op_cases import (
    FORMS,
    KEEP,
    NUMEL,
    SEGMENTS,
    counts,
    damages,
    room,
)

LIMITS = {
    "none stay": torch.tensor([0, 0, 0, 0, 0, 0]),
    "some": torch.tensor([0, 1, 700, 4093, 50, 3]),
    "a tile": torch.tensor([0, 1, 4096, 1, 109, 400]),
    "all": SEGMENTS.diff(),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("key", [-1, 12345])
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", range(3))
def test_prune_encode_with_a_capacity(
    place: Place, code: int, residual_dtype: torch.dtype, key: int, limit: str
) -> None:
    """In slots; the CPU's codec has an oracle of its own."""
    number = 4 * code + 2 * (key < 0) + list(LIMITS).index(limit)
    forms = {name: form for name, form in FORMS.items() if name != "blocks"}
    form = list(forms.values())[number % len(forms)]
    dtype = list(DTYPE_CODES)[number % 3]
    ranges, thresholds_R = torch.tensor([0, 3000, 9001]), torch.tensor([0.5, -1.0])
    grad_N = gradient(NUMEL, 1.0, dtype, seed=number)
    residual_N = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number)) * 0.5
    residual_N = residual_N.to(residual_dtype)
    slots_S = Slots.of(SEGMENTS, KEEP, LIMITS[limit], code, form["record_format"]).offsets
    grad, rest = place(grad_N, number % 5), place(residual_N, number % 7)
    out, got = room(code), place(room(code))
    sizes, nnz = ops.prune_encode(
        grad_N,
        Pruning(residual_N, ranges, thresholds_R, 0.9, key, LIMITS[limit]),
        Segments(SEGMENTS, KEEP, slots_S),
        RecordSpec(code, STEP, **form),
        out[:-32],
    )
    got_sizes, got_nnz = ops.prune_encode(
        grad,
        Pruning(rest, ranges, place(thresholds_R), 0.9, key, LIMITS[limit]),
        Segments(SEGMENTS, KEEP, slots_S),
        RecordSpec(code, STEP, **form),
        got[:-32],
    )
    assert got_sizes.tolist() == sizes.tolist()
    assert got_nnz.tolist() == nnz.tolist()
    assert torch.equal(got.cpu(), out)
    assert torch.equal(rest.cpu().view(torch.uint8), residual_N.view(torch.uint8))


def test_encode_and_decode_in_slots(place: Place) -> None:
    for code, (name, form) in enumerate(list(FORMS.items())[1:3]):
        grad_N = gradient(NUMEL, 0.05, list(DTYPE_CODES)[code], seed=code)
        most = torch.full((6,), 400)
        slots_S = Slots.of(SEGMENTS, KEEP, most, code, form["record_format"]).offsets
        out, got = room(code), place(room(code))
        ops.encode(
            grad_N,
            Segments(SEGMENTS, KEEP, slots_S),
            counts(grad_N),
            RecordSpec(code, STEP, **form),
            out,
        )
        ops.encode(
            place(grad_N),
            Segments(SEGMENTS, KEEP, slots_S),
            None,
            RecordSpec(code, STEP, **form),
            got,
        )
        assert torch.equal(got.cpu(), out), name
        message = out[: int(slots_S[-1])]
        acc_N = torch.randn(NUMEL)
        acc = place(acc_N, 1)
        for target, records in ((acc_N, message), (acc, place(message))):
            ops.decode_add_(
                target, records, Expected(SEGMENTS, code, STEP, rank=0, slots=slots_S), 0
            )
        assert torch.equal(acc.cpu().view(torch.int32), acc_N.view(torch.int32)), name


def test_a_bad_message_in_slots_has_the_same_error(place: Place) -> None:
    slots_S = Slots.of(SEGMENTS, KEEP, torch.full((6,), 400), 0, FORMAT_COO).offsets
    grad_N, out = gradient(NUMEL, 0.05, torch.float32), room(0)
    ops.encode(grad_N, Segments(SEGMENTS, KEEP, slots_S), counts(grad_N), RecordSpec(0, STEP), out)
    message = out[: int(slots_S[-1])].clone()
    narrow = slots_S.clone()
    narrow[1:] -= 16  # shorter than a header
    wide = slots_S.clone()
    wide[3:] += 16
    kinds = [(damaged, slots_S) for damaged in damages(message)]
    for damaged, slots in [*kinds, (message[: int(narrow[-1])], narrow), (message, wide)]:
        outcomes = []
        for to in (torch.clone, place):
            acc = to(torch.ones(NUMEL))
            try:
                ops.decode_add_(
                    acc, to(damaged), Expected(SEGMENTS, 0, STEP, rank=6, slots=slots), 0
                )
                outcomes.append("no error")
            except WireFormatError as error:
                outcomes.append(str(error))
                assert bool((acc == 1).all()), "a bad message was partly added"
        assert outcomes[0] == outcomes[1]


BAD_LIMITS = {
    "capacity has the wrong length": {"capacity": torch.tensor([1])},
    "capacity is out of range": {"capacity": torch.full((6,), -1)},
    "slots has the wrong length": {"slots": torch.tensor([0, 16])},
    "slots are no places of records": {"slots": torch.arange(1, 8) * 16},
    "slots is not ascending": {"slots": torch.tensor([0, 48, 32, 64, 80, 96, 112])},
    "the slot of segment 1 is too small": {"slots": torch.arange(7) * 48},
    "the output buffer is too small": {"slots": torch.arange(7) * 2**20},
    "blocks have no capacity": {"capacity": LIMITS["all"], "form": FORMS["blocks"]},
}


@pytest.mark.parametrize("problem", BAD_LIMITS)
def test_bad_limits_are_refused(place: Place, problem: str) -> None:
    grad, rest, out = place(torch.ones(NUMEL)), place(torch.zeros(NUMEL)), place(room(0))
    ranges, thresholds_R = SEGMENTS[[0, -1]], place(torch.zeros(1))
    bad = BAD_LIMITS[problem]
    with pytest.raises(ExtensionError, match=problem):
        ops.prune_encode(
            grad,
            Pruning(rest, ranges, thresholds_R, 1.0, 1, bad.get("capacity")),
            Segments(SEGMENTS, KEEP, bad.get("slots")),
            RecordSpec(0, STEP, **bad.get("form", {})),
            out,
        )
    assert not rest.any(), "a refused call changed the residual"


def test_a_sum_that_does_not_fit_its_slot_is_refused(place: Place) -> None:
    slots_S = Slots.of(SEGMENTS, KEEP, torch.full((6,), 5), 0, FORMAT_COO).offsets
    with pytest.raises(ExtensionError, match="the slot of segment 2 is too small"):
        ops.encode(
            place(torch.ones(NUMEL)),
            Segments(SEGMENTS, KEEP, slots_S),
            None,
            RecordSpec(0, STEP),
            place(room(0)),
        )


def encode_too_much(place: Place, slots_S: torch.Tensor, reports: Reports) -> None:
    """A dense sum for slots that have no room for it."""
    ops.encode(
        place(torch.ones(NUMEL)),
        Segments(SEGMENTS, KEEP, slots_S),
        None,
        RecordSpec(0, STEP),
        place(room(0)),
        reports=reports,
    )


def test_reports_of_all_calls_are_read_together(place: Place) -> None:
    """A right message, a damaged one, a sum that does not fit: nothing is raised before `read`."""
    reports, found = Reports(), []
    slots_S = Slots.of(SEGMENTS, KEEP, LIMITS["some"], 0, FORMAT_COO).offsets
    grad, out = place(gradient(NUMEL, 1.0, torch.float32)), place(room(0))
    _, nnz_S = ops.prune_encode(
        grad,
        Pruning(
            place(torch.zeros(NUMEL)),
            SEGMENTS[[0, -1]],
            place(torch.zeros(1)),
            1.0,
            -1,
            LIMITS["some"],
        ),
        Segments(SEGMENTS, KEEP, slots_S),
        RecordSpec(0, STEP),
        out,
        reports=reports,
    )
    reports.add(nnz_S, found.append, is_status=False)
    acc, message = place(torch.zeros(NUMEL)), out[: int(slots_S[-1])]
    ops.decode_add_(
        acc, message, Expected(SEGMENTS, 0, STEP, rank=3, slots=slots_S), 0, reports=reports
    )
    sent = place(message.cpu())
    reports.spoil_(sent)
    assert torch.equal(sent, message), "so far all is well"
    ops.decode_add_(
        acc,
        place(message.cpu()),
        Expected(SEGMENTS, 0, STEP + 1, rank=4, slots=slots_S),
        0,
        reports=reports,
    )
    encode_too_much(place, slots_S, reports)
    reports.spoil_(sent)
    with pytest.raises(WireFormatError, match="rank 4: field step"):
        reports.read()
    assert found[0].tolist() == nnz_S.cpu().tolist()
    assert bool((found[0] > 0).any())
    with pytest.raises(WireFormatError, match="rank 5: field magic"):
        ops.decode_add_(acc, sent, Expected(SEGMENTS, 0, STEP, rank=5, slots=slots_S), 0)
    reports.read()  # everything has been read
    encode_too_much(place, slots_S, reports)
    with pytest.raises(ExtensionError, match="the slot of segment"):
        reports.read()
