"""A second `pretrain` in one process: in-process restarts and notebooks build another model."""

from __future__ import annotations

import os
import socket
from typing import Any

from megatron_sparse.errors import ConfigError
from tests.megatron.train_ranks import installed_plugin, logged, train_ranks
from tests.ranks import error_text


def _build_twice(rank, run_dir):
    """What the plugin is attached to while one model after the other is built."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_sparse.megatron.bucket_group import CompressedBucketGroup
    from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig
    from megatron_sparse.run import preparation
    from megatron_sparse.run.composition import compose
    from megatron_sparse.telemetry.run_lock import locked

    found: dict[str, Any] = {}

    def is_attached(model: SmallGPT) -> bool:
        kinds = {type(group) is CompressedBucketGroup for group in model.ddp.bucket_groups}
        assert len(kinds) == 1, "all of them or none"
        return kinds.pop()

    def build() -> SmallGPT:
        """As `pretrain` does: the model, the hook of its configuration, the optimizer."""
        import megatron.training.training as host
        from megatron.core.optimizer import OptimizerConfig

        model = SmallGPT(SmallGPTConfig(layers=1))
        chunks = installed.post_wrap_hook([model.ddp])
        settings = OptimizerConfig(optimizer="sgd", lr=0.01)
        model.optimizer = host.get_megatron_optimizer(settings, chunks)
        return model

    def start_beside_it() -> None:
        preparation.make_run_dir(compose(own), "train")

    own = ["data=mock", f"name={run_dir.name}", f"runs_dir={run_dir.parent}"]
    (run_dir / preparation.CONFIG_FILE).touch()
    options = {"scheme": "direct", "density": 0.1, "warmup_iters": 0, "run_dir": run_dir}
    with logged() as lines, installed_plugin(2, **options) as installed:
        with locked(run_dir):
            found["beside another"] = error_text(build, ConfigError)
        first = build()
        found["train beside it"] = error_text(start_beside_it, ConfigError)
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
    found["closed"] = is_attached(third)
    found["train after it"] = error_text(start_beside_it, ConfigError)
    return found | {"lines": lines, "process": os.getpid()}


def test_the_plugin_follows_to_the_next_model(tmp_path):
    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    (found,) = train_ranks(_build_twice, 1, run_dir)
    holder = f"process {found['process']} on {socket.gethostname()}"
    assert all(holder in found[name] for name in ("beside another", "train beside it"))
    assert found["train after it"] == "no error"
    attached, lines = found["first"]
    assert attached
    assert not any("another model" in line for line in lines), "the hook runs twice for one model"
    assert found["second"] == (False, True)
    assert found["steps"] == 1, "the second model starts at step 0"
    assert found["third"] == (False, True)
    assert not found["closed"]
    assert sum("another model was built" in line for line in found["lines"]) == 2
    assert (tmp_path / "mine.1" / "plan.json").exists()
