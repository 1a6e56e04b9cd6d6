"""Every example in a docstring of the package and of the tests' oracles is right."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from tests.programs import ROOT

PACKAGE = "megatron_sparse"
EXAMPLES = sorted(
    path.relative_to(ROOT)
    for folder in (PACKAGE, "cuda_ext", "triton_kernels", "tests/oracles")
    for path in (ROOT / folder).rglob("*.py")
    if ">>> " in path.read_text("utf-8")
)


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_examples_of_docstrings(path: Path) -> None:
    parts = path.with_suffix("").parts
    name = ".".join(parts if parts[0] in (PACKAGE, "tests") else (PACKAGE, *parts))
    assert doctest.testmod(import_module(name)).failed == 0
