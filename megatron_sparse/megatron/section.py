"""Checks the `megatron:` section of a run before a rank starts; all its mistakes at once.

The quick checks need no import of megatron, and a rank makes them too. The launcher also asks
Megatron: its parser knows each flag and value, and its own validation, run with the section and
without, shows which key changes what a key of our own sections has set: by another name of the same
flag (`use_rotary_position_embeddings`), or by a file (`yaml_cfg`). What Megatron's layers would
refuse in a rank is checked with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import ConfigError, DependencyError, MegatronSparseError, raise_together
from megatron_sparse.megatron import arguments, refusals

_OF_ITS_SCRIPT = (
    *("fim_data", "sft", "dataloader_inter_document_masking", "hybrid_context_parallel"),
    *("check_for_spiky_loss", "logits_load_dir", "overlap_moe_expert_parallel_comm"),
)
"""Flags that Megatron's pretrain_gpt.py follows itself; `batches`, which replaces it, does not."""
_NOT_FOLLOWED = {
    "rampup_batch_size": "training.global_batch_size holds from the first iteration on",
    **dict.fromkeys(_OF_ITS_SCRIPT, "or run pretrain_gpt.py with megatron_sparse.install"),
}
"""Flags that do not work in `train`, and what to know; megatron-core 0.19 ignores the first."""
_OF_TRANSFORMER_ENGINE = ("fp8_format", "fp4_format", "tp_comm_overlap")
_DATA = "data"
"""Of what the validation has left: the files that Megatron's arguments name, in whatever way."""
TITLE = "the megatron: section cannot be used"


def quick_errors(config: RunConfig) -> list[MegatronSparseError]:
    """The errors that each key of the section shows by itself; without an import of megatron."""
    section = config.megatron
    found: list[MegatronSparseError] = [*arguments.owned_errors(section)]
    if config.plugin:
        found += refusals.section_errors(section)
    if find_spec("transformer_engine") is None:
        found += [
            DependencyError(
                f"megatron.{name}={value} needs Transformer Engine",
                expected="NVIDIA's package transformer_engine, which needs a GPU",
                got="no such package",
                remedy="install it, or leave the key out",
            )
            for name, value in section.items()
            # As the value of transformer_impl, or by a flag of its own.
            if value == "transformer_engine" or (value and name in _OF_TRANSFORMER_ENGINE)
        ]
    found += [
        ConfigError(
            f"megatron.{name} does not work in megatron-sparse train",
            expected="a flag that it follows",
            got=f"megatron.{name}={section[name]}",
            remedy=f"leave it out; {other}",
        )
        for name, other in _NOT_FOLLOWED.items()
        if section.get(name) not in (None, False)
    ]
    return found


