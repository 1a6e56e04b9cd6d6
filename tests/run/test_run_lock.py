"""One writer in a run's folder, and ranks that do not outlive their launcher."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_sparse.errors import ConfigError
from megatron_sparse.run import interrupt, preparation
from megatron_sparse.run.composition import compose
from megatron_sparse.telemetry import run_lock
from megatron_sparse.telemetry.run_lock import LOCK_FILE, STALE_S, locked
from tests.waiting import DEADLINE_S, until

HOLD = """
import sys, time
from pathlib import Path
from megatron_sparse.telemetry.run_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
RANK = """
import os
os.environ["MEGATRON_SPARSE_LAUNCHER"] = "1234567"  # another process than its parent
from megatron_sparse.run.interrupt import end_with_parent
end_with_parent()
print("lives on")
"""
STUCK = """
import signal
from datetime import timedelta
from torch.distributed import HashStore
from megatron_sparse.run import interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt.STUCK_S = 0.5
with interrupt.ending_where_stuck():
    print("waits", flush=True)
    HashStore().wait(["an answer"], timedelta(seconds=600))
"""


def started(script: str, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A process that runs a script, and the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_run_that_goes_on_keeps_its_folder(tmp_path, resume):
    config = compose(["data=mock", "name=mine", f"runs_dir={tmp_path}"])
    with ExitStack() as held:
        run_dir = preparation.make_run_dir(config, "first", lock_stack=held)
        again = dataclasses.replace(config, resume=resume)
        with pytest.raises(ConfigError, match="still going on") as caught:
            preparation.make_run_dir(again, "second")
        assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
        assert (run_dir / preparation.CONFIG_FILE).read_text().startswith("# first\n")
    preparation.make_run_dir(again, "second")
    assert (tmp_path / "mine.1").is_dir()


def test_of_two_runs_that_start_at_once_one_gets_the_folder(tmp_path, monkeypatch):
    """The other one makes its folder between this one's look at the path and its lock."""
    config = compose(["data=mock", "name=mine", f"runs_dir={tmp_path}"])
    look = preparation._check_is_run
    with ExitStack() as held:

        def slow_look(run_dir):
            look(run_dir)
            monkeypatch.setattr(preparation, "_check_is_run", look)
            preparation.make_run_dir(config, "first", lock_stack=held)

        monkeypatch.setattr(preparation, "_check_is_run", slow_look)
        with pytest.raises(ConfigError, match="still going on"):
            preparation.make_run_dir(config, "second")
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]
        said = (tmp_path / "mine" / preparation.CONFIG_FILE).read_text()
        assert said.startswith("# first\n")


def test_a_lock_that_has_moved_with_its_folder_counts_no_more(tmp_path, monkeypatch):
    run_dir, flock = tmp_path / "mine", run_lock.fcntl.flock
    run_dir.mkdir()

    def late_flock(file, how):
        run_dir.rename(tmp_path / "mine.1")
        flock(file, how)

    monkeypatch.setattr(run_lock.fcntl, "flock", late_flock)
    with pytest.raises(ConfigError, match="still going on"), locked(run_dir):
        pass


def test_the_lock_ends_with_its_process(tmp_path):
    holder, said = started(HOLD, str(tmp_path))
    assert said == "held"
    with pytest.raises(ConfigError, match=f"process {holder.pid} "), locked(tmp_path):
        pass
    holder.kill()
    holder.wait()
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert json.loads((tmp_path / LOCK_FILE).read_text()) == {}


def test_a_child_that_lives_on_does_not_keep_the_lock(tmp_path):
    with locked(tmp_path):
        files = [int(name) for name in os.listdir("/proc/self/fd")]
        path = str(tmp_path / LOCK_FILE)
        (held,) = [file for file in files if os.path.realpath(f"/proc/self/fd/{file}") == path]
        child = subprocess.Popen(["sleep", "600"], pass_fds=[held])
    with locked(tmp_path):
        assert child.poll() is None
    child.kill()
    child.wait()


@pytest.mark.parametrize(
    ("silent_s", "job", "is_free"),
    [(0, None, False), (STALE_S + 60, None, True), (0, "7", True), (0, "8", False)],
    ids=["alive", "lost", "requeued", "another job"],
)
def test_a_holder_on_another_host(tmp_path, monkeypatch, silent_s, job, is_free):
    """Where the file system keeps no locks between hosts, its last sign of life counts."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    path = tmp_path / LOCK_FILE
    path.write_text(json.dumps({"host": "node17", "pid": 1, "slurm_job": "7", "since": "noon"}))
    os.utime(path, (time.time() - silent_s,) * 2)
    if is_free:
        with locked(tmp_path):
            pass
        return
    with pytest.raises(ConfigError, match="process 1 on node17, since noon"), locked(tmp_path):
        pass
    assert json.loads(path.read_text())["host"] == "node17"


def test_a_holder_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_S", 0.01)
    path = tmp_path / LOCK_FILE
    with locked(tmp_path):
        os.utime(path, (0, 0))
        until(lambda: path.stat().st_mtime > 0)


def test_a_rank_ends_at_once_if_its_launcher_was_killed_before():
    """`test_fault_matrix` has those whose launcher is killed later."""
    rank, said = started(RANK)
    assert rank.wait(DEADLINE_S) == -signal.SIGKILL
    assert not said


def test_ctrl_c_ends_a_rank_that_waits_for_one_that_has_gone():
    process, said = started(STUCK)
    assert said == "waits"
    status = Path(f"/proc/{process.pid}/stat")
    until(lambda: status.read_text().rpartition(")")[2].split()[0] == "S")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGINT


def test_after_the_run_ctrl_c_belongs_to_the_caller_again():
    with interrupt.ending_where_stuck():
        assert signal.set_wakeup_fd(-1) >= 0
    assert signal.set_wakeup_fd(-1) == -1
