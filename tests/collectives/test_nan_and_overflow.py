"""Sums that are NaN or infinite, and sums whose partial sums would overflow fp16."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.formats.rounding import round_into, unify_nan_
from megatron_sparse.planner.plan import shape_of
from megatron_sparse.transport.virtual import VirtualTransport
from tests.collectives.cases import BY_FORM, Case, on_nodes, run_case, whole_sums

DTYPES = (("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "bf16"), ("fp16", "fp16"))
NUMEL = 240
RAW = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
SPECIALS = torch.cat(
    [
        torch.tensor([0x7FC00000, -0x400000, 0x7FA5A5A5], dtype=torch.int32).view(torch.float32),
        torch.tensor([float("inf"), -float("inf"), 1.0, 0.0, -0.0]),
    ]
)
"""NaN of both signs and with a payload, infinities, and the values that they may be added to."""


class GpuNan(TorchDispatchMode):
    """Gives sums that are NaN the bits that they have on a GPU: 0x7FFFFFFF, whatever the operands.

    An addition of a CPU keeps an operand's bits instead, so that `0 + NaN` and a copy of NaN agree.
    """

    ADDITIONS = (
        "aten::add",
        "aten::add_",
        "aten::sum",
        "aten::index_add_",
        "aten::scatter_add_",
        "megatron_sparse::decode_",
        "megatron_sparse::row_sparse_sum",
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in self.ADDITIONS:
            total = args[0] if func._schema.name.endswith("_") else result
            if total.is_floating_point():
                raw = total.view(RAW[total.dtype])
                raw.masked_fill_(total.isnan(), torch.iinfo(raw.dtype).max)
        return result


def specials(rank: int) -> torch.Tensor:
    """A rank's gradient, fp32 [N]: over all ranks every pair of special values meets."""
    generator = torch.Generator().manual_seed(rank)
    return SPECIALS[torch.randint(len(SPECIALS), (NUMEL,), generator=generator)]


@pytest.mark.parametrize("dtype", RAW)
def test_rounding_leaves_one_nan(dtype):
    """Also in the body of a vector loop, where torch's own conversion gives other bits."""
    values = specials(0)
    rounded = round_into(torch.empty(NUMEL, dtype=dtype), values)
    if dtype == torch.float32:
        assert torch.equal(bits(rounded), bits(values)), "a copy keeps all bits"
        unify_nan_(rounded)
    assert set(bits(rounded)[values.isnan()].tolist()) == {NAN_BITS[dtype]}
    kept = ~values.isnan()
    assert torch.equal(bits(rounded)[kept], bits(values.to(dtype))[kept])


def bits(values):
    """The raw bits: NaN equals nothing, not even itself."""
    return values.view(RAW[values.dtype])


@pytest.mark.parametrize(
    ("sizes", "additions"),
    [*(((n,), nullcontext) for n in (2, 3, 5)), ((2, 1), nullcontext), ((3,), GpuNan)],
)
@pytest.mark.parametrize(("name", "op"), BY_FORM)
def test_a_sum_that_is_nan_has_the_same_bits_on_every_rank(name, op, sizes, additions):
    n = sum(sizes)
    gradients = [specials(rank) for rank in range(n)]
    expected = sum(values.double() for values in gradients)
    for dtype, wire in DTYPES:
        case = Case(name, n, op, dtype, wire, numel=NUMEL)
        with additions():
            whole = whole_sums(case, run_case(case, on_nodes(sizes), values=gradients).results)
        for result in whole:
            assert torch.equal(bits(result), bits(whole[0])), (case, "not bit-identical")
            assert result.double().allclose(expected, rtol=0, atol=0, equal_nan=True), case


SUMMANDS = (60000.0, 60000.0, -60000.0, -60000.0, 4096.0)
"""Of the ranks, in some order for each element: any three end the range of fp16, 65504; all of them
do not. Sums of them are multiples of 32, which fp16 holds exactly."""
FP16 = (("fp32", "fp16"), ("fp16", "fp16"))


def large(n):
    """Each rank's gradient, fp32 [N], the summands in another order for each element."""
    generator = torch.Generator().manual_seed(n)
    summands = torch.tensor(SUMMANDS[:n])
    columns = [summands[torch.randperm(n, generator=generator)] for _ in range(NUMEL)]
    return list(torch.stack(columns, dim=1).contiguous())


def assert_sum_of_large(case, topology=None):
    """The result is the exact sum on every rank."""
    gradients = large(case.n)
    for result in whole_sums(case, run_case(case, topology, values=gradients).results):
        assert torch.equal(result.double(), sum(values.double() for values in gradients)), case


@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize(("name", "op"), BY_FORM)
def test_partial_sums_do_not_overflow_fp16(name, op, n):
    for dtype, wire in FP16:
        if name == "dense" and dtype == "fp16":
            continue  # The backend adds fp16 gradients in fp16, as for Megatron itself.
        assert_sum_of_large(Case(name, n, op, dtype, wire, numel=NUMEL))


def test_nodes_sums_do_not_overflow_fp16():
    for (dtype, wire), sizes in itertools.product(FP16, ((2, 2), (1, 3), (1, 1, 2))):
        case = Case("hierarchical", 4, dtype=dtype, wire=wire, numel=NUMEL)
        assert_sum_of_large(case, on_nodes(sizes))


@pytest.mark.parametrize("op", list(CollectiveOp))
def test_the_backend_never_adds_what_the_wire_narrows_to_fp16(monkeypatch, op):
    """The backends add in the dtype that they are given."""

    def refuse(*arguments):
        raise AssertionError(f"the backend adds {arguments}")

    monkeypatch.setattr(VirtualTransport, "all_reduce_", refuse)
    monkeypatch.setattr(VirtualTransport, "reduce_scatter", refuse)
    assert_sum_of_large(Case("dense", 4, op, "fp32", "fp16", numel=NUMEL))


@pytest.mark.parametrize(("wire", "expected"), [(None, 4), ("bf16", 2), ("fp16", 4)])
def test_the_planner_prices_partial_sums_as_they_travel(wire, expected):
    bucket = Bucket("b", torch.zeros(8), (), CollectiveOp.ALL_REDUCE, 2)
    assert shape_of(bucket, wire).partial_bytes == expected
