"""Typed errors: each says what was expected, what came instead, and the remedy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class MegatronSparseError(Exception):
    """Base of all errors that megatron_sparse raises on purpose.

    Args:
        what: one sentence that names the thing that is wrong.
        expected: what would have been right.
        got: what came instead.
        remedy: what the user can do now.

    Example:
        >>> print(ConfigError("compression.density is out of range", expected="0 < density <= 1",
        ...                   got="7", remedy="write a fraction: 0.01 keeps one element in 100"))
        compression.density is out of range
          expected: 0 < density <= 1
          got:      7
          remedy:   write a fraction: 0.01 keeps one element in 100
    """

    exit_code = 2

    def __init__(
        self, what: str, *, expected: object = None, got: object = None, remedy: str | None = None
    ) -> None:
        self.what = what
        self.expected = expected
        self.got = got
        self.remedy = remedy
        lines = [what]
        for label, text in (("expected", expected), ("got", got), ("remedy", remedy)):
            if text is not None:
                lines.append(f"  {label + ':':<9} {text}")
        super().__init__("\n".join(lines))


class ConfigError(MegatronSparseError):
    """A configuration value is wrong, unknown, or contradicts another."""


class DependencyError(MegatronSparseError):
    """Something that must be installed is missing or has a version that does not fit."""


class ExtensionError(MegatronSparseError):
    """The compiled extension could not be built or loaded, or an op got arguments it refuses."""


class HostError(MegatronSparseError):
    """The host framework (Megatron, PyTorch DDP) lacks a function that the plugin hooks."""


class DatasetError(MegatronSparseError):
    """A dataset or tokenizer is missing or unreadable."""


class WireFormatError(MegatronSparseError):
    """A message from a peer does not decode: names the sending rank and the header field."""

    exit_code = 3


class CommunicationError(MegatronSparseError):
    """A collective failed or ran out of time: names operation, bucket and, if known, the peer."""

    exit_code = 3


class ReplicaError(CommunicationError):
    """Ranks hold different copies of the same parameters: names bucket, holder and owner."""


class ProfileError(MegatronSparseError):
    """A sparsity profile or a gradient dump is unreadable, or of another model."""


class SweepError(MegatronSparseError):
    """Runs of a sweep failed, or its folder holds damaged outcomes."""

    exit_code = 1


class SelectionError(MegatronSparseError):
    """Selections and optimizer steps came in an order that would corrupt the residual."""

    exit_code = 3


class StorageError(MegatronSparseError):
    """A disk is full: names the file or the folder."""


class CheckpointError(MegatronSparseError):
    """The plugin's part of a checkpoint is missing, damaged, or belongs to another layout."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its class if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def raise_together(title: str, errors: Sequence[MegatronSparseError]) -> None:
    """Raises one error for several, so that the user can mend all of them at once.

    A single error is raised unchanged; without errors nothing happens. `title` begins the text of
    an error for several.

    Raises:
        MegatronSparseError: an error of the first one's class.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = [f"{each.what}: {each.remedy or each.got}" for each in errors]
        raise type(errors[0])(
            f"{title}, for {len(errors)} reasons", got="\n    " + "\n    ".join(lines)
        )


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Turns an `OSError` in the `with` body, which writes a file, into a `ConfigError`.

    `what` begins the error's text: the file's path, or what it holds.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{what} cannot be written",
            expected="a file that can be written",
            got=error,
            remedy="give another path",
        ) from error
