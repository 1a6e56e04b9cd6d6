"""Records of format Rice: round trips, conservation bit for bit, bits, by oracle and ops alike."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.reference import rice_values
from megatron_sparse.reference.rice import encode, index_words
from megatron_sparse.reference.rice_values import base_and_step, levels_of, quantise
from megatron_sparse.wire import (
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    FORMAT_RICE,
    HEADER_BYTES,
    RICE_BITS,
    RICE_SPANS,
    payload_bytes,
    rice_parameter,
    rice_payload_bytes,
    rice_span,
    rice_whole_payload_bytes,
)
from tests.codec import (
    CPU,
    QUANTISED,
    RICE,
    RICE_NAMES,
    Case,
    codecs,
    decoded,
    pruning_of,
    rice_dtypes,
    rice_spec,
    segments_of,
)
from tests.cuda_ext import cases
from tests.headers import read_headers

NUMELS = (0, 1, 63, 64, 127, 4095, 4096, 4097, 9000)
TOO_LARGE = 2.0**120

quantised = pytest.mark.parametrize("value_dtype", QUANTISED, ids=RICE_NAMES.get)


def select(codec, grad, residual, threshold, spec, *, offsets=None, dense=()):
    """A message by one threshold, of one segment by default, and what it decodes to."""
    segments = segments_of([0, grad.numel()] if offsets is None else offsets, dense)
    case = Case(grad, segments, spec, pruning_of(residual, threshold))
    made = codec.encode(case)
    return made, decoded(codec, made.bytes, case)


def gradient(numel, seed=0):
    """Values of 60 powers of two."""
    return cases.make("spread", numel, torch.float32, seed)


def threshold_for(x, density):
    """Keeps about this part; everything at 1, nothing at 0."""
    if density in (0, 1) or not x.numel():
        return math.inf if density == 0 else -1.0
    return float(x.abs().quantile(1 - density))


@codecs
@rice_dtypes
def test_a_message_and_its_residual_are_the_gradient(codec, value_dtype):
    for numel in NUMELS:
        grad, residual = gradient(numel, 1), gradient(numel, 2)
        x = grad + residual
        for density in (0, 0.001, 0.05, 0.3, 1):
            threshold = threshold_for(x, density)
            made, sent = select(codec, grad, residual, threshold, rice_spec(value_dtype))
            assert bool((sent[(x.abs() <= threshold) | (x == 0)] == 0).all())
            if value_dtype != 2:  # fp16 holds few of these exponents; it saturates and underflows
                assert torch.equal(sent + made.residual_N, x), f"{numel} {density}"
            else:
                assert torch.equal(x - sent, made.residual_N), f"{numel} {density}"


@codecs
@pytest.mark.parametrize("value_dtype", [3, 4], ids=RICE_NAMES.get)
def test_every_element_without_indices(codec, value_dtype):
    for numel in NUMELS:
        grad, residual = gradient(numel, 1), gradient(numel, 2)
        grad[::5], residual[::5] = 0, 0
        spec = rice_spec(value_dtype, without_indices=True)
        made, sent = select(codec, grad, residual, -1, spec)
        assert torch.equal(sent + made.residual_N, grad + residual)
        (header,) = read_headers(made.bytes, 0)
        assert header.payload_bytes == rice_whole_payload_bytes(numel, value_dtype, 12)
        assert header.nnz == int((grad + residual).count_nonzero())


@codecs
@rice_dtypes
def test_kept_segments(codec, value_dtype):
    """They are dense; in bf16 beside records of few bits."""
    numel, offsets, dense = 9000, [0, 4000, 4500, 4500, 9000], [0, 1, 0, 0]
    grad, residual = torch.randn(numel), torch.zeros(numel)
    grad[:4000] *= grad[:4000].abs() > 1.5
    grad[4500:] *= grad[4500:].abs() > 1.5
    spec = rice_spec(value_dtype, 13)
    made, sent = select(codec, grad, residual, 0, spec, offsets=offsets, dense=dense)
    headers = read_headers(made.bytes, 0)
    kept_dtype = 1 if value_dtype in RICE_BITS else value_dtype
    assert (headers[1].format, headers[1].dtype) == (FORMAT_DENSE, kept_dtype)
    assert {h.format for h in (headers[0], headers[3])} == {FORMAT_RICE}
    assert torch.equal(sent + made.residual_N, grad)


@codecs
def test_kept_values_of_a_quantised_message_are_rounded_one_by_one(codec):
    """To nearest even, and finite ones stay finite: a value's bytes depend on no other value."""
    values = torch.tensor(
        [1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, -3.4e38, math.inf, math.nan, 1e-45]
    )
    made, sent = select(codec, values, torch.zeros(7), -1, rice_spec(4), dense=[1])
    largest = float(torch.finfo(torch.bfloat16).max)
    wanted = torch.tensor([1, 1 + 2.0**-6, largest, -largest, math.inf, math.nan, 0])
    cases.assert_same_bits(sent, wanted, "sent")
    assert torch.equal(made.residual_N, torch.where(wanted.isfinite(), values - wanted, 0))


