"""Tables in the documentation whose rows name the tests that prove them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[\w+\])?`")


def rows_with_tests(page: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every row of the page's tables: its text, and file and function of each test it names.

    Header rows and the lines under them are left out.
    """
    lines = (ROOT / page).read_text("utf-8").splitlines()
    rows = []
    for index, line in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        is_header = following.startswith("|--") or following.startswith("| --")
        if line.startswith("|") and not line.startswith(("|--", "| --")) and not is_header:
            rows.append((line, _TEST.findall(line)))
    return rows


def test_functions(path: str) -> set[str]:
    """Names of the test functions in a file, those of classes included."""
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def untrue_rows(page: str) -> list[str]:
    """Rows that name no test, or one that does not exist."""
    return [
        line
        for line, tests in rows_with_tests(page)
        if not tests or any(name not in test_functions(path) for path, name in tests)
    ]
