"""Makes a checked `RunConfig` of Hydra's groups and overrides, or of a run's file.

A group, such as `model`, is a choice between YAML files, its options: `model=gpt_tiny`. An override
sets a group or a key. The dataclasses are the schema: an unknown key, a value of another type and
an unknown option of a group raise a `ConfigError` that names the valid ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import AUTO, SCHEMES, check, check_names
from megatron_sparse.config import described
from megatron_sparse.config.redaction import redact, redact_command
from megatron_sparse.config.run import RunConfig
from megatron_sparse.errors import ConfigError, first_line
from megatron_sparse.megatron.arguments import OWNED_FLAGS
from megatron_sparse.version import __version__

CONFIG_MODULE = "megatron_sparse.configs"
CONFIG_NAME = "train"
GROUPS = ("preset", "model", "compression", "scheme", "cluster", "data", "tracking", "experiment")

SCHEME = "scheme"
"""The group whose options are the registered schemes; the others have a file for each option."""

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
"""What Hydra raises where files and overrides make no configuration."""
_OTHER_NAMES = {**OWNED_FLAGS, "cluster_models": "planner.cluster"}
"""Names of other programs and files for keys of ours, with the key."""
_AT_ROOT = ("preset", "experiment", "cluster", "model")
_SETTING = re.compile(r"[~+]*(preset|compression|scheme|planner|straggler|experiment|plugin)\b")
_FREE = re.compile(r"(megatron|cluster\.env)[.=]")
_NO_NAME = re.compile(r"null|true|false|nan|[+-]?(inf|\d[\d_]*(\.[\d_]*)?(e[+-]?\d+)?)", re.I)
"""Values that Hydra reads as no text; as a group's option they end it with a traceback."""


def register_schema() -> None:
    """Makes `RunConfig` the schema of `configs/train.yaml`; fills in `--help`. Idempotent."""
    ConfigStore.instance().store(name="run_config", node=RunConfig)
    # These functions fill `${groups:}` and `${keys:}` in the template of `--help`.
    OmegaConf.register_new_resolver(
        "groups", lambda: described.groups_help(GROUPS, group_options), replace=True
    )
    OmegaConf.register_new_resolver(
        "keys",  # OmegaConf passes the whole configuration to a parameter named `_root_`
        lambda *, _root_: described.keys_help(OmegaConf.to_container(_root_, resolve=False)),  # type: ignore[arg-type]
        replace=True,
    )


