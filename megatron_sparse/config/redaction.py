"""Keeps secrets out of run folders, dashboards, error messages and recorded command lines.

Environment variables are recorded by an allow-list: those that decide how ranks start, meet and
compute, and no other (`is_recorded_variable`). This holds for the process's environment and for
`cluster.env`.

Two rules hide a secret elsewhere, and in the value of an allowed variable: its *name* looks like
that of a secret; or, whatever its name, the text has the shape of a well-known token or holds the
credentials of a URL. A secret with an innocent name and without such a shape is not found. It
belongs in the environment of the process that needs it.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

REDACTED = "***"

_SECRET_NAME = re.compile(
    # These words anywhere, such as in `password_file`.
    r"(?:^|_)(?:secrets?|passwd|password|passphrase|credentials?|apikey|cookies?|jwt|pgpass)(?:_|$)"
    # These as the last word: `moe_token_dispatcher_type` is no secret.
    r"|(?:^|_)(?:token|pass|pwd|auth|creds?|session|sig|signature)$"
    # `key` with a word before it: alone it is the key of a mapping.
    r"|(?:^|_)(?:access|api|auth|encryption|license|private|service|ssh)_(?:\w+_)?key(?:_id)?$"
)
"""Finds secrets' names, which are written in lower case with underscores."""
_SECRET_VARIABLE = re.compile(r"[A-Z0-9_]+_KEY")

