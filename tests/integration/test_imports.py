"""Import contracts: they hold, an import that points up breaks one, and the table matches them."""

import ast
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from tests.programs import ROOT, Done, ended

DOWN = "Imports point down"
SOURCES = ("megatron_sparse", "cuda_ext", "triton_kernels", "configs")


def check(checkout: Path) -> Done:
    """Runs the script of this checkout on another one."""
    return ended([sys.executable, str(ROOT / "scripts/check_imports.py"), str(checkout)])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that the check reads."""
    for name in SOURCES:
        for path in (ROOT / name).rglob("*.py"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(checkout: Path, module: str, line: str) -> None:
    with (checkout / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")


def test_the_contracts_hold() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("megatron_sparse/transport/virtual.py", "from megatron_sparse.run import launch", DOWN),
        ("cuda_ext/ops.py", "def later():\n    from megatron_sparse.formats import header", DOWN),
        (
            "megatron_sparse/reduction/reducer.py",
            "if TYPE_CHECKING:\n    from megatron_sparse.bench import table",
            "Training imports no bench, page or figure",
        ),
        (
            "megatron_sparse/collectives/direct.py",
            "import megatron_sparse.telemetry",
            "Collectives hand their measurements down as values",
        ),
        (
            "triton_kernels/prune.py",
            "import megatron_sparse.config",
            "Kernels know no configuration and no bucket",
        ),
        (
            "megatron_sparse/ddp/state.py",
            "from megatron.core import parallel_state",
            "Only megatron/ imports Megatron-LM",
        ),
        ("megatron_sparse/errors.py", "from megatron_sparse.newcomer import nothing", DOWN),
    ],
)
def test_a_planted_import_breaks_its_contract(
    checkout: Path, module: str, line: str, contract: str
) -> None:
    (checkout / "megatron_sparse/newcomer.py").write_text("")
    plant(checkout, module, line)
    done = check(checkout)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in done.stdout, done.stdout


def test_modules_that_import_one_another_are_named(checkout: Path) -> None:
    """Also a module and the `__init__` of its own package, which the contracts do not see."""
    plant(checkout, "megatron_sparse/errors.py", "import megatron_sparse")
    plant(checkout, "megatron_sparse/__init__.py", "import megatron_sparse.errors")
    done = check(checkout)
    assert done.returncode == 1
    assert "error: these modules import one another:\n" in done.stdout
    assert "\n  megatron_sparse.errors\n" in done.stdout, done.stdout


def test_the_table_of_the_design_has_the_rows_of_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    layers, *_ = settings["tool"]["importlinter"]["contracts"]
    wanted = [re.split(r" [|:] ", row) for row in layers["layers"]]
    page = (ROOT / "docs/design.md").read_text("utf-8")
    table = page.partition("| packages and modules |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert [re.findall(r"`(\w+)`", row) for row in rows] == wanted


def test_no_two_modules_have_a_public_class_of_one_name() -> None:
    found: dict[str, list[str]] = {}
    for package in ("megatron_sparse", "cuda_ext", "triton_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(found) > 250
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}
