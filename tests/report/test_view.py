"""`megatron-sparse view`: a run's folder as text and as a picture, and following its lines."""

import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_sparse.report import live_view
from tests import commands
from tests.report_runs import make_run

LAST, ASKED = 12, 20


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of 12 iterations of 100 ms, of which 20 were asked for."""
    config = {"training": {"iterations": ASKED}}
    return make_run(tmp_path / "one", "one", iterations=LAST, ends=False, config=config)


def view(*words: object) -> None:
    assert commands.run("view", *words) == 0


def test_an_iteration_that_was_asked_for(run, capsys):
    view(run, "--iteration 8 --columns 80")
    lines = capsys.readouterr().out.splitlines()
    # Twelve of 100 ms are left.
    assert lines[1].startswith("one ")
    assert lines[1].rstrip().endswith("8/20, 0:01 left")
    assert "loss 1.1250" in lines[2]


def test_the_last_iteration_and_the_terminals_width_are_taken_by_themselves(
    run, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "60")
    view(run)
    lines = capsys.readouterr().out.splitlines()
    assert "12/20" in lines[1]
    assert max(map(len, lines)) == 60


def test_a_run_whose_configuration_is_lost(run, capsys):
    """The bar is full, because the number of iterations is unknown."""
    (run / "config.yaml").unlink()
    view(run, "--columns 80")
    assert capsys.readouterr().out.splitlines()[1].rstrip().endswith("━ 12")


def test_the_picture_loads_nothing(run, tmp_path, capsys):
    output = tmp_path / "view.svg"
    view(run, "--output", output, "--iteration 8")
    assert capsys.readouterr().out == f"{output}\n"
    text = output.read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    # A browser would load each of these.
    assert "@import" not in text
    assert "@font-face" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags == {"svg", "style", "defs", "clipPath", "rect", "text", "g", "circle"}
    words = "".join(root.itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "one, iteration 8" in words
    assert "forward_backward" in words
    assert "wire/dense 2.00%" in words
    assert len(text) < 40_000


def test_a_name_of_the_user_is_text_in_the_picture(tmp_path):
    folder = make_run(tmp_path / "run", "<script>[bold]&</script>")
    view(folder, "--output", tmp_path / "view.svg")
    root = ElementTree.parse(tmp_path / "view.svg").getroot()
    assert "script" not in {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "<script>[bold]&</script>" in "".join(root.itertext())


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


def test_a_png_shows_the_whole_width_and_a_name_as_it_is(tmp_path, capsys):
    """Matplotlib would take what stands between dollars for a formula."""
    pytest.importorskip("matplotlib")
    folder, output = make_run(tmp_path / "run", r"$\no{formula$"), tmp_path / "view.png"
    sizes = {}
    for columns in (60, 100):
        view(folder, "--output", output, f"--columns {columns}")
        assert capsys.readouterr().out == f"{output}\n"
        head = output.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        sizes[columns] = struct.unpack(">II", head[16:])
    # The margin is the same, and so is the height.
    assert 1.5 < sizes[100][0] / sizes[60][0] < 100 / 60
    assert sizes[100][1] == pytest.approx(sizes[60][1], abs=60)
