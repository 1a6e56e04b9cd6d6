"""The launcher: the run's folder, the environment of the ranks, Slurm's variables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megatron_sparse import cuda_ext
from megatron_sparse.config.run import RunConfig
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron import arguments, checkpoint_folder, training
from megatron_sparse.run import launchers, preparation, rank_log, worker
from megatron_sparse.run.composition import compose, load
from megatron_sparse.transport.nccl_errors import ENVIRONMENT

TASK = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_ID": "12345",
    "MASTER_ADDR": "n0",
}
ENGINE = SchemeConfig(name="direct", capacity=1.5, nccl_engine=True)


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return compose(["data=mock", "name=mine", f"runs_dir={tmp_path}"])


def checkpoint(run_dir: Path, iteration: int = 10) -> Path:
    """A complete one of the format torch, without anything in it."""
    folder = run_dir / arguments.CHECKPOINTS
    saved = checkpoint_folder.checkpoint(folder, iteration) / "mp_rank_00"
    saved.mkdir(parents=True)
    torch.save({}, saved / "model_optim_rng.pt")
    checkpoint_folder.track(folder, iteration)
    return saved.parent


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

    @pytest.mark.parametrize("resume", ["auto", "must"])
    def test_a_run_with_a_checkpoint_goes_on(self, config, tmp_path, resume):
        checkpoint(preparation.make_run_dir(config, "first"))
        (tmp_path / "mine" / "breakdown.jsonl").write_text("kept")
        again = dataclasses.replace(config, resume=resume)
        assert preparation.make_run_dir(again, "second") == tmp_path / "mine"
        assert (tmp_path / "mine" / "breakdown.jsonl").read_text() == "kept"
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    def test_without_a_checkpoint_auto_starts_anew_and_must_fails(self, config, tmp_path):
        preparation.make_run_dir(config, "first")
        with pytest.raises(ConfigError, match="cannot be resumed"):
            preparation.make_run_dir(dataclasses.replace(config, resume="must"), "second")
        assert not (tmp_path / "mine.1").exists()
        preparation.make_run_dir(dataclasses.replace(config, resume="auto"), "third")
        assert (tmp_path / "mine.1").is_dir()

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

    def test_explicit_values_are_kept(self, config, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        said = dataclasses.replace(
            config,
            cluster=dataclasses.replace(config.cluster, device="cpu"),
            training=dataclasses.replace(config.training, precision="bf16"),
            compression=dataclasses.replace(config.compression, value_bits=3),
            scheme=dataclasses.replace(config.scheme, sum_bits=None),
        )
        assert preparation.decide(said) == said

    def test_too_few_gpus(self, config, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        wanted = dataclasses.replace(config.cluster, device="cuda")
        with pytest.raises(ConfigError, match=r"ranks_per_node=1"):
            preparation.decide(dataclasses.replace(config, cluster=wanted))


class TestPreflight:
    """Errors before the ranks start."""

    def test_the_nccl_engine_on_a_cpu(self, config):
        scheme = SchemeConfig(name="direct", capacity=1.5, nccl_engine=True)
        cluster = dataclasses.replace(config.cluster, device="cpu")
        run = dataclasses.replace(config, scheme=scheme, cluster=cluster)
        without = r"scheme\.nccl_engine=true without NCCL"
        with pytest.raises(ConfigError, match=without) as caught:
            preparation.preflight(run)
        assert caught.value.got == "cluster.device=cpu"
        preparation.preflight(dataclasses.replace(run, plugin=False))

    @pytest.mark.parametrize("where", ["shell", "cluster.env"])
    @pytest.mark.parametrize(
        ("scheme", "words"),
        [
            (SchemeConfig(nccl_errors="typed"), r"scheme\.nccl_errors=typed"),
            (ENGINE, r"scheme\.nccl_engine=true"),
        ],
    )
    def test_an_nccl_that_is_another_backend(self, config, monkeypatch, scheme, words, where):
        name = "TORCH_DIST_USE_NCCL2"
        monkeypatch.delenv(name, raising=False)
        cluster = dataclasses.replace(config.cluster, device="cuda")
        run = dataclasses.replace(config, scheme=scheme, cluster=cluster)
        preparation.preflight(run)
        if where == "shell":
            monkeypatch.setenv(name, "1")
        else:
            cluster = dataclasses.replace(cluster, env={name: "1"})
        switched = dataclasses.replace(run, cluster=cluster)
        with pytest.raises(ConfigError, match=f"{words} with {name}=1"):
            preparation.preflight(switched)
        preparation.preflight(dataclasses.replace(switched, scheme=SchemeConfig()))


class TestEnvironment:
    """Each rank's environment."""

    def on(self, config: RunConfig, device: str, **env: str) -> dict[str, str]:
        cluster = dataclasses.replace(config.cluster, device=device, env=env)
        return preparation.rank_environment(dataclasses.replace(config, cluster=cluster))

    def test_cpu_ranks_see_no_gpu(self, config, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert self.on(config, "cpu")["CUDA_VISIBLE_DEVICES"] == ""
        assert "CUDA_VISIBLE_DEVICES" not in self.on(config, "cuda")

    def test_the_users_own_variables_win(self, config, monkeypatch):
        monkeypatch.setenv("NCCL_DEBUG", "WARN")
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        found = self.on(config, "cuda", NCCL_DEBUG="INFO", NCCL_NET="x")
        assert (found["NCCL_DEBUG"], found["NCCL_NET"]) == ("WARN", "x")
        assert found["OMP_NUM_THREADS"] == "1"
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert self.on(config, "cuda")["OMP_NUM_THREADS"] == "3"

    def test_one_hardware_queue_where_megatron_demands_it(self, config, monkeypatch):
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        monkeypatch.delenv(name, raising=False)
        assert name not in self.on(config, "cuda")
        training = dataclasses.replace(config.training, tensor_parallel=2)
        tensor = dataclasses.replace(config, training=training)
        context = dataclasses.replace(config, megatron={"context_parallel_size": 2})
        for parallel in (tensor, context):
            assert self.on(parallel, "cuda")[name] == "1"
            assert self.on(parallel, "cuda", **{name: "8"})[name] == "8"

    def test_nccls_watchdog_lets_ranks_live_where_errors_are_to_be_typed(self, config, monkeypatch):
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        monkeypatch.delenv(name, raising=False)
        assert name not in self.on(config, "cuda")
        typed = dataclasses.replace(config, scheme=SchemeConfig(nccl_errors="typed"))
        assert ENVIRONMENT.items() <= self.on(typed, "cuda").items()
        assert name not in self.on(typed, "cpu")
        assert name not in self.on(dataclasses.replace(typed, plugin=False), "cuda")
        # The plugin refuses to run under it; this error is clearer than overriding it silently.
        monkeypatch.setenv(name, "3")
        assert self.on(typed, "cuda")[name] == "3"

    def test_a_rank_whose_group_was_aborted_leaves_at_once(self, config, monkeypatch, tmp_path):
        """Otherwise torch's destructors would wait for operations that never end."""

        def train(*_):
            raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0.")

        def leave(code):
            raise SystemExit(f"left at once with {code}")

        report = tmp_path / "error.json"
        monkeypatch.setenv(rank_log.ERROR_FILE, str(report))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setattr(training, "train", train)
        monkeypatch.setattr(worker.os, "_exit", leave)
        cluster = dataclasses.replace(config.cluster, device="cuda")
        for nccl_errors in ("torch", "typed"):
            scheme = SchemeConfig(nccl_errors=nccl_errors)
            run = dataclasses.replace(config, scheme=scheme, cluster=cluster)
            monkeypatch.setattr(worker.composition, "load", lambda _, run=run: run)
            if nccl_errors == "torch":
                with pytest.raises(torch.distributed.DistBackendError):
                    worker.main([str(tmp_path)])
                continue
            with pytest.raises(SystemExit, match="left at once with 3"):
                worker.main([str(tmp_path)])
        message, typed = rank_log.read_report(json.loads(report.read_text())) or ("", False)
        assert typed
        assert "an operation of NCCL failed" in message


class TestSlurm:
    """Which Slurm processes are ranks."""

    def test_a_task_of_srun_is_a_rank(self):
        assert launchers.slurm_ranks(TASK) == {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "n0",
            "MASTER_PORT": "22345",
        }

    def test_a_port_of_the_users_is_kept(self):
        assert launchers.slurm_ranks(TASK | {"MASTER_PORT": "1"})["MASTER_PORT"] == "1"

    def test_others_are_not(self):
        batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
        assert launchers.slurm_ranks(batch_script) == {}
        assert launchers.slurm_ranks(TASK | {"SLURM_STEP_NUM_TASKS": "1"}) == {}
        assert launchers.slurm_ranks(TASK | {"RANK": "0"}) == {}
        assert launchers.slurm_ranks({}) == {}

    def test_an_address_is_asked_for(self):
        task = {key: value for key, value in TASK.items() if key != "MASTER_ADDR"}
        with pytest.raises(ConfigError, match="scontrol show hostnames"):
            launchers.slurm_ranks(task)


def test_the_summary_says_that_minutes_of_compiling_come(config, monkeypatch):
    cluster = dataclasses.replace(config.cluster, device="cuda")
    run, folder = dataclasses.replace(config, cluster=cluster), Path("runs/mine")
    monkeypatch.setattr(cuda_ext, "compiles_first", lambda *parts: f"compiles {'+'.join(parts)}")
    assert "\n  compiles cpu+cuda\n" in preparation.describe(run, folder)
    monkeypatch.setenv("MEGATRON_SPARSE_CODEC", "torch")
    assert "\n  compiles cpu\n" in preparation.describe(run, folder)
    plain = dataclasses.replace(run, plugin=False)
    assert "compiles" not in preparation.describe(plain, folder)
    monkeypatch.setattr(cuda_ext, "compiles_first", lambda *parts: "")
    assert preparation.describe(run, folder).count("\n") == 3


def test_the_summary_says_when_the_target_is_reached(config):
    quick = compose(["experiment=quickstart", "cluster.device=cpu"])
    text = preparation.describe(quick, Path("runs/quickstart"))
    assert "2 ranks on cpu (gloo)" in text
    assert "density 0.22 in 4 bits from iteration 51 on" in text
    plain = dataclasses.replace(quick, plugin=False)
    assert "plain Megatron" in preparation.describe(plain, Path("runs/quickstart"))