def check(
    config: RunConfig, vocab_size: int, data_prefix: Path | None, environment: Mapping[str, str]
) -> None:
    """Checks the section with Megatron's parser and validation, whose import takes 5 s.

    Args:
        config: the run; device and precision are decided.
        vocab_size: of the data.
        data_prefix: of the indexed dataset; None takes Megatron's mock data.
        environment: of the ranks.

    Raises:
        MegatronSparseError: names every key that is refused, and what to set instead.
    """
    from megatron_sparse.megatron import training

    training.silence_known_noise()
    training.import_host()
    parser = arguments.megatron_parser()
    # The folder is a placeholder: nothing is written.
    derived = arguments.derived_flags(
        config, Path("run"), vocab_size=vocab_size, data_prefix=data_prefix
    )
    if "context_parallel_size" in config.megatron:
        # The batch may fit only with it, and the checks below try without.
        del derived["global_batch_size"]
    found: list[MegatronSparseError] = []
    # The keys that pass alone; and for every key the one of our own sections that sets the same.
    section, owners = {}, {}
    for key, value in config.megatron.items():
        owners[key] = arguments.owner(key, value)
        refused = quick_errors(dataclasses.replace(config, megatron={key: value}))
        try:
            arguments.command_line(derived, {key: value}, parser)
        except ConfigError as error:
            refused.append(error)
        found += refused
        # Owned flags, which have one error for that, stay: the others are checked as if our keys
        # had these values.
        harmless = 0 if owners[key] is None else 1
        if len(refused) == harmless:
            section[key] = value
    words = arguments.command_line(derived, {}, parser)
    ranks = config.cluster.nodes * config.cluster.ranks_per_node
    # Megatron asks for one connection with tensor parallelism, which the section may name.
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment}
    variables |= {"RANK": "0", "WORLD_SIZE": str(ranks)}
    # Without the section: the arguments as parsed, and after Megatron's validation.
    parsed, baseline = vars(parser.parse_args(words)), _validated(words, variables)
    if isinstance(baseline, ConfigError):
        raise_together(TITLE, found)
        raise baseline
    # What our keys set and the validation keeps: no key of the section may change it. What Megatron
    # computes may follow from the section, as the width of an MLP from `swiglu`.
    owned = {_DATA: "data.prefix"} | {
        dest: key
        for dest, key in arguments.owned_dests(parser).items()
        if parsed[dest] == baseline.get(dest)
    }

    def errors(keys: list[str]) -> list[MegatronSparseError]:
        """What is wrong with these keys of the section together; the texts name the last one."""
        words = arguments.command_line(derived, {key: section[key] for key in keys}, parser)
        validated = _validated(words, variables)
        told = {owners[key] for key in keys}  # keys of ours that have an error already
        name = f"megatron.{keys[-1]}={section[keys[-1]]}"
        if isinstance(validated, ConfigError):
            refused = f"Megatron refuses {name}: {validated.got}"
            return [ConfigError(refused, remedy="correct it, or leave it out")]
        return [
            ConfigError(
                f"{name} changes what {key} has set",
                expected=baseline.get(dest),
                got=validated.get(dest),
                remedy=f"leave it out, and set {key}",
            )
            for dest, key in owned.items()
            if key not in told and validated.get(dest) != baseline.get(dest)
        ]

    fitting: list[str] = []
    wrong: dict[str, list[MegatronSparseError]] = {}

    def fit(keys: list[str]) -> None:
        """Adds keys that fit to `fitting`, in order, and the errors of the others to `wrong`.

        Halves a list that does not fit, until each wrong key stands alone: neighbours that need
        each other, such as `account_for_*_in_pipeline_split`, are mostly tried together.
        """
        refused = errors([*fitting, *keys])
        if not refused:
            fitting.extend(keys)
        elif len(keys) == 1:
            wrong[keys[0]] = refused
        else:
            fit(keys[: len(keys) // 2])
            fit(keys[len(keys) // 2 :])

    if section:
        fit(list(section))
    to_retry = [key for key in wrong if owners[key] is None]
    wrong.clear()
    # A key that failed may need another that comes behind it: try once more beside all that fit.
    for key in to_retry:
        fit([key])
    found += itertools.chain.from_iterable(wrong.values())
    raise_together(TITLE, found)


def _validated(
    words: Sequence[str], variables: Mapping[str, str]
) -> dict[str, object] | ConfigError:
    """Megatron's arguments after its validation, and its data under `_DATA`; or its refusal."""
    from unittest import mock

    from megatron.training import arguments as host
    from megatron.training.utils import get_blend_and_blend_per_split

    from megatron_sparse.megatron import cpu_mode, training

    try:
        with (
            # Megatron reads the process's command line and environment.
            mock.patch.object(sys, "argv", [sys.argv[0], *words]),
            mock.patch.dict(os.environ, variables),
            # It would make log writers, too.
            mock.patch.object(host, "set_global_variables"),
            cpu_mode.properties(),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(action="ignore"),  # ranks say them
        ):
            args = host.parse_and_validate_args()
            _check_layers(training.model_config_of(args).transformer)
            # A blend in `data_path` is allowed: no key of ours can say it.
            data = get_blend_and_blend_per_split(args) if args.data_path is None else None
    except Exception as error:  # of any kind: an assertion, a file that is missing
        return arguments.refusal_of(error)
    validated = {_DATA: data or (None, None), **vars(args)}
    if args.use_layer_wise_distributed_optimizer and "--use-distributed-optimizer" in words:
        validated["use_distributed_optimizer"] = True  # Megatron has renamed what our key set
    return validated


def _check_layers(config: Any) -> None:
    """Raises what Megatron's layers refuse when a rank builds them, or in the first iteration."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    has_split_experts = config.num_moe_experts and config.tensor_model_parallel_size > 1
    assert config.sequence_parallel or not has_split_experts, (
        "experts with tensor parallelism need sequence_parallel"
    )
    if config.transformer_impl == "local":
        # With `rms_norm` the provider gives this norm from then on, whatever is asked for.
        of_rms = config.normalization == "RMSNorm"
        norm = WrappedTorchNorm if of_rms else LocalSpecProvider().layer_norm()
        norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        assert config.context_parallel_size == 1, "context parallelism needs Transformer Engine"
