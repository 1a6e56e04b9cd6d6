"""Messages made on CUDA tensors: what is refused, and what is reported later.

As in `test_codec.py`, the same tests run on a GPU, if there is one, and in the emulator.
"""

from dataclasses import replace

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, Segments
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.errors import ExtensionError, WireFormatError
from tests.codec import STEP, Case, pruning_of, rice_spec, segments_of, spec_of
from tests.cuda_emulator.device import Place
from tests.cuda_emulator.test_codec import LIMITS, LONG, NUMEL, SEGMENTS
from tests.cuda_ext import cases
from tests.cuda_ext.cases import scattered_grad as gradient
from tests.formats.test_message import test_a_refused_call_changes_nothing  # noqa: F401 - runs here


def pruning_there(
    place: Place, residual: torch.Tensor, threshold: float = 0.0, **changes
) -> Pruning:
    """One threshold for a residual that is on the device."""
    limits = place(torch.full((1,), threshold))
    return replace(pruning_of(residual, threshold), thresholds_R=limits, **changes)


def refused(problem: str, op, *given) -> None:
    with pytest.raises(ExtensionError, match=problem):
        op(*given)


def test_what_does_not_fit_is_refused(place: Place) -> None:
    grad_N, spec = gradient(NUMEL, 0.5, torch.float32), spec_of(0)
    room = ops.message_capacity(SEGMENTS.offsets, 0)
    grad, residual = place(grad_N), place(torch.zeros(NUMEL))
    out = place(torch.zeros(room, dtype=torch.uint8))
    pruning = pruning_there(place, residual)
    nnz = cases.count_nonzero(grad_N, SEGMENTS.offsets)
    wrong = nnz + torch.tensor([0, 0, 0, 0, 1, 0])
    slots = Slots.of(SEGMENTS.offsets, SEGMENTS.dense, torch.full((6,), 5), spec).offsets
    tight, blocks = replace(SEGMENTS, slots=slots), spec_of(0, "blocks64")
    counted = replace(pruning, capacity_S=nnz)
    encode, prune = ops.encode, ops.prune_encode
    refused("nnz of segment 4 is not what", encode, grad, SEGMENTS, wrong, spec, out)
    refused("the slot of segment 2 is too small", encode, grad, tight, None, spec, out)
    refused("blocks have no capacity", prune, grad, counted, SEGMENTS, blocks, out)
    assert not residual.any(), "a refused call changed the residual"


def test_too_little_room_for_rice_is_refused_before_the_residual_changes(place: Place) -> None:
    numel, spec = 23_200, rice_spec(4)
    residual, grad = place(torch.full((numel,), 0.5)), place(torch.ones(numel))
    pruning = pruning_there(place, residual)

    def buffer(nbytes: int) -> torch.Tensor:
        return place(torch.zeros(nbytes, dtype=torch.uint8))

    whole = Case(grad, LONG, spec).with_slots().segments
    assert whole.slots is not None
    slots = whole.slots.clone()
    slots[5:] -= 16
    tight = replace(LONG, slots=slots)
    tiny = Case(grad, LONG, spec).with_slots(torch.ones(6, dtype=torch.int64)).segments
    assert tiny.slots is not None
    room = buffer(ops.message_capacity(LONG.offsets, 4))
    less = replace(pruning, capacity_S=torch.full((6,), -1))
    small, tiny_room = buffer(4096), buffer(int(tiny.slots[-1]))
    for problem, op, *given in (
        ("the output buffer is too small", ops.prune_encode, pruning, LONG, spec, small),
        ("the output buffer is too small", ops.encode, LONG, None, spec, small, residual),
        ("the slot of segment 4 is too", ops.prune_encode, pruning, tight, spec, room),
        ("capacity is out of range", ops.prune_encode, less, LONG, spec, room),
        ("the slot of segment 2 is too small", ops.encode, tiny, None, spec, tiny_room),
    ):
        refused(problem, op, grad, *given)
        assert bool((residual.cpu() == 0.5).all())


def test_a_gradient_on_the_cpu_needs_its_counts() -> None:
    out = torch.zeros(1000, dtype=torch.uint8)
    grad_N, given = torch.zeros(8), (segments_of([0, 8]), None, spec_of(0))
    refused("nnz is missing", ops.encode, grad_N, *given, out)
    refused("grad is on the wrong device", ops.encode, grad_N.to("meta"), *given, out.to("meta"))


def encode_too_much(place: Place, segments: Segments, reports: Reports) -> None:
    """A dense sum for slots that have no room for it."""
    out = place(torch.zeros(ops.message_capacity(segments.offsets, 0), dtype=torch.uint8))
    ops.encode(place(torch.ones(NUMEL)), segments, None, spec_of(0), out, reports=reports)


def test_reports_of_all_calls_are_read_together(place: Place) -> None:
    """A right message, a damaged one, a sum that does not fit: nothing is raised before `read`."""
    reports, found, some = Reports(), [], torch.tensor(LIMITS["some"])
    case = Case(gradient(NUMEL, 1.0, torch.float32), SEGMENTS, spec_of(0)).with_slots(some)
    pruning = pruning_there(place, place(torch.zeros(NUMEL)), capacity_S=some)
    message = place(torch.zeros(case.room, dtype=torch.uint8))
    _, nnz_S = ops.prune_encode(
        place(case.grad_N), pruning, case.segments, case.spec, message, reports=reports
    )
    reports.add(nnz_S, found.append, is_status=False)
    acc = place(torch.zeros(NUMEL))
    ops.decode_add_(acc, message, case.expected(3), 0, reports=reports)
    sent = place(message.cpu())
    reports.spoil_(sent)
    assert torch.equal(sent, message), "so far all is well"
    later = Expected(SEGMENTS.offsets, 0, STEP + 1, 4, case.segments.slots)
    ops.decode_add_(acc, place(message.cpu()), later, 0, reports=reports)
    encode_too_much(place, case.segments, reports)
    reports.spoil_(sent)
    with pytest.raises(WireFormatError, match="rank 4: field step"):
        reports.read()
    assert found[0].tolist() == nnz_S.cpu().tolist()
    assert bool((found[0] > 0).any())
    with pytest.raises(WireFormatError, match="rank 5: field magic"):
        ops.decode_add_(acc, sent, case.expected(5), 0)
    reports.read()  # everything has been read
    encode_too_much(place, case.segments, reports)
    with pytest.raises(ExtensionError, match="the slot of segment"):
        reports.read()
