"""What `scripts/system_packages.sh` installs, and which jobs `scripts/slurm_job.sh` starts again.

Stand-ins for `id`, `apt-get` and Slurm; nothing is installed here.
"""

import os
import shutil
from pathlib import Path

import pytest

from tests.commands import stand_in
from tests.programs import ROOT, ended, with_variables

SCRIPT = ROOT / "scripts" / "system_packages.sh"
TOOLS = ("slurmctld", "munged", "ip", "tc", "chromium")


@pytest.fixture
def machine(tmp_path: Path):
    """Runs the script on a machine with these tools, as this user, with this apt-get."""
    script = SCRIPT.read_text()
    if any(Path(folder, tool).exists() for tool in TOOLS for folder in ("/usr/sbin", "/sbin")):
        # The script looks there even if PATH lacks it.
        script = script.replace(":/usr/sbin:/sbin", "")
    (tmp_path / "system_packages.sh").write_text(script)
    folder = tmp_path / "bin"
    folder.mkdir()
    for command in ("bash", "sort", "timeout", "sh", "echo"):
        found = shutil.which(command)
        assert found
        (folder / command).symlink_to(found)

    def run(*, tools: tuple[str, ...], user: int = 0, apt: str | None = "exit 0"):
        for tool in tools:
            stand_in(folder / tool, "exit 0")
        stand_in(folder / "id", f"echo {user}")
        if apt is not None:
            stand_in(folder / "apt-get", f'echo "apt-get $*" >>{tmp_path}/calls; {apt}')
        command = ["bash", str(tmp_path / "system_packages.sh"), str(tmp_path / "log")]
        done = ended(command, env={"PATH": str(folder)})
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_nothing_is_missing(machine):
    done, calls = machine(tools=TOOLS)
    assert (done.returncode, done.stdout, calls) == (0, "", [])


def test_only_what_is_missing_is_installed_after_an_update(machine):
    done, calls = machine(tools=("munged", "chromium", "ip"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "system packages: installing iproute2 slurm-wlm\n"
    assert calls[0].startswith("apt-get update")
    assert calls[1].endswith(" iproute2 slurm-wlm")
    assert "--no-install-recommends" in calls[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"user": 1000}, "not root"),
        ({"apt": None}, "no apt-get on this system"),
        ({"apt": "echo no network; exit 100"}, "apt-get failed, see "),
    ],
)
def test_packages_that_cannot_be_installed_are_named_without_failing(
    machine, tmp_path, changes, reason
):
    done, _ = machine(tools=("slurmctld", "munged", "ip", "tc"), **changes)
    assert done.returncode == 0
    assert f"system packages: chromium not installed ({reason}" in done.stdout
    if "no network" in str(changes):
        assert "no network" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("code", "gone", "restarts", "state", "requeued"),
    [
        (0, "n1", 0, "RUNNING", False),
        (2, "n1", 0, "RUNNING", False),  # the user's mistake
        (3, "n1", 0, "RUNNING", True),
        (1, "none", 0, "RUNNING", False),  # all nodes answer, so the run failed by itself
        (1, "n1", 3, "RUNNING", False),  # the limit of restarts is reached
        (143, "n1", 0, "COMPLETING", False),  # a rank has asked for the restart already
    ],
)
@pytest.mark.parametrize(
    ("array", "job"),
    [({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2")],
)
def test_only_a_lost_node_starts_a_job_again(
    tmp_path: Path,
    code: int,
    gone: str,
    restarts: int,
    state: str,
    requeued: bool,
    array: dict[str, str],
    job: str,
) -> None:
    stand_ins = {
        "scontrol": f'[ "$1" = show ] && echo n0 n1 || echo "$*" >>{tmp_path}/asked',
        "srun": f'case "$*" in *nodelist={gone}*) exit 1;; esac',
        "squeue": f'[ "$2" = --jobs={job} ] && echo {state}',
        "sleep": ":",
    }
    for name, text in stand_ins.items():
        stand_in(tmp_path / name, text)
    variables = with_variables(
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n[0-1]",
        SLURM_RESTART_COUNT=str(restarts),
        **array,
    )
    script = f". scripts/slurm_job.sh; train sh -c 'exit {code}'"
    done = ended(["bash", "-euo", "pipefail", "-c", script], env=variables)
    assert done.returncode == code, done.stderr
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == (f"requeue {job}\n" if requeued else "")
    assert ("no longer answer: n1" in done.stderr) is (requeued or restarts == 3)


def test_what_a_job_passes_on_to_srun(tmp_path: Path) -> None:
    stand_in(tmp_path / "python", "exit 0")
    stand_in(tmp_path / "scontrol", "seq -f node%05g 100000")
    variables = with_variables(
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        PYTHON=str(tmp_path / "python"),
        MASTER_ADDR="",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[00001-99999]",
        SLURM_EXPORT_ENV="NONE",
        SLURM_CPUS_PER_TASK="4",
    )
    shown = 'echo "$MASTER_ADDR $SLURM_EXPORT_ENV $SRUN_CPUS_PER_TASK"'
    script = f". scripts/slurm_job.sh; setup; {shown}"
    done = ended(["bash", "-euo", "pipefail", "-c", script], env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "node00001 ALL 4"
