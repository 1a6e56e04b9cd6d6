"""The shell scripts: output and actions, on a scratch checkout with stand-ins.

The stand-ins replace the slow programs (pip, pytest, training); the shell code is the real one.
"""

import os
import re
import shutil
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from tests import commands
from tests.commands import stand_in
from tests.programs import ROOT, Done, ended

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
    scripts = ("scripts/env.sh", "scripts/test.sh", "scripts/quickstart.sh", ".ci/run")
    for name in ("pyproject.toml", *scripts):
        shutil.copy(ROOT / name, folder / name)
    return folder


class Bare:
    """A checkout on a machine without any Python: no PATH but the commands, no pyenv, no venv."""

    def __init__(self, checkout: Path) -> None:
        self.checkout, self.bin = checkout, checkout.parent / "bin"
        self.versions = checkout.parent / "pyenv" / "versions"
        self.bin.mkdir()
        for command in COMMANDS:
            found = shutil.which(command)
            assert found, f"{command} is needed to run the scripts"
            (self.bin / command).symlink_to(found)
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(checkout.parent),
            "PYENV_ROOT": str(self.versions.parent),
        }

    def source(self, function: str, **more: str) -> Done:
        """Sources env.sh as the scripts do and calls one of its functions."""
        line = f"set -euo pipefail; . scripts/env.sh; {function}"
        return bash(line, self.checkout, self.env | more)

    def python(self, name: str, text: str) -> Path:
        """Puts a shell script on PATH that stands for a Python."""
        return stand_in(self.bin / name, text)


@pytest.fixture
def bare(checkout: Path) -> Bare:
    return Bare(checkout)


def bash(command: str, cwd: Path, env: dict[str, str] | None = None) -> Done:
    return ended(["bash", "-c", command], cwd=cwd, env=env)


def is_one_error(done: Done, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    commands.is_one_error(done.stderr, "remedy:", *words)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_syntax(script: Path) -> None:
    done = bash(f"bash -n '{script}'", ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="pre-commit brings its own")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    done = bash(f"shellcheck --external-sources '{script}'", ROOT)
    assert done.returncode == 0, done.stdout


def test_ci_runs_the_tests_and_keeps_the_exit_code(checkout: Path) -> None:
    stand_in(checkout / "scripts/test.sh", 'echo "in $PWD with [$*]"; exit 7')
    done = bash("bash checkout/.ci/run", checkout.parent)
    assert done.returncode == 7
    assert done.stdout == f"in {checkout} with []\n"


def test_no_usable_python_is_one_message(bare: Bare) -> None:
    is_one_error(bare.source("setup_environment train"), "Python >= 3.12", "no Python at all")

    # A pyenv shim of a version that is not switched on, and a Python that is too old.
    bare.python("python3.12", "echo 'pyenv: not found' >&2\nexit 127")
    bare.python("python3", "echo 'is Python 3.11.7' >&2\nexit 1")
    done = bare.source("setup_environment train")
    is_one_error(done, "python3.12: pyenv: not found", "python3: is Python 3.11.7")
    assert not (bare.checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("sys.version_info = (3, 11, 7)\nsys.version = '3.11.7 (main)'", "is Python 3.11.7"),
        # Debian's python3 without python3-venv.
        ("sys.modules['ensurepip'] = None", "lacks the module ensurepip"),
    ],
)
def test_an_unfit_python_is_found_by_running_it(bare: Bare, claim: str, said: str) -> None:
    """It is a real Python that believes something else about itself."""
    code = f'shift\ncode=$1\nshift\nexec {BASE_PYTHON} -c "import sys\n{claim}\n$code" "$@"'
    fake = bare.python("python3", code)
    is_one_error(bare.source("setup_environment"), f"{fake}: {said}")


def test_pyenv_versions_are_found_where_the_shims_fail(bare: Bare) -> None:
    bare.python("python3.12", "exit 127")
    stand_in(bare.versions / "3.11.7/bin/python3", "exit 1")
    fitting = bare.versions / "3.12.1/bin/python3"
    stand_in(fitting, f'exec {BASE_PYTHON} "$@"')
    done = bare.source('TRIED=""; find_base_python; echo "$BASE_PYTHON"')
    assert done.stdout.strip() == str(fitting), done.stderr


def test_active_environment_is_used_if_usable(bare: Bare) -> None:
    done = bare.source('find_environment; echo "$PYTHON"', VIRTUAL_ENV=sys.prefix)
    assert done.stdout.splitlines()[-1] == f"{sys.prefix}/bin/python"

    prefix = bare.checkout.parent / "old"
    stand_in(prefix / "bin/python", "echo too old >&2\nexit 1")
    is_one_error(bare.source("find_environment", VIRTUAL_ENV=str(prefix)), f"{prefix}: too old")

    base = {"CONDA_DEFAULT_ENV": "base", "CONDA_PREFIX": sys.prefix}
    is_one_error(bare.source("find_environment", **base), "no Python at all")


