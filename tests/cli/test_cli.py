"""`megatron-sparse`: listed commands, forwarded arguments, and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import megatron_sparse
from megatron_sparse.bench.codec.options import PruneSweep
from megatron_sparse.bench.options import parse_size
from megatron_sparse.cli import main
from megatron_sparse.cli.renamed import OPTIONS, RENAMED
from megatron_sparse.errors import CommunicationError, ConfigError
from megatron_sparse.run import launch
from megatron_sparse.run.composition import GROUPS, group_options
from tests.commands import is_one_error, refused, run

ROOT = Path(__file__).resolve().parents[2]


class TestRoot:
    """The program itself."""

    def test_version(self, capsys):
        assert run("--version") == 0
        assert capsys.readouterr().out == f"megatron_sparse {megatron_sparse.__version__}\n"

    def test_help_lists_every_command(self, capsys):
        assert run("--help") == 0
        out = capsys.readouterr().out
        for command in ("train", "doctor", "corpus", "build", "bench"):
            assert f" {command} " in out

    @pytest.mark.parametrize("line", ["", "doctor", "bench", "bench prune", "plan"])
    def test_h_is_help_of_every_command(self, line, capsys):
        assert run(line, "-h") == 0
        shown = capsys.readouterr().out
        assert run(line, "--help") == 0
        assert shown == capsys.readouterr().out

    def test_measurements_and_models_have_a_panel_of_their_own(self, capsys):
        assert run("--help") == 0
        commands, panel = capsys.readouterr().out.split("Measurements and models")
        for command in ("bench", "simulate", "schedule", "levels", "profile"):
            assert f" {command} " in panel
            assert f" {command} " not in commands

    def test_help_imports_nothing_heavy(self):
        """So it takes less than a second."""
        code = (
            "import sys\nfrom megatron_sparse.cli import main as cli\n"
            "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
            "heavy = {'torch', 'megatron', 'hydra', 'wandb', 'numpy'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("line", ["fly", "corpus", "bench prune --iters=0"])
    def test_wrong_usage_exits_with_two(self, line, capsys):
        assert run(line) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", RENAMED)
def test_a_command_that_has_left_names_its_remedy(command, capsys):
    assert run(*command.split(), "--any") == ConfigError.exit_code
    is_one_error(capsys.readouterr().err, f"megatron-sparse {command} has left", RENAMED[command])


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_has_left_names_its_remedy(option, capsys):
    assert run(option) == ConfigError.exit_code
    is_one_error(capsys.readouterr().err, f"megatron-sparse {option} has left", OPTIONS[option])


class TestOneNameForOutputs:
    """`--output`; its ending decides the format."""

    FORMER = (
        "profile runs/x --out=f",
        "calibrate --out f",
        "levels --out f",
        "simulate --all --out f",
        "corpus --kind code --out f",
        "bench training --out f",
        "bench time-to-loss --out f",
        "bench convergence --out f",
        "report runs/x --png f",
        "stragglers runs/x --csv f",
        "sweep runs/x --csv f",
    )

    @pytest.mark.parametrize("line", FORMER)
    def test_a_former_name_leads_to_it(self, line, capsys):
        assert run(line) == ConfigError.exit_code
        former = re.search("--(out|png|csv)", line)
        assert former
        is_one_error(
            capsys.readouterr().err, f"{former[0]} is now --output", "write --output in its place"
        )

    @pytest.mark.parametrize("line", ["doctor --csv f", "plan --out f", "report x --pgn f"])
    def test_others_stay_unknown(self, line, capsys):
        assert run(line) == 2
        assert "No such option" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("line", "endings"),
        [
            ("report made --output page.pdf", "ends in .html"),
            ("stragglers made --output=d.png --output=d.txt", ".png or .svg or .pdf or .csv"),
            ("sweep made --output table.txt", "ends in .csv"),
        ],
    )
    def test_another_ending_is_refused(self, line, endings, capsys):
        pytest.importorskip("matplotlib")
        assert endings in refused(capsys, line)

    def test_a_command_gets_each_by_its_ending(self, monkeypatch, tmp_path):
        pytest.importorskip("matplotlib")
        from megatron_sparse.report import page
        from megatron_sparse.telemetry import readiness

        given: list[tuple[object, ...]] = []
        monkeypatch.setattr(page, "run", lambda *paths: given.append(paths) or [])
        monkeypatch.setattr(readiness, "run", lambda *paths: given.append(paths))
        monkeypatch.chdir(tmp_path)
        for line in (
            "report a b",
            "report a --output charts",
            "report a --output x.html --output charts",
            "stragglers a --output x.csv",
            "stragglers a --output x.csv --output x.SVG",
        ):
            assert run(line) == 0
        a, html, charts = Path("a"), Path("x.html"), Path("charts")
        assert given == [
            ([a, Path("b")], Path("report.html"), None, None),
            ([a], Path("report.html"), charts, None),
            ([a], html, charts, None),
            (a, None, Path("x.csv")),
            (a, Path("x.SVG"), Path("x.csv")),
        ]


class TestTrain:
    """Everything goes to Hydra, and comes back as one error or an exit code."""

    def test_help_shows_groups_options_and_keys(self):
        run_help = subprocess.run(
            [sys.executable, ROOT / "scripts/train.py", "--help"], capture_output=True, text=True
        )
        assert run_help.returncode == 0, run_help.stderr
        for group in GROUPS:
            assert f"{group}: {', '.join(group_options(group))}" in run_help.stdout
        assert "use_distributed_optimizer: false" in run_help.stdout

    def test_a_learning_rate_of_zero_is_one_error(self, capsys):
        """Other mistakes are those of docs/mistakes.md."""
        assert "training.lr" in refused(capsys, "train data=mock training.lr=0")

    def test_the_exit_code_of_the_run_is_passed_on(self, monkeypatch):
        seen = []

        def failing(config, command):
            seen.append((config.name, command))
            return 7

        monkeypatch.setattr(launch, "run", failing)
        assert run("train name=mine megatron.manual_gc=true") == 7
        assert seen == [("mine", "megatron-sparse train name=mine megatron.manual_gc=true")]

    def test_a_typed_error_of_the_run_keeps_its_code(self, monkeypatch, capsys):
        def failing(config, command):
            raise CommunicationError("rank 3 is gone", expected="4 ranks", got="3")

        monkeypatch.setattr(launch, "run", failing)
        assert run("train") == CommunicationError.exit_code == 3
        captured = capsys.readouterr()
        is_one_error(captured.err, "rank 3 is gone")
        assert "Error executing job" not in captured.err, "Hydra adds nothing"

    def test_multirun_runs_one_after_the_other(self, monkeypatch, tmp_path):
        densities = []
        monkeypatch.setattr(
            launch, "run", lambda config, command: densities.append(config.compression.density)
        )
        monkeypatch.chdir(tmp_path)
        main.app(["train", "--multirun", "compression=topk99,topk95"], standalone_mode=False)
        assert densities == [0.01, 0.05]


class TestOthers:
    """The commands of other parts receive the user's arguments."""

    @pytest.fixture
    def calls(self, monkeypatch):
        """Replaces the modules that the commands import."""
        calls = {}

        def stand_in(name: str, function: str, result: object) -> None:
            def record(*args, **kwargs):
                calls[name] = (args, kwargs)
                return result

            module = types.ModuleType(name)
            setattr(module, function, record)
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            monkeypatch.setattr(
                sys.modules.get(parent, megatron_sparse), child, module, raising=False
            )

        stand_in("megatron_sparse.doctor.checks", "run", 1)
        stand_in("megatron_sparse.cuda_ext.build", "main", 0)
        stand_in(
            "megatron_sparse.bench.codec.prune",
            "run",
            [types.SimpleNamespace(bad=bad) for bad in (False, True)],
        )
        return calls

    def test_doctor(self, calls):
        assert run("doctor --json out.jsonl") == 1
        assert calls["megatron_sparse.doctor.checks"] == ((Path("out.jsonl"),), {})

    def test_build(self, calls):
        assert run("build --cuda off --verbose") == 0
        assert calls["megatron_sparse.cuda_ext.build"] == ((["--cuda", "off", "--verbose"],), {})

    def test_bench_prune(self, calls):
        """A row that is wrong fails the command."""
        options = "--min-bytes 64K --max-bytes 1M --density 0.001,0.01 --dtype bf16"
        more = "--residual-dtype bf16 --warmup 1 --iters 2 --threads 1 --json rows.jsonl"
        assert run("bench prune", options, more) == 1
        sweep = PruneSweep(
            min_bytes=2**16,
            max_bytes=2**20,
            densities=(0.001, 0.01),
            dtype="bf16",
            residual_dtype="bf16",
            warmup=1,
            iters=2,
            threads=1,
        )
        assert calls["megatron_sparse.bench.codec.prune"] == (
            (),
            {"sweep": sweep, "json_path": Path("rows.jsonl")},
        )
        asked = dict(argument.split("=") for argument in sweep.arguments())
        assert asked["--dtype"] == "bf16"
        assert asked["--min-bytes"] == str(2**16)
        assert "--density" not in asked, "the same as without it"

    @pytest.mark.parametrize(
        "options",
        [
            "--min-bytes 1T",
            "--min-bytes 0",
            "--min-bytes 2M --max-bytes 1M",
            "--density 0.1,,0.2",
            "--density 1.5",
        ],
    )
    def test_bench_mistakes(self, calls, options, capsys):
        refused(capsys, "bench prune", options)
        assert "megatron_sparse.bench.codec.prune" not in calls

    def test_corpus_mistake(self, tmp_path, capsys):
        error = refused(capsys, "corpus --kind poems --output", tmp_path / "data")
        assert "code | prose" in error


def test_sizes_are_powers_of_two():
    assert parse_size("--x", "1M") == 2**20
    assert parse_size("--x", "3g") == 3 * 2**30
    assert parse_size("--x", "64KB") == 2**16
    assert parse_size("--x", "1000") == 1000
    with pytest.raises(ConfigError, match="--x"):
        parse_size("--x", "1.5M")


def test_doctor_for_real_writes_json(tmp_path):
    """The real command once, through the installed entry point's function."""
    path = tmp_path / "doctor.jsonl"
    assert run("doctor --json", path) in (0, 1)
    assert {"name", "status", "detail", "remedy"} == set(json.loads(path.open().readline()))
