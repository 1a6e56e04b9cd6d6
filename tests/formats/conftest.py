"""Fixtures of the formats' tests."""

import pytest

from megatron_sparse.cuda_ext.ops import supported_isas


@pytest.fixture(params=supported_isas())
def isa(request, monkeypatch):
    """Every instruction set of this CPU in turn."""
    monkeypatch.setenv("MEGATRON_SPARSE_ISA", request.param)