# Groups, and several of them; outliers, denormals, equal and single entries, signed zeros.
floats = st.lists(st.floats(width=32), min_size=1, max_size=300)
scaled = st.builds(
    lambda values, exponent: [math.ldexp(value, exponent) for value in values],
    st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=200),
    st.integers(-149, 100),
)


@codecs
@given(floats | scaled, st.sampled_from(QUANTISED), st.booleans())
@settings(max_examples=150)
def test_conservation_of_any_floats(codec, values, value_dtype, whole):
    """Bit for bit but for the sign of a zero; a group that holds what is too large becomes NaN."""
    whole = whole and value_dtype in (3, 4)
    grad = torch.tensor(values, dtype=torch.float32)
    spec = rice_spec(value_dtype, without_indices=whole)
    made, sent = select(codec, grad, torch.zeros_like(grad), -1, spec)
    entries = torch.arange(grad.numel()) if whole else grad.nonzero().squeeze(1)
    for begin in range(0, entries.numel(), 128):
        group = entries[begin : begin + 128]
        if bool((grad[group].abs() < TOO_LARGE).all()):
            assert torch.equal(sent[group] + made.residual_N[group], grad[group])
            assert bool((made.residual_N[group].abs() <= grad[group].abs()).all())
            # In fp64 too: the subtraction was exact, it was not the addition that rounded.
            wide = sent[group].double() + made.residual_N[group].double()
            assert torch.equal(wide, grad[group].double())
        else:
            assert bool(sent[group].isnan().all())
            assert bool((made.residual_N[group] == 0).all())


@codecs
@quantised
@pytest.mark.parametrize("bad", [math.nan, -math.inf, TOO_LARGE, -3e38])
def test_what_is_too_large_reaches_its_group_and_no_other(codec, value_dtype, bad):
    grad = torch.randn(400)
    grad[200] = bad
    made, sent = select(codec, grad, torch.zeros(400), -1, rice_spec(value_dtype))
    assert bool(sent[128:256].isnan().all())
    assert bool((made.residual_N[128:256] == 0).all())
    rest = torch.cat([torch.arange(128), torch.arange(256, 400)])
    assert torch.equal(sent[rest] + made.residual_N[rest], grad[rest])


@codecs
@quantised
def test_just_below_what_is_too_large(codec, value_dtype):
    grad = torch.tensor([math.nextafter(TOO_LARGE, 0), 1.0]).float()
    grad = torch.where(grad >= TOO_LARGE, torch.tensor(TOO_LARGE * (1 - 2.0**-24)), grad)
    made, sent = select(codec, grad, torch.zeros(2), -1, rice_spec(value_dtype))
    assert torch.equal(sent + made.residual_N, grad)
    assert bool(sent.isfinite().all())


HARD_GROUPS = 9


def hard_group(rng, kind, count):
    """Magnitudes of a group that comes near the rule's limits."""
    shape, exponent = count, int(rng.integers(-140, 100))
    match kind:
        case 0:  # a wide range of exponents
            x = np.ldexp(rng.random(shape) + 1, -rng.integers(0, 40, shape))
        case 1:  # about 2^15 to 2^18 times the least: the base may become 0
            x = np.where(
                rng.random(shape) < 0.1, 2.0 ** rng.integers(14, 20), rng.random(shape) + 1
            )
        case 2:  # subnormal numbers
            return (rng.integers(0, 2 ** int(rng.integers(1, 18)), shape) * 2.0**-149).astype("f4")
        case 3:  # equal but for their last bits
            x = (rng.random() + 1) * (1 + rng.integers(0, 4, shape) * 2.0**-23)
        case 4:  # at halves, once and twice the least, but for the last bits
            x = rng.choice([1, 1.5, 2, 3, 4], shape) * (1 + rng.integers(-3, 4, shape) * 2.0**-23)
        case 5:  # one outlier
            x = rng.random(shape) + 1
            x[0] = 2.0 ** rng.integers(0, 60)
        case 6:  # few bits of mantissa: ties
            x = rng.integers(1, 64, shape) / 8
        case 7:  # any bits
            return rng.integers(0, 247 << 23, shape).astype("<u4").view("f4")
        case _:  # a tail
            x = np.abs(rng.standard_normal(shape)) * 0.3 + 2
    return np.minimum(np.ldexp(x, exponent), 2.0**119).astype("f4")


