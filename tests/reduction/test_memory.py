"""What a process holds, by item."""

from types import SimpleNamespace
from typing import cast

import torch

from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.formats.message import MessageBuffers
from megatron_sparse.reduction.memory import held
from megatron_sparse.reduction.reducer import GradientReducer


def test_buffers_of_other_packages_schemes_count_as_messages() -> None:
    buffers = MessageBuffers()
    buffers.take("star:0", 100, torch.device("cpu"))
    buffers.take("received:0", 50, torch.device("cpu"))
    reducer = cast("GradientReducer", SimpleNamespace(buffers=buffers))
    expected = {"residual": 0, "undo": 0, "messages": 100, "received": 50}
    assert held(ResidualStore(torch.float32), [reducer]) == expected
