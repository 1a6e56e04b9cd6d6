"""The launcher: the run's folder, the environment of the ranks, Slurm's variables."""

import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_sparse import cuda_ext
from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.run import launch, preparation
from megatron_sparse.run.composition import compose, load
from tests.programs import ended

CUDA = "cluster.device=cuda"


@pytest.fixture
def made(tmp_path) -> Callable[..., RunConfig]:
    """Makes the configuration of the run `mine`, with overrides."""
    return lambda *overrides: compose(
        ["data=mock", "name=mine", f"runs_dir={tmp_path}", *overrides]
    )


@pytest.fixture
def config(made) -> RunConfig:
    return made()


class TestRunDir:
    """The fate of an earlier run of the same name."""

    def test_it_holds_the_configuration_and_the_command(self, config, tmp_path):
        run_dir = preparation.make_run_dir(config, "the command")
        assert run_dir == tmp_path / "mine"
        assert load(run_dir / preparation.CONFIG_FILE) == config
        assert (run_dir / preparation.CONFIG_FILE).read_text().startswith("# the command\n")

    def test_never_moves_every_earlier_run_aside(self, config, tmp_path, capsys):
        for number in range(3):
            preparation.make_run_dir(config, f"run {number}")
        texts = [
            (tmp_path / name / preparation.CONFIG_FILE).read_text().splitlines()[0]
            for name in ("mine.1", "mine.2", "mine")
        ]
        assert texts == ["# run 0", "# run 1", "# run 2"]
        assert "mine.2" in capsys.readouterr().out

    def test_a_run_of_a_script_with_install_is_moved_aside_too(self, config, tmp_path):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "breakdown.jsonl").write_text("kept")
        preparation.make_run_dir(config, "command")
        assert (tmp_path / "mine.1" / "breakdown.jsonl").read_text() == "kept"
        assert not (tmp_path / "mine" / "breakdown.jsonl").exists()

    def test_a_folder_that_is_no_run_is_left_alone(self, config, tmp_path):
        (tmp_path / "mine").mkdir()
        preparation.make_run_dir(config, "an empty one will do")
        (tmp_path / "mine" / preparation.CONFIG_FILE).unlink()
        (tmp_path / "mine" / "thesis.tex").write_text("precious")
        with pytest.raises(ConfigError, match="not the folder of a run"):
            preparation.make_run_dir(config, "command")
        assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


class TestDecide:
    """The meaning of `auto`."""

    @pytest.mark.parametrize(
        ("gpus", "device", "precision"),
        [(0, "cpu", "fp32"), (1, "cpu", "fp32"), (2, "cuda", "bf16")],
    )
    def test_auto_takes_gpus_where_each_rank_has_one(
        self, config, monkeypatch, gpus, device, precision
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        decided = preparation.decide(config)
        assert decided.cluster.device == device
        assert decided.training.precision == precision

    def test_explicit_values_are_kept(self, made, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        bits = "compression.value_bits=3", "scheme.sum_bits=null"
        said = made("cluster.device=cpu", "training.precision=bf16", *bits)
        assert preparation.decide(said) == said

    def test_too_few_gpus(self, made, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        with pytest.raises(ConfigError, match=r"ranks_per_node=1"):
            preparation.decide(made(CUDA))


def test_the_nccl_engine_on_a_cpu_is_refused_before_the_ranks_start(made):
    engine = "scheme=direct", "scheme.capacity=1.5", "scheme.nccl_engine=true"
    on_cpu = made(*engine, "cluster.device=cpu")
    with pytest.raises(ConfigError, match=r"scheme\.nccl_engine=true without NCCL") as caught:
        preparation.preflight(on_cpu)
    assert caught.value.got == "cluster.device=cpu"
    preparation.preflight(dataclasses.replace(on_cpu, plugin=False))


def test_the_agents_handlers_of_signals_end_with_it(monkeypatch, tmp_path):
    from torch.distributed.launcher import api

    def agent(settings, command):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return lambda *arguments: None

    monkeypatch.setattr(api, "elastic_launch", agent)
    before = signal.getsignal(signal.SIGTERM)
    assert launch._run_agent(RunConfig(), tmp_path) == 0
    assert signal.getsignal(signal.SIGTERM) is before


class TestEnvironment:
    """Each rank's environment."""

    @pytest.fixture
    def of(self, made) -> Callable[..., dict[str, str]]:
        return lambda *overrides: preparation.rank_environment(made(*overrides))

    def test_cpu_ranks_see_no_gpu(self, of, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert of("cluster.device=cpu")["CUDA_VISIBLE_DEVICES"] == ""
        assert "CUDA_VISIBLE_DEVICES" not in of(CUDA)

    def test_the_users_own_variables_win(self, of, monkeypatch):
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        found = of(CUDA, "cluster.env.NCCL_DEBUG=INFO", "cluster.env.NCCL_NET=x")
        assert (found["NCCL_DEBUG"], found["NCCL_NET"]) == ("WARN", "x")
        assert found["OMP_NUM_THREADS"] == "1"
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert of(CUDA)["OMP_NUM_THREADS"] == "3"

    def test_torchruns_own_number_of_threads_gives_way(self, of, monkeypatch):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        assert of(CUDA)["OMP_NUM_THREADS"] == "1"
        assert of(CUDA, "cluster.env.OMP_NUM_THREADS='8'")["OMP_NUM_THREADS"] == "8"

    def test_torch_that_is_loaded_gets_its_number_of_threads(self):
        script = (
            "import torch\nfrom megatron_sparse.config.run import RunConfig\n"
            "from megatron_sparse.run import preparation, worker\n"
            "worker._check_size = lambda config: None\n"
            "worker._meet = lambda: (None, 0)\n"
            "preparation.decide = lambda config: config\n"
            "preparation.rank_environment = lambda config: {'OMP_NUM_THREADS': '3'}\n"
            "worker._agree_on_folder = lambda *given: None\n"
            "worker.run_started(RunConfig(), 'train'); print(torch.get_num_threads())"
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        said = ended([sys.executable, "-c", script], check=True, env=environment).stdout
        assert int(said) == 3

    def test_one_hardware_queue_where_megatron_demands_it(self, of, monkeypatch):
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        monkeypatch.delenv(name, raising=False)
        assert name not in of(CUDA)
        assert name not in of(CUDA, "megatron.context_parallel_size=null")
        for parallel in ("training.tensor_parallel=2", "megatron.context_parallel_size=2"):
            assert of(CUDA, parallel)[name] == "1"
            assert of(CUDA, parallel, f"cluster.env.{name}='8'")[name] == "8"


def test_the_summary_says_that_minutes_of_compiling_come(made, monkeypatch):
    run, folder = made(CUDA), Path("runs/mine")
    monkeypatch.setattr(cuda_ext, "compiles_first", lambda *parts: f"compiles {'+'.join(parts)}")
    assert "\n  compiles cpu+cuda\n" in preparation.describe(run, folder)
    assert "compiles" not in preparation.describe(made(CUDA, "plugin=false"), folder)
    monkeypatch.setattr(cuda_ext, "compiles_first", lambda *parts: "")
    assert preparation.describe(run, folder).count("\n") == 3


def test_the_summary_says_when_the_target_is_reached():
    quick = compose(["experiment=quickstart", "cluster.device=cpu"])
    text = preparation.describe(quick, Path("runs/quickstart"))
    assert "2 ranks on cpu (gloo)" in text
    assert "density 0.22 in 4 bits from iteration 51 on" in text
    plain = dataclasses.replace(quick, plugin=False)
    assert "plain Megatron" in preparation.describe(plain, Path("runs/quickstart"))
