"""`megatron-sparse view`: following a run that writes lines, and pictures without a terminal."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from megatron_sparse.report import live_view
from tests.commands import refused, run
from tests.report_runs import make_run

LAST = 12


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_run(tmp_path / "one", "one", ends=False, config={"training": {"iterations": LAST}})


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


def follow(monkeypatch, folder: Path, *parts: bytes) -> Writer:
    writer = Writer(folder, *parts)
    monkeypatch.setattr(live_view.time, "sleep", writer)
    assert run("view", folder, "--follow --columns 60") == 0
    return writer


class TestFollow:
    """`--follow`."""

    def test_it_goes_on_as_lines_come_and_ends_with_the_run(self, folder, monkeypatch, capsys):
        path = folder / "breakdown.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.unlink()
        half = len(lines[3]) // 2
        writer = follow(
            monkeypatch,
            folder,
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

    def test_ctrl_c_ends_it(self, folder, monkeypatch, capsys):
        path = folder / "breakdown.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:5]))
        follow(monkeypatch, folder)
        assert len(shown(capsys)) == 1

    def test_a_file_that_begins_anew(self, folder, monkeypatch, capsys):
        path = folder / "breakdown.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:8]))

        def begin_anew(seconds: float) -> None:
            if path.stat().st_size == len(lines[0]):
                raise KeyboardInterrupt
            path.write_bytes(lines[0])

        monkeypatch.setattr(live_view.time, "sleep", begin_anew)
        assert run("view", folder, "-f --columns 60") == 0
        assert shown(capsys)[-1] == f"1/{LAST}"

    def test_refusals(self, folder, tmp_path, capsys):
        assert "leave one" in refused(capsys, "view", folder, "--follow --iteration 3")
        assert "leave one" in refused(capsys, "view", folder, "--follow --output v.svg")
        assert "not the folder of a run" in refused(capsys, "view", tmp_path / "no", "--follow")
        (folder / "breakdown.jsonl").write_text('{"iteration": 1}\n')
        assert "not written by this version" in refused(capsys, "view", folder, "--follow")


@pytest.mark.parametrize("columns", [60, 100])
def test_a_png_needs_no_terminal(folder, tmp_path, capsys, columns):
    pytest.importorskip("matplotlib")
    output = tmp_path / "view.png"
    assert run("view", folder, "--output", output, f"--iteration 8 --columns {columns}") == 0
    assert capsys.readouterr().out == f"{output}\n"
    head = output.read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:])
    assert head.startswith(b"\x89PNG")
    assert width == pytest.approx((columns + 2) * 0.085 * 150, abs=2)
    assert height > 200


def test_a_name_of_the_user_is_plain_text_in_a_png(tmp_path):
    """Matplotlib would take what stands between dollars for a formula."""
    pytest.importorskip("matplotlib")
    folder = make_run(tmp_path / "run", r"$\no{formula$")
    assert run("view", folder, "--output", tmp_path / "view.png") == 0
