"""When the plugin checks NCCL's groups: before the optimizer steps, and before a save."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import CommunicationError
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.optimizer_step import UnconfirmedSums
from megatron_sparse.megatron.parameter_gathers import ParameterGathers
from megatron_sparse.recording import NullSink
from megatron_sparse.transport.nccl_errors import ENVIRONMENT, HealthCheck

FAILED: Any = SimpleNamespace(get_error=lambda: SimpleNamespace(name="TIMEOUT"))


@pytest.fixture
def attachment(monkeypatch: pytest.MonkeyPatch) -> Attachment:
    """An attachment without a model, in a process with a failed group."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    found = Attachment.__new__(Attachment)
    found.config = SparseConfig()
    found.sink = NullSink()
    found.unit = cast("Any", SimpleNamespace(per_token=False, bind=lambda optimizer: None))
    found.groups, found.run_dir, found.progress = [], None, cast("Any", None)
    found._chunks, found._reducers = [], {}
    found.residuals = ResidualStore(torch.float32)
    found.parameters = ParameterGathers(found.sink)
    found.config.parameters.method = "raw"
    found.nccl_health = HealthCheck(
        5.0, lambda: None, torch.device("cpu"), lambda: iter([("tensor (ranks 0, 1)", FAILED)])
    )
    found._sums = UnconfirmedSums(lambda: None)
    return found


def test_the_optimizer_does_not_step_after_a_failure(attachment: Attachment) -> None:
    steps: list[int] = []
    optimizer = SimpleNamespace(step=lambda: steps.append(1))
    attachment.bind_optimizer(optimizer, undo=False)
    with pytest.raises(CommunicationError, match=r"tensor .* before the optimizer's step"):
        optimizer.step()
    assert steps == []


def test_nothing_is_saved_after_a_failure(
    attachment: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_sparse.megatron.plugin import Plugin

    saved: list[int] = []
    plugin = Plugin.__new__(Plugin)
    plugin.attachment = attachment
    plugin._originals = {"save_checkpoint": lambda iteration: saved.append(iteration)}
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", HashStore)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(CommunicationError, match=r"tensor .* before a checkpoint"):
        plugin._save_checkpoint(10)
    assert saved == []
