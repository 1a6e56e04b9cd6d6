"""Shared parts of `bench codecs`: a gradient, an operation on it, a table's row.

A record is what a gradient is encoded as; an oracle is the slow implementation in `reference`.
Results are first compared with an oracle's; `#wrong` counts what differs, and a wrong row is not
timed. Operation, copy and peers are timed in turn, in the same run, so that a temporary slowdown of
the machine affects all of them. Times are medians, on a GPU of the device alone.

`copy` moves as many bytes as the operation (`bench/table.py`). Peers implement the operation in
another way. They do less: none writes a header, checks an index or rounds stochastically.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, median

import numpy as np
import torch

from megatron_sparse.bench.codec.options import CodecSweep
from megatron_sparse.bench.table import Action, copy_action
from megatron_sparse.cuda_ext.record_spec import RecordSpec
from megatron_sparse.formats.message import VALUE_DTYPES as DTYPES
from megatron_sparse.formats.message import WIRE_CODES, record_spec
from megatron_sparse.run.rows import CellRow, cell, optional

KEY = 20_250_101
STEP = 1
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A gradient, and the record that it becomes.

    Attributes:
        size: bytes of the gradient.
        density: fraction of the elements that the record holds.
        dtype: of the gradient.
        form: one of `options.FORMS`, such as `pici_paper`: Pici, variant `paper`.
        device: of the gradient.
    """

    size: int
    density: float
    dtype: str
    form: str = "coo"
    device: torch.device = CPU

    @property
    def numel(self) -> int:
        """Elements of the gradient."""
        return self.size // DTYPES[self.dtype].itemsize

    def of_numel(self, numel: int) -> Case:
        """The same with another number of elements."""
        return replace(self, size=numel * DTYPES[self.dtype].itemsize)

    @property
    def code(self) -> int:
        """Of the gradient's dtype."""
        return WIRE_CODES[self.dtype]

    @property
    def spec(self) -> RecordSpec:
        """The record's format: `rice_q8` is Rice with values of 8 bits.

        `pici_paper` orders bits as Pici's paper does; `dense_q4` is Rice of all elements in 4 bits.
        """
        name, _, variant = self.form.partition("_")
        if name == "dense":
            return record_spec(variant, STEP, "rice", whole=True)
        has_few_bits = name == "rice" and variant != ""
        value_dtype = variant if has_few_bits else self.dtype
        spec = record_spec(value_dtype, STEP, name, density=self.density)
        return replace(spec, paper_order=variant == "paper")

    def gradient(self) -> torch.Tensor:
        """Normally distributed elements."""
        generator = torch.Generator(self.device).manual_seed(self.numel)
        values_N = torch.randn(self.numel, generator=generator, device=self.device)
        return values_N.to(DTYPES[self.dtype])

    @property
    def threshold(self) -> float:
        """The magnitude that `density` of a normal distribution exceeds."""
        return NormalDist().inv_cdf(1 - self.density / 2) if self.density < 1 else -1.0

    def touched_bytes(self, values_N: torch.Tensor, *, whole: bool = False) -> int:
        """Bytes of all memory lines of an fp32 accumulator that adding a gradient touches.

        Its zeros are not added, and touch no line, unless `whole`.
        """
        # A memory line: the least that a GPU, or a CPU, reads or writes to touch one element.
        line_bytes = 32 if self.device.type == "cuda" else 64
        per_line = line_bytes // 4  # fp32
        # `lines` has full lines only, without the rest; at least one line is counted.
        in_full_lines = values_N.numel() // per_line * per_line
        lines = values_N[:in_full_lines].view(-1, per_line)
        touched = lines.shape[0] if whole else int((lines != 0).any(1).sum())
        return max(touched, 1) * line_bytes


@dataclass
class Task:
    """An operation to time.

    Attributes:
        op: its name.
        format: the format that the encoder chose, or `pici_paper`; `-` if there is no record.
        bytes_moved: read and written. A scatter-add moves whole lines of the accumulator.
        wrong: elements or bytes that differ from the oracle's.
        run: the operation.
        peers: other implementations of the operation, by name.
    """

    op: str
    format: str
    bytes_moved: int
    wrong: int
    run: Action
    peers: dict[str, Action] = field(default_factory=dict)


