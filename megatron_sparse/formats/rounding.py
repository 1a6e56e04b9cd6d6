"""Rounding values to another dtype with the codec's NaN.

The codec turns every NaN into one: 0x7FC00000 in fp32, 0x7FC0 in bf16 and 0x7E00 in fp16. torch's
conversions do not: on a CPU the bits of a bf16 NaN depend on the element's place in a vector
register, and fp16 keeps sign and payload. Ranks that take a sum partly from records and partly from
memory must therefore convert as the codec does, or they hold different bits.
"""

import torch


def unify_nan_(values_N: torch.Tensor) -> torch.Tensor:
    """Gives every NaN the codec's bits.

    On a CPU this only reads the values if there is no NaN. On CUDA it launches two elementwise
    kernels without looking first, since to look the CPU would have to wait.

    Args:
        values_N: fp32, bf16 or fp16. Mutated.

    Returns:
        `values_N`.

    Example:
        >>> negative = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
        >>> hex(int(unify_nan_(negative).view(torch.int32)))
        '0x7fc00000'
    """
    # A sum is NaN if a value is: one pass instead of two. Infinities of both signs make it NaN too;
    # then `masked_fill_` changes nothing.
    if values_N.device.type != "cpu" or bool(values_N.sum(dtype=torch.float32).isnan()):
        values_N.masked_fill_(values_N.isnan(), float("nan"))
    return values_N


def round_into(target_N: torch.Tensor, source_N: torch.Tensor) -> torch.Tensor:
    """Copies values and rounds them to nearest even where the target's dtype is narrower.

    Where it rounds, every NaN becomes the codec's; a copy without rounding keeps all bits.

    Args:
        target_N: fp32, bf16 or fp16. Mutated.
        source_N: as many values, in the same or a wider dtype.

    Returns:
        `target_N`.
    """
    target_N.copy_(source_N)
    if target_N.dtype.itemsize < source_N.dtype.itemsize:
        unify_nan_(target_N)
    return target_N
