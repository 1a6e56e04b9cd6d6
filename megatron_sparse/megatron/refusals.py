"""The settings of Megatron that the plugin refuses, each with the reason. Imports no megatron.

docs/parallelism.md has a row for each. They are checked three times, because each entry point sees
other settings: the `megatron:` section before a rank starts, Megatron's parsed arguments before it
builds a model, and the model that `attach` is given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_sparse.errors import ConfigError, HostError


@dataclass(frozen=True)
class Refusal:
    """One setting of Megatron that the plugin refuses.

    Attributes:
        key: in the `megatron:` section; with dashes it is Megatron's flag.
        attribute: of Megatron's arguments, or of the configuration of a DDP or a model.
        reason: follows the setting's name in the error's text.
        expected: what to use in its place.
        allowed: the largest value of `attribute` that leaves the setting off.
        only: the one value that is refused, alone or in a list, where others are not.
    """

    key: str
    attribute: str
    reason: str
    expected: str
    allowed: int = 0
    only: str | None = None

    @property
    def flag(self) -> str:
        """As on Megatron's command line."""
        return "--" + self.key.replace("_", "-")

    def found_in(self, owner: Any) -> object:
        """The value of the attribute if it turns the setting on, else None."""
        value = getattr(owner, self.attribute, None)
        return value if self.is_on(value) else None

    def is_on(self, value: Any) -> bool:
        """Whether this value turns the setting on."""
        if self.only is not None:
            return self.only in (value if isinstance(value, list) else [value])
        return int(value or 0) > self.allowed


_WRAP = "Megatron's DistributedDataParallel; --use-distributed-optimizer shards the optimizer"
_TENSOR = "weights that tensor parallelism alone shards"
_GATHER = "parameters that are gathered in bf16 or fp32"
_NOTHING_TO_ATTACH_TO = "leaves the plugin nothing to attach to: it has no gradient buckets"
_REPLAYED = "full_iteration replays the exchange of one step in all later ones"
_GRAPHS = "--cuda-graph-impl local or transformer_engine"
_OWN_GROUPS = "reduces gradients over groups of its own, which the plugin does not know"
_QUANTISED = "keeps parameters quantised; the plugin has not been tested on GPUs that can"

REFUSALS = (
    Refusal("use_megatron_fsdp", "use_megatron_fsdp", _NOTHING_TO_ATTACH_TO, _WRAP),
    Refusal("use_torch_fsdp2", "use_torch_fsdp2", _NOTHING_TO_ATTACH_TO, _WRAP),
    Refusal("tensor_parallel_num_weight_shards", "gtp_weight_remat_size", _OWN_GROUPS, _TENSOR, 1),
    Refusal(
        "expert_tensor_parallel_num_weight_shards",
        "expert_gtp_weight_remat_size",
        _OWN_GROUPS,
        _TENSOR,
        1,
    ),
    Refusal(
        "use_nccl_ub",
        "nccl_ub",
        "registers gradient buffers for collectives that the plugin replaces",
        "gradient buffers in ordinary memory",
    ),
    Refusal("fp8_param_gather", "fp8_param_gather", _QUANTISED, _GATHER),
    Refusal("fp4_param_gather", "fp4_param_gather", _QUANTISED, _GATHER),
    Refusal(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "lends gradient buffers to the all-gather of parameters",
        _GATHER,
    ),
    Refusal(
        "optimizer_cuda_graph",
        "optimizer_cuda_graph",
        "replays the optimizer's step without the plugin, which must see each step's outcome",
        "steps that are launched anew",
    ),
    Refusal("cuda_graph_impl", "cuda_graph_impl", _REPLAYED, _GRAPHS, only="full_iteration"),
    Refusal("cuda_graph_modules", "cuda_graph_modules", _REPLAYED, _GRAPHS, only="full_iteration"),
    Refusal(
        "inprocess_restart",
        "inprocess_restart",
        "restarts training in a process in which the plugin's threads and groups still run",
        "a new start of the ranks: torchrun --max-restarts, or resume=auto",
    ),
    Refusal(
        "dist_ckpt_optim_fully_reshardable",
        "dist_ckpt_optim_fully_reshardable",
        # sharded_param_state_fully_reshardable takes ranges of the padded buffer from a tensor
        # without the padding.
        "saves other numbers than the optimizer's where buckets are padded, in megatron-core 0.19",
        "the default format, which another number of data-parallel ranks can load",
    ),
)


