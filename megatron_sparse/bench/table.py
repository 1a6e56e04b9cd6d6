"""What every bench has in common: checked arguments, threads, taking turns, cells and files.

Rows are timed in turn: each round runs the operation, the copy and the peers once, so that what
slows the machine down for a while slows all of them. `copy` copies half the bytes that an operation
moves: it reads as many as it writes.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.errors import ConfigError
from megatron_sparse.version import __version__

SIZE_FACTOR = 4

type Action = Callable[[], object]
type Check = tuple[str, object, bool, str]
"""An argument's name, its value, whether that fits, and what would."""


def check_arguments(bench: str, checks: Iterable[Check]) -> None:
    """Refuses the first argument that does not fit.

    Raises:
        ConfigError: names the bench and the argument.
    """
    for name, value, fits, expected in checks:
        if not fits:
            raise ConfigError(f"{bench}: {name} is out of range", expected=expected, got=value)


@dataclass(frozen=True, kw_only=True)
class SizeSweep:
    """What every bench of the codec sweeps over, and how often it measures.

    Attributes:
        min_bytes: size of the smallest gradient; each is `SIZE_FACTOR` times the one before.
        max_bytes: no gradient is larger.
        warmup: rounds before the first that counts.
        iters: rounds that count.
        threads: torch's threads; None leaves them.
    """

    min_bytes: int = 2**20
    max_bytes: int = 2**26
    warmup: int = 3
    iters: int = 20
    threads: int | None = None

    def range_checks(self) -> list[Check]:
        """For `check_arguments`."""
        warmup, iters, threads = self.warmup, self.iters, self.threads
        at_most = f"4 to max_bytes ({self.max_bytes})"
        return [
            ("min_bytes", self.min_bytes, 4 <= self.min_bytes <= self.max_bytes, at_most),
            # One wire segment holds what is measured.
            ("max_bytes", self.max_bytes, self.max_bytes < 2**32, "less than 4 GiB"),
            ("warmup", warmup, warmup >= 0, "0 or more"),
            ("iters", iters, iters >= 1, "1 or more"),
            ("threads", threads, threads is None or threads >= 1, "1 or more"),
        ]

    def sizes(self) -> Iterator[int]:
        """Bytes of each gradient."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size *= SIZE_FACTOR


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Within it, torch's threads are `count`; None leaves them."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_cpu(threads: int | None) -> str:
    """The machine and the versions, for a table's first line."""
    return (
        f"{platform.processor() or platform.machine()}, megatron_sparse {__version__}, "
        f"torch {torch.__version__}, {threads or torch.get_num_threads()} threads, "
        f"{ops.supported_isas()[-1]}"
    )


def copy_action(bytes_moved: int, device: torch.device | str = "cpu") -> Action:
    """The ceiling: a plain copy that reads and writes `bytes_moved` in all."""
    source = torch.ones(max(bytes_moved // 2, 1), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # written, so that its pages exist
    return lambda: target.copy_(source)


def time_in_turn(actions: Sequence[Action], warmup: int, iters: int) -> list[list[float]]:
    """Microseconds of each action in each round that counts; on the host's clock."""
    times_us: list[list[float]] = [[] for _ in actions]
    for round_index in range(warmup + iters):
        for action, kept in zip(actions, times_us, strict=True):
            start_s = time.perf_counter()
            action()
            if round_index >= warmup:
                kept.append((time.perf_counter() - start_s) * 1e6)
    return times_us


def cell(value: float | None, width: int, digits: int) -> str:
    """A number of `digits` decimals to the right of `width` columns; `-` for None."""
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"
