"""Tables in the documentation whose rows name the tests that prove them."""

import ast
import re
from itertools import pairwise

from tests.programs import ROOT

_RULE = re.compile(r"\| ?--")
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[[\w-]+\])?`")


def rows_with_tests(page: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """The rows of the page's tables that have a column `test`, without their headers.

    Each is its text, and file and function of each test that it names.
    """
    lines = (ROOT / page).read_text("utf-8").splitlines()
    rows = []
    is_wanted = False
    for before, line in pairwise(lines):
        if not line.startswith("|"):
            is_wanted = False
        elif _RULE.match(line):
            is_wanted = before.endswith("| test |")
        elif is_wanted:
            rows.append((line, _TEST.findall(line)))
    assert rows, f"{page} has no table with a column `test`"
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
