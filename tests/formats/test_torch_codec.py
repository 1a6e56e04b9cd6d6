"""The torch-operation codec writes and reads the oracle's bytes, as the compiled one does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse.errors import WireFormatError
from megatron_sparse.formats import torch_codec
from tests import damage
from tests.codec import POISON, RANK, Case, Made, check, segments_of, spec_of
from tests.cuda_ext import cases


class TorchCodec:
    """See `Codec`."""

    name = "torch"

    def encode(self, case: Case) -> Made:
        """See `Codec`."""
        out = torch.full((case.room,), POISON, dtype=torch.uint8)
        nnz_S = cases.count_nonzero(case.grad_N, case.segments.offsets)
        sizes = torch_codec.encode(case.grad_N, case.segments, nnz_S, case.spec, out).tolist()
        records = out[: sum(sizes)].split(sizes)
        return Made([record.numpy().tobytes() for record in records], nnz_S.tolist())

    def decode_(self, acc, message, expected, *, fresh=False) -> None:
        """See `Codec`."""
        data = torch.tensor(list(message), dtype=torch.uint8)
        torch_codec.decode_add_(acc, data, expected, fresh=fresh)


TORCH = TorchCodec()


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.integers(0, 63),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.sampled_from(range(3)),
    st.integers(0, 1000),
)
def test_same_bytes_and_same_sum_as_the_oracle(sizes, keep, density, code, seed):
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    grad_N = cases.pruned_grad(int(offsets[-1]), density, cases.DTYPES[code], seed)
    segments = segments_of(offsets, [keep >> segment & 1 for segment in range(len(sizes))])
    check(Case(grad_N, segments, spec_of(code)), TORCH)


@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_narrowed_values_have_the_oracles_bits_also_where_they_are_nan(code, density):
    grad_N = cases.pruned_grad(341, density, torch.float32, 5)
    specials = torch.tensor([0x7FC00000, -0x400000, 0x7FA5A5A5], dtype=torch.int32)
    nonzero = grad_N.nonzero().flatten()
    grad_N[nonzero] = specials.view(torch.float32)[torch.arange(nonzero.numel()) % 3]
    grad_N[nonzero[-1]] = 1.00390625  # halfway between two values of bf16
    check(Case(grad_N, segments_of([0, 300, 341]), spec_of(code)), TORCH)


def test_damage_is_refused_and_nothing_is_added():
    case, good = damage.plain("coo")
    acc = torch.zeros(case.numel)
    for found in (*damage.headers(good, case.numel), *damage.sections("coo", good)):
        with pytest.raises(WireFormatError, match=f"rank {RANK}: field") as caught:
            TORCH.decode_(acc, found.message, case.expected())
        assert any(f"field {field} is" in caught.value.what for field in found.fields), found.what
    assert not acc.any()