def group_options(group: str) -> list[str]:
    """The options of a group, sorted: names of schemes for `scheme`, else of the group's files."""
    if group == SCHEME:
        return sorted([AUTO, *SCHEMES])
    folder = files(CONFIG_MODULE) / group
    names = [entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    return sorted(name.removesuffix(".yaml") for name in names)


def hydra_overrides(overrides: Sequence[str]) -> list[str]:
    """Rewrites overrides to Hydra's syntax.

    Hydra's flags come first: its parser refuses overrides on both sides of a flag.
    """
    flags = [text for text in overrides if not _is_override(text)]
    values = [text for text in overrides if _is_override(text)]
    return [*flags, *map(_in_hydra_syntax, values)]


def _in_hydra_syntax(override: str) -> str:
    """Adds to one override what Hydra needs and users omit; refuses options Hydra cannot check.

    Raises:
        ConfigError: lists the options.
    """
    if _FREE.match(override):  # a key that is in no schema, such as megatron.manual_gc=true
        return f"++{override}"
    group, _, value = override.partition("=")
    if group not in GROUPS:
        return override
    known = group_options(group)
    for name in value.split(","):
        if _NO_NAME.fullmatch(name):
            raise ConfigError(
                f"{group} has no option {name!r}",
                expected=" | ".join(known),
                got=override,
                remedy=f"choose one, or leave {group} out",
            )
        # What is no word, as both parts of a sweep's `choice(a,b)`, is left to Hydra.
        if group == SCHEME and re.fullmatch(r"\w+", name) and name not in known:
            raise _unknown_option(f"{SCHEME}/{name}", known)
    if group == SCHEME:  # Hydra has no file for a scheme
        return f"{SCHEME}.name={value}"
    # Files of these groups have keys of several sections: Hydra has to put them at the root.
    return f"{group}@_global_={value}" if group in _AT_ROOT else override


def with_preset(arguments: Sequence[str]) -> list[str]:
    """Puts `preset=auto` before the arguments of `train` if none sets synchronisation (`_SETTING`).

    Not with --hydra-help, for which Hydra composes its own configuration, without presets.

    Example:
        >>> with_preset(["model=gpt_tiny"]), with_preset(["scheme=zen"])
        (['preset=auto', 'model=gpt_tiny'], ['scheme=zen'])
    """
    if any(map(_SETTING.match, arguments)) or "--hydra-help" in arguments:
        return list(arguments)
    return ["preset=auto", *arguments]


def _is_override(text: str) -> bool:
    return not text.startswith("-") and ("=" in text or text.startswith("~"))


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Composes and checks the configuration of `megatron-sparse train OVERRIDE...`.

    Raises:
        ConfigError: an option, key or value is wrong.

    Example:
        >>> compose(["model=gpt2_xl", "compression=topk999"]).compression.density
        0.001
    """
    register_schema()
    GlobalHydra.instance().clear()  # an earlier call may have initialised Hydra
    rewritten = hydra_overrides(overrides)
    try:
        with initialize_config_module(CONFIG_MODULE, version_base=None):
            return from_hydra(hydra_compose(CONFIG_NAME, overrides=rewritten))
    except COMPOSITION_ERRORS as error:
        raise config_error(error) from None


def from_hydra(composed: DictConfig) -> RunConfig:
    """Makes a checked `RunConfig` of a configuration that Hydra composed.

    Raises:
        ConfigError: a value is wrong.
    """
    try:
        resolved = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise config_error(error) from None
    return from_mapping(resolved)  # type: ignore[arg-type]


def from_mapping(mapping: Mapping[str, Any]) -> RunConfig:
    """Makes a checked `RunConfig` of nested plain values.

    Raises:
        ConfigError: a key is unknown or a value is wrong.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), dict(mapping))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise config_error(error) from None
    assert isinstance(config, RunConfig)
    if config.plugin:
        sharded = config.training.use_distributed_optimizer
        op = CollectiveOp.REDUCE_SCATTER if sharded else CollectiveOp.ALL_REDUCE
        check(config.sparse, op)
    else:
        # Plain Megatron runs no scheme. Only a name that does not exist is refused.
        check_names(config.scheme, config.planner)
    return config


def load(path: Path) -> RunConfig:
    """Reads a file that `save` wrote.

    Raises:
        ConfigError: the file cannot be read, or is not a run's configuration.
    """
    problem = "nothing in it"
    mapping: Any = None
    try:
        mapping = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # yaml's errors have no common base with those of the disk
        problem = f"{type(error).__name__}: {error}"
    if not isinstance(mapping, dict) or not mapping:
        raise ConfigError(
            f"{path} cannot be read",
            expected="the configuration of a run, as YAML",
            got=mapping or problem,
            remedy="start the run again; it writes this file",
        )
    return from_mapping(mapping)  # type: ignore[arg-type]


def saved_schedule(path: Path) -> dict[str, int]:
    """Reads `compression.warmup_iters` and `compression.ramp_iters` from a run's `config.yaml`.

    The file is not checked as a `RunConfig`, because another version may have written it.

    Returns:
        `warmup_iters` and `ramp_iters` -> number. A value that is null, as the ramp is with
        `compression.density=auto`, is left out. Empty if the file cannot be read.
    """
    try:
        section = OmegaConf.to_container(OmegaConf.load(path))["compression"]  # type: ignore[index]
        found = {key: section[key] for key in ("warmup_iters", "ramp_iters")}  # type: ignore[index]
    except Exception:  # yaml's errors have no common base with those of the disk
        return {}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def save(config: RunConfig, path: Path, command: str) -> None:
    """Writes every value of the run as YAML, under a comment with the command that started it.

    Hides secrets in the command, and each variable of `cluster.env` that is not on the allow-list
    of `redaction`; the ranks read hidden variables from their environment. `load` returns every
    other value unchanged.
    """
    values = dataclasses.asdict(config)
    values["cluster"]["env"] = redact(values["cluster"]["env"], "env")
    text = OmegaConf.to_yaml(OmegaConf.create(values))
    head = f"# {redact_command(command)}\n# megatron_sparse {__version__}\n"
    path.write_text(head + text, "utf-8")


