"""A rank of a Slurm job: its place, its log, its run's provenance."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron import arguments
from megatron_sparse.run import launchers, provenance
from megatron_sparse.run.composition import compose
from tests.commands import stand_in
from tests.programs import ROOT, ended, output_of, with_variables

STEP = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_JOB_ID": "10007",
    "SLURM_STEP_NODELIST": "n[0-2]",
}


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Puts a scontrol on PATH that runs a line of shell and records its arguments."""

    def install(does: str) -> Path:
        calls = tmp_path / "calls"
        command = stand_in(tmp_path / "bin" / "scontrol", f'echo "$@" >>{calls}\n{does}')
        monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")
        return calls

    return install


class TestSlurm:
    """Slurm's variables and scontrol."""

    def test_ranks_rendezvous_at_the_first_node(self, scontrol):
        calls = scontrol("printf 'n0\\nn1\\nn2\\n'")
        place = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "n0"}
        assert launchers.slurm_ranks(STEP) == place | {"MASTER_PORT": "20007"}
        of_user = STEP | {"MASTER_PORT": "1"}
        assert launchers.slurm_ranks(of_user)["MASTER_PORT"] == "1"
        assert calls.read_text().splitlines()[0] == "show hostnames n[0-2]"

    def test_the_last_task_of_an_array_requeues_itself_alone(self, scontrol, monkeypatch):
        monkeypatch.setattr(launchers.time, "sleep", lambda seconds: None)
        calls = scontrol("exit 0")
        task = {"SLURM_ARRAY_TASK_ID": "3"}
        launchers.requeue(STEP | task | {"SLURM_ARRAY_JOB_ID": "10007"})
        launchers.requeue(STEP | task | {"SLURM_ARRAY_JOB_ID": "10005"})  # not the last one
        assert calls.read_text() == "requeue 10007_3\nrequeue 10007\n"

    def test_others_are_no_ranks(self):
        batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
        for given in (batch_script, STEP | {"SLURM_STEP_NUM_TASKS": "1"}, STEP | {"RANK": "0"}, {}):
            assert launchers.slurm_ranks(given) == {}

    def test_without_an_answer_it_is_one_typed_error(self, scontrol, monkeypatch):
        scontrol("exit 1")
        with pytest.raises(ConfigError, match="scontrol show hostnames"):
            launchers.slurm_ranks(STEP)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(ConfigError, match="No such file or directory: 'scontrol'"):
            launchers.slurm_ranks(STEP)

    def test_requeue(self, scontrol, monkeypatch):
        waits = []
        monkeypatch.setattr(launchers.time, "sleep", waits.append)
        calls = scontrol("exit 0")
        launchers.requeue(STEP)
        assert calls.read_text() == "requeue 10007\n"
        # Waiting for scontrol sleeps, too.
        assert waits[-1] == launchers.KILL_S, "Slurm ends the job; nobody may take it for finished"

    def test_requeue_that_is_refused(self, scontrol):
        scontrol("echo 'Requested operation is presently disabled' >&2; exit 1")
        with pytest.raises(ConfigError, match="presently disabled") as caught:
            launchers.requeue(STEP)
        assert "resume=auto" in str(caught.value)
        with pytest.raises(ConfigError, match="no SLURM_JOB_ID"):
            launchers.requeue({})


class TestSaveSignal:
    """`training.save_signal` and `cluster.requeue`."""

    def flags(self, tmp_path, *overrides: str) -> dict[str, object]:
        fp32 = ["data=mock", "cluster.device=cpu", "training.precision=fp32"]
        length = ["training.iterations=50", "training.lr_warmup_iters=1"]
        config = compose([*fp32, *length, *overrides])
        return arguments.derived_flags(config, tmp_path, vocab_size=512, data_prefix=None)

    @pytest.mark.parametrize("name", ["SIGUSR2", "SIGINT"])
    def test_megatron_gets_the_signal_and_a_folder_to_save_to(self, tmp_path, name):
        flags = self.flags(tmp_path, f"training.save_signal={name}")
        assert (flags["exit_signal_handler"], flags["exit_signal"]) == (True, name)
        assert (flags["save"], flags["save_interval"]) == (str(tmp_path / "checkpoints"), 50)
        parsed = arguments.megatron_parser().parse_args(
            arguments.command_line(flags, {}, arguments.megatron_parser())
        )
        assert parsed.exit_signal.name == name
        flags = self.flags(tmp_path, "training.save_signal=SIGUSR1", "training.save_interval=7")
        assert flags["save_interval"] == 7
        assert "exit_signal" not in self.flags(tmp_path)


