"""Keeps secrets out of run folders, dashboards, error messages and recorded command lines.

Two rules hide a secret: its *name* looks like that of a secret; or, whatever its name, the text has
the shape of a well-known token or holds the password of a URL. A secret with an innocent name and
without such a shape is not found: secrets belong in the environment of the process that needs them,
which is written nowhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

REDACTED = "***"

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORDS = re.compile(r"[^A-Za-z0-9]+")
_ANYWHERE = {"secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey"}
_LAST = {"token", "pass", "pwd", "auth"}
_OF_A_VOCABULARY = {"bos", "eod", "eos", "mask", "middle", "pad", "prefix", "suffix", "unk"}
_KINDS_OF_KEY = {"access", "api", "auth", "encryption", "license", "private", "service", "ssh"}

_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+(?=@)")
_TOKEN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|sk-[\w-]{20,}|xox[abp]-[\w-]{10,}|AKIA[A-Z0-9]{16})\b"
)
# A name, then `=` or (in `{NAME:VALUE}`, or as an HTTP header) `:`, then a value.
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w.\-]*)(\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,{}\"']+)")


def is_secret_name(name: str) -> bool:
    """Whether a value with this name must be hidden.

    Example:
        >>> [is_secret_name(name) for name in ("WANDB_API_KEY", "cluster.env.HF_TOKEN", "token")]
        [True, True, True]
        >>> [is_secret_name(name) for name in ("tokenizer_type", "moe_token_dispatcher_type")]
        [False, False]
    """
    words = [word.lower() for word in _WORDS.split(_CAMEL.sub("_", name)) if word]
    while words and words[-1].isdigit():
        words.pop()
    if not words:
        return False
    if words[-1] == "token" and _OF_A_VOCABULARY.intersection(words):
        return False
    if _ANYWHERE.intersection(words) or words[-1] in _LAST:
        return True
    if words[-1] == "id" and words[-3:-1] == ["access", "key"]:
        return True
    # `key` alone is the key of a mapping; SOMETHING_KEY in an environment is a secret.
    before = words[:-1]
    environment = name == name.upper() and bool(before)
    return words[-1] == "key" and (environment or bool(_KINDS_OF_KEY.intersection(before)))


def redact(value: Any, name: str = "") -> Any:
    """A copy of nested plain values in which secrets are `REDACTED`.

    Args:
        value: a value, or nested mappings, lists and tuples of values; not mutated.
        name: the key of the value. Under a secret name None, flags and empty strings stay visible:
            they only show whether the secret is set.
    """
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([redact(item, name) for item in value])
    if is_secret_name(name) and value is not None and value != "" and not isinstance(value, bool):
        return REDACTED
    return _without_shapes(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """`text` without the values of `NAME=VALUE` and `NAME: VALUE` that look secret."""

    def hide(found: re.Match[str]) -> str:
        name, between, _ = found.groups()
        return f"{name}{between}{REDACTED}" if is_secret_name(name) else found[0]

    return _without_shapes(_ASSIGNMENT.sub(hide, text))


def redact_command(command: str) -> str:
    """A command line without the secrets in `NAME=VALUE` words and `--name VALUE` pairs.

    Args:
        command: a command line as `shlex.join` writes it; words keep their quoting.
    """
    words = shlex.split(command)
    shown, hides_next = [], False
    for word in words:
        shown.append(REDACTED if hides_next else redact_text(word))
        hides_next = word.startswith("--") and "=" not in word and is_secret_name(word)
    return shlex.join(shown).replace(shlex.quote(REDACTED), REDACTED)


def _without_shapes(text: str) -> str:
    return _TOKEN_SHAPES.sub(REDACTED, _URL_PASSWORD.sub(rf"\1:{REDACTED}", text))
