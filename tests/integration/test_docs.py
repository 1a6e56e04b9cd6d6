"""The documentation: every command is checked, the cheap ones are run, links and quotes hold."""

import ast
import re
import sys
from pathlib import Path

import pytest

from megatron_sparse import errors
from megatron_sparse.cli import main
from megatron_sparse.sparsity.gradient_dump import FOLDER, GradientDumpWriter
from tests.doc_tables import untrue_rows
from tests.integration.doc_commands import (
    FENCE,
    PAGES,
    PROGRAM,
    Checker,
    Command,
    Uncovered,
    commands_of,
    mentions_of,
    unmarked_commands,
)
from tests.programs import ROOT, ended, with_variables
from tests.report_runs import make_run

CHECKER = Checker()
TOUR = ROOT / "docs" / "quick-tour.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
# Each takes seconds at most, on runs made for these tests; one for each kind of command.
CHEAP = ("report", "view", "plan", "profile", "simulate --list")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


# What a command of the program does needs no second way on a page.
OTHER_WAYS = {
    "python scripts/train.py": "megatron-sparse train",
    "python -m megatron_sparse.cuda_ext.build": "megatron-sparse build",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
class TestEachPage:
    """Checks of every page."""

    def test_programs_accept_the_commands(self, page):
        for command in commands_of(page):
            try:
                CHECKER.check(command)
            except Uncovered:
                raise
            except BaseException as error:
                raise AssertionError(f"{command}\n{type(error).__name__}: {error}") from error

    def test_there_is_one_way_to_start_things(self, page):
        text = page.read_text("utf-8")
        for other, command in OTHER_WAYS.items():
            assert other not in text, f"say `{command}`"

    def test_no_command_hides_in_a_block_of_another_kind(self, page):
        assert unmarked_commands(page) == [], "mark the block as bash"

    def test_mentioned_commands_and_options_exist(self, page):
        for command in mentions_of(page):
            CHECKER.check_mention(command)

    def test_python_blocks_are_python(self, page):
        for block in FENCE.finditer(page.read_text("utf-8")):
            if block[1] == "python":
                ast.parse(block[2])

    def test_links_lead_somewhere(self, page):
        for target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
            if target.startswith(("http://", "https://")):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor in anchors_of(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["checkpoints", "compression", "parallelism", "precision"])
def test_every_row_of_a_table_of_tests_names_one_that_exists(page):
    assert untrue_rows(f"docs/{page}.md") == []


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


class TestTheCheckerItself:
    """It refuses wrong commands."""

    @pytest.mark.parametrize(
        "line",
        [
            "megatron-sparse fly",
            "megatron-sparse report",
            "megatron-sparse doctor --jsn x",
            "megatron-sparse plan --ranks many",
            "megatron-sparse train compression.densty=0.1",
            "megatron-sparse train --multirun compression.density=0.1,7",
            "bash scripts/none.sh",
            "torchrun --nproc-per-node 2 examples/none.py",
            "pip install 'megatron-sparse[none]'",
            "python examples/natural_sparsity/deepfm.py --quickly",
            "sbatch scripts/none.sbatch",
        ],
    )
    def test_mistakes(self, line, tmp_path):
        page = tmp_path / "page.md"
        page.write_text(f"# Page\n\n```bash\n{line}\n```\n")
        (command,) = commands_of(page)
        assert command.place == "page.md:4"
        with pytest.raises(BaseException):  # noqa: B017, PT011 - each program has its own
            CHECKER.check(command)

    def test_a_command_without_a_rule(self):
        with pytest.raises(Uncovered, match="no rule for rm"):
            CHECKER.check(Command("page.md:1", ("rm", "-r", "runs")))

    def test_a_command_in_an_unmarked_block_is_found(self, tmp_path):
        page = tmp_path / "page.md"
        page.write_text("```\nmegatron-sparse plan\n```\n")
        assert unmarked_commands(page) == ["megatron-sparse plan"]


def cheap_commands() -> list[Command]:
    """The cheap commands of all pages, each text once."""
    found = {}
    for page in PAGES:
        for command in commands_of(page):
            text = " ".join(command.words[1:])
            if command.words[0] == PROGRAM and text.startswith(CHEAP):
                found.setdefault(command.words, command)
    return list(found.values())


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder to run commands in, with every run that one names."""
    monkeypatch.chdir(tmp_path)

    def prepare(command: Command) -> None:
        for word in command.words:
            if re.fullmatch(r"(runs|recordings)/[\w-]+", word):
                import torch

                make_run(tmp_path / word, Path(word).name, iterations=6)
                folder = tmp_path / word / ("" if word.startswith("recordings") else FOLDER)
                for rank in range(2):
                    values = torch.zeros(4096)
                    values[rank::64] = 1.0
                    writer = GradientDumpWriter(folder, [5], rank=rank, world_size=2)
                    for kind in ("gradient", "selected"):
                        writer.write("group0.0", 5, kind, values)

    return prepare


@pytest.mark.parametrize("command", cheap_commands(), ids=lambda c: "_".join(c.words[1:])[:60])
def test_cheap_commands_run(command, workplace, capsys):
    workplace(command)
    with pytest.raises(SystemExit) as caught:
        main.main(command.words[1:])
    assert not caught.value.code, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(5 * 280)  # each command has its own limit below
def test_the_quick_tour_as_it_is_written(tmp_path):
    """All of it, in order, on two real ranks; the environment it begins with is this one."""
    commands = commands_of(TOUR)
    run = [command.words for command in commands if command.words[0] == PROGRAM]
    assert [words[1] for words in run] == ["doctor", "train", "train", "report", "plan"]
    env = with_variables(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", WANDB_MODE="disabled")
    for words in run:
        command = [sys.executable, "-W", "ignore", "-m", "megatron_sparse.cli.main", *words[1:]]
        done = ended(command, 280, cwd=tmp_path, env=env)
        # doctor exits with 1 if something is missing, which may be so on a test machine.
        assert done.returncode in ((0, 1) if words[1] == "doctor" else (0,)), done.stderr[-2000:]
        assert "Traceback" not in done.stderr
    assert (tmp_path / "report.html").stat().st_size > 50_000


class TestTroubleshooting:
    """The page has every error class, and quotes the source's messages."""

    def test_every_error_class_has_a_section(self):
        text = TROUBLESHOOTING.read_text("utf-8")
        sections = set(re.findall(r"^## `(\w+)`", text, re.MULTILINE))
        classes = {
            name
            for name, thing in vars(errors).items()
            if isinstance(thing, type) and issubclass(thing, errors.MegatronSparseError)
        } - {"MegatronSparseError"}
        assert sections == classes

    def test_quoted_messages_are_in_the_source(self):
        """`...` stands for values; the parts between must be in one file, in order."""
        sources = [
            # Adjacent literals of a long message are one text.
            re.sub(r'"\s*\n\s*f?r?"', "", path.read_text("utf-8"))
            for folder in ("megatron_sparse", "cuda_ext", "triton_kernels", "scripts")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".sh", ".cpp", ".h")
        ]
        quotes = re.findall(r"^### `(.+)`$", TROUBLESHOOTING.read_text("utf-8"), re.MULTILINE)
        assert len(quotes) >= 20
        for quote in quotes:
            parts = [re.escape(part.strip()) for part in quote.split("...") if part.strip()]
            pattern = re.compile(r"[^\n]{0,80}?".join(parts))
            assert any(pattern.search(text) for text in sources), quote