@dataclass
class CodecRow(CellRow):
    """One line of the table and one JSON object; times are medians in microseconds.

    There is a row for each peer; the operation's own numbers are the same in all of them. A row
    whose result is wrong has no times.
    """

    count: int = cell("elements", "size >13 size(B) | count >11")
    dtype: str = cell("of the gradient and of the values on the wire", ">5 type")
    op: str = cell("the operation", ">12")
    format: str = cell("of the record; `-` if the operation makes none", ">10")
    density: float = cell("fraction that is sent", ">7g")
    bytes_moved: int = cell("read and written", ">11 moved(B)")
    device: str = cell("`cpu` or `cuda`")
    time_us: float | None = optional("of the operation", ">10.1f time(us)")
    copy_us: float | None = optional("of a copy that reads and writes as much", ">10.1f copy(us)")
    ratio: float | None = optional("the median over the rounds of time / copy", ">6.2f")
    peer_us: float | None = optional("the peer's time", ">11.1f peer(us) | peer_us/time_us >6.1f x")
    wrong: int = cell("elements or bytes that differ from the oracle's", ">6 #wrong", default=0)
    peer: str | None = optional("name of another implementation", "<1")

    @property
    def size(self) -> int:
        """Bytes of the gradient."""
        return self.count * DTYPES[self.dtype].itemsize


def measure(case: Case, task: Task, sweep: CodecSweep) -> list[CodecRow]:
    """Times a task in turn with a copy and with its peers; returns one row for each peer.

    A task without peers has one row. So has a task that is wrong, which is not timed.
    """
    row = CodecRow(
        op=task.op,
        format=task.format,
        dtype=case.dtype,
        density=case.density,
        count=case.numel,
        bytes_moved=task.bytes_moved,
        device=case.device.type,
        wrong=task.wrong,
    )
    if task.wrong:
        return [row]
    peers = task.peers if sweep.peers else {}
    actions = [task.run, copy_action(task.bytes_moved, case.device), *peers.values()]
    times_us, copies_us, *peers_us = time_in_turn(actions, sweep.warmup, sweep.iters, case.device)
    row.time_us, row.copy_us = median(times_us), median(copies_us)
    rounds = zip(times_us, copies_us, strict=True)
    row.ratio = median(time_us / copy_us for time_us, copy_us in rounds)
    timed_peers = zip(peers, peers_us, strict=True)
    return [replace(row, peer=name, peer_us=median(us)) for name, us in timed_peers] or [row]


def time_in_turn(
    actions: Sequence[Action], warmup: int, iters: int, device: torch.device = CPU
) -> list[tuple[float, ...]]:
    """Returns, for each action, its microseconds in each of the `iters` rounds after the warm-up.

    Each round runs all actions once, so that a slowdown of the machine affects all of them.
    """
    run_round = _host_round if device.type == "cpu" else _device_round
    rounds = [run_round(actions) for _ in range(warmup + iters)]
    return list(zip(*rounds[warmup:], strict=True))  # transposed: by action


def _host_round(actions: Sequence[Action]) -> list[float]:
    """Runs each action once; returns the microseconds of each."""
    times_us = []
    for action in actions:
        start_s = time.perf_counter()
        action()
        times_us.append((time.perf_counter() - start_s) * 1e6)
    return times_us


HEAD_START_CYCLES = 40_000_000
"""About 20 ms: the host needs less to launch a round."""


def _device_round(actions: Sequence[Action]) -> list[float]:
    """Runs each action once; returns the GPU's microseconds of each, between two events.

    The GPU sleeps until the host has launched everything, so the host's time does not count.
    """
    torch.cuda._sleep(HEAD_START_CYCLES)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in actions]
    for action, (begin, end) in zip(actions, events, strict=True):
        begin.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]  # from milliseconds


def differing(got: torch.Tensor | bytes, expected: torch.Tensor | bytes) -> int:
    """The number of bytes that differ, whatever dtype and device; all if the lengths differ."""
    got_bytes, expected_bytes = _bytes_of(got), _bytes_of(expected)
    if got_bytes.size != expected_bytes.size:
        return max(got_bytes.size, expected_bytes.size)
    return int((got_bytes != expected_bytes).sum())


def _bytes_of(data: torch.Tensor | bytes) -> np.ndarray:
    if isinstance(data, bytes):
        return np.frombuffer(data, np.uint8)
    return data.cpu().view(torch.uint8).numpy()
