"""What a mistake in an argument or an option is answered with: the thing that was meant."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from megatron_sparse import SparseConfig
from megatron_sparse.errors import ConfigError, HostError, StorageError
from megatron_sparse.run import application, interrupt, launch, preparation
from megatron_sparse.run.composition import compose
from megatron_sparse.run.interrupt import LOCAL_RANKS
from tests.programs import output_of


@pytest.mark.parametrize("variable", LOCAL_RANKS)
def test_a_mistake_is_reported_once_a_node(monkeypatch, variable):
    waited = []
    monkeypatch.setattr(interrupt.time, "sleep", waited.append)
    for name in LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for said in ("--multi-run", "compression.densty=1", "compression.density=7"):
        monkeypatch.setenv(variable, "1")
        with pytest.raises(SystemExit) as ended:
            application.train(["data=mock", said])
        assert ended.value.code == ConfigError.exit_code
        # torchrun would kill the first rank before it has printed the error.
        assert waited.pop() == interrupt.FIRST_S
        monkeypatch.setenv(variable, "0")
        with pytest.raises(ConfigError):
            application.train(["data=mock", said])
    assert not waited


def test_a_process_that_has_loaded_triton_ends_without_a_word():
    """Triton's bindings would list all that `end_quickly` keeps from being freed."""
    program = "from megatron_sparse.run import interrupt; interrupt.end_quickly(); import triton"
    assert output_of([sys.executable, "-c", program]) == ""


def test_a_section_is_no_dict():
    with pytest.raises(ConfigError, match=r"write CompressionConfig\(\.\.\.\)"):
        SparseConfig(compression={"density": 0.1})  # type: ignore[arg-type]


def test_a_sweep_names_its_wrong_values_before_the_first_run(tmp_path):
    sweep = ["--multirun", "data=mock", f"runs_dir={tmp_path}", "compression.density=0.1,7,8"]
    with pytest.raises(ConfigError) as refused:
        application.train(sweep)
    assert "for 2 reasons" in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_run_on_one_node_does_not_claim_what_its_level_leaves_out(tmp_path):
    config = preparation.decide(
        compose(["data=mock", "compression.level=node", "cluster.device=cpu"])
    )
    said = preparation.describe(config, tmp_path)
    assert "level=node on one node: nothing is compressed" in said
    assert "bits" not in said


class Sharded(FSDPModule, torch.nn.Linear):
    """As FSDP2 makes them of a Linear."""


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (torch.nn.parallel.DistributedDataParallel, r"megatron_sparse\.ddp_hook"),
        (Sharded, "FSDP2 .* use DDP, Megatron's or PyTorch's own"),
    ],
)
def test_attach_names_what_serves_another_wrapper(wrapper, said):
    from megatron_sparse.megatron.buckets import check_supported

    with pytest.raises(HostError, match=said):
        check_supported(object.__new__(wrapper))


def test_the_limit_of_open_files_is_raised(monkeypatch):
    limits = [(256, 4096)]
    monkeypatch.setattr(launch.resource, "getrlimit", lambda of: limits[-1])
    monkeypatch.setattr(launch.resource, "setrlimit", lambda of, to: limits.append(to))
    launch.raise_file_limit()
    assert limits[-1] == (4096, 4096)
    for large in ((100_000, launch.resource.RLIM_INFINITY), (launch.resource.RLIM_INFINITY,) * 2):
        limits.append(large)
        launch.raise_file_limit()
        assert limits[-1] == large


def test_output_on_a_full_disk_is_one_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_sparse.cli.main", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == StorageError.exit_code
    assert done.stderr == "error: the disk that the output is written to is full\n"