def test_venv_is_made_and_made_anew_after_an_interruption(bare: Bare) -> None:
    bare.python("python3.12", f'exec {BASE_PYTHON} "$@"')
    (bare.checkout / ".venv/bin").mkdir(parents=True)
    (bare.checkout / ".venv/.megatron-sparse-made").touch()
    done = bare.source('find_environment; "$PYTHON" -c "import pip"')
    assert done.returncode == 0, done.stderr
    assert ".venv is made anew" in done.stdout
    assert "made" not in bare.source("find_environment").stdout


def test_venv_of_the_user_is_never_removed(bare: Bare) -> None:
    notes = bare.checkout / ".venv/notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    is_one_error(bare.source("find_environment"), "remove .venv")
    assert notes.read_text() == "mine"


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


class FakePip(Bare):
    """An active environment whose pip records its calls."""

    def __init__(self, checkout: Path) -> None:
        super().__init__(checkout)
        self.prefix = checkout.parent / "env"
        venv.create(self.prefix, symlinks=True)
        self.site = next(self.prefix.glob("lib/python*/site-packages"))
        (self.site / "pip").mkdir(exist_ok=True)
        (self.site / "pip/__main__.py").write_text(PIP)
        (self.site / "pip/__init__.py").touch()
        self.env["VIRTUAL_ENV"] = str(self.prefix)

    def calls(self, function: str) -> list[str]:
        """The calls of pip by a function of env.sh."""
        log = self.site / "calls.txt"
        log.unlink(missing_ok=True)
        self.source(function)
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def fake_pip(checkout: Path) -> FakePip:
    return FakePip(checkout)


def test_installs_in_order_once(fake_pip: FakePip) -> None:
    before, package = fake_pip.calls("setup_environment dev cuda")
    # torch and nvcc must be installed before the extension is built with them.
    assert all(word in before for word in ("torch>=", "nvcc", "setuptools>=", "wheel"))
    assert package.endswith("--no-build-isolation -e .[cuda,dev]")

    again = fake_pip.source('setup_environment dev cuda; echo "$PATH"')
    assert again.returncode == 0, again.stderr
    assert "installed already" in again.stdout
    assert again.stdout.splitlines()[-1].startswith(f"{fake_pip.prefix}/bin:")
    assert fake_pip.calls("setup_environment dev cuda") == []
    assert fake_pip.calls("setup_environment train") == [], "dev brings train along"


def test_installs_again_when_a_dependency_changed(fake_pip: FakePip) -> None:
    checkout, train = fake_pip.checkout, "setup_environment train"
    before, package = fake_pip.calls(train)
    assert package.endswith("-e .[train]")
    assert "nvcc" not in before
    *_, package = fake_pip.calls("setup_environment cuda")
    assert package.endswith("-e .[cuda,train]"), "what was there stays"
    assert fake_pip.calls(train) == []

    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert len(fake_pip.calls(train)) == 2
    (checkout / "setup.py").write_text("# new\n")
    assert len(fake_pip.calls(train)) == 2
    shutil.rmtree(fake_pip.site / "megatron_sparse-0.dist-info")
    assert len(fake_pip.calls(train)) == 2, "the package was uninstalled"


def test_failing_pip_shows_the_end_of_its_log_and_runs_again_next_time(fake_pip: FakePip) -> None:
    (fake_pip.site / "broken").touch()
    done = fake_pip.source("setup_environment train")
    is_one_error(done, "ERROR: No matching distribution", "megatron-sparse-install.log")
    (fake_pip.site / "broken").unlink()
    assert len(fake_pip.calls("setup_environment train")) == 2


@pytest.fixture
def recorded(checkout: Path) -> Path:
    """Replaces env.sh's installation by a Python that records its arguments."""
    log = checkout / "log.txt"
    python = stand_in(
        checkout / "bin/python",
        f'echo "python $*" >>{log}\ncase "$*" in *pytest*) exit ${{PYTEST_CODE:-0}};; esac',
    )
    stand_in(checkout / "bin/pre-commit", f'echo "pre-commit $*" >>{log}\nexit $LINT')
    stand_in(checkout / "bin/nvidia-smi", "exit 1")
    with (checkout / "scripts/env.sh").open("a") as file:
        file.write(
            f'setup_environment() {{ echo "setup $* strict=${{MEGATRON_SPARSE_STRICT:-}}" >>{log}\n'
            f"  PYTHON={python} VIRTUAL_ENV={checkout} PATH={checkout}/bin:$PATH; }}\n"
        )
    stand_in(checkout / "scripts/system_packages.sh", f'echo "packages" >>{log}')
    stand_in(checkout / "scripts/fuzz.sh", f'echo "fuzz $*" >>{log}; exit "${{FUZZ_CODE:-0}}"')
    (checkout / ".git").mkdir()
    return log


def run_script(script: str, checkout: Path, **env: str) -> Done:
    path = f"{checkout}/bin:{os.environ['PATH']}"
    # Settings of this run of the tests must not reach the script under test.
    own = ("CI", "MEGATRON_SPARSE_STRICT", "MEGATRON_SPARSE_FUZZ_SECONDS")
    inherited = {k: v for k, v in os.environ.items() if k not in own}
    return bash(f"bash scripts/{script}", checkout, inherited | {"LINT": "0", "PATH": path} | env)


