"""Two processes on one GPU train: Megatron's own loop over NCCL, and torch's DDP."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu_ranks import on_one_gpu
from tests.programs import ROOT

NEEDED = ("megatron", "hydra", "omegaconf", "rich", "typer")


def losses(said: list[str]) -> tuple[float, float]:
    """The first and the last one, which the writing rank prints."""
    first, last = re.findall(r"loss ([\d.]+) -> ([\d.]+)", "\n".join(said))[0]
    return float(first), float(last)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        ["scheme=dense"],
        ["preset=safe"],
        ["compression=topk99", "scheme=direct", "scheme.capacity=1.25", "scheme.nccl_engine=true"],
        ["preset=safe", "training.use_distributed_optimizer=true", "parameters.method=exact"],
    ],
    ids=["dense", "safe", "engine", "exact parameters"],
)
def test_a_run(settings: list[str], tmp_path: Path) -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}")
    run = ["train", "experiment=testbed", "name=gpu", f"runs_dir={tmp_path}"]
    run += ["cluster.device=cuda", "cluster.nodes=2", "cluster.ranks_per_node=1"]
    run += ["training.iterations=20", "compression.keep_below_numel=256"]
    said = on_one_gpu(2, "-m", "megatron_sparse.cli.main", *run, *settings)
    first, last = losses(said)
    assert last < first


@pytest.mark.gpu
def test_the_ddp_example_learns() -> None:
    said = on_one_gpu(2, str(ROOT / "examples" / "train_ddp.py"), "--steps", "100")
    first, last = losses(said)
    # Uniform guessing costs ln 256 = 5.5 nats, the bytes' frequencies alone about 3.3.
    assert last < 3.1 < 4 < first
