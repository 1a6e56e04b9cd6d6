"""Inputs that the kernel tests share, and exact comparison."""

import math

import torch

from megatron_sparse.cuda_ext import ops

ISAS = ops.supported_isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RESIDUAL_DTYPES = (torch.float32, torch.bfloat16)
FLT_MAX = torch.finfo(torch.float32).max
SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097, 100_003)
KINDS = ("spread", "special", "zero", "equal")

# Signed zeros, NaN of either sign, infinities, the ends of each dtype's range, denormals of fp16
# (6e-8 is its smallest), of bf16 and of fp32, and values between two neighbours of each.
SPECIAL = (
    0.0,
    -0.0,
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    FLT_MAX,
    -FLT_MAX,
    65504.0,
    65519.9,
    65520.0,
    -65280.0,
    65408.0,
    3.3961775292304957e38,
    1e-45,
    -1e-40,
    9.2e-41,
    1.1754943508222875e-38,
    6e-8,
    3e-8,
    -2.9e-8,
    1.5e-8,
    6.1e-5,
    6.103515625e-05,
    -7.62939453125e-06,
    7.6e-06,
    1.0,
    1.00390625,
    -1.0039062,
    1.0000001,
    2.5,
    -1e-3,
)


def kinds(numel: int) -> tuple[str, ...]:
    """The kinds worth a test at this size: uniform input at one that ends inside a vector."""
    return KINDS if numel in (17, 4097) else KINDS[:2]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    width = {4: torch.int32, 2: torch.int16}.get(tensor.element_size())
    return tensor.view(width) if tensor.is_floating_point() and width else tensor


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fails with the first element whose bits differ."""
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, what
    different = (bits(got) != bits(expected)).nonzero()
    if len(different):
        at = int(different[0])
        raise AssertionError(
            f"{what}: {len(different)} of {got.numel()} differ, first at {at}: "
            f"got {got[at].item()!r}, expected {expected[at].item()!r}"
        )


def make(kind: str, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """`numel` elements of one kind: `spread` covers 60 powers of two, `special` the list above."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "zero":
        return torch.zeros(numel, dtype=dtype)
    if kind == "equal":
        return torch.full((numel,), -1.2345678, dtype=dtype)
    if kind == "special":
        order = torch.randint(0, len(SPECIAL), (numel,), generator=generator)
        return torch.tensor(SPECIAL, dtype=torch.float32)[order].to(dtype)
    exponent = torch.randint(-40, 20, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * torch.exp2(exponent.float())).to(dtype)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, one element off any alignment, between poisoned neighbours."""
    room = torch.full((tensor.numel() + 2,), math.nan, dtype=tensor.dtype, device=tensor.device)
    room[1:-1] = tensor
    return room[1:-1]


def cut(numel: int, pieces: int, seed: int = 0) -> torch.Tensor:
    """Ascending offsets of `pieces` pieces of [0, numel), empty ones among them."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(0, numel + 1, (pieces - 1,), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([numel])])


SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


def _normal(numel: int, density: float, generator: torch.Generator) -> torch.Tensor:
    grad = torch.randn(numel, generator=generator)
    return grad * (torch.rand(numel, generator=generator) < density)


def pruned_grad(numel: int, density: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A pruned gradient of about this density, with NaN, infinity and -0.0 near its begin."""
    grad = _normal(numel, density, torch.Generator().manual_seed(seed))
    for at, value in zip((1, 3, 5), (math.nan, -0.0, math.inf), strict=True):
        if density > 0 and numel > at:
            grad[at] = value
    return grad.to(dtype)


def scattered_grad(numel: int, density: float, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The same where they lie anywhere, if there is room, and the smallest numbers beside them."""
    generator = torch.Generator().manual_seed(seed)
    grad = _normal(numel, density, generator)
    if density > 0 and numel > 100:
        special = [-0.0, math.nan, math.inf, -math.inf, SMALLEST[dtype], -SMALLEST[dtype]]
        grad[torch.randperm(numel, generator=generator)[:6]] = torch.tensor(special)
    return grad.to(dtype)


def count_nonzero(grad_N: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Non-zero elements of each piece, by a prefix sum."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), (grad_N != 0).cumsum(0)])
    return before[offsets].diff()


BAD_SELECTIONS = {
    "grad has the wrong dtype": {"grad": torch.zeros(8, dtype=torch.float64)},
    "residual has the wrong dtype": {"residual_N": torch.zeros(8, dtype=torch.float16)},
    "residual has the wrong length": {"residual_N": torch.zeros(7)},
    "thresholds has the wrong length": {"thresholds_R": torch.zeros(2)},
    "tie_chances has the wrong length": {"tie_chances_R": torch.zeros(2)},
    "tie_chances has the wrong dtype": {"tie_chances_R": torch.zeros(1, dtype=torch.float64)},
    "range_offsets does not cut": {"range_offsets": torch.tensor([0, 7])},
    "range_offsets has the wrong dtype": {"range_offsets": torch.tensor([0, 8], dtype=torch.int32)},
    "leak is out of range": {"leak": 1.5},
}
"""By the error: the gradient, or fields of `Pruning`, that do not fit 8 fp32 elements."""