class TestProvenance:
    """`starts.jsonl`."""

    def test_a_line_for_each_start_without_secrets(self, tmp_path):
        environment = {
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": "0",
            "NCCL_NET": "IB",
            "WANDB_API_KEY": "abc123",
            "DB_PASSWORD": "hunter2",
            "PGPASS": "pgpass1",
        }
        for count in range(2):
            now = environment | {"SLURM_RESTART_COUNT": str(count)}
            with patch.dict(os.environ, now, clear=True):
                provenance.record_start(tmp_path, "train a=1 token=geheim")
        text = (tmp_path / provenance.STARTS_FILE).read_text()
        for secret in ("abc123", "hunter2", "geheim", "pgpass1"):
            assert secret not in text
        first, second = map(json.loads, text.splitlines())
        recorded = ("NCCL_NET", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
        assert first["environment"] == {name: environment[name] for name in recorded}
        assert second["environment"]["SLURM_RESTART_COUNT"] == "1"
        assert first["packages"]["torch"]

    def test_commit_and_whether_files_were_changed_since(self, tmp_path):
        def git(*words: str) -> str:
            named = ["-c", "user.name=n", "-c", "user.email=e@e"]
            return output_of(["git", *named, *words], cwd=tmp_path).strip()

        git("init", "-q")
        (tmp_path / "edited.py").write_text("1")
        git("add", ".")
        git("commit", "-qm", "first")
        head = git("rev-parse", "HEAD")
        assert provenance.commit(tmp_path) == head
        (tmp_path / "edited.py").write_text("2")
        assert provenance.commit(tmp_path) == f"{head}-dirty"
        # A package that is installed below another repository does not belong to its commit.
        (tmp_path / "inside").mkdir()
        assert provenance.commit(tmp_path / "inside") is None


PROGRAM = """
import os, sys
from pathlib import Path
from megatron_sparse.errors import ConfigError
from megatron_sparse.run.rank_log import rank_log
rank, kind = int(sys.argv[1]), sys.argv[2]
print("before", flush=True)
try:
    with rank_log(Path(sys.argv[3]), rank, 2):
        print("from python")
        os.system("echo from C; echo problem of C >&2")
        if kind == "typed":
            raise ConfigError("typed mistake")
        if kind == "crash":
            raise ZeroDivisionError("in the middle")
except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
print("after")
"""


class TestRankLog:
    """One log for each rank; the last rank also prints."""

    def run(self, tmp_path, rank: int, kind: str = "good") -> tuple[str, str, str]:
        command = [sys.executable, "-c", PROGRAM, str(rank), kind, str(tmp_path)]
        done = ended(command, env=with_variables(PYTHONPATH=str(ROOT)))
        return done.stdout, done.stderr, (tmp_path / "logs" / f"rank{rank}.log").read_text()

    def test_all_but_the_last_are_in_their_logs_only(self, tmp_path):
        out, err, log = self.run(tmp_path, 0)
        assert (out, err) == ("before\nafter\n", "")
        assert sorted(log.splitlines()) == ["from C", "from python", "problem of C"]
        _, _, log = self.run(tmp_path, 0)
        assert log.count("from python") == 2, "a restart appends"

    def test_the_last_one_is_in_both(self, tmp_path):
        out, _, log = self.run(tmp_path, 1)
        logged = ["from C", "from python", "problem of C"]
        assert sorted(log.splitlines()) == logged
        assert sorted(out.splitlines()) == ["after", "before", *logged]

    def test_a_typed_error_is_printed_and_not_logged(self, tmp_path):
        _, err, log = self.run(tmp_path, 0, "typed")
        assert err.startswith("error: typed mistake")
        assert "typed mistake" not in log

    def test_a_crash_leaves_its_traceback_in_the_log(self, tmp_path):
        _, err, log = self.run(tmp_path, 0, "crash")
        assert "ZeroDivisionError: in the middle" in log
        assert "ZeroDivisionError: in the middle" in err
