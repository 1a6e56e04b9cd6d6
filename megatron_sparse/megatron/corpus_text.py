"""Collects the text of the corpora of `megatron-sparse corpus` from the Python installation.

The kind `code` is the standard library's source files. `prose` is every string of a module that
reads as English (docstrings, the topics of `pydoc_data`, arguments of `add_docstr`), with package
descriptions and licences; a repeated paragraph is taken only once.
"""

import ast
import hashlib
import importlib.metadata
import json
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

type Document = tuple[str, str]
"""Name and text."""

type Source = tuple[str, Callable[[], list[str]]]
"""Name, and what reads its texts: only when its turn comes, for the progress to be true."""

_REVISION = 1  # raise it when the same sources would give another corpus
_MIN_DOCUMENT_CHARS = 200
_MIN_STRING_CHARS = 80
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "testing", "idlelib", "__pycache__"}
)
# Tables written as Python, and prose.
_NOT_CODE = ("encodings/", "pydoc_data/", "html/entities.py")
# How code, reStructuredText directives and field lists, and commands begin.
_NOT_PROSE = (">>>", "..", ":", "$", "#")
# Distribution -> the folders of it that hold prose. All of them come with torch and megatron-core;
# one that a future release no longer has is left out, which changes the fingerprint.
_PROSE_FOLDERS = {
    "megatron-core": ("megatron",),
    "networkx": ("networkx",),
    "numpy": ("numpy",),
    "sympy": ("sympy",),
    "torch": ("torch/nn", "torch/optim", "torch/distributions", "torch/utils/data"),
}


def shown[T](items: Iterable[T], label: str) -> Iterable[T]:
    """Passes items through, and shows on stderr how many are done."""
    return track(list(items), f"  {label:<26}", console=Console(stderr=True))


def code() -> Iterator[Document]:
    """Yields the standard library's modules, except short ones and data tables (`_NOT_CODE`)."""
    root = _stdlib()
    for path in shown(_python_files(root), "read the standard library"):
        name = path.relative_to(root).as_posix()
        text = path.read_text("utf-8", errors="replace")
        if len(text) >= _MIN_DOCUMENT_CHARS and not name.startswith(_NOT_CODE):
            yield name, text


def prose() -> Iterator[Document]:
    """Yields a document for each file: its English paragraphs that no earlier file had."""
    seen: set[bytes] = set()  # hashes of all paragraphs so far
    for name, read_texts in shown(_prose_sources(), "read documentation"):
        new_paragraphs = []
        for text in read_texts():
            for paragraph in paragraphs(text):
                # 16 bytes are enough to tell paragraphs apart, in half the memory.
                key = hashlib.sha256(paragraph.encode()).digest()[:16]
                if key not in seen:
                    seen.add(key)
                    new_paragraphs.append(paragraph)
        document = "\n\n".join(new_paragraphs)
        if len(document) >= _MIN_DOCUMENT_CHARS:
            yield name, document


def _prose_sources() -> list[Source]:
    """Lists the files with prose, each as its name and a function that reads its texts."""
    root = _stdlib()
    sources: list[Source] = [
        (f"python/{path.relative_to(root).as_posix()}", partial(_strings, path))
        for path in _python_files(root)
    ]
    for distribution in _PROSE_FOLDERS:
        installed = _installed(distribution)
        if installed is not None:
            sources.append((f"{distribution}/description", partial(_description, installed)))
            sources += _files(distribution, installed)
    return sources


def _files(distribution: str, installed: importlib.metadata.Distribution) -> Iterator[Source]:
    """Yields the licences of a package, and the modules in its folders in `_PROSE_FOLDERS`."""
    folders = tuple(f"{folder}/" for folder in _PROSE_FOLDERS[distribution])
    for file in sorted(installed.files or [], key=str):
        name, path = file.as_posix(), Path(str(installed.locate_file(file)))
        if ".dist-info/" in name and re.search("licen[cs]e|notice|copying", file.name.lower()):
            yield f"{distribution}/{name}", partial(_whole, path)
        is_module = name.endswith(".py") and name.startswith(folders)
        if is_module and _SKIPPED_FOLDERS.isdisjoint(file.parts):
            yield name, partial(_strings, path)


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of `text` that read as English, each joined into one line.

    A paragraph counts as English when it has eight words or more, ends as a sentence does, and
    letters, spaces and plain punctuation make up nearly all of it: that drops code, tables,
    formulas, lists of names and reStructuredText directives.
    """
    for block in re.split(r"\n\s*\n", text):
        paragraph = " ".join(block.split())
        n_words = len(re.findall(r"\b[A-Za-z]{2,}\b", paragraph))
        if n_words < 8 or paragraph.startswith(_NOT_PROSE):
            continue
        ends_a_sentence = paragraph[-1] in ".:!?"
        n_plain = len(re.findall(r"[A-Za-z ,.]", paragraph))
        if ends_a_sentence and n_plain >= 0.92 * len(paragraph):
            yield paragraph


def _strings(path: Path) -> list[str]:
    """Returns a module's long string constants, docstrings among them, in source order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the modules that are read
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []  # templates and examples of wrong Python carry the suffix .py too
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    # `ast.walk` goes breadth-first, which is not the order of the source.
    constants.sort(key=lambda node: (node.lineno, node.col_offset))
    strings = [node.value for node in constants if isinstance(node.value, str)]
    return [text for text in strings if len(text) >= _MIN_STRING_CHARS]


def _description(installed: importlib.metadata.Distribution) -> list[str]:
    return [str(installed.metadata.get_payload() or "")]  # type: ignore[attr-defined]


def _whole(path: Path) -> list[str]:
    return [path.read_text("utf-8", errors="replace")]


def _installed(distribution: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _python_files(root: Path) -> list[Path]:
    files = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(p for p in files if _SKIPPED_FOLDERS.isdisjoint(p.relative_to(root).parts))


def fingerprint(kind: str) -> str:
    """Hashes what decides a corpus's text: rules, versions, and the files' names and sizes."""
    root = _stdlib()
    facts: list[Any] = [_REVISION, kind, platform.python_version()]
    facts += [(p.relative_to(root).as_posix(), p.stat().st_size) for p in _python_files(root)]
    for name in _PROSE_FOLDERS if kind == "prose" else ():  # `code` has no packages
        installed = _installed(name)
        facts.append((name, installed.version if installed else None))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
