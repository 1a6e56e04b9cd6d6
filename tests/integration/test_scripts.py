"""The shell scripts: output and actions, on a scratch checkout with stand-ins.

The stand-ins replace the slow programs (pip, pytest, training); the shell code is the real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("scripts/**/*.sbatch"), ROOT / ".ci/run"]
)
# The programs that the scripts use besides Python, for a PATH without Python.
COMMANDS = ("bash", "cut", "dirname", "grep", "head", "mkdir", "rm", "sleep", "tail")
# The interpreter below the environment that runs the tests.
BASE_PYTHON = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with env.sh, the other scripts and pyproject.toml, and nothing installed."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    (folder / ".ci").mkdir()
    for name in ("pyproject.toml", "scripts/env.sh", "scripts/test.sh", ".ci/run"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "scripts/quickstart.sh", folder / "scripts")
    return folder


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment without any Python: no PATH but the commands, no pyenv, no active venv."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for command in COMMANDS:
        found = shutil.which(command)
        assert found, f"{command} is needed to run the scripts"
        (folder / command).symlink_to(found)
    return {"PATH": str(folder), "HOME": str(tmp_path), "PYENV_ROOT": str(tmp_path / "pyenv")}


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def bash(
    command: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=env, text=True, capture_output=True, timeout=120
    )


def source(function: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Sources env.sh as the scripts do and calls one of its functions."""
    return bash(f"set -euo pipefail; . scripts/env.sh; {function}", cwd, env)