def config_error(error: Exception) -> ConfigError:
    """Turns one of `COMPOSITION_ERRORS` into a `ConfigError`, by its class, or else by its text."""
    # Hydra wraps OmegaConf's errors, which name the key.
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else None
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, error.options or ())
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"the override {error.override!r} cannot be read",
            expected="group=option or section.key=value",
            got=first_line(error),
            remedy="quote values with special characters: 'name=\"a b\"'",
        )
    for found in (error, cause):
        if isinstance(found, ValidationError):
            return _wrong_type(found)
        if isinstance(found, ConfigKeyError | ConfigAttributeError):
            return _unknown_key(str(found.full_key or ""))
    several = re.match("Ambiguous value for argument '(.+)'", str(error))
    if several:
        # Shows the override as the user wrote it, before `hydra_overrides`.
        override = several[1].replace("@_global_", "").lstrip("+")
        key, _, value = override.partition("=")
        return ConfigError(
            f"{key} has several values",
            expected="one value, or --multirun for a run of each",
            got=override,
            remedy=f"add --multirun; or, as one text with a comma, quote it: '{key}=\"{value}\"'",
        )
    named = re.match(
        r"Could not (?:override|append to|delete from config)[^']*'([^']+)'", str(error)
    )
    if named:
        return _unknown_key(named[1])
    return ConfigError(
        "the configuration cannot be composed",
        expected=f"{CONFIG_NAME}.yaml with options of {', '.join(GROUPS)}",
        # Joins Hydra's lines: the first names the file, the next ones the key or line number.
        got=" ".join(str(error).split()),
        remedy="megatron-sparse train --help shows groups and options",
    )


def _unknown_option(name: str, options: Sequence[str]) -> ConfigError:
    """The error for `name`, a `group/option` that is not one of the group's `options`."""
    group, _, option = name.removesuffix(".yaml").rpartition("/")
    meant = _closest(option, options)
    return ConfigError(
        f"{group} has no option {option!r}" if group else f"no configuration file {option!r}",
        expected=" | ".join(options) or "a file of that name",
        got=f"{group}={option}" if group else f"--config-name {option}",
        remedy=f"did you mean {meant}?" if meant else "choose one, or give its --config-dir",
    )


def closest_key(key: str) -> str | None:
    """The key, or the group, that the user most likely means by an unknown name; None if unclear.

    Args:
        key: with or without a section; names of Megatron's flags count too.

    Example:
        >>> closest_key("training.train_iters"), closest_key("lr_warmup")
        ('training.iterations', 'training.lr_warmup_iters')
    """
    keys = list(described.every_key())
    last = key.rpartition(".")[2]
    # Reversed: where two sections have a key of one name, the first section's counts.
    by_last = {known.rpartition(".")[2]: known for known in reversed(keys)}
    # A key without its section or in a wrong one, or by another name; else a misspelt key or group.
    meant = by_last.get(last) or _OTHER_NAMES.get(last) or _closest(key, [*keys, *GROUPS])
    return meant or by_last.get(_closest(last, list(by_last)) or "")  # misspelt and no section


def _unknown_key(key: str) -> ConfigError:
    """The error for a key that no section has: lists the section's keys, suggests the closest."""
    section = key.rpartition(".")[0]
    known_keys = described.every_key()
    inside = [known for known in known_keys if section and known.startswith(f"{section}.")]
    meant = closest_key(key)
    hint = f"did you mean {meant}? " if meant else ""
    return ConfigError(
        f"there is no key {key!r}",
        expected=", ".join(inside) or f"a group ({', '.join(GROUPS)}) or a key of a section",
        got=key,
        remedy=f"{hint}megatron-sparse train --cfg job shows every key, CHANGELOG.md what replaces "
        "removed ones; Megatron's own flags go to megatron.FLAG=VALUE",
    )


def _wrong_type(error: ValidationError) -> ConfigError:
    """The error for a value that does not have its key's type."""
    key = str(error.full_key or "")
    keys = described.every_key()
    # For an item of a list or mapping, as `a.b[0]` or `a.b.c`, the type is declared for `a.b`.
    outer = re.sub(r"[.\[][^.\[]*$", "", key)
    known = keys.get(key) or keys.get(outer)
    return ConfigError(
        f"{key or 'a section'} has the wrong type",
        expected=known.type if known else "a section of keys",
        got=first_line(error),
    )


def _closest(word: str, words: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.6)), None)