OWN_FORMAT = "torch_dist"
"""The format of Megatron's checkpoints in which the plugin's state travels."""
LOST = (
    "--ckpt-format %s: checkpoints hold nothing of the plugin. A resumed run starts with zero "
    "residuals, a new plan, the switch as configured and the lossy parameters that all ranks hold; "
    "its steps go on at the checkpoint's iteration"
)


def check_checkpoints(settings: Mapping[str, Any], mode: str, *, saves: bool) -> None:
    """Refuses settings of Megatron's checkpoints with which residuals would be lost.

    Args:
        settings: Megatron's arguments, or the `megatron:` section.
        mode: `compression.residual_checkpoint`.
        saves: whether the run saves checkpoints.

    Raises:
        ConfigError: residuals are to be saved in a format that cannot hold them. Or Megatron is to
            assume that all checkpoints of a run have the same tensors, which is false: a bucket
            has a residual only after its first selection.
    """
    if mode == "none":  # residuals are not saved
        return
    found = settings.get("ckpt_format", OWN_FORMAT)
    if saves and found != OWN_FORMAT:
        raise ConfigError(
            "checkpoints of this format cannot hold residuals",
            expected=f"--ckpt-format {OWN_FORMAT}, Megatron's default",
            got=f"--ckpt-format {found}, with compression.residual_checkpoint={mode}",
            remedy=f"set --ckpt-format {OWN_FORMAT} (megatron.ckpt_format={OWN_FORMAT}); or "
            "compression.residual_checkpoint=none: a resumed run then starts with zero residuals",
        )
    if settings.get("ckpt_assume_constant_structure"):
        raise ConfigError(
            "--ckpt-assume-constant-structure does not hold: residuals appear while training",
            expected="checkpoints whose structure may change",
            got=f"the flag, with compression.residual_checkpoint={mode}",
            remedy="leave the flag out, or set compression.residual_checkpoint=none",
        )


def section_errors(section: Mapping[str, Any]) -> list[ConfigError]:
    """Returns an error for each refused setting that the `megatron:` section of a run turns on."""
    return [
        ConfigError(
            f"megatron.{refusal.key} {refusal.reason}",
            expected=refusal.expected,
            got=f"megatron.{refusal.key}={section[refusal.key]}",
            remedy="leave the key out, or train without the plugin: plugin=false",
        )
        for refusal in REFUSALS
        if refusal.key in section and refusal.is_on(section[refusal.key])
    ]


def check_arguments(arguments: Any, mode: str) -> None:
    """Checks Megatron's parsed arguments, before it builds a model.

    Args:
        arguments: Megatron's.
        mode: `compression.residual_checkpoint`.

    Raises:
        ConfigError: they turn a refused setting on, or residuals would be lost.
    """
    settings = vars(arguments)
    check_checkpoints(settings, mode, saves=bool(settings.get("save")))
    for refusal in REFUSALS:
        value = refusal.found_in(arguments)
        if value is not None:
            raise ConfigError(
                f"{refusal.flag} {refusal.reason}",
                expected=refusal.expected,
                got=f"{refusal.attribute}={value}",
                remedy="leave the flag out, or train without megatron_sparse.install(...)",
            )


def check_chunk(chunk: Any) -> None:
    """Checks a model that Megatron wrapped in DDP.

    Raises:
        HostError: the configuration of the wrap or of the model turns a refused setting on.
    """
    for refusal in REFUSALS:
        for owner in (getattr(chunk, "ddp_config", None), getattr(chunk, "config", None)):
            value = refusal.found_in(owner)
            if value is not None:
                raise HostError(
                    f"{refusal.flag} {refusal.reason}",
                    expected=refusal.expected,
                    got=f"{type(owner).__name__}.{refusal.attribute}={value}",
                    remedy="build the model without it, or train without the plugin",
                )
