"""Records of quantised differences: the compiled codec against the oracle, and damaged records."""

from functools import partial

import numpy as np
import pytest
import torch

from megatron_sparse.errors import ExtensionError
from megatron_sparse.formats.quantised import add_difference_, encode_difference, record_bytes
from megatron_sparse.reference.rice_values import levels_of
from megatron_sparse.wire import QUANTISED_BITS
from tests.codec import on_threads
from tests.formats import moves_cases
from tests.formats.moves_cases import adam_like, refusal, repaired
from tests.oracles import quantised

NUMELS = [0, 1, 63, 64, 127, 128, 129, 4096, 65536 + 130]
EPOCH = 7
updates = partial(adam_like, dtype=torch.float32)


def any_bits(numel, seed=0):
    """Any bit patterns but NaN and infinity; groups of subnormal numbers among them."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, numel).astype("<u4")
    words &= np.where(words & 0x7F800000 == 0x7F800000, 0xFF7FFFFF, 0xFFFFFFFF).astype("<u4")
    words[: numel // 4] &= np.uint32(0x80FFFFFF)
    words[numel // 4 : numel // 2] &= np.uint32(0x8001FFFF)
    return torch.from_numpy(words.view("<f4"))


def check(old, new, bits):
    record = encode_difference(new, old, bits=bits, epoch=EPOCH)
    with np.errstate(all="ignore"):
        wanted = quantised.encode(new.numpy(), old.numpy(), bits, EPOCH)
        sum_wanted = quantised.add(wanted, old.numpy(), bits)
    assert record.numpy().tobytes() == wanted
    assert record.numel() == record_bytes(old.numel(), bits)
    held = old.clone()
    add_difference_(record, held, epoch=EPOCH)
    right = moves_cases.bits(held) == sum_wanted.view("<u4")
    assert np.all(right | np.isnan(sum_wanted) & np.isnan(held.numpy()))
    return held


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", QUANTISED_BITS)
@pytest.mark.parametrize("numel", NUMELS)
def test_bytes_and_sums_are_the_oracles(numel, bits):
    old, new = updates(numel)
    check(old, new, bits)
    check(torch.zeros(numel), any_bits(numel), bits)
    check(any_bits(numel, 1), any_bits(numel, 2), bits)
    check(old, old, bits)


@pytest.mark.parametrize("bits", QUANTISED_BITS)
def test_the_error_is_at_most_half_a_step(bits):
    """Plus the half unit by which a scale in bf16 is off, for the codes at the limit."""
    old, new = updates(128 * 40)
    values = new - old
    held = torch.zeros_like(values)
    add_difference_(encode_difference(values, held, bits=bits, epoch=0), held, epoch=0)
    step = values.view(-1, 128).abs().amax(1) / levels_of(bits)
    error = (held - values).view(-1, 128).abs().amax(1) / step
    assert 0.4 < float(error.max()) < 0.5 * (1 + 2**-8)


@pytest.mark.parametrize("bits", QUANTISED_BITS)
def test_halves_are_rounded_to_even(bits):
    limit = levels_of(bits)
    values = torch.tensor([float(limit), 0.5, 1.5, 2.5, -0.5, -1.5, 3.5])
    assert check(torch.zeros(7), values, bits).tolist() == [limit, 0, 2, 2, 0, -2, 4]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", QUANTISED_BITS)
@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), 2.0**127])
def test_what_is_not_finite_reaches_its_group_and_no_other(bad, bits):
    old, new = updates(400)
    new[200] = bad
    held = check(old, new, bits)
    assert bool(held[128:256].isnan().all())
    assert bool(held[:128].isfinite().all())
    assert bool(held[256:].isfinite().all())


@pytest.mark.parametrize("bits", QUANTISED_BITS)
def test_the_smallest_scales(bits):
    """Subnormal scales round by half of themselves: codes stay within the limit."""
    for exponent in range(-149, -120):
        values = torch.linspace(-1, 1, 128) * 2.0**exponent
        check(torch.zeros(128), values, bits)
    zeros = check(torch.full((128,), 0.0), torch.full((128,), -0.0), bits)
    assert bool((zeros == 0).all())


def refused(record, held, field="", epoch=EPOCH):
    assert f"field {field}" in refusal(record, held, epoch, add_difference_)


@pytest.mark.parametrize("bits", QUANTISED_BITS)
def test_every_changed_byte_is_refused_and_changes_nothing(bits):
    old, new = updates(300)
    record = encode_difference(new, old, bits=bits, epoch=EPOCH)
    for place in range(record.numel()):
        damaged = record.clone()
        damaged[place] ^= 0x10
        refused(damaged, old)


@pytest.mark.parametrize("length", [0, 47, 48, 64, 160, -16])
def test_a_cut_record_is_refused(length):
    old, new = updates(300)
    refused(encode_difference(new, old, bits=4, epoch=EPOCH)[:length].clone(), old)


def test_records_of_another_epoch_or_length_are_refused():
    old, new = updates(256)
    record = encode_difference(new, old, bits=4, epoch=EPOCH)
    refused(record, old, "step", epoch=EPOCH + 1)
    refused(record, torch.zeros(255), "numel")


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (5, 6, "format"),
        (6, 1, "dtype"),
        (7, 3, "flags"),
        (16, 1, "nnz"),
        (32, 1, "offset"),
        (52, 64, "group size"),
        (60, 1, "zeros of the sub-header"),
        (65, 0xFF, "scale"),
        (65, 0x80, "scale"),
    ],
)
def test_forged_fields_are_named(place, value, field):
    old, new = updates(256)
    record = encode_difference(new, old, bits=8, epoch=EPOCH)
    record[place] = value
    refused(repaired(record), old, field)


FOUR = torch.zeros(4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: encode_difference(FOUR.bfloat16(), FOUR, bits=4, epoch=0), "dtype"),
        (lambda: encode_difference(FOUR, torch.zeros(5), bits=4, epoch=0), "length"),
        (lambda: encode_difference(torch.zeros(8)[::2], FOUR, bits=4, epoch=0), "shape"),
        (lambda: encode_difference(FOUR, FOUR, bits=5, epoch=0), "bits"),
    ],
)
def test_wrong_arguments(call, text):
    with pytest.raises(ExtensionError, match=text):
        call()


def test_the_result_does_not_depend_on_threads():
    old, new = updates(3 * 65536 + 77)
    one = encode_difference(new, old, bits=4, epoch=0)
    with on_threads(2):
        assert torch.equal(one, encode_difference(new, old, bits=4, epoch=0))
