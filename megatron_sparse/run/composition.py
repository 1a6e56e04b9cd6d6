"""From Hydra's groups and overrides, or from a file, to a checked `RunConfig`.

The dataclasses are the schema: an unknown key, a value of another type and an unknown option of a
group all raise a `ConfigError` that names the valid ones.
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
from megatron_sparse.errors import ConfigError
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
_AT_ROOT = re.compile(r"^(preset|experiment|cluster|model)=")
_SETTING = re.compile(r"[~+]*(preset|compression|scheme|planner|straggler|experiment|plugin)\b")
_FREE = re.compile(r"(megatron|cluster\.env)[.=]")
_NO_NAME = re.compile(r"null|true|false|\d+", re.IGNORECASE)
"""Values that Hydra reads as no text; as a group's option they end it with a traceback."""


def register_schema() -> None:
    """Makes `RunConfig` the base of `configs/train.yaml`. Idempotent."""
    ConfigStore.instance().store(name="run_config", node=RunConfig)
    # The template of `--help` has `${groups:}` and `${keys:}`.
    OmegaConf.register_new_resolver(
        "groups", lambda: described.groups_help(GROUPS, group_options), replace=True
    )
    OmegaConf.register_new_resolver(
        "keys",  # OmegaConf passes the whole configuration as `_root_`
        lambda *, _root_: described.keys_help(OmegaConf.to_container(_root_, resolve=False)),  # type: ignore[arg-type]
        replace=True,
    )


def group_options(group: str) -> list[str]:
    """The options of a group, sorted."""
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
    """One override as Hydra's parser takes it; the user writes neither `++` nor `@_global_`."""
    if _FREE.match(override):  # adds a key, such as megatron.manual_gc=true
        override = f"++{override}"
    _check_names(override)
    # The values of a preset, an experiment, a cluster or a model belong at the root.
    override = _AT_ROOT.sub(r"\1@_global_=", override)
    return _scheme_override(override)


def _check_names(override: str) -> None:
    """Refuses values that cannot be the name of a group's option.

    Raises:
        ConfigError: lists the options.
    """
    group, _, value = override.partition("=")
    for name in value.split(",") if group in GROUPS else ():
        if _NO_NAME.fullmatch(name):
            raise ConfigError(
                f"{group} has no option {name!r}",
                expected=" | ".join(group_options(group)),
                got=override,
                remedy=f"choose one, or leave {group} out",
            )


def with_preset(arguments: Sequence[str]) -> list[str]:
    """The arguments of `train`, with `preset=auto` where none of them is about synchronisation.

    With --hydra-help Hydra composes its own configuration, which has no presets.

    Example:
        >>> with_preset(["model=gpt_tiny"]), with_preset(["scheme=zen"])
        (['preset=auto', 'model=gpt_tiny'], ['scheme=zen'])
    """
    names_one = any(map(_SETTING.match, arguments))
    stays = names_one or "--hydra-help" in arguments
    return list(arguments) if stays else ["preset=auto", *arguments]


def _is_override(text: str) -> bool:
    return not text.startswith("-") and ("=" in text or text.startswith("~"))


def _scheme_override(text: str) -> str:
    """Spells `scheme=NAME` as `scheme.name=NAME`: schemes have no files of their own."""
    group, _, value = text.partition("=")
    if group != SCHEME:
        return text
    known = group_options(SCHEME)
    for name in value.split(","):
        if re.fullmatch(r"\w+", name) and name not in known:
            raise _unknown_option(f"{SCHEME}/{name}", known)
    return f"{SCHEME}.name={value}"


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Composes and checks the configuration of `megatron-sparse train OVERRIDE...`.

    Args:
        overrides: as on the command line.

    Raises:
        ConfigError: an option, key or value is wrong.

    Example:
        >>> compose(["model=gpt2_xl", "compression=topk999"]).compression.density
        0.001
    """
    register_schema()
    GlobalHydra.instance().clear()
    spelt = hydra_overrides(overrides)
    try:
        with initialize_config_module(CONFIG_MODULE, version_base=None):
            return from_hydra(hydra_compose(CONFIG_NAME, overrides=spelt))
    except COMPOSITION_ERRORS as error:
        raise config_error(error) from None


def from_hydra(composed: DictConfig) -> RunConfig:
    """Checks a configuration that Hydra composed.

    Raises:
        ConfigError: a value is wrong.
    """
    try:
        resolved = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise config_error(error) from None
    return from_mapping(resolved)  # type: ignore[arg-type]


def from_mapping(mapping: Mapping[str, Any]) -> RunConfig:
    """Makes a configuration of nested plain values, and checks it.

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
    try:
        mapping = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # yaml's errors have no common base with those of the disk
        mapping = f"{type(error).__name__}: {error}"
    if not isinstance(mapping, dict) or not mapping:
        raise ConfigError(
            f"{path} cannot be read",
            expected="the configuration of a run, as YAML",
            got=mapping or "nothing in it",
            remedy="start the run again; it writes this file",
        )
    return from_mapping(mapping)  # type: ignore[arg-type]


