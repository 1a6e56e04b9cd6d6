"""The scripts in examples/ run as they are."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.integration.doc_commands import commands_of
from tests.programs import ROOT, output_of, with_variables
from tests.ranks import MEGATRON, run_command

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 512 --make-vocab-size-divisible-by 64 --log-interval 1 "
    "--num-workers 0 --split 90,5,5"
)
CPU = (ROOT / "docs" / "cpu.md").read_text().partition("```\n--")[2].partition("```")[0]
"""The flags that the page names, without the first two dashes."""
EXAMPLE = ROOT / "examples" / "pretrain_gpt.py"
OWN_LINES = ("# line 1", "# line 2")
HYBRID = "--hybrid-layer-pattern *-*- --spec megatron_sparse.megatron.local_hybrid local_stack_spec"


VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONPATH": str(ROOT),
}


def flags(*more: str) -> list[str]:
    """Megatron's flags for the model on a CPU."""
    return [*MODEL.split(), *f"--{CPU}".split(), *more]


def start(script: Path, *arguments: str) -> str:
    """The script's output on two ranks, as torchrun starts them."""
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d"
    place = ["--rdzv-endpoint", "localhost:0"]
    command = [sys.executable, *torchrun.split(), *place, str(script), *arguments]
    return output_of(command, 400, cwd=script.parent, env=with_variables(**VARIABLES))


def forked(folder: Path, script: Path, *arguments: str) -> str:
    """As `start`, in processes that have imported Megatron, which is faster."""
    output = folder / "output"
    output.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        codes = run_command([str(script), *arguments], 2, output, MEGATRON)
    assert codes == [0, 0], output.read_text()[-6000:]
    return output.read_text()


def losses(output: str) -> list[str]:
    """The losses that Megatron prints, by iteration."""
    return re.findall(r"lm loss: (\S+)", output)


@pytest.mark.timeout(900)
def test_the_two_lines_in_a_script_of_the_users_own(tmp_path):
    """With them and without them: the same losses, where the first 500 iterations are dense."""
    text = EXAMPLE.read_text()
    kept = [
        line
        for line in text.splitlines(keepends=True)
        if not line.rstrip().split(":")[0].endswith(OWN_LINES)
        and line != "import megatron_sparse\n"
    ]
    with_lines, without = tmp_path / "with.py", tmp_path / "without.py"
    preset = 'install("safe", '
    assert preset in text
    # In few bits the warm-up would round.
    options = f"value_bits=None, sum_bits=None, run_dir={str(tmp_path / 'run')!r}, "
    with_lines.write_text(text.replace(preset, preset + options))
    without.write_text("".join(kept))
    # Two lines and their import; no other line of the script mentions the plugin.
    assert len(text.splitlines()) - len(kept) == 3
    outside = "".join(kept).split('"""', 2)[2].replace("from megatron_sparse.megatron import", "")
    assert "megatron_sparse" not in outside

    output = start(with_lines, *flags())
    # The plugin's own metric in Megatron's log line, and its table at the end.
    assert "iteration        4/       4" in output
    assert "comm/wire_ratio" in output
    assert "warmup" in output
    assert json.loads((tmp_path / "run/summary.json").read_text())["target_density"] == 0.22
    plain = forked(tmp_path, without, *flags())
    assert "comm/wire_ratio" not in plain
    assert losses(output) == losses(plain)
    assert len(losses(plain)) == 4


@pytest.mark.timeout(500)
def test_the_two_lines_with_a_hybrid_model(tmp_path):
    output = forked(tmp_path, EXAMPLE, *flags(*HYBRID.split()))
    assert "comm/wire_ratio" in output
    assert len(losses(output)) == 4
    assert "GPTModel IS DEPRECATED" not in output, "Megatron prints it for the other model"


@pytest.mark.timeout(900)
def test_a_loop_with_attach_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path):
    """With the two commands of the page."""
    commands = commands_of(ROOT / "docs" / "checkpoints.md")
    first, second = (command.words for command in commands if command.words[0] == "torchrun")
    assert first[-1] == second[-1], "the same folder"

    def steps(run: Callable[..., str], command: Sequence[str], folder: str) -> list[str]:
        script, *options = command[command.index("2") + 1 : -1]
        output = run(ROOT / script, *options, str(tmp_path / folder))
        return [line for line in output.splitlines() if line.startswith("step ")]

    fast = partial(forked, tmp_path)
    stopped = steps(start, first, "resumed")
    assert len(stopped) == 10
    assert stopped + steps(fast, second, "resumed") == steps(fast, second, "whole")
