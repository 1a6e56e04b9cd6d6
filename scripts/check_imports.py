"""Checks imports: the contracts of import-linter in pyproject.toml, and no circles.

    python scripts/check_imports.py [CHECKOUT]

`configs`, `cuda_ext` and `triton_kernels` are at the top of the repository, and setuptools maps
them into the package. import-linter looks for modules in one folder and does not follow this map.
So the script copies the sources to a temporary folder with the layout of a wheel, and checks the
contracts there. It does not import the package. Imports inside functions and under TYPE_CHECKING
count like all others.

The contracts find circles between packages. Circles among the modules of one package, its
`__init__` included, are found by this script itself.
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
    """Groups of modules that import one another, each sorted; an empty list if there are none."""
    sys.path.insert(0, str(package_dir.parent))
    try:
        graph = grimp.build_graph(PACKAGE, cache_dir=None)
    finally:
        sys.path.remove(str(package_dir.parent))
    imports = nx.DiGraph()
    for importer in graph.modules:
        imported = graph.find_modules_directly_imported_by(importer)
        imports.add_edges_from((importer, module) for module in imported)
    groups = nx.strongly_connected_components(imports)
    return sorted(sorted(group) for group in groups if len(group) > 1)


def main(checkout: Path) -> int:
    """Prints the violations; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        assemble(checkout, out)
        found = circles(out / PACKAGE)
        for group in found:
            print("error: these modules import one another:", *group, sep="\n  ")
        # lint-imports puts its working folder first on sys.path, so it finds the copy.
        command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
        done = subprocess.run(command, cwd=out, check=False)
    return done.returncode or bool(found)


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else root))
