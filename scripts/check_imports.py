"""Checks who imports whom: the contracts of import-linter in pyproject.toml, and no circle.

    python scripts/check_imports.py [CHECKOUT]

`configs`, `cuda_ext` and `triton_kernels` stand at the top of the repository, and setuptools maps
them into the package. import-linter looks for modules on disk below one folder and follows no such
map. So the sources are first copied into a temporary folder, laid out as in a wheel, and the
contracts are checked there. Nothing of the package is imported. Imports inside of functions and
under TYPE_CHECKING count like all others.

The contracts see circles between packages; the modules of one package may still form one, also
with the package's own `__init__`. That is checked here, module by module.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import grimp
import networkx as nx

PACKAGE = "megatron_sparse"


def assemble(checkout: Path, out: Path) -> None:
    """Copies the package's Python files from a checkout to `out/megatron_sparse`, as in a wheel."""
    settings = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))
    folders = settings["tool"]["setuptools"]["package-dir"]
    for module, source in {PACKAGE: PACKAGE, **folders}.items():
        target = out.joinpath(*module.split("."))
        for path in (checkout / source).rglob("*.py"):
            copy = target / path.relative_to(checkout / source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    shutil.copy(checkout / "pyproject.toml", out)


def circles(package_dir: Path) -> list[list[str]]:
    """Groups of modules that import one another, each sorted; empty where there are none."""
    sys.path.insert(0, str(package_dir.parent))
    try:
        graph = grimp.build_graph(PACKAGE, cache_dir=None)
    finally:
        sys.path.remove(str(package_dir.parent))
    imports = nx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    groups = nx.strongly_connected_components(imports)
    return sorted(sorted(group) for group in groups if len(group) > 1)


def main(checkout: Path) -> int:
    """Prints what is broken; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        assemble(checkout, out)
        found = circles(out / PACKAGE)
        for group in found:
            print("error: these modules import one another:", *group, sep="\n  ")
        # The command puts its working folder first on sys.path: it finds the copy there.
        command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
        done = subprocess.run(command, cwd=out, check=False)
    return done.returncode or bool(found)


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else root))
