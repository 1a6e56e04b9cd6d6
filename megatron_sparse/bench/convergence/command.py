"""`bench convergence`: the final validation loss of small models, compressed beside dense.

Each run is one `megatron-sparse train experiment=convergence`, in its own process and folder:
Megatron's own loop on real text, two gloo ranks or more. Runs follow one another. Each run's
results are in its folder (`convergence.json`). A run whose results are there already, with the same
arguments, is not repeated, so an interrupted study can be continued.

The validation loss is Megatron's: the mean over the tokens of held-out documents. After the last
iteration Megatron validates twice, on different samples; the final loss is the mean of the two.
Runs of one seed see the same samples in the same order, so the choice of samples does not affect
the differences between them.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from statistics import mean
from typing import IO

from megatron_sparse.bench.convergence.settings import BY_NAME, CORPORA, RANKS, Run, Study
from megatron_sparse.bench.table import describe_cpu
from megatron_sparse.bench.training_runs import finished_curve, save_result, saved_result
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron import corpus
from megatron_sparse.run import composition, local_ranks

RESULT_FILE = "convergence.json"
VOCAB_SIZE = 1024
"""Small, for even so half of the model's weights belong to the vocabulary."""


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        model: of `CORPORA`.
        setting: name of the setting.
        seed: its seed.
        arguments: of `train`, without names and folders.
        curve: (iteration, validation loss), the last iteration twice.
        wire_ratio: bytes sent over a dense ring's, over the whole run; 1 without compression.
        wire_ratio_target: the same over the iterations at the target density.
        elapsed_s: of the whole process.
        bits: of a rank's own messages for each element, over the whole run; None in results of
            versions that did not count them.
        bits_target: the same over the iterations at the target density.
    """

    model: str
    setting: str
    seed: int
    arguments: list[str]
    curve: list[tuple[int, float]]
    wire_ratio: float
    wire_ratio_target: float
    elapsed_s: float
    bits: float | None = None
    bits_target: float | None = None

    @property
    def last(self) -> list[float]:
        """The validations after the last iteration."""
        return [loss for iteration, loss in self.curve if iteration == self.curve[-1][0]]

    @property
    def final(self) -> float:
        """The final validation loss."""
        return mean(self.last)


def run(study: Study) -> list[Result]:
    """Trains the runs that have no results yet, and prints a line for each run.

    Raises:
        ConfigError: an override is wrong, or the folder cannot be made.
        DatasetError: a corpus cannot be made.
        MegatronSparseError: a run failed; the end of its log is in the message.
    """
    runs = list(study.runs())
    for each in runs:
        composition.compose([*study.arguments(each), *_place(study, each)])
    try:
        study.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "bench convergence: the folder of the runs cannot be made",
            expected="a folder that can be made and written",
            got=error,
            remedy="give another --out",
        ) from None
    print(
        f"# {describe_cpu(1)}\n# {len(runs)} runs of {study.iters} iterations, "
        f"{study.ranks} ranks, gloo",
        flush=True,
    )
    for model in study.models:
        kind = CORPORA[model]
        corpus.prepare(kind, study.corpus_dir(model), VOCAB_SIZE)  # type: ignore[arg-type]
    results = []
    for number, each in enumerate(runs, 1):
        result = find(study, each)
        how = "done before"
        if result is None:
            result = _train(study, each)
            how = f"{result.elapsed_s:.0f} s"
        results.append(result)
        print(
            f"{number:>3}/{len(runs)} {each.name:<28} final {result.final:.4f} ({how})", flush=True
        )
    return results


def find(study: Study, each: Run) -> Result | None:
    """The results of a run with the same arguments; None if there is none."""
    values = saved_result(study.out / each.name / RESULT_FILE, study.arguments(each))
    return None if values is None else Result(**values)


def found(study: Study) -> list[Result]:
    """The results of all finished runs of the study.

    Raises:
        ConfigError: no run has finished.
    """
    results = [result for each in study.runs() if (result := find(study, each))]
    if not results:
        raise ConfigError(
            "bench convergence: there is nothing to report",
            expected=f"{RESULT_FILE} of a finished run with these arguments in {study.out}",
            got="none",
            remedy="leave out --report, or give the --out and --iters of the study",
        )
    return results


def _place(study: Study, each: Run) -> list[str]:
    return [
        f"name={each.name}",
        f"runs_dir={study.out}",
        f"data.dir={study.corpus_dir(each.model)}",
        "cluster.device=cpu",
        *([f"cluster.ranks_per_node={study.ranks}"] if study.ranks == RANKS else []),
    ]


def _start(study: Study, each: Run, log: IO[str]) -> int:
    """Runs `train`; returns the exit code.

    With `cluster.nodes` this machine's ranks stand for those of several nodes. `train` starts the
    ranks of one node only, so they are started here.
    """
    arguments = [*study.arguments(each), *_place(study, each)]
    command = local_ranks.command_line(["train", *arguments])
    if composition.compose(arguments).cluster.nodes == 1:
        return local_ranks.run(command, log)
    return local_ranks.run_loopback(command, study.ranks, log)


def _train(study: Study, each: Run) -> Result:
    arguments = study.arguments(each)
    folder, log_path = study.out / each.name, study.out / f"{each.name}.log"
    start_s = time.monotonic()
    with log_path.open("w") as log:
        code = _start(study, each, log)
    curve = finished_curve("convergence", log_path, code, study.iters)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    target = summary["phases"].get(
        "target", {"wire_ratio": 1.0, "bits_per_element": summary["bits_per_element"]}
    )
    result = Result(
        model=each.model,
        setting=each.setting.name,
        seed=each.seed,
        arguments=arguments,
        curve=curve,
        wire_ratio=summary["wire_ratio"],
        wire_ratio_target=target["wire_ratio"],
        elapsed_s=time.monotonic() - start_s,
        bits=summary["bits_per_element"],
        bits_target=target["bits_per_element"],
    )
    save_result(folder / RESULT_FILE, asdict(result))
    return result


def label_of(result: Result) -> str:
    """Of the result's setting."""
    return BY_NAME[result.setting].label
