"""All modules can be imported from a checkout, an editable install and a wheel.

`configs`, `cuda_ext` and `triton_kernels` stand at the top of the repository and are mapped into
the package, so each way of importing finds them by other means.
"""

import os
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT, ended, output_of

FOLDERS = ("megatron_sparse", "configs", "cuda_ext", "triton_kernels")
MODULES = (FOLDERS[0], *(f"megatron_sparse.{name}" for name in FOLDERS[1:]))
pytestmark = pytest.mark.timeout(900)  # compiles the libraries; minutes on a loaded machine
IMPORT = "; ".join(
    (
        "import importlib",
        f"ms = [importlib.import_module(m) for m in {MODULES}]",
        "[print(list(m.__path__)[0]) for m in ms]",
    )
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout as it comes from git: builds write into it."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    made = ".git .venv runs data build dist site *.egg-info __pycache__ *.so outputs wandb .*_cache"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*made.split(" ")))
    # A library of another revision, without the stamp that says of which.
    (folder / "cuda_ext/_lib").mkdir(exist_ok=True)
    (folder / "cuda_ext/_lib/megatron_sparse_cuda.so").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, source)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed") / "target"
    pip("install", "--no-deps", "--target", target, wheel)
    return target


def pip(*arguments: object, python: Path | None = None) -> None:
    target = ["--python", str(python)] if python else []
    command = [sys.executable, "-m", "pip", *target, "--no-input", *map(str, arguments)]
    # The CUDA library takes minutes; the checkout's own, which every other test uses, has it.
    built = environment(MEGATRON_SPARSE_CUDA="off")
    output_of(command, None, env=built)


def environment(**more: str) -> dict[str, str]:
    """The environment without a PYTHONPATH that would find the checkout."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return found | more


def imported_from(python: Path | str, cwd: Path, **env: str) -> list[Path]:
    """Imports MODULES in a new process; returns the file of each."""
    done = ended([str(python), "-c", IMPORT], cwd=cwd, env=environment(**env))
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def test_from_the_root_of_the_repository(source: Path) -> None:
    """As in `python scripts/train.py` with nothing installed."""
    found = imported_from(sys.executable, source, PYTHONPATH=str(source))
    assert found == [source / name for name in FOLDERS]


def test_from_an_editable_install(source: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    venv.create(prefix, symlinks=True)
    python = prefix / "bin" / "python"
    # torch and setuptools of this environment, which the build uses, seen from the new one.
    site = next(prefix.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    # The wheel's tests compile; here the checkout's libraries are found to be up to date.
    shutil.copytree(ROOT / "cuda_ext" / "_lib", source / "cuda_ext" / "_lib", dirs_exist_ok=True)
    pip("install", "--no-build-isolation", "--no-deps", "-e", source, python=python)
    found = imported_from(python, tmp_path)
    assert found == [source / name for name in FOLDERS]
    assert (prefix / "bin" / "megatron-sparse").is_file()


def test_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    found = imported_from(sys.executable, tmp_path, PYTHONPATH=str(installed))
    package = installed / "megatron_sparse"
    assert found == [package, *(package / name for name in FOLDERS[1:])]


def test_wheel_holds_everything(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not any(name.endswith("megatron_sparse_cuda.so") for name in names), "CUDA is off"
    for folder, pattern in (
        ("megatron_sparse", "**/*.py"),
        ("configs", "**/*"),
        ("triton_kernels", "**/*.py"),
        ("cuda_ext", "**/*.py"),
        ("cuda_ext", "csrc/*"),
    ):
        files = [
            p.relative_to(source)
            for p in (source / folder).glob(pattern)
            if p.is_file() and "__pycache__" not in p.parts
        ]
        assert files, f"{folder}/{pattern} is empty"
        inside = {
            str(p if folder == "megatron_sparse" else Path("megatron_sparse") / p) for p in files
        }
        assert inside <= names, f"missing from the wheel: {sorted(inside - names)}"
    assert any(
        name.startswith("megatron_sparse/cuda_ext/_lib/") and name.endswith(".so") for name in names
    ), "the extension is not in the wheel"
    assert not any(name.startswith(("configs/", "cuda_ext/", "tests/")) for name in names)
    (licence,) = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(licence) == (source / "LICENSE").read_bytes()


def test_wheel_fits_every_python_of_the_platform(wheel: Path) -> None:
    """The extension uses torch's stable ABI and no Python symbol: one wheel for all versions."""
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl"), "it holds compiled code"


def test_wheel_finds_its_extension(installed: Path, tmp_path: Path) -> None:
    code = "from megatron_sparse import cuda_ext; s = cuda_ext.status()['cpu']"
    code += "; assert s['built']; print(s['path'])"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = ended(command, cwd=tmp_path, env=environment(PYTHONPATH=str(installed)))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed)
