"""`megatron-sparse view`: a run's folder as text, and following its lines."""

import sys
from pathlib import Path

import pytest

from megatron_sparse.report import live_view
from tests import commands
from tests.programs import output_of, with_variables
from tests.report_runs import make_run

LAST, ASKED = 12, 20


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of 12 iterations of 100 ms, of which 20 were asked for."""
    config = {"training": {"iterations": ASKED}}
    return make_run(tmp_path / "one", "one", iterations=LAST, ends=False, config=config)


def view(*words: object) -> None:
    assert commands.run("view", *words) == 0


def test_the_last_iteration_is_shown_as_wide_as_the_terminal(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    view(run)
    lines = capsys.readouterr().out.splitlines()
    # Eight of 100 ms are left.
    assert lines[1].startswith("one ")
    assert lines[1].rstrip().endswith("12/20, 0:01 left")
    assert "loss 0.7500" in lines[2]
    assert max(map(len, lines)) == 60


def test_a_run_whose_configuration_is_lost(run, capsys):
    """The bar is full, because the number of iterations is unknown."""
    (run / "config.yaml").unlink()
    view(run, "--columns 80")
    assert capsys.readouterr().out.splitlines()[1].rstrip().endswith("━ 12")


def test_a_terminal_without_the_bars_characters(run):
    command = [sys.executable, "-m", "megatron_sparse.cli.main", "view", run]
    shown = output_of(command, env=with_variables(PYTHONIOENCODING="latin-1"))
    assert "exposed" in shown


class Writer:
    """Takes the place of `sleep`: writes the next part of the lines each time."""

    def __init__(self, folder: Path, *parts: bytes) -> None:
        self.path = folder / "breakdown.jsonl"
        self.parts = list(parts)

    def __call__(self, seconds: float) -> None:
        if not self.parts:
            raise KeyboardInterrupt
        with self.path.open("ab") as file:
            file.write(self.parts.pop(0))


def shown(capsys) -> list[str]:
    """The places of the views that were printed."""
    lines = capsys.readouterr().out.splitlines()
    return [line.rpartition(" ")[2] for line in lines if line.startswith("one ")]


def follow(monkeypatch, run: Path, *parts: bytes) -> Writer:
    writer = Writer(run, *parts)
    monkeypatch.setattr(live_view.time, "sleep", writer)
    view(run, "--follow --columns 60")
    return writer


class TestFollow:
    """`--follow`, of a run whose last iteration is `LAST`."""

    @pytest.fixture
    def path(self, run) -> Path:
        """Its lines."""
        config = run / "config.yaml"
        config.write_text(config.read_text().replace(str(ASKED), str(LAST)))
        return run / "breakdown.jsonl"

    def test_it_goes_on_as_lines_come_and_ends_with_the_run(self, run, path, monkeypatch, capsys):
        lines = path.read_bytes().splitlines(keepends=True)
        path.unlink()
        half = len(lines[3]) // 2
        writer = follow(
            monkeypatch,
            run,
            b"",
            lines[0],
            b"".join(lines[1:3]) + lines[3][:half],
            lines[3][half:],
            b"damaged\n" + b"".join(lines[4:]),
            b"never",
        )
        assert writer.parts == [b"never"]
        views = shown(capsys)
        assert len(views) == 4
        # The time that is left of the first ones, and the end.
        assert views[-1] == f"{LAST}/{LAST}"

    def test_ctrl_c_ends_it(self, run, path, monkeypatch, capsys):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:5]))
        follow(monkeypatch, run)
        assert len(shown(capsys)) == 1

    def test_a_file_that_begins_anew(self, run, path, monkeypatch, capsys):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:8]))

        def begin_anew(seconds: float) -> None:
            if path.stat().st_size == len(lines[0]):
                raise KeyboardInterrupt
            path.write_bytes(lines[0])

        monkeypatch.setattr(live_view.time, "sleep", begin_anew)
        view(run, "-f --columns 60")
        assert shown(capsys)[-1] == f"1/{LAST}"

    def test_lines_of_another_version(self, run, path, capsys):
        path.write_text('{"iteration": 1}\n')
        assert "not written by this version" in commands.refused(capsys, "view", run, "--follow")
