"""Slow oracles, one for each op: written to be read. Imported by tests and benches only."""

import torch

from megatron_sparse.wire import pad16


def padded(section: bytes | torch.Tensor) -> bytes:
    """A section of a record, with zeros up to where the next one begins; or a tensor's bytes."""
    if isinstance(section, torch.Tensor):
        section = section.contiguous().view(torch.uint8).numpy().tobytes()
    return section.ljust(pad16(len(section)), b"\0")
