"""`ops` on CUDA tensors: the bytes, sums and errors of the CPU's codec, on a GPU and emulated.

The same tests run on a GPU, if there is one, and in the emulator. `place` puts a tensor there.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.cuda_ext.reports import Reports
from megatron_sparse.errors import ExtensionError, WireFormatError
from tests.cuda_emulator.codec_cases import STEP, Place, gradient
from tests.cuda_emulator.emulated import DTYPE_CODES
from tests.cuda_emulator.op_cases import (
    FILL,
    FORMS,
    KEEP,
    NUMEL,
    SEGMENTS,
    assert_same_message,
    counts,
    damages,
    message_of,
    room,
)


@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_encode(place: Place, form: str, density: float) -> None:
    dtypes = list(DTYPE_CODES)
    # Every pair of gradient and wire dtype, over the formats and densities.
    turn = list(FORMS).index(form) + int(10 * density)
    dtype, code = dtypes[turn % 3], (turn // 3 + turn) % 3
    grad_N, out = gradient(NUMEL, density, dtype, seed=turn), room(code)
    nnz = counts(grad_N)
    sizes = ops.encode(
        grad_N, Segments(SEGMENTS, KEEP), nnz, RecordSpec(code, STEP, **FORMS[form]), out[:-32]
    )
    for shift, given in ((0, None), (3, nnz)):
        got = place(room(code))
        got_sizes = ops.encode(
            place(grad_N, shift),
            Segments(SEGMENTS, KEEP),
            given,
            RecordSpec(code, STEP, **FORMS[form]),
            got[:-32],
        )
        assert_same_message(got, got_sizes, out, sizes)


@pytest.mark.parametrize("code", range(3))
@pytest.mark.parametrize("dtype", DTYPE_CODES, ids=str)
def test_encode_every_pair_of_dtypes(place: Place, dtype: torch.dtype, code: int) -> None:
    grad_N, out, got = gradient(NUMEL, 0.1, dtype, seed=code), room(code), place(room(code))
    sizes = ops.encode(
        grad_N, Segments(SEGMENTS, KEEP), counts(grad_N), RecordSpec(code, STEP), out[:-32]
    )
    got_sizes = ops.encode(
        place(grad_N, 1), Segments(SEGMENTS, KEEP), None, RecordSpec(code, STEP), got[:-32]
    )
    assert_same_message(got, got_sizes, out, sizes)


PRUNINGS = [
    (grad, residual, code, key)
    for grad in DTYPE_CODES
    for residual in (torch.float32, torch.bfloat16)
    for code in range(3)
    for key in (-1, 12345)
]


@pytest.mark.parametrize(("dtype", "residual_dtype", "code", "key"), PRUNINGS, ids=str)
def test_prune_encode(
    place: Place, dtype: torch.dtype, residual_dtype: torch.dtype, code: int, key: int
) -> None:
    number = PRUNINGS.index((dtype, residual_dtype, code, key))
    form = list(FORMS)[number % len(FORMS)]
    # Ranges end inside tiles and segments; one keeps all, -0.0 and NaN too, one nothing finite.
    ranges = torch.tensor([0, 3000, 3000, 8191, 8300, 9001])
    thresholds_R = torch.tensor([1.5, 0.0, 1.2, -1.0, math.inf])
    chances_R = torch.tensor([0.4, 1.0, 0.5, 0.5, 0.5]) if number % 3 else None
    grad_N = gradient(NUMEL, 1.0, dtype, seed=number)
    residual_N = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number)) * 0.5
    residual_N[::97] = -0.0
    grad_N[::97] = -0.0
    grad_N[1::5], residual_N[1::5] = 1.5, 0  # ties in the first range
    residual_N = residual_N.to(residual_dtype)
    grad, rest = place(grad_N, number % 5), place(residual_N, number % 7)
    out, got = room(code), place(room(code))
    sizes, nnz = ops.prune_encode(
        grad_N,
        Pruning(residual_N, ranges, thresholds_R, 0.9, key, tie_chances_R=chances_R),
        Segments(SEGMENTS, KEEP),
        RecordSpec(code, STEP, **FORMS[form]),
        out[:-32],
    )
    got_sizes, got_nnz = ops.prune_encode(
        grad,
        Pruning(
            rest,
            ranges,
            place(thresholds_R),
            0.9,
            key,
            tie_chances_R=None if chances_R is None else place(chances_R),
        ),
        Segments(SEGMENTS, KEEP),
        RecordSpec(code, STEP, **FORMS[form]),
        got[:-32],
    )
    assert_same_message(got, got_sizes, out, sizes)
    assert got_nnz.tolist() == nnz.tolist()
    assert torch.equal(rest.cpu().view(torch.uint8), residual_N.view(torch.uint8))
    assert torch.equal(grad.cpu().view(torch.uint8), grad_N.view(torch.uint8)), "only read"


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_decode_add(place: Place, form: str, fresh: bool) -> None:
    code = list(FORMS).index(form) % 3
    message, base, acc_M = message_of(form, code), 5, torch.randn(NUMEL + 20)
    got = place(acc_M, 2)
    for target, records in ((acc_M, message), (got, place(message))):
        ops.decode_add_(
            target[base:], records, Expected(SEGMENTS, code, STEP, rank=0), 0, fresh=fresh
        )
    assert torch.equal(got.cpu().view(torch.int32), acc_M.view(torch.int32))
    with pytest.raises(WireFormatError, match="rank 3: field offset"):
        ops.decode_add_(got, place(message), Expected(SEGMENTS + base, code, STEP, rank=3), 0)


@pytest.mark.parametrize("ranks", [1, 5, 20])
@pytest.mark.parametrize("form", FORMS)
def test_decode_sum(place: Place, form: str, ranks: int) -> None:
    """The same bits as one message after the other on the CPU, NaN apart; 20 take two passes."""
    code = list(FORMS).index(form) % 3
    messages = [message_of(form, code, density) for density in (0.05, 0.01, 0.3, 0.0)]
    messages = [messages[rank % 4] for rank in range(ranks)]
    expected = Expected(SEGMENTS, code, STEP, rank=0)
    acc_M = torch.randn(NUMEL + 20)
    got, base = place(acc_M, 3), 5
    for number, message in enumerate(messages):
        ops.decode_add_(acc_M[base:], message, expected, 0, fresh=number == 0)
    ops.decode_sum_(got[base:], [place(each) for each in messages], expected, 0, range(ranks))
    found, wanted = got.cpu(), acc_M
    assert torch.equal(found.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(found[numbers].view(torch.int32), wanted[numbers].view(torch.int32))


def test_decode_sum_names_the_first_bad_rank(place: Place) -> None:
    good, expected = message_of("coo", 0), Expected(SEGMENTS, 0, STEP, rank=0)
    bad = good.clone()
    bad[40] ^= 1
    messages = [place(each) for each in (good, bad, bad)]
    acc, reports = place(torch.zeros(NUMEL)), Reports()
    with pytest.raises(WireFormatError, match="rank 8: field checksum"):
        ops.decode_sum_(acc, messages, expected, 0, [6, 8, 9])
    ops.decode_sum_(acc, messages, expected, 0, [6, 8, 9], reports=reports)
    with pytest.raises(WireFormatError, match="rank 8: field checksum"):
        reports.read()
    with pytest.raises(ExtensionError, match="a message is missing"):
        ops.decode_sum_(acc, messages, expected, 0, [6, 8])
    with pytest.raises(ExtensionError, match="segments do not lie in acc"):
        ops.decode_sum_(acc[:8000], messages[:1], expected, 0, [6])


@pytest.mark.parametrize("form", ["coo", "pici"])
def test_a_bad_message_has_the_same_error_and_adds_nothing(place: Place, form: str) -> None:
    for damaged in damages(message_of(form, 0)):
        outcomes = []
        for to in (torch.clone, place):
            acc = to(torch.ones(NUMEL))
            try:
                ops.decode_add_(acc, to(damaged), Expected(SEGMENTS, 0, STEP, rank=6), 0)
                outcomes.append("no error")
            except WireFormatError as error:
                outcomes.append(str(error))
                assert bool((acc == 1).all()), "a bad message was partly added"
        assert outcomes[0] == outcomes[1]


def test_what_does_not_fit_is_refused(place: Place) -> None:
    grad_N = gradient(NUMEL, 0.5, torch.float32)
    grad, residual = place(grad_N), place(torch.zeros(NUMEL))
    small = place(torch.zeros(1000, dtype=torch.uint8))
    with pytest.raises(ExtensionError, match="the output buffer is too small"):
        ops.encode(grad, Segments(SEGMENTS, KEEP), None, RecordSpec(0, STEP), small)
    ranges, thresholds_R = SEGMENTS[[0, -1]], place(torch.zeros(1))
    with pytest.raises(ExtensionError, match="the output buffer is too small"):
        ops.prune_encode(
            grad,
            Pruning(residual, ranges, thresholds_R, 1.0, 1),
            Segments(SEGMENTS, KEEP),
            RecordSpec(0, STEP),
            small,
        )
    assert not residual.any(), "a refused call changed the residual"
    wrong = counts(grad_N) + torch.tensor([0, 0, 0, 0, 1, 0])
    with pytest.raises(ExtensionError, match="nnz of segment 4 is not what the gradient holds"):
        ops.encode(grad, Segments(SEGMENTS, KEEP), wrong, RecordSpec(0, STEP), place(room(0)))
    with pytest.raises(ExtensionError, match="scratch is not used on CUDA"):
        ops.encode(
            grad,
            Segments(SEGMENTS, KEEP),
            None,
            RecordSpec(0, STEP),
            place(room(0)),
            torch.zeros(8),
        )
    with pytest.raises(ExtensionError, match="step is out of range"):
        ops.encode(grad, Segments(SEGMENTS, KEEP), None, RecordSpec(0, -1), place(room(0)))
    message = place(message_of("coo", 0))
    with pytest.raises(ExtensionError, match="the segments do not lie in acc"):
        ops.decode_add_(
            place(torch.zeros(NUMEL - 1)), message, Expected(SEGMENTS, 0, STEP, rank=0), 0
        )


def test_an_empty_bucket(place: Place) -> None:
    nothing = torch.zeros(0)
    offsets, keep = torch.tensor([0]), torch.zeros(0, dtype=torch.uint8)
    out = place(torch.full((16,), FILL, dtype=torch.uint8))
    assert (
        ops.encode(place(nothing), Segments(offsets, keep), None, RecordSpec(0, STEP), out).tolist()
        == []
    )
    sizes, nnz = ops.prune_encode(
        place(nothing),
        Pruning(place(nothing), offsets, place(nothing), 1.0, 1),
        Segments(offsets, keep),
        RecordSpec(0, STEP),
        out,
    )
    assert (sizes.tolist(), nnz.tolist()) == ([], [])
    ops.decode_add_(place(nothing), out[:0], Expected(offsets, 0, STEP, rank=0), 0)
    assert bool((out == FILL).all())


def test_a_gradient_on_the_cpu_needs_its_counts() -> None:
    with pytest.raises(ExtensionError, match="nnz is missing"):
        ops.encode(torch.zeros(NUMEL), Segments(SEGMENTS, KEEP), None, RecordSpec(0, STEP), room(0))
    with pytest.raises(ExtensionError, match="grad is on the wrong device"):
        ops.encode(
            torch.zeros(NUMEL, device="meta"),
            Segments(SEGMENTS, KEEP),
            None,
            RecordSpec(0, STEP),
            torch.zeros(8, dtype=torch.uint8, device="meta"),
        )
