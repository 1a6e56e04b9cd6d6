"""Fixtures of the formats' tests."""

import pytest
import torch

from megatron_sparse.cuda_ext.ops import supported_isas


@pytest.fixture(params=supported_isas())
def isa(request, monkeypatch):
    """Every instruction set of this CPU in turn."""
    monkeypatch.setenv("MEGATRON_SPARSE_ISA", request.param)


@pytest.fixture
def place(isa):
    """Copies a tensor on the CPU, some elements behind an aligned address."""

    def shifted(tensor, shift=0):
        room = torch.empty(tensor.numel() + shift, dtype=tensor.dtype)
        return room[shift:].copy_(tensor)

    return shifted
