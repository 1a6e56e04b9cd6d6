"""A second `pretrain` in one process: in-process restarts and notebooks build another model."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_sparse.megatron import cpu_mode
from tests.ranks import run_ranks


def _build_twice(rank, world_size, run_dir):
    """What the plugin is attached to while one model after the other is built."""
    cpu_mode.enable()
    import torch.distributed as dist
    from megatron.core import parallel_state

    cpu_mode.enable_training()
    import megatron.training.training as host
    from megatron.core.optimizer import OptimizerConfig

    from megatron_sparse.megatron import install, plugin
    from megatron_sparse.megatron.bucket_group import CompressedBucketGroup
    from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron_sparse").addHandler(handler)
    found: dict[str, Any] = {"lines": lines}

    def is_attached(model: SmallGPT) -> bool:
        kinds = {type(group) is CompressedBucketGroup for group in model.ddp.bucket_groups}
        assert len(kinds) == 1, "all of them or none"
        return kinds.pop()

    def build() -> SmallGPT:
        """As `pretrain` does: the model, the hook of its configuration, the optimizer."""
        model = SmallGPT(SmallGPTConfig(layers=1))
        chunks = installed.post_wrap_hook([model.ddp])
        settings = OptimizerConfig(optimizer="sgd", lr=0.01)
        model.optimizer = host.get_megatron_optimizer(settings, chunks)
        return model

    arguments = SimpleNamespace(train_iters=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "get_args", lambda: arguments)
        patch.setattr(plugin, "get_tensorboard_writer", lambda: None)
        patch.setattr(plugin, "get_wandb_writer", lambda: None)
        installed = install(scheme="direct", density=0.1, warmup_iters=0, run_dir=run_dir)
        first = build()
        first.step()
        found["first"] = is_attached(first), list(lines)

        second = build()
        second.step()
        found["second"] = is_attached(first), is_attached(second)
        found["steps"] = installed.attachment.step

        # An in-process restart also makes new process groups.
        store = dist.HashStore()
        dist.destroy_process_group()
        parallel_state.destroy_model_parallel()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        third = build()
        third.step()
        found["third"] = is_attached(second), is_attached(third)
        installed.close()
        found["closed"] = is_attached(third)
    return found


def test_the_plugin_follows_to_the_next_model(tmp_path):
    (found,) = run_ranks(_build_twice, 1, tmp_path)
    attached, lines = found["first"]
    assert attached
    assert not any("another model" in line for line in lines), "the hook runs twice for one model"
    assert found["second"] == (False, True)
    assert found["steps"] == 1, "the second model starts at step 0"
    assert found["third"] == (False, True)
    assert not found["closed"]
    assert sum("another model was built" in line for line in found["lines"]) == 2
    assert (tmp_path / "plan.json").exists()