BEFORE_TESTS = [
    "setup dev cuda strict=1",
    "pre-commit install-hooks",
    "pre-commit run --all-files",
    "python -m megatron_sparse.cuda_ext.build",
]


def test_test_script_runs_everything_strictly(checkout: Path, recorded: Path) -> None:
    done = run_script("test.sh", checkout, MEGATRON_SPARSE_TEST_WORKERS="3")
    assert done.returncode == 0
    assert recorded.read_text().splitlines() == [
        *BEFORE_TESTS,
        "packages",
        "python -m pytest -m not slow -n 3 --dist loadfile --no-loadscope-reorder",
        "fuzz 60",
    ]


def test_quick_loop_is_linters_and_tests_of_one_process(checkout: Path, recorded: Path) -> None:
    done = run_script("test.sh --quick -k zen", checkout, MEGATRON_SPARSE_TEST_WORKERS="2")
    assert done.returncode == 0
    *before, tests = recorded.read_text().splitlines()
    assert before == BEFORE_TESTS
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
    *_, tests = recorded.read_text().splitlines()
    assert tests == "python -m pytest -m not slow tests/config -k density"
    assert "pre-commit" not in recorded.read_text()


@pytest.mark.parametrize(
    "codes", ["0 0 0 -> 0", "1 0 0 -> 1", "0 5 0 -> 5", "1 5 0 -> 5", "0 0 1 -> 1", "0 5 1 -> 5"]
)
def test_test_script_exit_code(checkout: Path, recorded: Path, codes: str) -> None:
    """Those of the linters, of the tests and of fuzzing, and the script's."""
    lint, tests, fuzz, _, code = codes.split()
    stand_in(
        checkout / "bin/pre-commit",
        f'echo "pre-commit $*" >>{recorded}\n[ "$1" = install-hooks ] || exit {lint}',
    )
    done = run_script("test.sh", checkout, PYTEST_CODE=tests, FUZZ_CODE=fuzz)
    assert done.returncode == int(code)
    assert "pytest" in recorded.read_text(), "the tests run even when a linter complains"


def test_linters_that_cannot_be_installed_are_named(checkout: Path, recorded: Path) -> None:
    stand_in(
        checkout / "bin/pre-commit",
        f'echo "pre-commit $* SKIP=$SKIP" >>{recorded}\n[ "$1" != install-hooks ]',
    )
    done = run_script("test.sh", checkout, CI="")
    assert done.returncode == 0
    assert "shellcheck cannot be installed here" in done.stdout
    assert "SKIP=codespell,clang-format,shellcheck" in recorded.read_text()
    is_one_error(run_script("test.sh", checkout, CI="true"), "pre-commit install-hooks")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("runs_dir=else", "name=quickstart runs_dir=else"),
        ("", "name=quickstart"),
        ("gpt", "name=quickstart_gpt"),
        ("compression.density=0.05", "name=quickstart compression.density=0.05"),
        ("name=mine", "name=mine name=mine"),
    ],
)
def test_quickstart(checkout: Path, recorded: Path, arguments: str, said: str) -> None:
    model, kind = ("gpt_tiny", "prose") if arguments == "gpt" else ("starcoder_tiny", "code")
    train = f"model={model} experiment=quickstart data={kind} {said}"
    done = run_script(f"quickstart.sh {arguments}", checkout)
    assert done.returncode == 0, done.stderr
    runs = arguments.removeprefix("runs_dir=") if "runs_dir=" in arguments else "runs"
    run = f"{runs}/{train.rpartition(' name=')[2].split()[0]}"
    assert recorded.read_text().splitlines() == [
        "setup train strict=",
        f"python -m megatron_sparse.cli.main corpus --kind {kind} --output data/{kind}",
        f"python scripts/train.py {train}",
        f"python -m megatron_sparse.cli.main report {run} --output {run}/report.html",
    ]
    assert f"scheme=dense name=dense runs_dir={runs}" in done.stdout
    assert f"megatron_sparse.cli.main report {run} {runs}/dense" in done.stdout


def test_the_quickstarts_install_can_write_its_report() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["optional-dependencies"]["train"]
    names = {re.split("[>=<]", requirement)[0] for requirement in needed}
    assert {"matplotlib", "jinja2"} <= names


def test_quickstart_on_gpus_builds_the_cuda_part(checkout: Path, recorded: Path) -> None:
    stand_in(checkout / "bin/nvidia-smi", "exit 0")
    run_script("quickstart.sh", checkout)
    assert recorded.read_text().startswith("setup train cuda")


def test_quickstart_refuses_an_unknown_model(checkout: Path, recorded: Path) -> None:
    is_one_error(run_script("quickstart.sh bert", checkout), "starcoder | gpt", "bert")
    assert not recorded.exists(), "nothing is installed for a run that cannot be"
