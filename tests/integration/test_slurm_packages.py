"""`scripts/system_packages.sh` installs missing packages if it may, and never fails.

Stand-ins for `id` and `apt-get`; nothing is installed here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import stand_in
from tests.programs import ROOT, ended

SCRIPT = ROOT / "scripts" / "system_packages.sh"
TOOLS = ("slurmctld", "munged", "ip", "tc", "chromium")


@pytest.fixture
def machine(tmp_path: Path):
    """Runs the script on a machine with these tools, as this user, with this apt-get."""
    if any(Path(folder, tool).exists() for tool in TOOLS for folder in ("/usr/sbin", "/sbin")):
        # The script looks there even if PATH lacks it.
        script = SCRIPT.read_text().replace(":/usr/sbin:/sbin", "")
    else:
        script = SCRIPT.read_text()
    (tmp_path / "system_packages.sh").write_text(script)
    folder = tmp_path / "bin"
    folder.mkdir()
    for command in ("bash", "sort", "timeout", "sh", "echo"):
        found = shutil.which(command)
        assert found
        (folder / command).symlink_to(found)

    def add(name: str, text: str) -> None:
        stand_in(folder / name, text)

    def run(*, tools: tuple[str, ...], user: int = 0, apt: str | None = "exit 0"):
        for tool in tools:
            add(tool, "exit 0")
        add("id", f"echo {user}")
        if apt is not None:
            add("apt-get", f'echo "apt-get $*" >>{tmp_path}/calls; {apt}')
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
