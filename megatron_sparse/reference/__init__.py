"""Slow oracles that tests and benches compare with: written to be read."""

import torch

from megatron_sparse.wire import pad16


def padded(section: bytes | torch.Tensor) -> bytes:
    """A section of a record, with zeros up to where the next one begins; or a tensor's bytes."""
    if isinstance(section, torch.Tensor):
        section = section.contiguous().view(torch.uint8).numpy().tobytes()
    return section.ljust(pad16(len(section)), b"\0")


def numbers_at(data: bytes, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy of so many numbers of a section, from a byte on; there may be none."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data[at : at + numel * dtype.itemsize]), dtype=dtype)
