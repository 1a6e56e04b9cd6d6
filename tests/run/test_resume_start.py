"""What a start says about the checkpoint that it goes on from, and an end about the one it leaves.

One run of two iterations leaves a real checkpoint of Megatron's; everything else is compared with
it, or with damaged copies of it, before any rank starts.
"""

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import CheckpointError, CommunicationError, ConfigError
from megatron_sparse.megatron import arguments, checkpoint_fit, checkpoint_folder
from megatron_sparse.megatron.checkpoint_folder import TRACKER, checkpoint, choose
from megatron_sparse.run import interrupt, launch, preparation, resume, worker
from megatron_sparse.run.composition import compose
from tests.megatron.test_pretrain import ROOT, SMALL, TIMEOUT_S, train
from tests.programs import ended
from tests.waiting import DEADLINE_S, until

RUN = (
    "cluster.ranks_per_node=1",
    "cluster.device=cpu",
    "training.precision=fp32",
    "training.global_batch_size=null",
    "scheme=agsparse",
    "compression.warmup_iters=0",
    "compression.ramp_iters=0",
    "training.save_interval=1",
)
DONE = 2
SHARDED = "training.use_distributed_optimizer"
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """The folder of runs, with a run `mine` that has checkpoints of iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("real")
    train(folder, "mine", *RUN, f"training.iterations={DONE}")
    return folder


@pytest.fixture
def runs(real, tmp_path) -> Path:
    """A copy, to damage."""
    return Path(shutil.copytree(real, tmp_path / "runs"))


def config_of(runs: Path, *overrides: str, iterations: int = DONE):
    words = [*SMALL, *RUN, "name=mine", f"runs_dir={runs}", f"training.iterations={iterations}"]
    return compose([*words, *overrides])


def start_of(runs: Path, *overrides: str, iterations: int = DONE) -> resume.Start:
    config = config_of(runs, *overrides, iterations=iterations)
    return preparation.check_start(config, VOCAB_SIZE, in_rank=False)


def agreed(*configs: RunConfig) -> list[tuple[RunConfig, Path] | None]:
    """The run and the folder that each of two ranks takes, as srun would have started them."""
    store = torch.distributed.HashStore()
    with ExitStack() as held, ThreadPoolExecutor(2) as ranks:
        given = configs, ["train"] * 2, [store] * 2, range(2), [held] * 2
        return list(ranks.map(worker._agree_on_folder, *given, timeout=DEADLINE_S))


class TestWhatIsLeft:
    """`training.resume=auto` says where it goes on."""

    @pytest.mark.parametrize("load", [(), ("training.load=gone",)])
    def test_nothing(self, runs, capsys, load):
        """A run that goes on with its own checkpoint needs no other."""
        config = config_of(runs, "resume=auto", *load)
        before = sorted(path for path in runs.rglob("*"))
        assert launch.run(config, "megatron-sparse train") == 0
        said = capsys.readouterr().out
        assert "nothing left to do: the checkpoint of mine has iteration 2 of 2" in said
        # Without it Megatron refuses another number of iterations.
        assert "set megatron.override_opt_param_scheduler=true" in said
        assert sorted(path for path in runs.rglob("*")) == before, "and nothing is written"

    def test_nothing_for_ranks_that_srun_started(self, runs):
        config = config_of(runs, "resume=auto", "cluster.ranks_per_node=2")
        assert agreed(config, config) == [None, None]

    def test_a_rank_0_that_does_not_answer_is_named(self, runs):
        store = torch.distributed.HashStore()
        store.set_timeout(timedelta(milliseconds=100))
        with pytest.raises(CommunicationError, match="look at what rank 0 printed"):
            worker._agree_on_folder(config_of(runs), "train", store, 1, ExitStack())

    def test_some_iterations_for_a_user_who_goes_back(self, runs):
        checkpoint_folder.track(runs / "mine/checkpoints", 1)
        start = start_of(runs, "resume=must")
        assert (start.iteration, start.own, start.warnings) == (1, True, ())
        text = preparation.describe(config_of(runs), runs / "mine", start)
        assert text.endswith("\n  resumed at 1 of 2")

    def test_a_load_that_is_not_the_runs_own(self, runs):
        overrides = ("name=other", f"training.load={runs / 'mine/checkpoints'}")
        start = start_of(runs, *overrides)
        assert not start.is_done(config_of(runs, *overrides))
        assert resume.describe(config_of(runs), start).startswith("starts from ")
        anew = start_of(runs, *overrides, "megatron.finetune=true", iterations=50)
        assert anew.iteration == 0

    def test_a_load_from_the_folder_that_would_be_moved_aside(self, runs):
        with pytest.raises(ConfigError, match="run's own folder"):
            start_of(runs, "resume=never", f"training.load={runs / 'mine/checkpoints'}")


class TestSchedule:
    """A run that goes on keeps its warm-up and ramp; the file of its folder has them."""

    NULL = ("compression.warmup_iters=null", "compression.ramp_iters=null")

    def scheduled(self, runs: Path, *overrides: str) -> tuple[int | None, int | None]:
        config = config_of(runs, *self.NULL, *overrides, iterations=10_000)
        found = preparation.with_schedule(config, resume.find(config)).compression
        return found.warmup_iters, found.ramp_iters

    def write(self, runs: Path, text: str) -> None:
        (runs / "mine" / preparation.CONFIG_FILE).write_text(text)

    def test_it_is_kept_where_the_user_sets_none(self, runs):
        assert self.scheduled(runs, "resume=must") == (0, 0)
        self.write(runs, "compression: {warmup_iters: 500, ramp_iters: 70, left: 1}\n")
        assert self.scheduled(runs, "resume=auto") == (500, 70)
        assert self.scheduled(runs, "resume=auto", "compression.ramp_iters=5") == (500, 5)

    def test_another_run_has_its_own(self, runs):
        load = f"training.load={runs / 'mine/checkpoints'}"
        assert self.scheduled(runs, "resume=never") == (500, 1000)
        assert self.scheduled(runs, "name=other", load) == (500, 1000)

    @pytest.mark.parametrize("text", ["", "compression: {", "compression: {warmup_iters: null}"])
    def test_a_file_without_it_leaves_the_length(self, runs, text):
        self.write(runs, text)
        assert self.scheduled(runs, "resume=must") == (500, 1000)

    def test_ranks_that_srun_started_take_that_of_rank_0(self, runs, monkeypatch):
        """The other rank does not see its folder, as on nodes without a common disk."""
        start = start_of(runs, "resume=must")
        monkeypatch.setattr(preparation, "preflight", lambda config, **_: VOCAB_SIZE)
        monkeypatch.setattr(preparation, "check_start", lambda *given, in_rank: start)
        overrides = (*self.NULL, "resume=auto", "cluster.ranks_per_node=2")
        folders = runs, runs / "far"
        for each in agreed(*(config_of(path, *overrides, iterations=9) for path in folders)):
            assert each is not None
            assert (each[0].compression.warmup_iters, each[0].compression.ramp_iters) == (0, 0)
            assert each[1] == runs / "mine"

    def test_with_density_auto_no_rank_has_a_ramp_before_the_preset_is_chosen(
        self, runs, monkeypatch
    ):
        monkeypatch.setattr(preparation, "preflight", lambda config, **_: VOCAB_SIZE)
        overrides = (*self.NULL, "preset=auto", "name=new", "cluster.ranks_per_node=2")
        config = config_of(runs, *overrides, iterations=200)
        found = [each and each[0].compression for each in agreed(config, config)]
        assert found[0] == found[1]
        assert (found[0].warmup_iters, found[0].ramp_iters) == (10, None)


class TestFit:
    """What Megatron refuses after the start, with an assertion or with nothing at all."""

    @pytest.mark.parametrize(
        ("overrides", "expected", "remedy"),
        [
            ("model.num_layers=4", "model.num_layers=2", "as the checkpoint has them"),
            ("megatron.num_layers=4", "model.num_layers=2", "as the checkpoint has them"),
            ("model.hidden_size=128", "model.hidden_size=64", "training.load=null"),
            ("model.num_query_groups=2", "model.num_query_groups=4", "resume=never"),
            ("model.tied_embeddings=false", "model.tied_embeddings=true", "resume=never"),
            ("model.position_embedding_type=rope", "learned_absolute", "resume=never"),
            ("training.iterations=9", "training.iterations=2", "override_opt_param_scheduler"),
            ("training.lr=0.01", "training.lr=0.0003", "use_checkpoint_opt_param_scheduler"),
            (
                "cluster.ranks_per_node=2",
                "training.global_batch_size=2",
                "null means one micro-batch of 2 on each of 2 data-parallel ranks",
            ),
            (
                "training.global_batch_size=8",
                "training.global_batch_size=2",
                "set the keys as the checkpoint has them",
            ),
            (
                "cluster.ranks_per_node=2 training.tensor_parallel=2",
                "training.tensor_parallel=1",
                "compression.residual_checkpoint=none",
            ),
            (f"{SHARDED}=true", f"{SHARDED}=false", "megatron.no_load_optim=true"),
            ("training.precision=bf16", "training.precision=fp32", "no_load_optim"),
            ("megatron.optimizer=sgd", "megatron.optimizer=adam", "no_load_optim"),
        ],
    )
    def test_another_run_is_refused_before_ranks_start(self, runs, overrides, expected, remedy):
        checkpoint_folder.track(runs / "mine/checkpoints", 1)
        with pytest.raises(CheckpointError) as caught:
            start_of(runs, "resume=auto", *overrides.split())
        assert expected in str(caught.value.expected)
        assert remedy in str(caught.value.remedy)
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        "overrides",
        [
            (),
            ("training.iterations=9", "megatron.override_opt_param_scheduler=true"),
            ("training.lr=0.01", "megatron.use_checkpoint_opt_param_scheduler=true"),
            ("cluster.ranks_per_node=2", "training.micro_batch_size=1"),
            ("training.precision=bf16", "megatron.no_load_optim=true"),
            ("plugin=false",),
            ("compression.density=0.5", "scheme=direct"),
            ("training.overlap_grad_reduce=false",),
        ],
    )
    def test_what_may_change(self, runs, overrides):
        checkpoint_folder.track(runs / "mine/checkpoints", 1)
        assert start_of(runs, "resume=must", *overrides).iteration == 1

    def test_a_finetune_run_goes_on_with_its_own_checkpoint(self, runs):
        """It keeps its optimizer and schedule, and the iteration that the start names."""
        checkpoint_folder.track(runs / "mine/checkpoints", 1)
        with pytest.raises(CheckpointError, match="learning-rate schedule"):
            start_of(runs, "resume=must", "megatron.finetune=true", iterations=9)
        config, without = config_of(runs, "megatron.finetune=true"), config_of(runs)
        assert arguments.passed_flags(config, own=True) == without.megatron
        assert arguments.passed_flags(config, own=False) == config.megatron != without.megatron

    def test_a_fresh_optimizer_is_for_the_loaded_checkpoint(self, runs):
        flags = ("megatron.no_load_optim=true", "megatron.no_load_rng=true")
        loads, own = config_of(runs, "training.load=a", *flags), config_of(runs, *flags)
        assert arguments.passed_flags(loads, own=True) == config_of(runs).megatron
        assert arguments.passed_flags(loads, own=False) == loads.megatron
        assert arguments.passed_flags(own, own=True) == own.megatron

    def test_the_optimizer_of_muon_is_not_compared(self, runs, monkeypatch):
        """Megatron saves the names that its validation gives optimizer and sharding."""
        checkpoint_folder.track(runs / "mine/checkpoints", 1)
        state = checkpoint_fit.common_state(checkpoint(runs / "mine/checkpoints", 1))
        state["args"].optimizer = "muon"
        monkeypatch.setattr(checkpoint_fit, "common_state", lambda _: state)
        muon = ("megatron.optimizer=muon", f"{SHARDED}=true")
        assert start_of(runs, "resume=must", *muon).iteration == 1

    def test_the_vocabulary(self, runs):
        with pytest.raises(CheckpointError, match=r"model\.vocab_size=512"):
            checkpoint_fit.check(config_of(runs), 700, checkpoint(runs / "mine/checkpoints", 2))

    def test_nothing_is_lost(self, runs):
        before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
        with pytest.raises(CheckpointError):
            launch.run(config_of(runs, "resume=auto", iterations=9), "megatron-sparse train")
        assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before


class TestPartial:
    """A checkpoint that is not complete is never the one that a run goes on from."""

    @pytest.mark.parametrize(
        ("name", "length"),
        [
            *(("__0_0.distcp", 1000), (".metadata", 500), ("metadata.json", 0)),
            *(("__0_0.distcp", None), (".metadata", None), ("metadata.json", None), ("", None)),
        ],
    )
    def test_the_newest_complete_one_is_taken(self, runs, name, length, capsys):
        """A file of the newest is cut to a length, or is missing, or its whole folder is."""
        folder = runs / "mine/checkpoints"
        assert choose(folder) == checkpoint_folder.ChosenCheckpoint(2)
        damaged = checkpoint(folder, 2) / name
        if length is not None:
            os.truncate(damaged, length)
        elif name:
            damaged.unlink()
        else:
            shutil.rmtree(damaged)
        start = start_of(runs, "resume=auto")
        assert start.iteration == 1
        preparation.make_run_dir(config_of(runs, "resume=auto"), "again", start)
        assert (folder / TRACKER).read_text() == "1", "which is what Megatron reads"
        said = capsys.readouterr().out
        assert "iteration 2 is not complete" in said
        assert "taken: 1" in said

    @pytest.mark.parametrize("text", ["", "12x", "\x00\x00"])
    def test_a_tracker_that_the_full_disk_cut_off(self, runs, text):
        (runs / "mine/checkpoints" / TRACKER).write_text(text)
        start = start_of(runs, "resume=must")
        assert (start.iteration, start.repairs) == (2, {runs / "mine/checkpoints": 2})

    def test_a_tracker_that_was_not_written_yet(self, runs):
        folder = runs / "mine/checkpoints"
        (folder / TRACKER).unlink()
        for how in ("resume=auto", "resume=must"):
            start = start_of(runs, how)
            assert (start.iteration, start.repairs) == (2, {folder: 2})
            assert f"{TRACKER} is missing or damaged; taken: 2" in start.warnings[0]

    def test_no_complete_one(self, runs):
        for iteration in (1, 2):
            (checkpoint(runs / "mine/checkpoints", iteration) / ".metadata").unlink()
        with pytest.raises(ConfigError, match="cannot be resumed") as caught:
            start_of(runs, "resume=must")
        assert ".metadata is missing; there is no other" in str(caught.value.got)
        start = start_of(runs, "resume=auto")
        preparation.make_run_dir(config_of(runs, "resume=auto"), "again", start)
        assert (runs / "mine.1/checkpoints").is_dir()
        assert not (runs / "mine/checkpoints").exists()

    def test_of_training_load(self, runs):
        folder = runs / "mine/checkpoints"
        load = ("name=other", f"training.load={folder}")
        (checkpoint(folder, 2) / ".metadata").unlink()
        with pytest.raises(CheckpointError, match="choose another iteration"):
            start_of(runs, *load, "megatron.ckpt_step=2")
        assert start_of(runs, *load, "megatron.ckpt_step=1").iteration == 1
        for tracked in ("2", ""):
            (folder / TRACKER).write_text(tracked)
            with pytest.raises(CheckpointError, match="write 1, the newest complete one, into"):
                start_of(runs, *load)

    def test_of_the_format_torch(self, tmp_path):
        saved = checkpoint(tmp_path, 3) / "mp_rank_00"
        saved.mkdir(parents=True)
        path = saved / "model_optim_rng.pt"
        torch.save({"weight": torch.ones(1000)}, path)
        assert checkpoint_folder.damage(saved.parent) is None
        os.truncate(path, path.stat().st_size - 100)
        assert "model_optim_rng.pt is cut off" in str(checkpoint_folder.damage(saved.parent))


class TestEnd:
    """What is said after an end that was not planned."""

    def test_the_last_checkpoint_and_the_command(self, runs):
        config = config_of(runs, iterations=5)
        command = "megatron-sparse train 'cluster.env.PGPASS=planted' resume=auto name=mine"
        # It would go back, and drop the optimizer.
        command += " megatron.ckpt_step=1 megatron.no_load_optim=true"
        said = resume.go_on(config, runs / "mine", command)
        assert said == (
            "the last checkpoint has iteration 2 of 5; to go on:\n"
            "  megatron-sparse train 'cluster.env.PGPASS=***' name=mine resume=must"
        )
        said = resume.go_on(config_of(runs), runs / "mine", command)
        assert said.endswith("nothing is left to do")
        (checkpoint(runs / "mine/checkpoints", 2) / ".metadata").unlink()
        said = resume.go_on(config, runs / "mine", command)
        assert "the last checkpoint has iteration 1 of 5" in said

    @pytest.mark.parametrize(("code", "advises"), [(2, False), (3, True)])
    def test_advice_unless_the_next_start_repeats_it(
        self, runs, monkeypatch, capsys, code, advises
    ):
        config = config_of(runs, iterations=5)
        monkeypatch.setattr(preparation, "begin", lambda *_, **__: (config, runs / "mine"))
        monkeypatch.setattr(launch, "_run_agent", lambda *_: code)
        assert launch._launch(config, "megatron-sparse train") == code
        assert ("; to go on:" in capsys.readouterr().err) == advises

    def test_a_temporary_checkpoint_counts_and_a_sweep_goes_on_with_all_its_runs(self, runs):
        checkpoints = runs / "mine/checkpoints"
        checkpoints.rename(runs / "moved")
        checkpoints.mkdir()
        (runs / "moved").rename(checkpoints / "non_persistent")
        config = config_of(runs, "megatron.non_persistent_ckpt_type=global", iterations=5)
        said = resume.go_on(config, runs / "mine", "megatron-sparse train --multirun seed=1,2")
        assert "the last checkpoint has iteration 2 of 5" in said
        assert said.endswith(" resume=auto")

    def test_no_checkpoint(self, tmp_path):
        said = resume.go_on(config_of(tmp_path), tmp_path, "megatron-sparse train")
        assert said.startswith("no checkpoint is saved; training.save_interval=N")

    def test_a_second_ctrl_c_kills_the_launcher(self):
        """And so its ranks, see `test_fault_matrix`."""
        from torch.distributed.elastic.multiprocessing import SignalException

        before = signal.getsignal(signal.SIGINT)
        with interrupt.saving(True):
            with pytest.raises(SignalException):
                signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is before

    def test_ctrl_c_leaves_no_traceback_while_a_rank_starts(self, tmp_path):
        rank = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", launch.RANK, str(tmp_path / "config.yaml")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"RANK": "0", "WORLD_SIZE": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert rank.stdout is not None
        with rank.stdout as said:
            assert any("| " in line and "torch.version" in line for line in said)
            rank.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" not in said.read()
        assert rank.wait() == -signal.SIGINT

    def test_the_launcher_collects_no_garbage_as_it_ends(self):
        script = (
            "import atexit, gc\n"
            "from megatron_sparse.run import application\n"
            "application._hydra = lambda *arguments: None\n"
            "atexit.register(lambda: print(gc.get_freeze_count()))\n"
            "application.train([])\n"
        )
        assert int(ended([sys.executable, "-c", script], check=True).stdout) > 100_000

    def test_ctrl_c_saves_and_says_how_to_go_on(self, tmp_path):
        """A whole run; without the key the same end finds the checkpoint of `save_interval`."""
        command = [sys.executable, str(ROOT / "scripts/train.py"), *SMALL, *RUN]
        command += ["name=stopped", f"runs_dir={tmp_path}", "training.iterations=100000"]
        command += ["training.save_signal=SIGINT", "training.save_interval=100000"]
        with (tmp_path / "output").open("w+") as output:
            run = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                # A job that was started in the background ignores SIGINT, and so do its children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
            try:
                lines = tmp_path / "stopped/breakdown.jsonl"
                until(
                    lambda: run.poll() is not None or (lines.exists() and lines.stat().st_size),
                    TIMEOUT_S,
                )
                run.send_signal(signal.SIGINT)
                assert run.wait(TIMEOUT_S) == 128 + signal.SIGINT
            finally:
                run.kill()
            output.seek(0)
            said = output.read()
        done = choose(tmp_path / "stopped/checkpoints").iteration
        assert done is not None
        assert done >= 1
        assert f"the last checkpoint has iteration {done} of 100000; to go on:" in said
        assert said.rstrip().endswith("resume=must")
        assert "Traceback" not in said, said[-3000:]
