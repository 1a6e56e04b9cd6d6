"""Jobs of a real Slurm, started by scripts/slurm_bed.sh: three nodes on the loopback.

All runs are the same training of two ranks, so an interrupted job must have the losses of the
undisturbed one. Waits have long limits, because a busy machine must not fail them; they end as soon
as their condition holds.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs import ROOT, SMALL_RUN, Done, ended, why_no_bed
from tests.tracked import json_lines
from tests.waiting import DEADLINE_S, until

BED = str(ROOT / "scripts" / "slurm_bed.sh")
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "setsid")
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
ITERATIONS = 60
DISTURBED_AT = 8
WAIT_S = 280
TRAINING = (
    *SMALL_RUN,
    "cluster.device=cpu",
    "cluster.env.GLOO_SOCKET_IFNAME=lo",
    "compression.warmup_iters=0",
    "compression.ramp_iters=0",
    "compression.density=0.05",
    f"training.iterations={ITERATIONS}",
    "scheme=direct",
    "tracking=off",
)


SPACES = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true")
WHY_NOT = why_no_bed("the Slurm bed", TOOLS, SPACES, PATH)
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(600),
]


@dataclass(frozen=True)
class Job:
    """One batch job on a bed: Slurm's number of it, and its output file."""

    bed: Bed
    number: str
    output: Path

    def field(self, name: str) -> str:
        asked = ("scontrol", "show", "job", self.number)
        # Which a busy machine's controller owes at times.
        shown = until(lambda: self.bed.run(*asked).stdout, WAIT_S)
        found = re.search(rf"\b{name}=(\S+)", shown)
        assert found, f"scontrol says nothing of {name}: {shown}"
        return found[1]

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def reaches(self, iteration: int) -> None:
        line = re.compile(rf"iteration +{iteration}/")
        until(lambda: line.search(self.text()), WAIT_S, self.end)

    def finishes(self) -> None:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.field("JobState") in ended, WAIT_S, self.end)
        assert self.field("JobState") == "COMPLETED", self.end()

    def end(self) -> str:
        return f"{self.field('JobState')}\n" + "\n".join(self.text().splitlines()[-40:])

    def losses(self) -> dict[int, float]:
        """The last recorded loss of each iteration.

        Not Megatron's printed losses: there the second loss after a start is the mean of two.
        """
        lines = json_lines(self.output.with_suffix("") / "breakdown.jsonl")
        return {line["iteration"]: line["loss"] for line in lines}


@dataclass(frozen=True)
class Bed:
    """A running Slurm, and the folder where its jobs write."""

    folder: Path
    runs: Path

    def environment(self) -> dict[str, str]:
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM", "RANK", "MASTER_", "WANDB_"))
        }
        return clean | {
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{PATH}",
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "COLUMNS": "200",
        }

    def run(self, *command: str, **more: str) -> Done:
        return ended(command, WAIT_S, env=self.environment() | more)

    def submit(self, script: str, name: str, *overrides: str, **more: str) -> Job:
        output = self.runs / f"{name}.out"
        asked = ("--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={output}")
        run = (f"runs_dir={self.runs}", f"name={name}", *overrides)
        command = ("sbatch", *asked, f"--chdir={ROOT}", ROOT / "scripts" / script, *TRAINING, *run)
        done = ended(command, WAIT_S, "/", env=self.environment() | more)
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip(), output)