@pytest.mark.parametrize(
    ("bits", "indices"), [(8, True), (4, True), (3, True), (2, True), (8, False), (4, False)]
)
def test_hard_groups_are_conserved(bits, indices):
    """The quantiser alone; also its bound, and that hard groups are hard."""
    rng, without_base = np.random.default_rng(bits), 0
    for trial in range(1800):
        count = int(rng.choice([1, 2, 3, 31, 128]))
        magnitude = hard_group(rng, trial % HARD_GROUPS, count)
        x = np.where(rng.random(count) < 0.5, -magnitude, magnitude)
        group = quantise(x, bits, indices=indices)
        wide = group.sent.astype(np.float64) + group.residual
        assert np.array_equal(wide, x.astype(np.float64)), x
        assert np.array_equal(group.sent + group.residual, x), x
        assert np.all(np.abs(group.residual) <= magnitude), x
        base, step = base_and_step(group.scale_word)
        without_base += bool(base == 0 < magnitude.min() > 2.0**-120)
        if bits >= 4:
            # Half a step; the last bits of the quotient, and of a step below the subnormal ones.
            bound = step / 2 + magnitude.max() * 2.0**-22 + levels_of(bits) * 2.0**-149
            assert np.all(np.abs(group.residual) <= bound), x
    assert without_base > 20


@pytest.mark.parametrize(("limit", "is_exact"), [(2.0**16, True), (2.0**40, False)])
def test_a_small_base_beside_a_large_step_would_lose_bits(limit, is_exact, monkeypatch):
    """Why such a base becomes 0: 2^18 - (1 + 2^-7) has 25 bits."""
    monkeypatch.setattr(rice_values, "BASE_LIMIT", np.float32(limit))
    x = np.array([1 + 2.0**-7, 2.0**18, 2.0**23], np.float32)
    group = quantise(x, 4, indices=True)
    assert np.array_equal(group.sent.astype(np.float64) + group.residual, x) == is_exact
    assert (base_and_step(group.scale_word)[0] == 0) == is_exact


