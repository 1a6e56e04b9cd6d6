"""Mistakes of users, each as typed: one clear error, exit code 2, nothing started, nothing lost."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_sparse.run import launch
from tests.commands import is_one_error, run
from tests.report_runs import make_run

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WANDB_MODE")


class Mistake:
    """One of them: a command without the program's name, and what its message contains.

    That is besides `expected:` and `got:`. `lacks`: a package that is not installed. `ranks`: how
    many a launcher has started. `port_is_taken`: the launcher's, by another program.
    """

    def __init__(
        self,
        typed: str,
        *says: str,
        lacks: str = "",
        ranks: int = 0,
        port_is_taken: bool = False,
    ) -> None:
        self.typed, self.says, self.lacks = typed, says, lacks
        self.ranks, self.port_is_taken = ranks, port_is_taken

    def __str__(self) -> str:
        note = f"{self.lacks} is not installed" if self.lacks else f"{self.ranks} ranks"
        return self.typed + (f" ({note})" if self.lacks or self.ranks else "")


def train(words: str, *says: str, **more: Any) -> Mistake:
    """One on mock data."""
    return Mistake(f"train data=mock {words}", *says, **more)


MISTAKES = (
    # Names and values.
    Mistake("train model=gpt3", "gpt2_xl"),
    Mistake("train preset=balancd", "did you mean balanced?"),
    Mistake("train --config-name nope", "no configuration file 'nope'", "--config-dir"),
    Mistake("train --multirun data=mock scheme=dense,direct", "cannot start a sweep", ranks=2),
    train("model.layers=4", "did you mean model.num_layers?"),
    train("micro_batch_size=4", "did you mean training.micro_batch_size?"),
    train("lr_warmup=10", "did you mean training.lr_warmup_iters?"),
    train("cluster_models=perlmutter", "did you mean planner.cluster?"),
    Mistake("train --iterations 100", "did you mean training.iterations=VALUE?"),
    train("compression=topk99,topk95", "add --multirun"),
    train("preset=safe,balanced", "got:      preset=safe,balanced"),
    train("--multirun scheme=dense,direct --cfg job", "give one of these flags only"),
    train("'training.lr=1e-3, 1e-4'", "add --multirun"),
    train("--multi-run", "did you mean --multirun?"),
    train("--density", "did you mean compression.density=VALUE?"),
    train("compression.density=1%", "write 0.01"),
    train("compression.value_bits=5", "auto | 8 | 4 | 3 | 2 | null"),
    train("scheme=omnireduc", "did you mean omnireduce?"),
    Mistake(
        "train --multirun data=mock 'compression.density=interval(0.1,0.2)'",
        "no list of values",
    ),
    Mistake("train --multirun lr=1,2", "did you mean training.lr"),
    Mistake("train --multirun 'scheme=choice('", "cannot be read"),
    Mistake("doctor model=gpt2_xl", "--memory"),
    Mistake("simulate --paper zen --figure 9", "figure"),
    Mistake("simulate --figure 8 --all", "figure"),
    Mistake("simulate", "figure"),
    train("training.lr=fast", "float"),
    train("training.lr=0", "training.lr"),
    Mistake("bench codecs --min-bytes 1T", "--min-bytes"),
    Mistake("bench codecs --min-bytes 0", "--min-bytes"),
    Mistake("bench codecs --density 0.1,,0.2", "--density"),
    Mistake("bench codecs --density 1.5", "out of range"),
    train("training.iterations=1.5", "int"),
    train("training.overlap_grad_reduce=maybe", "bool"),
    train("compression.density=7", "0 < compression.density <= 1"),
    train("training.precision=fp8", "auto | fp32 | bf16 | fp16"),
    train("training.save_signal=SIGKILL", "SIGUSR1 | SIGUSR2 | SIGTERM"),
    train("scheme.wire_dtype=int8", "fp32 | bf16 | fp16"),
    train("'name=\"my run\"'", "letters, digits"),
    train("'compression.keep_patterns=[\"(emb\"]'", "regular expression"),
    # Flags of Megatron.
    train("megatron.split=949,50,1", "quote it: 'megatron.split=\"949,50,1\"'"),
    train("megatron.recompute_activation=true", "recompute_activations"),
    train("megatron.use_megatron_fsdp=true", "plugin=false"),
    # Values that do not fit each other.
    train("model.num_attention_heads=7", "model.hidden_size"),
    train("training.tensor_parallel=3", "the number of ranks"),
    train("training.global_batch_size=3", "training.micro_batch_size"),
    train("training.iterations=50 training.lr_warmup_iters=100", "training.lr_warmup_iters <= 49"),
    train(
        "scheme=zen training.use_distributed_optimizer=true",
        "training.use_distributed_optimizer=false",
    ),
    train("compression=dense scheme.wire_dtype=bf16", "compression.density=1"),
    train("scheme=zen scheme.capacity=1.25", "agsparse"),
    train("scheme=omnireduce scheme.format=pici", "scheme.format=auto"),
    train("scheme=straggler", "straggler.mode=pinned"),
    train("straggler.mode=persistent", "scheme.deterministic=false"),
    train("straggler.mode=pinned straggler.rank=2", "<= 1"),
    train("preset=safe scheme.format=coo", "compression.value_bits out"),
    train("preset=safe scheme=zen", "choose another scheme"),
    train("cluster.requeue=true", "training.save_signal=SIGUSR1"),
    Mistake(
        "plan --bucket-bytes 4M --ranks 4 --cluster perlmutter --schemes zen --op reduce_scatter",
        "direct",
    ),
    # Data, checkpoints and other files.
    Mistake("train data.dir=no/corpus", "megatron-sparse corpus"),
    Mistake("train data.dir=null", "data.prefix"),
    Mistake("train data.dir=null data.prefix=no/corpus data.vocab_size=512", ".idx"),
    train("model.vocab_size=100", "model.vocab_size=null"),
    train("'data.split=\"90\"'", "95,5,0"),
    train("training.load=no/checkpoints", "latest_checkpointed_iteration"),
    train("resume=must", "resume=auto"),
    train("planner.cluster=no.yaml", "perlmutter"),
    train("planner.cluster=notes.txt", "calibrate"),
    Mistake("plan --bucket-bytes 4M --ranks 4 --cluster no.yaml", "perlmutter"),
    Mistake("plan --bucket-bytes 4MB5 --ranks 4 --cluster perlmutter", "K, M or G"),
    Mistake("view no/run", "the folder of a run"),
    Mistake("report thesis", "the folder of a run"),
    Mistake("profile made", "tracking.record_gradients_iters"),
    Mistake("profile no/such/folder", "no gradient dump", "record_gradients_iters"),
    Mistake("view no/run --follow", "not the folder of a run"),
    Mistake("corpus --kind poems --output data", "code | prose"),
    # Where the output goes.
    train("runs_dir=notes.txt", "runs_dir"),
    train("runs_dir=. name=thesis", "choose another name"),
    Mistake("report made --output report.pdf", "--output report.html", "ends in .html"),
    Mistake("report made --output table.txt", "or .csv"),
    Mistake("report made --output thesis/thesis.tex/report.html", "cannot be written"),
    Mistake("report made --output=notes.txt/a.csv --output=a.html", "cannot be written"),
    Mistake("report made --output charts", "write --output charts.html"),
    Mistake("bench codecs --json no/folder/rows.jsonl", "there is no folder"),
    Mistake("bench codecs --json thesis", "is a folder"),
    Mistake("bench convergence --output notes.txt", "--output notes.txt cannot be written"),
    Mistake("calibrate --output mine.yaml", "--force"),
    Mistake("corpus --kind code --output thesis", "another folder"),
    # Where the ranks run.
    train("cluster.nodes=2", "put srun before the command"),
    train("cluster.device=cuda cluster.ranks_per_node=512", "512"),
    Mistake("train data=mock", "4 ranks were started", ranks=4),
    train("cluster.ranks_per_node=1", "MASTER_PORT", ranks=1, port_is_taken=True),
    Mistake("calibrate --ranks 1", "one rank has no links", "2"),
    Mistake("calibrate --timeout 0", "--timeout"),
    Mistake("calibrate --netbed", "--netbed"),
    Mistake("calibrate --ranks 4 --ranks-per-node 2", "none without --netbed"),
    Mistake("calibrate --sweep --output mine.yaml", "unknown key 'a measured cluster'"),
    Mistake("bench collectives --netbed", "--mbit"),
    # Plans.
    Mistake("plan", "none of them"),
    Mistake("plan runs/x --bucket-bytes 1M", "RUN and --bucket-bytes"),
    Mistake("plan --bucket-bytes 1M --ranks 4", "needs a cluster"),
    Mistake("plan --bucket-bytes 1M --cluster perlmutter", "number of ranks"),
    Mistake("plan --bucket-bytes 3 --ranks 2 --cluster perlmutter", "at least 4 bytes"),
    Mistake("plan --bucket-bytes 1M --ranks 2 --cluster atlantis", "no cluster"),
    Mistake("plan --bucket-bytes 1M --ranks 2 --cluster perlmutter --value-bits 5", "--value-bits"),
    Mistake("plan runs/x --ranks 4", "needs a cluster"),
    Mistake("plan runs/x --value-bits 4", "needs a cluster"),
    Mistake("plan no_such_run", "is no plan"),
    Mistake("plan runs/x --cluster perlmutter --schemes magic", "planner.schemes"),
    Mistake("plan runs/x --op broadcast", "--op"),
    # Benches that exchange messages.
    Mistake("bench collectives --scheme=telepathy", "direct"),
    Mistake("bench collectives --min-bytes=2M --max-bytes=1M", "64 to max_bytes"),
    Mistake("bench collectives --min-bytes=64 --max-bytes=64 --ranks=100", "min_bytes"),
    Mistake("bench collectives --value-bits=q4", "such as 2,4,8"),
    Mistake(
        "bench collectives --value-bits=4 --format=coo --virtual --scheme=direct", "auto | rice"
    ),
    Mistake("bench collectives --netbed --mbit=100 --virtual", "--virtual"),
    Mistake("bench collectives --scheme=ssar_rd --op=reduce_scatter", "nothing to measure"),
    Mistake("bench collectives --nccl-engine", "without a capacity"),
    Mistake("bench collectives --level=rack", "rank | node"),
    Mistake(
        "bench collectives --nccl-engine --capacity=1.25 --virtual",
        "virtual ranks have no NCCL",
    ),
    Mistake("bench collectives --ranks=2 --ranks-per-node=2", "none without --netbed or --virtual"),
    Mistake("bench collectives --delay-ms=-1", "0 or more"),
    Mistake("bench collectives --delay-ms=2000 --timeout=1", "less than --timeout"),
    Mistake("bench gather --virtual --ranks=1", "2 or more"),
    Mistake("bench collectives --ranks=3", "--ranks", ranks=2),
    # Benches that train.
    Mistake("bench training --scheme=telepathy", "plain"),
    Mistake("bench training training.lr=0", "training.lr"),
    Mistake("bench training --netbed", "--mbit R"),
    Mistake("bench training --delay-ms=30", "0 without --netbed"),
    Mistake("bench training --netbed --mbit=100 --ranks=3 --sites=2", "an even number of hosts"),
    Mistake(
        "bench training --iters=4 megatron.log_interval=10", "megatron.log_interval=10 divides"
    ),
    Mistake("bench training --warmup=3 --iters=7 megatron.log_interval=10", "interval=10 divides"),
    Mistake("bench collectives --timeout=inf", "at most a year"),
    Mistake("bench collectives --netbed --mbit=100 --ranks=4 --ranks-per-node=3", "divisor of 4"),
    Mistake("bench training --slow-rank=1", "no plain"),
    Mistake("bench training --scheme=dense --slow-rank=2", "0 to 1"),
    Mistake("bench training --scheme=dense --slow-rank=1 --slow-ms=0", "more than 0"),
    Mistake("bench convergence --setting=topk2", "topk1"),
    Mistake("bench convergence --seeds=0", "numbers from 1 on"),
    Mistake("bench convergence --iters=205", "a multiple of 10"),
    Mistake("bench convergence --ranks=3", "a divisor of 16"),
    Mistake("bench convergence training.learning_rate=1", "training.learning_rate"),
    Mistake("bench time-to-loss --setting=safe", "plain among them"),
    # Packages that are not installed.
    Mistake("train data=mock", "megatron-sparse[train]", lacks="megatron"),
    Mistake("train data=mock", "tracking.tensorboard=false", lacks="tensorboard"),
    Mistake("train data=mock", "tracking.wandb=disabled", lacks="wandb"),
    train(
        "--multirun hydra/launcher=submitit_slurm scheme=dense,direct",
        "megatron-sparse[slurm]",
        lacks="hydra_plugins.hydra_submitit_launcher",
    ),
    Mistake("report made", "megatron-sparse[figures]", lacks="matplotlib"),
    Mistake("report made", "megatron-sparse[figures]", lacks="jinja2"),
    Mistake("bench convergence --figures pictures", "megatron-sparse[figures]", lacks="matplotlib"),
    Mistake("simulate --paper zen", "megatron-sparse[figures]", lacks="scipy"),
    Mistake("dashboard me/mine", "megatron-sparse[dashboard]", lacks="wandb_workspaces"),
    Mistake("corpus --kind code --output corpus", "megatron-sparse[train]", lacks="tokenizers"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A user's files, and a run; no mistake changes them."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "notes.txt").write_text("mine\n")
    (folder / "mine.yaml").write_text("a measured cluster\n")
    (folder / "thesis").mkdir()
    (folder / "thesis" / "thesis.tex").write_text("precious\n")
    (folder / "made").mkdir()
    make_run(folder / "made", "made", iterations=3, buckets=1)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def refuse(*words: object) -> None:
    pytest.fail(f"a program was started: {words}")


class Popen(subprocess.Popen):
    """Refuses to start ranks; git and the like may run."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        program = Path(args if isinstance(args, str) else str(args[0])).name
        if program.startswith(("python", "bash", "torchrun", "srun")):
            refuse(args)
        super().__init__(args, *more, **options)


@pytest.fixture
def busy_port():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield str(busy.getsockname()[1])


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_one_error_and_costs_nothing(mistake, folder, monkeypatch, capsys, busy_port):
    before = contents(folder)
    monkeypatch.chdir(folder)
    for name in (*LAUNCHER, *(name for name in os.environ if name.startswith("SLURM_"))):
        monkeypatch.delenv(name, raising=False)
    launched = {"RANK": "0", "WORLD_SIZE": str(mistake.ranks)} if mistake.ranks else {}
    if mistake.port_is_taken:
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": busy_port}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    if mistake.lacks:  # hidden, whether or not it was imported
        hidden = [name for name in sys.modules if name.startswith(f"{mistake.lacks}.")]
        for name in (mistake.lacks, *hidden):
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(launch, "_run_agent", refuse)
    assert run(mistake.typed) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out
    assert "***" not in printed.err, "nothing of it is a secret"
    is_one_error(printed.err, *mistake.says)
    assert contents(folder) == before
