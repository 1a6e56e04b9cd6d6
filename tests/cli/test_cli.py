"""`megatron-sparse`: listed commands, forwarded arguments, and errors."""

import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest

import megatron_sparse
from megatron_sparse.bench.codec.options import CodecSweep
from megatron_sparse.bench.options import parse_size
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.run import launch
from tests.commands import is_one_error, refused, run
from tests.programs import output_of


class TestRoot:
    """The program itself."""

    def test_version(self, capsys):
        assert run("--version") == 0
        assert capsys.readouterr().out == f"megatron_sparse {megatron_sparse.__version__}\n"

    def test_help_lists_every_command(self, capsys):
        assert run("--help") == 0
        commands, panel = capsys.readouterr().out.split("Measurements and models")
        for command in ("train", "doctor", "corpus", "build"):
            assert f" {command} " in commands
        for command in ("bench", "simulate", "levels", "profile"):
            assert f" {command} " in panel
            assert f" {command} " not in commands

    @pytest.mark.parametrize("line", ["", "doctor", "bench", "bench codecs", "plan"])
    def test_h_is_help_of_every_command(self, line, capsys):
        assert run(line, "-h") == 0
        shown = capsys.readouterr().out
        assert run(line, "--help") == 0
        assert shown == capsys.readouterr().out

    def test_help_imports_nothing_heavy(self):
        """So it takes less than a second."""
        code = (
            "import sys\nfrom megatron_sparse.cli import main as cli\n"
            "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
            "heavy = {'torch', 'megatron', 'hydra', 'wandb', 'numpy'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        output_of([sys.executable, "-c", code])

    @pytest.mark.parametrize("line", ["fly", "corpus", "bench codecs --iters=0"])
    def test_wrong_usage_exits_with_two(self, line, capsys):
        assert run(line) == 2
        assert "Traceback" not in capsys.readouterr().err


class TestTrain:
    """Everything goes to Hydra, and comes back as one error or an exit code."""

    def test_the_exit_code_of_the_run_is_passed_on(self, monkeypatch):
        monkeypatch.setattr(launch, "run", failing := Mock(return_value=7))
        assert run("train name=mine megatron.manual_gc=true") == 7
        ((config, command),) = (call.args for call in failing.mock_calls)
        assert config.name == "mine"
        assert command == "megatron-sparse train name=mine megatron.manual_gc=true"

    def test_a_typed_error_of_the_run_keeps_its_code(self, monkeypatch, capsys):
        gone = CommunicationError("rank 3 is gone", expected="4 ranks", got="3")
        monkeypatch.setattr(launch, "run", Mock(side_effect=gone))
        assert run("train") == CommunicationError.exit_code == 3
        captured = capsys.readouterr()
        is_one_error(captured.err, "rank 3 is gone")
        assert "Error executing job" not in captured.err, "Hydra adds nothing"

    def test_hydra_has_a_help_of_its_own(self):
        output_of([sys.executable, "-m", "megatron_sparse.cli.main", "train", "--hydra-help"])

    def test_a_flag_that_unpickles_a_file_is_refused(self, capsys):
        refused(capsys, "train", "--experimental-rerun")


class TestOthers:
    """The commands of other parts receive the user's arguments."""

    def test_doctor(self, monkeypatch):
        monkeypatch.setattr("megatron_sparse.doctor.checks.run", look := Mock(return_value=1))
        assert run("doctor --json out.jsonl") == 1
        look.assert_called_once_with(Path("out.jsonl"))

    def test_build(self, monkeypatch):
        monkeypatch.setattr("megatron_sparse.cuda_ext.build.main", build := Mock(return_value=0))
        assert run("build --cuda off --verbose") == 0
        build.assert_called_once_with(["--cuda", "off", "--verbose"])

    def test_bench_codecs(self, monkeypatch):
        """A row that is wrong fails the command."""
        rows = [types.SimpleNamespace(bad=bad) for bad in (False, True)]
        measure = Mock(return_value=rows)
        monkeypatch.setattr("megatron_sparse.bench.codec.codecs.run", measure)
        options = "--min-bytes 64K --max-bytes 64M --density 0.001,0.01 --dtype bf16 --op prune"
        more = "--warmup 1 --iters 2 --threads 1 --json rows.jsonl"
        assert run("bench codecs", options, more) == 1
        given = {"dtypes": ("bf16",), "ops": ("prune",), "warmup": 1, "iters": 2, "threads": 1}
        sweep = CodecSweep(min_bytes=2**16, max_bytes=2**26, densities=(0.001, 0.01), **given)
        measure.assert_called_once_with(sweep, json_path=Path("rows.jsonl"))
        asked = dict(argument.split("=") for argument in sweep.arguments())
        assert asked["--dtype"] == "bf16"
        assert asked["--min-bytes"] == str(2**16)
        assert "--max-bytes" not in asked, "the same as without it"


def test_sizes_are_powers_of_two():
    assert parse_size("--x", "1M") == 2**20
    assert parse_size("--x", "3g") == 3 * 2**30
    assert parse_size("--x", "64KB") == 2**16
    assert parse_size("--x", "1000") == 1000
    with pytest.raises(ConfigError, match="--x"):
        parse_size("--x", "1.5M")
