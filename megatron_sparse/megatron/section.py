"""Checks the `megatron:` section of a run before a rank starts; reports all mistakes at once.

The section holds Megatron's own flags. Flags that *keys of ours*, in the run's other sections, set
are *owned*: the section may not set them. The quick checks need no import of megatron, and a rank
makes them too. The launcher also runs Megatron's parser, which knows each flag and value, and
Megatron's validation, with the section and without: that shows which key changes an owned flag by
another name (`use_rotary_position_embeddings`) or by a file (`yaml_cfg`). What Megatron's layers
would refuse in a rank is checked, too.
"""

import argparse
import contextlib
import dataclasses
import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
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
"""Key in `_validated`'s result for the data files that Megatron's arguments name, in any way."""
TITLE = "the megatron: section cannot be used"


def quick_errors(config: RunConfig) -> list[MegatronSparseError]:
    """Returns the errors that are visible from one key alone, without an import of megatron."""
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
            # Either `transformer_impl: transformer_engine`, or a flag that only works with it.
            if value == "transformer_engine" or (value and name in _OF_TRANSFORMER_ENGINE)
        ]
    found += [
        ConfigError(
            f"megatron.{name} does not work in megatron-sparse train",
            expected="a flag that it follows",
            got=f"megatron.{name}={section[name]}",
            remedy=f"leave it out; {alternative}",
        )
        for name, alternative in _NOT_FOLLOWED.items()
        if section.get(name) not in (None, False)
    ]
    return found


def check(
    config: RunConfig, vocab_size: int, data_prefix: Path | None, environment: Mapping[str, str]
) -> None:
    """Checks each key of the section with Megatron's parser, then all with its validation.

    No key may make the validation fail, or change an owned flag. Importing Megatron takes 5 s.

    Device and precision must be decided. `data_prefix` of None takes Megatron's mock data;
    `environment` is that of the ranks.

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
        # The batch size may fit only with that key, and the checks below also try without it.
        del derived["global_batch_size"]
    found, section = _checked_alone(config, derived, parser)  # `section` still has owned flags
    owners = {key: arguments.owner(key, value) for key, value in section.items()}
    words = arguments.command_line(derived, {}, parser)
    ranks = config.cluster.nodes * config.cluster.ranks_per_node
    # Megatron demands one connection with tensor parallelism, which the section may turn on.
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **environment}
    variables |= {"RANK": "0", "WORLD_SIZE": str(ranks)}
    # Without the section: the arguments as parsed, and after Megatron's validation.
    parsed, baseline = vars(parser.parse_args(words)), _validated(words, variables)
    if isinstance(baseline, ConfigError):  # the keys of ours are refused
        raise_together(TITLE, found)
        raise baseline
    # Argument of Megatron that no key of the section may change -> the key of ours that sets it.
    # Arguments that Megatron's validation computes are left out: they may follow from the section,
    # as the width of an MLP follows from `swiglu`.
    owned = {_DATA: "data.prefix"} | {
        dest: key
        for dest, key in arguments.owned_dests(parser).items()
        if parsed[dest] == baseline.get(dest)
    }

    def errors(keys: list[str]) -> list[MegatronSparseError]:
        """Validates these keys of the section together; the errors name the last key."""
        words = arguments.command_line(derived, {key: section[key] for key in keys}, parser)
        validated = _validated(words, variables)
        reported = {owners[key] for key in keys}  # `found` has an error for each of these
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
            if key not in reported and validated.get(dest) != baseline.get(dest)
        ]

    fitting: list[str] = []
    refused_keys = _fit(list(section), fitting, errors) if section else []
    # A refused key may need a later one: try it once more, with all keys that fit.
    for key in refused_keys:
        if owners[key] is None:  # else `found` has an error for the key
            refused = errors([*fitting, key])
            found += refused
            if not refused:
                fitting.append(key)
    raise_together(TITLE, found)


def _checked_alone(
    config: RunConfig, derived: dict[str, object], parser: argparse.ArgumentParser
) -> tuple[list[MegatronSparseError], dict[str, Any]]:
    """Checks each key of the section by itself.

    Returns:
        The errors, and the keys to check together, with their values: also a key whose only error
        is that a key of ours sets the same flag, because other keys may need its value.
    """
    found: list[MegatronSparseError] = []
    section = {}
    for key, value in config.megatron.items():
        refused = quick_errors(dataclasses.replace(config, megatron={key: value}))
        try:
            arguments.command_line(derived, {key: value}, parser)
        except ConfigError as error:
            refused.append(error)
        found += refused
        is_owned = arguments.owner(key, value) is not None
        if len(refused) == int(is_owned):  # no error but the one that every owned flag gets
            section[key] = value
    return found, section


def _fit(keys: list[str], fitting: list[str], errors: Callable[[list[str]], Any]) -> list[str]:
    """Adds to `fitting` the keys that have no errors together with it; returns the other keys.

    Halves a list that has errors, down to single keys: neighbours that need each other, such as
    `account_for_*_in_pipeline_split`, are mostly tried together.
    """
    if not errors([*fitting, *keys]):
        fitting.extend(keys)
        return []
    if len(keys) == 1:
        return keys
    half = len(keys) // 2
    return [*_fit(keys[:half], fitting, errors), *_fit(keys[half:], fitting, errors)]


def _validated(
    words: Sequence[str], variables: Mapping[str, str]
) -> dict[str, object] | ConfigError:
    """Returns Megatron's validated arguments by name, data files under `_DATA`; or its error."""
    from unittest import mock

    from megatron.training import arguments as host
    from megatron.training.utils import get_blend_and_blend_per_split

    from megatron_sparse.megatron import cpu_mode, training

    try:
        with (
            # Megatron reads the process's command line and environment.
            mock.patch.object(sys, "argv", [sys.argv[0], *words]),
            mock.patch.dict(os.environ, variables),
            # `set_global_variables` would open log writers.
            mock.patch.object(host, "set_global_variables"),
            cpu_mode.properties(),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(action="ignore"),  # the ranks will print them
        ):
            args = host.parse_and_validate_args()
            _check_layers(training.model_config_of(args).transformer)
            # `data_path` is ours, or a blend, which is allowed: nothing is compared.
            data = get_blend_and_blend_per_split(args) if args.data_path is None else None
    except Exception as error:  # of any kind: an assertion, a file that is missing
        return arguments.refusal_of(error)
    validated = {_DATA: data or (None, None), **vars(args)}
    if args.use_layer_wise_distributed_optimizer and "--use-distributed-optimizer" in words:
        validated["use_distributed_optimizer"] = True  # as given; Megatron has turned it off
    return validated


def _check_layers(config: Any) -> None:
    """Raises what Megatron's layers would raise in a rank, at their construction or first call."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    has_split_experts = config.num_moe_experts and config.tensor_model_parallel_size > 1
    assert config.sequence_parallel or not has_split_experts, (
        "experts with tensor parallelism need sequence_parallel"
    )
    if config.transformer_impl == "local":
        # The constructor raises for a norm that it cannot make. For RMSNorm the provider is not
        # asked, because it would then return this norm for all later calls.
        of_rms = config.normalization == "RMSNorm"
        norm = WrappedTorchNorm if of_rms else LocalSpecProvider().layer_norm()
        norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        assert config.context_parallel_size == 1, "context parallelism needs Transformer Engine"