@pytest.mark.parametrize("numel", [2**20, 2**22])
@pytest.mark.parametrize("density", [0.001, 0.005, 0.01, 0.05, 0.1])
def test_positions_take_at_most_5_percent_more_than_their_entropy(density, numel):
    rng, span = np.random.default_rng(0), rice_span(density)
    index = np.flatnonzero(rng.random(numel, dtype=np.float32) < density)
    p = index.size / numel
    entropy = -math.log2(p) - (1 - p) / p * math.log2(1 - p)
    words = sum(
        index_words(part - begin, 2**span).size
        for begin in range(0, numel, 2**span)
        for part in [index[np.searchsorted(index, begin) : np.searchsorted(index, begin + 2**span)]]
    )
    bits = 32 * words + 64 * (numel // 2**span + 1)
    assert entropy < bits / index.size < 1.05 * entropy
    # Values of few bits come to that: 4, the scales, the padding of planes and of the last group.
    values = torch.from_numpy(rng.standard_normal(index.size).astype("f4"))
    record, _ = encode(values, torch.from_numpy(index), range(numel), rice_spec(4, span))
    assert 8 * len(record) / index.size < 1.05 * (entropy + 4.25)


COUNT = 2**20
PAGE = Path(__file__).resolve().parents[2] / "docs/wire-format.md"
DOCUMENTED = re.findall(rf"^ +{COUNT} +(.*)$", PAGE.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("line", DOCUMENTED, ids=lambda line: line.split()[0])
def test_the_documented_bits_are_those_of_records(line):
    density, entropy, rice, ratio, coo, pici, *by_values = map(float, line.split())
    grad_N = torch.from_numpy(np.random.default_rng(0).random(COUNT, dtype=np.float32) < density)
    entries = int(grad_N.count_nonzero())
    p = entries / COUNT
    assert entropy == pytest.approx(-math.log2(p) - (1 - p) / p * math.log2(1 - p), abs=0.006)
    for code, stated in zip([0, 1, *QUANTISED], by_values, strict=True):
        spec = rice_spec(code, rice_span(density))
        made, _ = select(CPU[0], grad_N.float(), torch.zeros(COUNT), 0.0, spec)
        assert stated == pytest.approx(8 * len(made.bytes) / entries, abs=0.006), code
        if code == 0:
            # Less the header; values and words are padded together.
            positions = 8 * (len(made.bytes) - HEADER_BYTES - 4 * entries) / entries
            assert rice == pytest.approx(positions, abs=0.006 + 8 * 16 / entries)
    assert ratio == pytest.approx(rice / entropy, abs=0.002)
    for form, stated in ((FORMAT_COO, coo), (FORMAT_PICI, pici)):
        found = 8 * (payload_bytes(form, COUNT, entries, 0) - 4 * entries) / entries
        assert stated == pytest.approx(found, abs=0.006 + 8 * 16 / entries)


@pytest.mark.parametrize(
    ("draw", "bits", "most"),
    [("normal", 4, 0.033), ("normal", 3, 0.055), ("normal", 2, 0.09), ("laplace", 2, 0.16)],
)
def test_fitted_levels_lose_less_than_even_ones(draw, bits, most):
    """The quality that presets rely on: errors of the largest 5 %, as parts of the values."""
    x = np.sort(np.abs(getattr(np.random.default_rng(0), draw)(size=20 * 128 * 100)))[-128 * 100 :]
    x_GK = np.random.default_rng(1).permutation(x).reshape(100, 128).astype(np.float32)
    fitted = np.stack([quantise(x_K, bits, indices=True).residual for x_K in x_GK])
    step = x_GK.max(axis=1, keepdims=True) / levels_of(bits)
    even = x_GK - np.rint(x_GK / step) * step
    size, *errors = (
        np.sqrt(np.mean(each.astype(np.float64) ** 2)) for each in (x_GK, fitted, even)
    )
    assert errors[0] < errors[1]
    assert errors[0] < most * size


@codecs
def test_bits_of_a_message_are_the_oracle_s_table(codec):
    """Chunk, row and word by hand: 9 entries in the second of three chunks."""
    grad = torch.zeros(3 * 4096)
    grad[4096:8192:512] = torch.arange(1, 9) / 8
    grad[8191] = 2.0
    made, _ = select(codec, grad, torch.zeros_like(grad), 0, rice_spec(4))
    words = np.frombuffer(made.bytes[HEADER_BYTES:], "<u4")
    gaps = np.array([0, *[511] * 7, 510])
    r = rice_parameter(4096, 9)
    assert r == 8
    unary = -(-int(((gaps >> r) + 1).sum()) // 32)
    total = 1 + 4 + r + unary
    assert words[:4].tolist() == [1 | 12 << 8, 3, total, 0]
    assert words[4:12].tolist() == [0, 0, 0, 0, 9, total, 9, total]
    assert words[12 + 1 + 4] == 0b11111110  # bit 0 of the gaps but the first and the last: 511
    assert len(made.bytes) == HEADER_BYTES + 16 + 32 + -(-4 * total // 16) * 16


def test_the_parameter_is_the_best():
    for numel in (1, 2, 100, 4096, 2**24):
        for entries in {1, 2, 3, numel // 7, numel // 3, numel // 2, numel - 1, numel}:
            if not 0 < entries <= numel:
                continue
            r = rice_parameter(numel, entries)
            worst = [entries * (k + 1) + (numel - entries) / 2**k for k in range(26)]
            assert worst[r] == min(worst)


@given(
    st.integers(1, 3),
    st.integers(0, 4095),
    st.lists(st.integers(0, 9), min_size=1, max_size=60),
    st.sampled_from(list(RICE.values())),
    st.sampled_from(["first", "last", "even", "one of each", "random"]),
)
@settings(max_examples=150)
def test_a_slot_holds_every_record(chunks, short, runs, value_dtype, shape):
    """`rice_payload_bytes` is enough for k entries wherever they lie."""
    numel = 4096 * chunks - short
    rng = np.random.default_rng(len(runs))
    k = min(sum(run**3 for run in runs) + 1, numel)
    index = {
        "first": np.arange(k),
        "last": np.arange(numel - k, numel),
        "even": np.linspace(0, numel - 1, k).astype(np.int64),
        "one of each": np.unique(np.append(np.arange(0, numel, 4096), np.arange(k - 1))[:k]),
        "random": np.sort(rng.permutation(numel)[:k]),
    }[shape]
    index_K = torch.from_numpy(np.unique(index))
    record, _ = encode(torch.ones(index_K.numel()), index_K, range(numel), rice_spec(value_dtype))
    assert len(record) - HEADER_BYTES <= rice_payload_bytes(numel, k, value_dtype, 12)


def test_the_span_follows_the_density():
    assert [rice_span(density) for density in (1, 0.25, 0.05, 0.01, 0.001, 1e-9)] == [
        *(12, 12, 15, 17, 20, RICE_SPANS[-1])
    ]


@codecs
@pytest.mark.parametrize("log2_span", [12, 17, 24])
def test_any_span_holds_the_same_entries(codec, log2_span):
    grad = gradient(300_000)
    grad[::2] = 0
    made, sent = select(codec, grad, torch.zeros_like(grad), 0, rice_spec(0, log2_span))
    cases.assert_same_bits(sent, grad + 0.0, "sent")
    # Another decoder's messages have other spans; a receiver takes them all.
    assert made.bytes[HEADER_BYTES + 1] == log2_span
