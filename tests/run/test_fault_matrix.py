"""Signal x launcher x resume: ranks end soon, and a run's folder never has two writers."""

import json
import multiprocessing
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from megatron_sparse.megatron.arguments import CHECKPOINTS
from megatron_sparse.megatron.checkpoint_folder import TRACKER
from megatron_sparse.telemetry.run_lock import LOCK_FILE
from tests.megatron.test_pretrain import SMALL
from tests.ranks import MEGATRON
from tests.run import fault_job
from tests.run.fault_job import FIRST, LAUNCHERS, MARKS, RANKS
from tests.waiting import DEADLINE_S, is_gone, until

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
RESUMES = ("must", "auto", "never")
"""In this order each one finds what it is about."""
# Each launcher makes each of the three next starts once.
CASES = [
    pytest.param(launcher, received, RESUMES[(i + j) % 3], id=f"{launcher}-{received.name}")
    for i, launcher in enumerate(LAUNCHERS)
    for j, received in enumerate(SIGNALS)
]
ENDED_S = 5.0
"""Ranks end that soon on a machine that is not loaded."""
pytestmark = pytest.mark.timeout(3 * DEADLINE_S)


def marks(run_dir: Path) -> list[tuple[str, str, int]]:
    """Start, rank and process for each time a rank has written."""
    path = run_dir / MARKS
    lines = path.read_text().splitlines() if path.exists() else []
    return [(name, rank, int(process)) for name, rank, process in map(str.split, lines)]


class Folder:
    """A folder of runs, and the processes started in it."""

    def __init__(self, path: Path) -> None:
        self.run_dir = path / "mine"
        self.output = path / "output"
        self._words = ["model=gpt_tiny", "data=mock", "tracking=off", "cluster.device=cpu"]
        self._words += [f"cluster.ranks_per_node={RANKS}", "name=mine", f"runs_dir={path}"]
        # Forked from a process that has imported everything, so that a start takes no seconds.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([MEGATRON, fault_job.__name__])
        self._started: list[Any] = []

    def start(self, launcher: str, name: str, resume: str, *overrides: str) -> Any:
        words = [*self._words, f"resume={resume}", *overrides]
        process = self._context.Process(
            target=fault_job.start, args=(launcher, name, words, str(self.output))
        )
        process.start()
        self._started.append(process)
        return process

    def ranks(self) -> dict[str, int]:
        return {rank: process for _, rank, process in marks(self.run_dir)}

    def said(self) -> str:
        return self.output.read_text()

    def clear(self) -> None:
        for process in self._started:
            process.kill()
            process.join()
        for process in self.ranks().values():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    found = Folder(tmp_path)
    yield found
    found.clear()


def stop(launcher: str, process: Any, ranks: list[int], received: signal.Signals) -> None:
    """Signals the launcher; Slurm itself signals each task of a step."""
    for each in ranks if launcher == "srun" else [process.pid]:
        os.kill(each, received)


@pytest.mark.parametrize(("launcher", "received", "own"), CASES)
def test_a_stopped_run_and_the_next_starts(folder, launcher, received, own):
    """All values of `resume`: beside the run, and after it has been stopped.

    The launcher makes one of the next starts; srun's stand-in, which forks its ranks, the others.
    """
    first = folder.start(launcher, FIRST, resume="never")
    until(lambda: len(folder.ranks()) == RANKS or first.exitcode is not None)
    assert first.exitcode is None, folder.said()
    ranks = folder.ranks()

    beside = [folder.start("local", "second", resume) for resume in RESUMES]
    until(lambda: all(each.exitcode is not None for each in beside))
    holder = json.loads((folder.run_dir / LOCK_FILE).read_text())["pid"]
    assert holder == (first.pid if launcher == "local" else ranks["0"])
    assert [each.exitcode for each in beside] == [2, 2, 2], folder.said()
    assert folder.said().count(f"process {holder} on {socket.gethostname()}") == 3

    stop(launcher, first, list(ranks.values()), received)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    until(lambda: all(map(is_gone, ranks.values())), ENDED_S * max(1.0, load))
    until(lambda: first.exitcode is not None)
    if launcher != "torchrun":  # which prints its own
        assert "Traceback" not in folder.said()

    for resume in RESUMES:
        last = folder.start(launcher if resume == own else "srun", resume, resume)
        last.join(DEADLINE_S)
        assert last.exitcode == 0, folder.said()
    by_folder = {path.name: marks(path) for path in folder.run_dir.parent.glob("mine*")}
    writers = {
        name: [start for start, _ in groupby(start for start, _, _ in found)]
        for name, found in by_folder.items()
    }
    assert writers == {"mine.1": [FIRST, "must", "auto"], "mine": ["never"]}
    assert folder.said().count("resumed at 1 of") == 2
    assert {rank for _, rank, _ in by_folder["mine"]} == {"0", "1"}


def holders(path: Path) -> set[str]:
    """The processes that have a file open; of a log, until its last writer ends."""
    found = set()
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if opened.readlink() == path:
                found.add(opened.parts[2])
    return found


ITERATIONS = 12
TRAINED = (
    *SMALL,
    "scheme=agsparse",
    f"training.iterations={ITERATIONS}",
    "training.save_interval=1",
)


@pytest.mark.parametrize(
    ("launcher", "received", "resume"),
    [
        pytest.param("local", signal.SIGKILL, "auto", marks=pytest.mark.slow),
        pytest.param("srun", signal.SIGINT, "must", marks=pytest.mark.slow),
        ("torchrun", signal.SIGKILL, "auto"),
    ],
)
def test_a_real_training_writes_each_iteration_once(folder, launcher, received, resume):
    """It is stopped after its first checkpoint, and goes on at once from the last complete one."""
    first = folder.start(launcher, "", "never", *TRAINED)
    tracker = folder.run_dir / CHECKPOINTS / TRACKER
    until(lambda: tracker.exists() or first.exitcode is not None)
    assert first.exitcode is None, folder.said()
    os.kill(first.pid, received)
    until(lambda: first.exitcode is not None)
    until(lambda: not holders(folder.run_dir / "logs" / "rank1.log"))
    last = folder.start(launcher, "", resume, *TRAINED)
    until(lambda: last.exitcode is not None)
    assert last.exitcode == 0, folder.said()
    (at,) = re.findall(rf"resumed at (\d+) of {ITERATIONS}", folder.said())
    assert 1 <= int(at) < ITERATIONS
    lines = (folder.run_dir / "breakdown.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    assert [path.name for path in folder.run_dir.parent.glob("mine*")] == ["mine"]
