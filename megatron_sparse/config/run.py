"""The typed configuration of a whole training run: `RunConfig` and its sections.

Hydra composes it from `configs/` (see `run.composition`), this module checks it, and the run's
folder keeps it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_sparse.config.checks import Checked, choice, divides, in_range, number, whole
from megatron_sparse.config.model import ModelConfig
from megatron_sparse.config.parameters import COMPRESSED, ParametersConfig
from megatron_sparse.config.scheme import DTYPES
from megatron_sparse.config.sparse import (
    CompressionConfig,
    PlannerConfig,
    SchemeConfig,
    SparseConfig,
    StragglerConfig,
    TrackingConfig,
)
from megatron_sparse.errors import ConfigError

SAVE_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT")
"""Allowed values of `training.save_signal`."""
LR_WARMUP_ITERS = 100
"""The longest warm-up that `training.lr_warmup_iters=null` takes."""


@dataclass
class ClusterConfig(Checked):
    """Where a run takes place: processes, devices, environment variables.

    Attributes:
        nodes: machines. On more than one, start the ranks with `srun` or `torchrun`. If all are
            started on one machine, it counts as this many nodes; see docs/parallelism.md.
        ranks_per_node: processes on each machine, one for each GPU.
        device: `cuda`, `cpu`, or `auto`: GPUs if each rank of a node has one, else CPU. The run
            prints its choice and keeps it in `config.yaml`.
        env: environment variables of the ranks (NCCL_*, OMP_NUM_THREADS and the like). Without the
            latter a rank has one CPU thread. A variable that is already set in the environment of
            the start command keeps its value.
        requeue: after `training.save_signal` has ended the run, ask Slurm to start the job again;
            with `resume=auto` the run then continues.
    """

    SECTION = "cluster"

    nodes: int = whole(1, 1)
    ranks_per_node: int = whole(2, 1)
    device: str = choice("auto", ("auto", "cpu", "cuda"))
    env: dict[str, str] = field(default_factory=dict)
    requeue: bool = False

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node


@dataclass
class DataConfig(Checked):
    """The training data: exactly one of `dir`, `prefix` and `mock`.

    Attributes:
        dir: folder of a corpus made by `megatron-sparse corpus`, relative to the folder in which
            the run is started.
        prefix: path of a Megatron indexed dataset without `.bin`.
        mock: use Megatron's synthetic data.
        vocab_size: number of token ids of `prefix` or `mock`; a corpus in `dir` stores its own.
        split: parts for training, validation and test, in the form of Megatron's `--split`.
    """

    SECTION = "data"

    dir: str | None = "data/code"
    prefix: str | None = None
    mock: bool = False
    vocab_size: int | None = whole(None, 2)
    split: str = "95,5,0"

    def __post_init__(self) -> None:
        """Checks each key, that there is one source of data, and the keys that depend on it."""
        super().__post_init__()
        given = [name for name in ("dir", "prefix") if getattr(self, name) is not None]
        given += ["mock"] if self.mock else []
        if len(given) != 1:
            raise ConfigError(
                "the data is ambiguous" if given else "there is no data",
                expected="exactly one of data.dir, data.prefix and data.mock",
                got=" and ".join(f"data.{name}" for name in given) or "none of them",
                remedy="set the others to null (data.mock to false), or data=code|prose|mock",
            )
        if (self.vocab_size is None) != (self.dir is not None):
            raise ConfigError(
                "data.vocab_size does not fit the data",
                expected="a number with data.prefix or data.mock, null with data.dir",
                got="null" if self.vocab_size is None else self.vocab_size,
                remedy="give the number of token ids, including the end-of-document token",
            )
        three_numbers = re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?){2}", self.split)
        if three_numbers is None or not sum(map(float, self.split.split(","))):
            raise ConfigError(
                "data.split is not a split",
                expected="three numbers, not all zero, for training, validation and test",
                got=repr(self.split),
                remedy='write data.split="95,5,0"',
            )


@dataclass
class TrainingConfig(Checked):
    """The training loop.

    Attributes:
        iterations: optimizer steps of the whole run.
        lr: the highest learning rate; it then falls along a cosine to `min_lr`.
        min_lr: the last learning rate.
        lr_warmup_iters: iterations over which the learning rate rises from 0; null takes 100, or
            a tenth of the run where that is less.
        micro_batch_size: samples of one forward pass on one rank.
        global_batch_size: samples of an iteration on all ranks; null takes one micro-batch a rank.
        precision: dtype of weights and activations: `fp32`, `bf16`, `fp16` (with loss scaling), or
            `auto`: bf16 on GPUs, fp32 on a CPU, where bf16 is two to three times slower. The run
            prints its choice and keeps it in `config.yaml`.
        seed: seed of weights, dropout and the order of samples.
        overlap_grad_reduce: synchronise gradients during the backward pass.
        use_distributed_optimizer: shard the optimizer's state (reduce-scatter of gradients).
        tensor_parallel: ranks that share each layer.
        pipeline_parallel: ranks that share the stack of layers.
        eval_interval: iterations between validations; 0 does not validate.
        eval_iters: iterations of each validation.
        save_interval: iterations between checkpoints in the run's folder; 0 saves none.
        save_signal: name of a signal: on it the run finishes the current iteration, saves a
            checkpoint and ends. With this option it also saves a checkpoint at its end. SIGUSR1,
            SIGUSR2 and SIGTERM are for batch jobs: a rank that receives one ends with code 0.
            SIGINT is Ctrl-C, which stops a run at once without this option; with it the second
            Ctrl-C does.
        load: folder of checkpoints to start from; a resumed run takes its own.
    """

    SECTION = "training"

    iterations: int = whole(1000, 1)
    lr: float = number(3e-4, 0, low_open=True)
    min_lr: float = number(3e-5, 0)
    lr_warmup_iters: int | None = whole(None, 0)
    micro_batch_size: int = whole(2, 1)
    global_batch_size: int | None = whole(None, 1)
    precision: str = choice("auto", ("auto", *DTYPES))
    seed: int = whole(1234, 1, 2**31 - 1)
    overlap_grad_reduce: bool = True
    use_distributed_optimizer: bool = False
    tensor_parallel: int = whole(1, 1)
    pipeline_parallel: int = whole(1, 1)
    eval_interval: int = whole(0, 0)
    eval_iters: int = whole(10, 1)
    save_interval: int = whole(0, 0)
    save_signal: str | None = choice(None, (*SAVE_SIGNALS, None))
    load: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("training.min_lr", self.min_lr, 0, self.lr)
        # Megatron asserts that the schedule has steps left after the warm-up.
        in_range("training.lr_warmup_iters", self.lr_warmup, 0, self.iterations - 1)

    @property
    def lr_warmup(self) -> int:
        """Iterations over which the learning rate rises, whether given or derived."""
        if self.lr_warmup_iters is not None:
            return self.lr_warmup_iters
        return min(LR_WARMUP_ITERS, self.iterations // 10)


@dataclass
class RunConfig(Checked):
    """A training run: `megatron-sparse train` composes this configuration, every rank reads it.

    Attributes:
        name: name of the run's folder in `runs_dir`: letters, digits, `.`, `_`, `-`.
        runs_dir: folder of all runs, relative to the folder in which the run is started.
        resume: what to do if a run of this name exists: `never` moves it aside and starts anew,
            `auto` continues it if it has a checkpoint and moves it aside otherwise, `must`
            continues it or fails.
        plugin: False trains plain Megatron without the plugin, for comparison.
        model: see `ModelConfig`.
        compression: see `CompressionConfig`.
        scheme: see `SchemeConfig`.
        planner: see `PlannerConfig`.
        straggler: see `StragglerConfig`.
        parameters: see `ParametersConfig`.
        cluster: see `ClusterConfig`.
        data: see `DataConfig`.
        tracking: see `TrackingConfig`.
        training: see `TrainingConfig`.
        megatron: any flag of Megatron-LM that no key of the other sections sets, e.g.
            `{recompute_activations: true}`.
    """

    name: str = "run"
    runs_dir: str = "runs"
    resume: str = choice("never", ("never", "auto", "must"))
    plugin: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    scheme: SchemeConfig = field(default_factory=SchemeConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    parameters: ParametersConfig = field(default_factory=ParametersConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    megatron: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks each key, then the keys of several sections that depend on one another."""
        super().__post_init__()
        # Megatron's flags have dashes; this package looks them up with underscores.
        self.megatron = {key.replace("-", "_"): value for key, value in self.megatron.items()}
        if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", self.name) is None:
            raise ConfigError(
                "name is not a valid folder name",
                expected="letters, digits, '.', '_' and '-', not beginning with '.' or '-'",
                got=repr(self.name),
            )
        if self.cluster.requeue and self.training.save_signal is None:
            raise ConfigError(
                "cluster.requeue=true needs training.save_signal",
                expected="training.save_signal=" + " | ".join(SAVE_SIGNALS),
                got="null",
                remedy="set training.save_signal=SIGUSR1, and sbatch --signal=USR1@120",
            )
        if self.plugin and self.parameters.method in COMPRESSED:  # `exact` or `lossy`
            self._check_gather()
        tensor, pipeline = self.training.tensor_parallel, self.training.pipeline_parallel
        tensor_key, pipeline_key = "training.tensor_parallel", "training.pipeline_parallel"
        both_keys, ranks = f"{tensor_key} * {pipeline_key}", self.cluster.world_size
        # First, because `data_parallel` divides the ranks by both.
        divides(both_keys, tensor * pipeline, "the number of ranks", ranks)
        divides(tensor_key, tensor, "model.num_query_groups", self.model.query_groups)
        divides(tensor_key, tensor, "the width of the MLP", self.model.ffn_width)
        # If no straggler is named, the rank is null; 0 stands for it, because 0 always passes.
        in_range("straggler.rank", self.straggler.rank or 0, 0, self.data_parallel - 1)
        divides(pipeline_key, pipeline, "model.num_layers", self.model.num_layers)
        divides(
            f"training.micro_batch_size * {self.batch_ranks} data-parallel ranks",
            self.training.micro_batch_size * self.batch_ranks,
            "training.global_batch_size",
            self.global_batch_size,
        )

    def _check_gather(self) -> None:
        """Refuses `parameters.method`, which is `exact` or `lossy`, where it cannot work.

        Both methods need the distributed optimizer, and `lossy` needs tensors on a CPU.
        """
        method = self.parameters.method
        if not self.training.use_distributed_optimizer:
            key, needed, given = "training.use_distributed_optimizer", "true", "false"
        elif method == "lossy" and self.cluster.device == "cuda":
            key, needed, given = "cluster.device", "cpu", "cuda"
        else:
            return
        raise ConfigError(
            f"parameters.method={method} cannot gather this run's parameters",
            expected=f"{key}={needed}",
            got=f"{key}={given}",
            remedy="set parameters.method=auto, or raw",
        )

    @property
    def sparse(self) -> SparseConfig:
        """The plugin's configuration, whose warm-up and ramp suit the run's length."""
        return SparseConfig(
            self.compression.in_run_of(self.training.iterations),
            self.scheme,
            self.tracking,
            self.planner,
            self.straggler,
            self.parameters,
        )

    @property
    def data_parallel(self) -> int:
        """Ranks that hold the same parameters."""
        return self.cluster.world_size // (
            self.training.tensor_parallel * self.training.pipeline_parallel
        )

    @property
    def batch_ranks(self) -> int:
        """Into how many parts a batch is divided; context-parallel ranks have the same samples."""
        context = self.megatron.get("context_parallel_size", 1)
        is_valid = isinstance(context, int) and context > 0 and self.data_parallel % context == 0
        # Any other value is ignored here, because Megatron itself refuses it.
        return self.data_parallel // context if is_valid else self.data_parallel

    @property
    def global_batch_size(self) -> int:
        """Samples of an iteration on all ranks."""
        one_each = self.training.micro_batch_size * self.batch_ranks
        return self.training.global_batch_size or one_each
