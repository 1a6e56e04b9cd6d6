"""The commands that the documentation tells its readers to type, and a way to check each of them.

A command is a line of a fenced `bash` block; `Checker` has a rule for every program that may come
first in it. A command without a rule is an error: add a rule, or remove the command. Rules check
everything that can be checked without doing the work: options are
parsed by the program itself, overrides composed by Hydra, scripts read by bash, and files exist.
"""

import ast
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer.main

from megatron_sparse.cli import main
from megatron_sparse.run import application, composition, sweep
from tests.programs import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(megatron-sparse [^`]+)`(?!`)")
PROGRAM = "megatron-sparse"
LOOKS_LIKE_ONE = re.compile(
    r"^\s*(?:\$ )?(?:sudo |[A-Z_]+=\S+ )*"
    r"(?:megatron-sparse|python|pip|bash|torchrun|srun|sbatch|git|jq|wandb|tensorboard|apt-get) "
)
OF_A_CLUSTER = {"srun", "salloc", "squeue", "scancel", "scontrol", "sinfo", "sacct"}
OF_THE_SHELL = {"cd", "export", "source", "ls", "cat", "tail", "less"}
OF_THE_SHELL |= {"cp", "mkdir", "scp", "ssh", "sed"}
FIRST_WORDS = {
    "git": ("clone", "pull", "checkout"),
    "pre-commit": ("run", "install"),
    "tensorboard": ("--logdir",),
    "wandb": ("sync", "login"),
}
"""Programs of which only the first word is checked."""


@dataclass(frozen=True)
class Command:
    """One command of a page; `place` is its file and line.

    `words`: as a shell splits them; without comments, `sudo` and settings of variables.
    """

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def commands_of(page: Path) -> list[Command]:
    """The commands of a page's `bash` blocks, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in FENCE.finditer(text):
        if block[1] == "bash":
            first = text.count("\n", 0, block.start(2)) + 1
            found += list(_commands_in(block[2], page.name, first))
    return found


def unmarked_commands(page: Path) -> list[str]:
    """Lines of other blocks that look like commands; they would not be checked."""
    blocks = [block[2] for block in FENCE.finditer(page.read_text("utf-8")) if not block[1]]
    return [line for block in blocks for line in block.splitlines() if LOOKS_LIKE_ONE.match(line)]


def mentions_of(page: Path) -> list[Command]:
    """Commands named inside sentences and tables; options may lack their values there."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [
        Command(page.name, tuple(shlex.split(" ".join(found[1].split()))))
        for found in INLINE.finditer(text)
    ]


def _commands_in(block: str, name: str, first: int) -> Iterator[Command]:
    number, begun = first, ""
    for offset, line in enumerate(block.splitlines()):
        number = number if begun else first + offset
        begun += line
        if line.endswith("\\"):
            begun = begun[:-1] + " "
            continue
        pieces = shlex.shlex(begun, posix=True, punctuation_chars="|;&")
        pieces.whitespace_split = True
        pieces.commenters = "#"
        words: list[str] = []
        for word in [*pieces, ";"]:
            if set(word) <= set("|;&"):
                bare = _bare(words)
                if bare:
                    yield Command(f"{name}:{number}", tuple(bare))
                words = []
            else:
                words.append(word)
        begun = ""


def _bare(words: Sequence[str]) -> list[str]:
    """The words from the program on."""
    rest = list(words)
    while rest and (rest[0] in ("sudo", "$") or re.fullmatch(r"[A-Z_]+=.*", rest[0])):
        rest.pop(0)
    return rest


class Uncovered(Exception):
    """There is no rule for a command."""


class Checker:
    """Checks a command without doing its work."""

    @cached_property
    def _program(self) -> Any:
        return typer.main.get_command(main.app)

    def check(self, command: Command) -> None:
        """Raises the exception of the program or file that refuses the command.

        Raises:
            Uncovered: no rule covers it.
        """
        first, *rest = command.words
        program = "python" if re.fullmatch(r"python3(\.\d+)?", first) else first
        rule = getattr(self, f"_{program.replace('-', '_')}", None)
        if first.endswith(".sh"):
            self._bash([first])
        elif first in FIRST_WORDS:
            assert rest[0] in FIRST_WORDS[first], command
        elif rule is not None:
            rule(rest)
        elif first not in OF_A_CLUSTER | OF_THE_SHELL:
            raise Uncovered(f"{command}: tests/integration/doc_commands.py has no rule for {first}")

    def check_mention(self, command: Command) -> None:
        """The subcommand and the options exist; values may be missing."""
        _, *rest = command.words
        found, rest = self._subcommand(rest)
        if found.name == "train":
            self._train([word for word in rest if "=" in word])
            return
        known = {name for option in found.params for name in (*option.opts, *option.secondary_opts)}
        for word in rest:
            name = word.partition("=")[0]
            assert not word.startswith("--") or name in {*known, "--help"}, f"{command}: {name}"

    def _subcommand(self, words: list[str]) -> tuple[Any, list[str]]:
        found, rest = self._program, list(words)
        # Only a group has commands; isinstance does not work, because typer has its own copy of
        # click.
        while hasattr(found, "commands") and rest and not rest[0].startswith("-"):
            name = rest.pop(0)
            assert name in found.commands, f"there is no command {name}"
            found = found.commands[name]
        return found, rest

    def _megatron_sparse(self, words: list[str]) -> None:
        found, rest = self._subcommand(words)
        if found.name == "train":
            self._train(rest)
        elif "--help" not in rest and "--version" not in rest:
            # Parses and converts every option, reports missing ones, and runs nothing.
            found.make_context(found.name, list(rest))

    def _train(self, words: list[str]) -> None:
        application.check_flags(words)
        bare = {word for word in words if "=" not in word and not word.startswith("-")}
        assert bare <= {"job"}, f"no overrides: {bare}"
        overrides = []
        for text in words:
            if text.startswith("hydra/launcher="):
                folder = ROOT / "configs/hydra/launcher"
                assert (folder / f"{text.partition('=')[2]}.yaml").exists(), text
            elif "=" in text and not text.startswith(("-", "hydra.")):
                overrides.append(text)
        if {"--multirun", "-m"} & set(words):
            application.check_each_run(sweep.parsed(overrides))
        else:
            composition.compose(overrides)

    def _python(self, words: list[str]) -> None:
        if words[0] == "-m":
            module, rest = words[1], words[2:]
            if module == "pytest":
                self._pytest(rest)
            assert find_spec(module), f"there is no module {module}"
            return
        self._script(words)

    def _script(self, words: list[str]) -> None:
        script, *rest = words
        path = ROOT / script
        assert path.exists(), f"there is no {script}"
        # Every option must appear in the script or in a file beside it.
        spelled = {
            node.value
            for file in path.parent.glob("*.py")
            for node in ast.walk(ast.parse(file.read_text("utf-8")))
            if isinstance(node, ast.Constant)
        }
        for word in rest:
            option = word.partition("=")[0]
            assert not word.startswith("--") or option in spelled, f"{script} has no {option}"

    def _torchrun(self, words: list[str]) -> None:
        if PROGRAM in words:
            assert "--no-python" in words
            self._megatron_sparse(words[words.index(PROGRAM) + 1 :])
            return
        scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
        self._script(words[scripts[0] :])

    def _bash(self, words: list[str]) -> None:
        subprocess.run(["bash", "-n", ROOT / words[0]], check=True)

    def _sbatch(self, words: list[str]) -> None:
        (script,) = [word for word in words if word.endswith(".sbatch")]
        self._bash([script])
        self._train([word for word in words[words.index(script) + 1 :] if "=" in word])

    def _pytest(self, words: list[str]) -> None:
        paths = [word for word in words if word.startswith(("tests", "examples"))]
        assert all((ROOT / path.partition("::")[0]).exists() for path in paths), paths

    def _pip(self, words: list[str]) -> None:
        assert words[0] == "install"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        for found in re.findall(r"(?:megatron-sparse|\.)\[([^\]]+)\]", " ".join(words)):
            assert set(found.split(",")) <= set(extras), f"pyproject.toml has no extra {found}"

    def _jq(self, words: list[str]) -> None:
        assert words[-1] in ("breakdown.jsonl", "buckets.jsonl", "summary.json"), words
