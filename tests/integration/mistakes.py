"""Mistakes that users make, each as typed, and what the program answers."""

from __future__ import annotations

import io
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_sparse.cli import main
from megatron_sparse.run import launch
from tests.report_runs import make_run

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WANDB_MODE")


@dataclass(frozen=True, eq=False)
class Mistake:
    """One of them.

    Attributes:
        typed: the command without the program's name.
        says: what the message contains, besides `expected:` and `got:`.
        lacks: a package that is not installed.
        ranks: variables that a launcher sets; `BUSY` as a port is one that is in use.
        note: what else is needed to see it.
    """

    typed: str
    says: str
    lacks: str = ""
    ranks: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        return self.typed + (f" ({self.note})" if self.note else "")


def _without(package: str, typed: str, says: str) -> Mistake:
    return Mistake(typed, says, lacks=package, note=f"{package} is not installed")


MISTAKES: Mapping[str, tuple[Mistake, ...]] = {
    "Names and values": (
        Mistake("train model=gpt3", "gpt2_xl"),
        Mistake("train preset=balancd", "did you mean balanced?"),
        Mistake("train cluster=perlmuter", "did you mean perlmutter?"),
        Mistake("train scheme=agspars", "did you mean agsparse?"),
        Mistake("train data=mock model.layers=4", "did you mean model.num_layers?"),
        Mistake("train data=mock training.train_iters=100", "did you mean training.iterations?"),
        Mistake("train data=mock micro_batch_size=4", "did you mean training.micro_batch_size?"),
        Mistake("train data=mock lr_warmup=10", "did you mean training.lr_warmup_iters?"),
        Mistake("train data=mock cluster_models=perlmutter", "did you mean planner.cluster?"),
        Mistake("train --iterations 100", "did you mean training.iterations=VALUE?"),
        Mistake("train data=mock compression=topk99,topk95", "add --multirun"),
        Mistake("train data=mock --multirun scheme=dense,direct --cfg job", "leave the others out"),
        Mistake("train data=mock 'training.lr=1e-3, 1e-4'", "add --multirun"),
        Mistake("train data=mock training.lr=fast", "float"),
        Mistake("train data=mock training.iterations=1.5", "int"),
        Mistake("train data=mock training.overlap_grad_reduce=maybe", "bool"),
        Mistake("train data=mock compression.density=7", "0 < compression.density <= 1"),
        Mistake("train data=mock compression.density=0", "0 < compression.density <= 1"),
        Mistake("train data=mock training.precision=fp8", "auto | fp32 | bf16 | fp16"),
        Mistake("train data=mock scheme.wire_dtype=int8", "fp32 | bf16 | fp16"),
        Mistake("train data=mock 'name=\"my run\"'", "letters, digits"),
        Mistake("train data=mock 'compression.keep_patterns=[\"(emb\"]'", "regular expression"),
    ),
    "Flags of Megatron": (
        Mistake("train data=mock megatron.num_layers=3", "set model.num_layers"),
        Mistake("train data=mock megatron.bf16=true", "set training.precision"),
        Mistake("train data=mock megatron.recompute_activation=true", "recompute_activations"),
        Mistake("train data=mock megatron.use_megatron_fsdp=true", "plugin=false"),
    ),
    "Values that do not fit each other": (
        Mistake("train data=mock model.num_attention_heads=7", "model.hidden_size"),
        Mistake("train data=mock training.tensor_parallel=3", "the number of ranks"),
        Mistake("train data=mock training.global_batch_size=3", "training.micro_batch_size"),
        Mistake(
            "train data=mock training.iterations=50 training.lr_warmup_iters=100",
            "training.lr_warmup_iters <= 49",
        ),
        Mistake(
            "train data=mock scheme=zen training.use_distributed_optimizer=true",
            "training.use_distributed_optimizer=false",
        ),
        Mistake(
            "train data=mock compression=dense scheme.wire_dtype=bf16", "compression.density=1"
        ),
        Mistake("train data=mock scheme=zen scheme.capacity=1.25", "agsparse"),
        Mistake("train data=mock scheme=omnireduce scheme.format=pici", "scheme.format=auto"),
        Mistake("train data=mock scheme=straggler", "straggler.mode=pinned"),
        Mistake("train data=mock straggler.mode=dynamic", "scheme.deterministic=false"),
        Mistake("train data=mock straggler.mode=pinned straggler.rank=2", "<= 1"),
        Mistake("train data=mock preset=safe scheme.format=coo", "compression.value_bits out"),
        Mistake("train data=mock preset=safe scheme=zen", "choose another scheme"),
        Mistake("train data=mock scheme=peer_two_shot", "scheme.name=direct"),
        Mistake(
            "train data=mock cluster=perlmutter compression.threshold_scope=tp_group",
            "planner.cluster=null",
        ),
        Mistake("train data=mock cluster.requeue=true", "training.save_signal=SIGUSR1"),
        Mistake(
            "plan --bucket-bytes 4M --ranks 4 --cluster perlmutter --schemes zen "
            "--op reduce_scatter",
            "direct",
        ),
    ),
    "Data, checkpoints and other files": (
        Mistake("train data.dir=no/corpus", "megatron-sparse corpus"),
        Mistake("train data.dir=null", "data.prefix"),
        Mistake("train data.dir=null data.prefix=no/corpus data.vocab_size=512", ".idx"),
        Mistake("train data=mock model.vocab_size=100", "model.vocab_size=null"),
        Mistake("train data=mock 'data.split=\"90\"'", "95,5,0"),
        Mistake("train data=mock training.load=no/checkpoints", "latest_checkpointed_iteration"),
        Mistake("train data=mock resume=must", "resume=auto"),
        Mistake("train data=mock planner.cluster=no.yaml", "perlmutter"),
        Mistake("train data=mock planner.cluster=notes.txt", "calibrate"),
        Mistake("train data=mock planner.pin=no.json", "plan.json"),
        Mistake("plan --bucket-bytes 4M --ranks 4 --cluster no.yaml", "perlmutter"),
        Mistake("plan --bucket-bytes 4MB5 --ranks 4 --cluster perlmutter", "K, M or G"),
        Mistake("view no/run", "the folder of a run"),
        Mistake("report thesis", "the folder of a run"),
        Mistake("sweep thesis", "runs_dir"),
        Mistake("profile made", "tracking.record_gradients_iters"),
    ),
    "Where the output goes": (
        Mistake("train data=mock runs_dir=notes.txt", "runs_dir"),
        Mistake("train data=mock runs_dir=. name=thesis", "choose another name"),
        Mistake("view made --output view.jpg", "--output view.png"),
        Mistake("report made --output report.pdf", "--output report.html"),
        Mistake("schedule --ranks 4 --output schedule.bmp", "--output schedule.png"),
        Mistake("report made --png charts", "write --output in its place"),
        Mistake("bench prune --json no/folder/rows.jsonl", "there is no folder"),
        Mistake("bench prune --json thesis", "is a folder"),
        Mistake("calibrate --output mine.yaml", "--force"),
        Mistake("corpus --kind code --output thesis", "another folder"),
    ),
    "Where the ranks run": (
        Mistake("train data=mock cluster.nodes=2", "put srun before the command"),
        Mistake("train data=mock cluster.device=cuda cluster.ranks_per_node=512", "512"),
        Mistake(
            "train data=mock",
            "4 ranks were started",
            ranks={"RANK": "0", "WORLD_SIZE": "4"},
            note="under torchrun --nproc-per-node 4",
        ),
        Mistake(
            "train data=mock cluster.ranks_per_node=1",
            "MASTER_PORT",
            ranks={
                "RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "BUSY",
            },
            note="under srun, on a port that is in use",
        ),
        Mistake("calibrate --ranks 1", "2"),
        Mistake("calibrate --virtual --cluster perlmutter", "--sweep"),
        Mistake("bench collectives --netbed", "--mbit"),
        Mistake("doctor --distributed", "calibrate --quick"),
    ),
    "Packages that are not installed": (
        _without("megatron", "train data=mock", "megatron-sparse[train]"),
        _without("tensorboard", "train data=mock", "tracking.tensorboard=false"),
        _without("wandb", "train data=mock", "tracking.wandb=disabled"),
        _without(
            "hydra_plugins.hydra_submitit_launcher",
            "train data=mock --multirun hydra/launcher=submitit_slurm scheme=dense,direct",
            "megatron-sparse[slurm]",
        ),
        _without("matplotlib", "report made", "megatron-sparse[figures]"),
        _without("jinja2", "report made", "megatron-sparse[figures]"),
        _without("matplotlib", "bench convergence --figures pictures", "megatron-sparse[figures]"),
        _without("scipy", "simulate --paper zen", "megatron-sparse[figures]"),
        _without("wandb_workspaces", "dashboard me/mine", "megatron-sparse[dashboard]"),
        _without("tokenizers", "corpus --kind code --output corpus", "megatron-sparse[train]"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a mistake.

    Attributes:
        code: the exit code.
        printed: standard output.
        error: standard error.
        changed: files that were changed, removed or made.
        started: programs that were started.
    """

    code: object
    printed: str
    error: str
    changed: tuple[str, ...]
    started: tuple[str, ...]

    @property
    def message(self) -> str:
        """The error's first line."""
        lines = [line for line in self.error.splitlines() if line.startswith("error: ")]
        return lines[0].removeprefix("error: ") if lines else ""


def outcome_of(mistake: Mistake) -> Outcome:
    """Makes a mistake in this process, in a folder with a user's files, and looks what it did."""
    before_folder = Path.cwd()
    printed, error = io.StringIO(), io.StringIO()
    started: list[str] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name).resolve()
        _users_files(folder)
        before = _contents(folder)
        stack.callback(os.chdir, before_folder)
        os.chdir(folder)
        stack.enter_context(_environment(mistake, stack))
        stack.enter_context(_missing(mistake.lacks))
        stack.enter_context(mock.patch.object(subprocess, "Popen", _watched(started)))
        stack.enter_context(mock.patch.object(launch, "_run_agent", _refuse(started)))
        stack.enter_context(redirect_stdout(printed))
        stack.enter_context(redirect_stderr(error))
        code: object = None
        try:
            main.main(shlex.split(mistake.typed))
        except SystemExit as ended:
            code = ended.code
        except Exception:
            error.write(traceback.format_exc())
        after = _contents(folder)
        changed = {path for path in before | after if before.get(path) != after.get(path)}
        text = error.getvalue().replace(str(folder), "FOLDER")
    return Outcome(code, printed.getvalue(), text, tuple(sorted(changed)), tuple(started))


def _users_files(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine\n")
    (folder / "mine.yaml").write_text("a measured cluster\n")
    (folder / "thesis").mkdir()
    (folder / "thesis" / "thesis.tex").write_text("precious\n")
    (folder / "made").mkdir()
    make_run(folder / "made", "made", iterations=3, buckets=1)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


@contextmanager
def _environment(mistake: Mistake, stack: ExitStack) -> Iterator[None]:
    variables = dict(mistake.ranks)
    if variables.get("MASTER_PORT") == "BUSY":
        busy = stack.enter_context(socket.socket())
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        variables["MASTER_PORT"] = str(busy.getsockname()[1])
    with mock.patch.dict(os.environ, variables):
        for name in [*os.environ]:
            if name.startswith("SLURM_") or (name in LAUNCHER and name not in variables):
                del os.environ[name]
        yield


@contextmanager
def _missing(package: str) -> Iterator[None]:
    """Hides a package, whether or not it was imported."""
    if not package:
        yield
        return
    hidden = {name: None for name in sys.modules if name.startswith(f"{package}.")}
    with mock.patch.dict(sys.modules, {package: None, **hidden}):  # type: ignore[dict-item]
        yield


def _watched(started: list[str]) -> type[subprocess.Popen[bytes]]:
    class Popen(subprocess.Popen):
        """Refuses to start ranks; git and the like may run."""

        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            program = Path(args if isinstance(args, str) else str(args[0])).name
            if program.startswith(("python", "bash", "torchrun", "srun")):
                _refuse(started)(args)
            super().__init__(args, *more, **options)

    return Popen


def _refuse(started: list[str]) -> Callable[..., None]:
    def refuse(*args: object) -> None:
        started.append(str(args))
        raise AssertionError("a program was started")

    return refuse


def everything() -> dict[Mistake, Outcome]:
    """Makes every mistake."""
    return {each: outcome_of(each) for part in MISTAKES.values() for each in part}
