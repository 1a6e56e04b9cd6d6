"""Optional packages are found without an import of their code."""

import subprocess
import sys

import pytest

from megatron_sparse.extras import is_installed


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("json", True),
        ("json.decoder", True),
        ("json.decoder.deeper", False),
        ("json.none", False),
        ("no_such_package", False),
        ("no_such_package.module", False),
    ],
)
def test_modules_are_found(module: str, found: bool) -> None:
    assert is_installed(module) is found


def test_a_module_that_is_blocked_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "json", None)
    assert not is_installed("json")


def test_nothing_of_megatron_is_imported() -> None:
    """CPU mode is enabled after this question and before any import of megatron's code."""
    program = (
        "import sys\n"
        "from megatron_sparse.extras import is_installed\n"
        "assert is_installed('megatron.training')\n"
        "print([name for name in sys.modules if name.startswith('megatron.')])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.strip() == "[]", shown.stderr