def is_one_error(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1, done.stderr
    for word in ("expected:", "got:", "remedy:", *words):
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_syntax(script: Path) -> None:
    done = bash(f"bash -n '{script}'", ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    shutil.which("shellcheck") is None,
    reason="shellcheck is not on PATH; pre-commit brings its own",
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    done = bash(f"shellcheck --external-sources '{script}'", ROOT)
    assert done.returncode == 0, done.stdout


def test_ci_runs_the_tests_and_keeps_the_exit_code(checkout: Path) -> None:
    executable(checkout / "scripts/test.sh", 'echo "in $PWD with [$*]"; exit 7\n')
    done = bash("bash checkout/.ci/run", checkout.parent)
    assert done.returncode == 7
    assert done.stdout == f"in {checkout} with []\n"


def test_no_usable_python_is_one_message(checkout: Path, bare: dict[str, str]) -> None:
    folder = Path(bare["PATH"])
    done = source("setup_environment train", checkout, bare)
    is_one_error(done, "Python >= 3.12", "no Python at all")

    # A pyenv shim of a version that is not switched on, and a Python that is too old.
    executable(folder / "python3.12", "#!/bin/sh\necho 'pyenv: not found' >&2\nexit 127\n")
    executable(folder / "python3", "#!/bin/sh\necho 'is Python 3.11.7' >&2\nexit 1\n")
    done = source("setup_environment train", checkout, bare)
    is_one_error(done, "python3.12: pyenv: not found", "python3: is Python 3.11.7")
    assert not (checkout / ".venv").exists()


def test_too_old_python_is_found_by_running_it(checkout: Path, bare: dict[str, str]) -> None:
    """The version check runs in Python; here that interpreter claims to be 3.11."""
    fake = executable(
        Path(bare["PATH"]) / "python3",
        f'#!/bin/sh\nshift\ncode=$1\nshift\nexec {BASE_PYTHON} -c "import sys\n'
        'sys.version_info = (3, 11, 7)\nsys.version = \'3.11.7 (main)\'\n$code" "$@"\n',
    )
    is_one_error(source("setup_environment", checkout, bare), f"{fake}: is Python 3.11.7")


def test_python_without_ensurepip_is_not_used(checkout: Path, bare: dict[str, str]) -> None:
    """Debian's python3 without python3-venv."""
    fake = executable(
        Path(bare["PATH"]) / "python3",
        f'#!/bin/sh\nshift\ncode=$1\nshift\nexec {BASE_PYTHON} -c "import sys\n'
        'sys.modules[\'ensurepip\'] = None\n$code" "$@"\n',
    )
    is_one_error(source("setup_environment", checkout, bare), f"{fake}: lacks the module ensurepip")


def test_pyenv_versions_are_found_where_the_shims_fail(
    checkout: Path, bare: dict[str, str]
) -> None:
    executable(Path(bare["PATH"]) / "python3.12", "#!/bin/sh\nexit 127\n")
    versions = Path(bare["PYENV_ROOT"]) / "versions"
    executable(versions / "3.11.7/bin/python3", "#!/bin/sh\nexit 1\n")
    fitting = executable(versions / "3.12.1/bin/python3", f'#!/bin/sh\nexec {BASE_PYTHON} "$@"\n')
    done = source('TRIED=""; find_base_python; echo "$BASE_PYTHON"', checkout, bare)
    assert done.stdout.strip() == str(fitting), done.stderr


def test_active_environment_is_used_if_usable(checkout: Path, bare: dict[str, str]) -> None:
    done = source('find_environment; echo "$PYTHON"', checkout, bare | {"VIRTUAL_ENV": sys.prefix})
    assert done.stdout.splitlines()[-1] == f"{sys.prefix}/bin/python"

    old = executable(checkout.parent / "old/bin/python", "#!/bin/sh\necho too old >&2\nexit 1\n")
    prefix = str(old.parent.parent)
    done = source("find_environment", checkout, bare | {"VIRTUAL_ENV": prefix})
    is_one_error(done, f"{prefix}: too old")

    base = {"CONDA_DEFAULT_ENV": "base", "CONDA_PREFIX": sys.prefix}
    is_one_error(source("find_environment", checkout, bare | base), "no Python at all")


def test_venv_is_made_and_made_anew_after_an_interruption(
    checkout: Path, bare: dict[str, str]
) -> None:
    python = Path(bare["PATH"]) / "python3.12"
    executable(python, f'#!/bin/sh\nexec {BASE_PYTHON} "$@"\n')
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/.megatron-sparse-made").touch()
    done = source('find_environment; "$PYTHON" -c "import pip"', checkout, bare)
    assert done.returncode == 0, done.stderr
    assert ".venv is made anew" in done.stdout
    done = source("find_environment", checkout, bare)
    assert "made" not in done.stdout


def test_venv_of_the_user_is_never_removed(checkout: Path, bare: dict[str, str]) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv/notes.txt").write_text("mine")
    is_one_error(source("find_environment", checkout, bare), "remove .venv")
    assert (checkout / ".venv/notes.txt").read_text() == "mine"


PIP = """
import pathlib, sys, sysconfig
site = pathlib.Path(sysconfig.get_paths()["purelib"])
with (site / "calls.txt").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if (site / "broken").exists():
    print("ERROR: No matching distribution")
    sys.exit(1)
if "-e" in sys.argv:
    info = site / "megatron_sparse-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Name: megatron-sparse\\nVersion: 0\\n")
"""


@pytest.fixture
def fake_pip(checkout: Path, bare: dict[str, str]) -> tuple[Path, dict[str, str]]:
    """An active environment whose pip records its calls; the folder of its packages."""
    prefix = checkout.parent / "env"
    venv.create(prefix, symlinks=True)
    site = next(prefix.glob("lib/python*/site-packages"))
    executable(site / "pip/__main__.py", PIP)
    (site / "pip/__init__.py").touch()
    return site, bare | {"VIRTUAL_ENV": str(prefix)}


def calls(site: Path) -> list[str]:
    path = site / "calls.txt"
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def test_installs_in_order_once(checkout: Path, fake_pip: tuple[Path, dict[str, str]]) -> None:
    site, env = fake_pip
    done = source('setup_environment dev cuda; echo "$PATH"', checkout, env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(env["VIRTUAL_ENV"] + "/bin:")
    before, package = calls(site)
    # torch and nvcc must be installed before the extension is built with them.
    assert "torch>=" in before
    assert "nvcc" in before
    assert "setuptools>=" in before
    assert "wheel" in before
    assert package.endswith("--no-build-isolation -e .[cuda,dev]")
    constraints = Path(env["VIRTUAL_ENV"]) / "megatron-sparse-constraints.txt"
    assert constraints.read_text() == "cuda-toolkit==13.0.*\n"
    assert all(f"--constraint {constraints}" in call for call in (before, package))

    begin = time.perf_counter()
    again = source("setup_environment dev cuda", checkout, env)
    seconds = time.perf_counter() - begin
    assert "installed already" in again.stdout
    assert calls(site) == []
    # Promised in under a second; three interpreters start in it, and CI's cores are shared.
    assert seconds < 3

    assert source("setup_environment train", checkout, env).returncode == 0
    assert calls(site) == [], "dev brings train along"


def test_installs_again_when_a_dependency_changed(
    checkout: Path, fake_pip: tuple[Path, dict[str, str]]
) -> None:
    site, env = fake_pip
    source("setup_environment train", checkout, env)
    before, package = calls(site)
    assert package.endswith("-e .[train]")
    assert "nvcc" not in before
    source("setup_environment cuda", checkout, env)
    assert calls(site)[-1].endswith("-e .[cuda,train]"), "what was there stays"
    source("setup_environment train", checkout, env)
    assert calls(site) == []

    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    source("setup_environment train", checkout, env)
    assert len(calls(site)) == 2
    (checkout / "setup.py").write_text("# new\n")
    source("setup_environment train", checkout, env)
    assert len(calls(site)) == 2
    shutil.rmtree(site / "megatron_sparse-0.dist-info")
    source("setup_environment train", checkout, env)
    assert len(calls(site)) == 2, "the package was uninstalled"


def test_failing_pip_shows_the_end_of_its_log_and_runs_again_next_time(
    checkout: Path, fake_pip: tuple[Path, dict[str, str]]
) -> None:
    site, env = fake_pip
    (site / "broken").touch()
    done = source("setup_environment train", checkout, env)
    is_one_error(done, "ERROR: No matching distribution", "megatron-sparse-install.log")
    (site / "broken").unlink()
    calls(site)
    assert source("setup_environment train", checkout, env).returncode == 0
    assert len(calls(site)) == 2


@pytest.fixture
def recorded(checkout: Path) -> Path:
    """Replaces env.sh's installation by a Python that records its arguments."""
    log = checkout / "log.txt"
    python = executable(
        checkout / "bin/python",
        f'#!/bin/sh\necho "python $*" >>{log}\n'
        'case "$*" in *pytest*) exit ${PYTEST_CODE:-0};; esac\n',
    )
    executable(
        checkout / "bin/pre-commit", f'#!/bin/sh\necho "pre-commit $*" >>{log}\nexit $LINT\n'
    )
    executable(checkout / "bin/nvidia-smi", "#!/bin/sh\nexit 1\n")
    with (checkout / "scripts/env.sh").open("a") as file:
        file.write(
            f'setup_environment() {{ echo "setup $* strict=${{MEGATRON_SPARSE_STRICT:-}}" >>{log}\n'
            f"  PYTHON={python} VIRTUAL_ENV={checkout} PATH={checkout}/bin:$PATH; }}\n"
        )
    executable(checkout / "scripts/system_packages.sh", f'echo "packages" >>{log}\n')
    executable(checkout / "scripts/fuzz.sh", f'echo "fuzz $*" >>{log}; exit "${{FUZZ_CODE:-0}}"\n')
    (checkout / ".git").mkdir()
    return log


def run_script(script: str, checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout}/bin:{os.environ['PATH']}"
    # Settings of this run of the tests must not reach the script under test.
    own = ("CI", "MEGATRON_SPARSE_STRICT", "MEGATRON_SPARSE_FUZZ_SECONDS")
    inherited = {k: v for k, v in os.environ.items() if k not in own}
    return bash(f"bash scripts/{script}", checkout, inherited | {"LINT": "0", "PATH": path} | env)


def test_test_script_runs_everything_strictly(checkout: Path, recorded: Path) -> None:
    done = run_script("test.sh", checkout, MEGATRON_SPARSE_TEST_WORKERS="3")
    assert done.returncode == 0
    assert recorded.read_text().splitlines() == [
        "setup dev cuda strict=1",
        "pre-commit install-hooks",
        "pre-commit run --all-files",
        "python -m megatron_sparse.cuda_ext.build",
        "packages",
        "python -m pytest -m not slow -n 3 --dist loadfile --no-loadscope-reorder",
        "fuzz 120",
    ]


def test_quick_loop_is_linters_and_tests_of_one_process(checkout: Path, recorded: Path) -> None:
    done = run_script("test.sh --quick -k zen", checkout, MEGATRON_SPARSE_TEST_WORKERS="2")
    assert done.returncode == 0
    *before, tests = recorded.read_text().splitlines()
    assert before == [
        "setup dev cuda strict=1",
        "pre-commit install-hooks",
        "pre-commit run --all-files",
        "python -m megatron_sparse.cuda_ext.build",
    ]
    words = tests.split()
    assert words[:6] == ["python", "-m", "pytest", "-m", "not", "slow"]
    assert words[-7:] == ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-k", "zen"]
    paths = words[6:-7]
    assert "tests/formats" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_test_script_arguments(checkout: Path, recorded: Path) -> None:
    run_script("test.sh --full", checkout, MEGATRON_SPARSE_FUZZ_SECONDS="7", OMP_NUM_THREADS="1")
    workers = min(len(os.sched_getaffinity(0)), 4)
    assert recorded.read_text().splitlines()[-2:] == [
        f"python -m pytest -n {workers} --dist loadfile --no-loadscope-reorder",
        "fuzz 7",
    ]
    recorded.unlink()
    run_script("test.sh tests/config -k density", checkout)
    assert (
        recorded.read_text().splitlines()[-1]
        == "python -m pytest -m not slow tests/config -k density"
    )
    assert "pre-commit" not in recorded.read_text()


@pytest.mark.parametrize(
    ("lint", "tests", "fuzz", "code"),
    [
        ("0", "0", "0", 0),
        ("1", "0", "0", 1),
        ("0", "5", "0", 5),
        ("1", "5", "0", 5),
        ("0", "0", "1", 1),
        ("0", "5", "1", 5),
    ],
)
def test_test_script_exit_code(
    checkout: Path, recorded: Path, lint: str, tests: str, fuzz: str, code: int
) -> None:
    executable(
        checkout / "bin/pre-commit",
        f'#!/bin/sh\necho "pre-commit $*" >>{recorded}\n[ "$1" = install-hooks ] || exit {lint}\n',
    )
    done = run_script("test.sh", checkout, PYTEST_CODE=tests, FUZZ_CODE=fuzz)
    assert done.returncode == code
    assert "pytest" in recorded.read_text(), "the tests run even when a linter complains"


def test_linters_that_cannot_be_installed_are_named_and_ci_fails(
    checkout: Path, recorded: Path
) -> None:
    executable(
        checkout / "bin/pre-commit",
        f'#!/bin/sh\necho "pre-commit $* SKIP=$SKIP" >>{recorded}\n[ "$1" != install-hooks ]\n',
    )
    done = run_script("test.sh", checkout, CI="")
    assert done.returncode == 0
    assert "shellcheck cannot be installed here" in done.stdout
    assert "SKIP=codespell,clang-format,shellcheck" in recorded.read_text()
    is_one_error(run_script("test.sh", checkout, CI="true"), "pre-commit install-hooks")


@pytest.mark.parametrize(
    ("arguments", "kind", "train"),
    [
        ("", "code", "model=starcoder_tiny experiment=quickstart data=code name=quickstart"),
        ("gpt", "prose", "model=gpt_tiny experiment=quickstart data=prose name=quickstart_gpt"),
        (
            "compression.density=0.05",
            "code",
            "model=starcoder_tiny experiment=quickstart data=code name=quickstart "
            "compression.density=0.05",
        ),
    ],
)
def test_quickstart(checkout: Path, recorded: Path, arguments: str, kind: str, train: str) -> None:
    done = run_script(f"quickstart.sh {arguments}", checkout)
    assert done.returncode == 0, done.stderr
    assert recorded.read_text().splitlines() == [
        "setup train strict=",
        f"python -W ignore -m megatron_sparse.megatron.corpus --kind {kind} --out data/{kind}",
        f"python scripts/train.py {train}",
    ]


def test_quickstart_on_gpus_builds_the_cuda_part(checkout: Path, recorded: Path) -> None:
    executable(checkout / "bin/nvidia-smi", "#!/bin/sh\nexit 0\n")
    run_script("quickstart.sh", checkout)
    assert recorded.read_text().startswith("setup train cuda")


def test_quickstart_refuses_an_unknown_model(checkout: Path, recorded: Path) -> None:
    is_one_error(run_script("quickstart.sh bert", checkout), "starcoder | gpt", "bert")
    assert not recorded.exists(), "nothing is installed for a run that cannot be"