def saved_schedule(path: Path) -> dict[str, int]:
    """The numbers of `compression.warmup_iters` and `compression.ramp_iters` in a run's file.

    Returns:
        Those that are numbers there: with `compression.density=auto` the ramp is null. None of a
        file that cannot be read. The file is not checked as a `RunConfig`, because its other keys
        may be of another version.
    """
    try:
        section = OmegaConf.to_container(OmegaConf.load(path))["compression"]  # type: ignore[index]
        found = {key: section[key] for key in ("warmup_iters", "ramp_iters")}  # type: ignore[index]
    except Exception:  # yaml's errors have no common base with those of the disk
        return {}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def save(config: RunConfig, path: Path, command: str) -> None:
    """Writes every value of the run as YAML, under a comment with the command that made it.

    Secrets in the command are hidden, and every variable of `cluster.env` that is not on the
    allow-list of `redaction`; the ranks read those from their own environment. `load` returns every
    other value unchanged.
    """
    values = dataclasses.asdict(config)
    values["cluster"]["env"] = redact(values["cluster"]["env"], "env")
    text = OmegaConf.to_yaml(OmegaConf.create(values))
    head = f"# {redact_command(command)}\n# megatron_sparse {__version__}\n"
    path.write_text(head + text, "utf-8")


def config_error(error: Exception) -> ConfigError:
    """Turns one of `COMPOSITION_ERRORS` into a typed one, by its class, or else by its text."""
    cause = error.__cause__ if isinstance(error, ConfigCompositionException) else None
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _unknown_option(error.missing_cfg_file, error.options or ())
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"the override {error.override!r} cannot be read",
            expected="group=option or section.key=value",
            got=_first_line(error),
            remedy="quote values with special characters: 'name=\"a b\"'",
        )
    for found in (error, cause):
        if isinstance(found, ValidationError):
            return _wrong_type(found)
        if isinstance(found, ConfigKeyError | ConfigAttributeError):
            return _unknown_key(str(found.full_key or ""))
    several = re.match("Ambiguous value for argument '(.+)'", str(error))
    if several:
        # `hydra_overrides` has added these.
        given = several[1].replace("@_global_", "").lstrip("+")
        key, _, value = given.partition("=")
        return ConfigError(
            f"{key} has several values",
            expected="one value, or --multirun for a run of each",
            got=given,
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
        # In one line: the first of Hydra's lines names the file, the next ones the key or place.
        got=" ".join(str(error).split()),
        remedy="megatron-sparse train --help shows groups and options",
    )


def _unknown_option(name: str, options: Sequence[str]) -> ConfigError:
    """The error for `name`, a `group/option` that is not one of the group's `options`."""
    group, _, option = name.removesuffix(".yaml").rpartition("/")
    meant = _closest(option, options)
    return ConfigError(
        f"{group or 'the configuration'} has no option {option!r}",
        expected=" | ".join(options) or "a file of that name",
        got=f"{group}={option}",
        remedy=f"did you mean {meant}?" if meant else f"choose one, or add configs/{name}.yaml",
    )


def closest_key(key: str) -> str | None:
    """The key, or the group, that the user most likely means by a name that is none.

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
    meant = by_last.get(last) or _OTHER_NAMES.get(last)
    # Groups are no keys, but the misspelt word may be the name of one.
    meant = meant or _closest(key, [*keys, *GROUPS])
    return meant or by_last.get(_closest(last, list(by_last)) or "")


def _unknown_key(key: str) -> ConfigError:
    """The error for a key that no section has: lists the section's keys and names the nearest."""
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
    """The error for a value of another type."""
    key = str(error.full_key or "")
    keys = described.every_key()
    outer = re.sub(r"[.\[][^.\[]*$", "", key)  # of an item of a list or mapping
    known = keys.get(key) or keys.get(outer)
    return ConfigError(
        f"{key or 'a section'} has the wrong type",
        expected=known.type if known else "a section of keys",
        got=_first_line(error),
    )


def _closest(word: str, words: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, words, n=1, cutoff=0.6)), None)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