_URL_USER = re.compile(r"(?<=://)[^/\s]+(?=@)")
"""The user and password of an address. The user alone may be a key, as at an error tracker."""
_TOKEN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|sk-[\w-]{20,}|xox[abp]-[\w-]{10,}|AKIA[A-Z0-9]{16})\b"
)
# A name, then `=` or (in `{NAME:VALUE}`, or as an HTTP header) `:`, then a value.
_ASSIGNMENT = re.compile(
    r"([A-Za-z_][\w.\-]*)(\s*(?:=|:(?!//))\s*)(\"[^\"]*\"|'[^']*'|[^\s,{}\"']+)"
)
_OVERRIDE = re.compile(r"([+~-]*)([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)
_ENVIRONMENT_SECTION = "env"
"""The section of a configuration (`cluster.env`) whose keys are environment variables."""

_RECORDED_PREFIXES = (
    *("MEGATRON_SPARSE_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "PYTORCH_"),
    *("TORCH_", "TORCHELASTIC_", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
    # libfabric: the files of configs/cluster set it.
    "FI_",
)
_RECORDED_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONPATH", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SILENT"),
}
# By name, because Slurm's variables hold secrets, too: SLURM_JWT is a credential, SLURM_EXPORT_ENV
# the text of --export=NAME=VALUE, SLURM_JOB_COMMENT free text, SLURM_SPANK_* a plugin's options.
_RECORDED_OF_SLURM = re.compile(
    r"SLURM_(?:CLUSTER_NAME|DISTRIBUTION|NNODES|NODEID|NODELIST|NPROCS|NTASKS|PROCID|LOCALID"
    r"|RESTART_COUNT|TASKS_PER_NODE|NTASKS_PER_\w+|CPUS_\w+|CPU_BIND\w*|MEM_\w+|GPUS\w*"
    r"|THREADS_PER_CORE|SUBMIT_HOST|GTIDS|TOPOLOGY_ADDR\w*"
    r"|(?:JOB|STEP|ARRAY_JOB|ARRAY_TASK)_(?:ID|NAME|NODELIST|NUM_NODES|NUM_TASKS|CPUS_PER_NODE"
    r"|GPUS|PARTITION|QOS|START_TIME|END_TIME|TASKS_PER_NODE|RESERVATION|COUNT|MIN|MAX))"
)


def is_recorded_variable(name: str) -> bool:
    """Whether an environment variable is on the allow-list, and its name is not a secret's.

    Example:
        >>> [is_recorded_variable(name) for name in ("NCCL_DEBUG", "SLURM_JOB_ID", "RANK")]
        [True, True, True]
        >>> [is_recorded_variable(name) for name in ("PGPASS", "SLURM_JWT", "HOME")]
        [False, False, False]
    """
    allowed = (
        name.startswith(_RECORDED_PREFIXES)
        or name in _RECORDED_NAMES
        or _RECORDED_OF_SLURM.fullmatch(name) is not None
    )
    return allowed and not is_secret_name(name)


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be recorded, sorted by name; secrets in their values are hidden."""
    return {
        name: redact_text(value)
        for name, value in sorted(environment.items())
        if is_recorded_variable(name)
    }


def is_secret_name(name: str) -> bool:
    """Whether the name of a key or variable looks like that of a secret.

    Example:
        >>> [is_secret_name(name) for name in ("WANDB_API_KEY", "cluster.env.HF_TOKEN", "token")]
        [True, True, True]
        >>> [is_secret_name(name) for name in ("tokenizer_type", "moe_token_dispatcher_type")]
        [False, False]
    """
    snake = re.sub(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", "_", name)  # cuts `apiKey`, too
    # A number at the end says nothing: API_KEY_2 is a key.
    snake = re.sub(r"(?:_\d*)+$", "", snake)
    # In capitals any name that ends in _KEY is a secret's, in lower case only some.
    is_variable = _SECRET_VARIABLE.fullmatch(snake) is not None
    return is_variable or _SECRET_NAME.search(snake.lower()) is not None


def redact(value: Any, name: str = "") -> Any:
    """A copy of nested plain values in which secrets are `REDACTED`.

    Args:
        value: a value, or nested mappings, lists and tuples of values; not mutated.
        name: the key of `value`; items of a list have the key of the list. Under a secret's name,
            None, flags and empty strings stay visible: they only show whether the secret is set.
            In the section `env` every variable that is not `is_recorded_variable` is hidden.
    """
    if isinstance(value, Mapping):
        if name == _ENVIRONMENT_SECTION:
            return {
                key: redact(item, str(key)) if is_recorded_variable(str(key)) else REDACTED
                for key, item in value.items()
            }
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([redact(item, name) for item in value])
    only_tells_if_set = value is None or value == "" or isinstance(value, bool)
    if is_secret_name(name) and not only_tells_if_set:
        return REDACTED
    return _without_shapes(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Hides tokens in `text`, and values of `NAME=VALUE` and `NAME: VALUE` if NAME looks secret."""
    shown, position = [], 0  # the text before `position` is in `shown`
    while found := _ASSIGNMENT.search(text, position):
        name, value_start = found[1], found.end(2)  # after the `=` or `:`
        shown.append(text[position:value_start])
        if _is_hidden(name):
            shown.append(REDACTED)
            position = found.end()
        else:
            # The value of a harmless name may itself have an assignment in it.
            position = value_start
    return _without_shapes("".join(shown) + text[position:])


def _is_hidden(name: str) -> bool:
    """Whether the value of a key, such as `cluster.device`, or of a variable is hidden in a text.

    In the section `env`, as in `cluster.env.NAME`, all variables but the recorded ones are hidden.
    """
    parts = name.split(".")
    if len(parts) > 1 and parts[-2] == _ENVIRONMENT_SECTION:
        return not is_recorded_variable(parts[-1])
    return is_secret_name(name)


def redact_command(command: str) -> str:
    """A command line without the secrets in `NAME=VALUE` words and `--name VALUE` pairs.

    Args:
        command: a command line as `shlex.join` writes it; words keep their quoting.
    """
    words = shlex.split(command)
    shown, is_secret_value = [], False
    for word in words:
        shown.append(REDACTED if is_secret_value else _redact_word(word))
        # The word after `--api-key` is its value.
        is_secret_value = word.startswith("--") and "=" not in word and is_secret_name(word)
    # `shlex.join` quotes the stars of `REDACTED`; they need no quotes, as this is only shown.
    return shlex.join(shown).replace(shlex.quote(REDACTED), REDACTED)


def _redact_word(word: str) -> str:
    """A word of a command line without its secrets; `NAME=VALUE` is an override for Hydra.

    An override's secret value is hidden as a whole, because it may contain spaces and commas.
    """
    override = _OVERRIDE.fullmatch(word)
    if override is None:
        return redact_text(word)
    sign, name, value = override.groups()  # sign: Hydra's `+`, `++`, `~`, or a flag's dashes
    if _is_hidden(name):
        return f"{sign}{name}={REDACTED}"
    if name.rpartition(".")[2] == _ENVIRONMENT_SECTION:  # cluster.env={NAME:VALUE,...}
        return f"{sign}{name}={_ASSIGNMENT.sub(_hide_variable, value)}"
    return redact_text(word)


def _hide_variable(found: re.Match[str]) -> str:
    """A `NAME:VALUE` of `cluster.env={...}`."""
    name, between, value = found.groups()
    return f"{name}{between}{redact_text(value) if is_recorded_variable(name) else REDACTED}"


def _without_shapes(text: str) -> str:
    return _TOKEN_SHAPES.sub(REDACTED, _URL_USER.sub(REDACTED, text))
