"""A second `pretrain` in one process: in-process restarts and notebooks build another model."""

import os
import socket

import pytest

from megatron_sparse.errors import ConfigError
from tests.megatron.parallel_gpt import Layout, ParallelGPT
from tests.megatron.train_ranks import installed_plugin, logged, on_ranks


@on_ranks(1)
def test_the_plugin_follows_to_the_next_model(rank, tmp_path):
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_sparse.megatron.bucket_group import CompressedBucketGroup
    from megatron_sparse.run import preparation
    from megatron_sparse.run.composition import compose
    from megatron_sparse.telemetry.run_lock import locked

    def is_attached(model: ParallelGPT) -> bool:
        kinds = {type(group) is CompressedBucketGroup for group in model.chunks[0].bucket_groups}
        assert len(kinds) == 1, "all of them or none"
        return kinds.pop()

    def build() -> ParallelGPT:
        """As `pretrain` does: the model, the hook of its configuration, the optimizer."""
        import megatron.training.training as host
        from megatron.core.optimizer import OptimizerConfig

        model = ParallelGPT(Layout(layers=1))
        chunks = installed.post_wrap_hook(model.chunks)
        settings = OptimizerConfig(optimizer="sgd", lr=0.01)
        model.optimizer = host.get_megatron_optimizer(settings, chunks)
        model.step()
        assert is_attached(model)
        return model

    def start_beside_it() -> None:
        preparation.make_run_dir(compose(own), "train")

    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    (run_dir / preparation.CONFIG_FILE).touch()
    own = ["data=mock", "name=mine", f"runs_dir={tmp_path}"]
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    options = {"scheme": "direct", "density": 0.1, "warmup_iters": 0, "run_dir": run_dir}
    with logged() as lines, installed_plugin(2, **options) as installed:
        with locked(run_dir), pytest.raises(ConfigError, match=holder):
            build()
        first = build()
        with pytest.raises(ConfigError, match=holder):
            start_beside_it()
        assert not any("another model" in line for line in lines), "the hook ran twice for one"
        second = build()
        assert not is_attached(first)
        assert installed.attachment.step == 1, "the second model starts at step 0"

        # An in-process restart also makes new process groups.
        store = dist.HashStore()
        dist.destroy_process_group()
        parallel_state.destroy_model_parallel()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        third = build()
        assert not is_attached(second)
    assert not is_attached(third)
    start_beside_it()
    assert sum("another model was built" in line for line in lines) == 2
    assert (tmp_path / "mine.1" / "plan.json").exists()