@pytest.fixture(scope="module")
def bed(tmp_path_factory) -> Iterator[Bed]:
    # A short path: a socket is in it.
    parent = Path(tempfile.mkdtemp(prefix="slurm"))
    process = subprocess.Popen(
        ["bash", BED, "hold", str(parent / "bed"), "3"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if not process.stdout.readline().startswith("Slurm is up"):
            pytest.fail(f"the bed did not start: {process.stderr.read()}")
        yield Bed(parent / "bed", tmp_path_factory.mktemp("runs"))
    finally:
        process.stdin.close()
        process.wait(DEADLINE_S)
        process.stdout.close()
        process.stderr.close()
        shutil.rmtree(parent)


@pytest.fixture(scope="module")
def undisturbed(bed: Bed) -> Job:
    # The pre-flight check, too, must take the interface of TRAINING instead of that cluster's.
    other = ("cluster=perlmutter", "planner.cluster=null")
    job = bed.submit("train_srun.sbatch", "undisturbed", *other, MEGATRON_SPARSE_PREFLIGHT="on")
    job.finishes()
    return job


def test_srun_starts_ranks_and_leaves_a_complete_folder(bed: Bed, undisturbed: Job):
    """Two nodes, one rank each, the pre-flight check before them."""
    assert sorted(undisturbed.losses()) == list(range(1, ITERATIONS + 1))
    assert "# all 2 ranks have met, on 2 hosts" in undisturbed.text()
    assert "# slowest link between nodes: rank" in undisturbed.text()
    run = bed.runs / "undisturbed"
    assert (run / "config.yaml").is_file()
    (start,) = json_lines(run / "starts.jsonl")
    assert start["environment"]["SLURM_JOB_ID"] == undisturbed.number
    assert start["environment"]["SLURM_JOB_NODELIST"] == "n[0-1]"
    assert start["host"] == "n0"
    logs = {path.name: path.read_text() for path in (run / "logs").iterdir()}
    assert set(logs) == {"rank0.log", "rank1.log"}
    assert f"iteration {ITERATIONS:8}/" in logs["rank1.log"], "Megatron prints on the last rank"
    assert "lm loss" not in logs["rank0.log"]


def test_signal_saves_and_slurm_starts_the_job_again(bed: Bed, undisturbed: Job):
    """Both forms at the same time; restarted runs have the losses of the undisturbed one."""
    off = {"MEGATRON_SPARSE_PREFLIGHT": "off", "RANKS_PER_NODE": "1"}
    jobs = {form: bed.submit(f"train_{form}.sbatch", form, **off) for form in ("srun", "torchrun")}
    for job in jobs.values():
        job.reaches(DISTURBED_AT)
        # As --signal=USR1@S does it: to the job's steps.
        assert bed.run("scancel", "--signal=USR1", job.number).returncode == 0
    for form, job in jobs.items():
        job.finishes()
        assert job.field("Restarts") == "1", job.end()
        said = re.search(r"SIGUSR1 has ended the run after iteration (\d+)", job.text())
        log = (bed.runs / form / "logs" / "rank0.log").read_text()
        assert said, job.end()
        assert DISTURBED_AT <= int(said[1]) < ITERATIONS
        assert "no longer answer" not in job.text(), job.end()
        assert "loading distributed checkpoint from" in log
        # Each iteration is there once: the second start began where the first had ended.
        lines = re.findall(r"iteration +(\d+)/", job.text())
        assert lines == [str(iteration) for iteration in range(1, ITERATIONS + 1)]
        assert job.losses() == undisturbed.losses()
        starts = json_lines(bed.runs / form / "starts.jsonl")
        restarts = [start["environment"].get("SLURM_RESTART_COUNT", "0") for start in starts]
        assert restarts == ["0", "1"]


def test_a_node_that_fails_is_replaced(bed: Bed, undisturbed: Job):
    """The node without the batch script; Slurm itself detects the loss of the other one."""
    often, off = "training.save_interval=4", {"MEGATRON_SPARSE_PREFLIGHT": "off"}
    job = bed.submit("train_srun.sbatch", "replaced", often, **off)
    job.reaches(DISTURBED_AT)
    assert job.field("NodeList") == "n[0-1]"
    assert bed.run("bash", BED, "fail", str(bed.folder), "n1").returncode == 0
    try:
        job.finishes()
        assert job.field("NodeList") == "n[0,2]"
        assert job.field("Restarts") == "1"
        # The writing rank was on the lost node, and its unwritten lines were lost with it.
        found = job.losses()
        assert set(range(DISTURBED_AT + 1, ITERATIONS + 1)) <= found.keys()
        assert found.items() <= undisturbed.losses().items()
        assert len(json_lines(bed.runs / "replaced" / "starts.jsonl")) == 2
    finally:
        assert bed.run("bash", BED, "start", str(bed.folder), "n1").returncode == 0


def test_sweep_by_submitit(bed: Bed, undisturbed: Job):
    """A run that works and one that cannot, as jobs of two tasks each."""
    folder = bed.runs / "sweep"
    done = bed.run(
        sys.executable,
        "scripts/train.py",
        "--multirun",
        "hydra/launcher=submitit_slurm",
        *TRAINING,
        "+megatron.lr_decay_style=cosine,unheard",
        "cluster.ranks_per_node=2",
        f"runs_dir={folder}",
        "hydra.launcher.timeout_min=10",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 2 runs of the sweep failed" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "lr-decay-style" in done.stderr
    (works,) = [path.parent.name for path in folder.glob("*/summary.json")]
    assert works == "run_lr_decay_style-cosine"
    table = bed.run(
        *(sys.executable, "-m", "megatron_sparse.cli.main", "report", str(folder)),
        f"--output={folder}/table.csv",
    )
    assert table.returncode == 0, table.stderr
    with (folder / "table.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["run"], row["iterations"]) == (works, str(ITERATIONS))
    # The same training as the undisturbed job's, on one node instead of two.
    assert row["last loss"] == f"{undisturbed.losses()[ITERATIONS]:.4f}"


def test_scripts_name_the_mistake(bed: Bed):
    """Outside of a job, and with an interpreter that cannot be used."""
    alone = bed.run("bash", "scripts/train_srun.sbatch")
    assert alone.returncode == 2
    assert "sbatch scripts/train_srun.sbatch" in alone.stderr
    job = bed.submit("train_torchrun.sbatch", "nopython", PYTHON="/bin/false")
    until(lambda: job.field("JobState") == "FAILED", WAIT_S, job.end)
    assert job.field("ExitCode") == "2:0"
    assert "the interpreter does not fit" in job.text()


def test_the_bed_refuses_wrong_arguments(bed: Bed, tmp_path: Path):
    for arguments, words in (
        (["up", str(bed.folder)], "folder is in use"),
        (["up", str(tmp_path / "new"), "0"], "NODES is out of range"),
        (["up", str(tmp_path / ("long" * 30))], "too long for a socket"),
        (["down", str(tmp_path)], "there is no bed to end"),
        (["fail", str(bed.folder), "n9"], "the node is unknown"),
        (["jump", str(bed.folder)], "the action is unknown"),
    ):
        done = ended(["bash", BED, *arguments])
        assert done.returncode == 2
        assert done.stderr.count("error:") == 1
        assert words in done.stderr
