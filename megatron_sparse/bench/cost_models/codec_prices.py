"""Prices of local work on a virtual cluster, independent of the cost models: two kinds.

`MemoryBoundPrices` stands for a GPU: each call costs the bytes that it really moves over a rate
(a MODEL; `simulate.pricing`). `TimedPrices` is this machine's CPU, timed call by call: at densities
and sizes that no calibration uses, so that a cluster file is not graded by its own numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from megatron_sparse.bench.table import torch_threads
from megatron_sparse.calibration.codec import codec_calls
from megatron_sparse.formats.header import Header
from megatron_sparse.pricing.cluster import CodecOp
from megatron_sparse.simulate.pricing import Measure, moved_bytes, records_nnz
from megatron_sparse.wire import FORMAT_NAMES, FORMAT_RICE, HEADER_BYTES, RICE_BITS

SMALL_NUMEL = 64
"""Tensors up to this size are offsets, sizes and states: they do not grow with the bucket."""
HELD_OUT_DENSITIES = (0.0005, 0.003, 0.02, 0.07, 0.2, 0.7)
HELD_OUT_NUMELS = (3 * 2**14, 3 * 2**17, 3 * 2**20)
"""None of `calibration_codec`'s."""


class CodecPrices(Protocol):
    """The time of local work, independent of any planner's model."""

    def measure(self, scale: float) -> Measure:
        """Seconds of a tensor operation on a bucket that stands for one `scale` times as large."""
        ...


@dataclass(frozen=True)
class MemoryBoundPrices:
    """A device whose kernels are bound by its memory; see `simulate.pricing`.

    Attributes:
        bytes_a_second: read and written together.
    """

    bytes_a_second: float

    def measure(self, scale: float) -> Measure:
        """See `CodecPrices`."""

        def seconds(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
            grows = func.namespace == "megatron_sparse" or _largest(args, kwargs) > SMALL_NUMEL
            moved = moved_bytes(func, args, kwargs, result)
            return moved * (scale if grows else 1.0) / self.bytes_a_second

        return seconds


def _largest(*values: Any) -> int:
    """Elements of the largest tensor in some arguments."""
    sizes = [0]
    for value in values:
        if isinstance(value, torch.Tensor):
            sizes.append(value.numel())
        elif isinstance(value, list | tuple):
            sizes.append(_largest(*value))
        elif isinstance(value, dict):
            sizes.append(_largest(*value.values()))
    return max(sizes)


@dataclass(frozen=True)
class Call:
    """A call of the codec as it is priced.

    Attributes:
        op: as of `CodecRate`.
        format: as of `CodecRate`.
        numel: elements of the vector that is coded.
        density: non-zeros / elements.
    """

    op: CodecOp
    format: str
    numel: float
    density: float


@dataclass(frozen=True)
class TimedPrices:
    """Seconds an element, timed.

    Interpolates logarithmically between densities, and takes the nearest size.

    Attributes:
        numels: of the vectors, ascending.
        densities: ascending.
        seconds: (op, format) -> by size and density, an element's.
    """

    numels: tuple[int, ...]
    densities: tuple[float, ...]
    seconds: Mapping[tuple[CodecOp, str], np.ndarray]

    # Dense outcomes are kept by prices: those that were timed together are the same.
    __hash__ = object.__hash__

    @classmethod
    def timed(
        cls,
        numels: Sequence[int] = HELD_OUT_NUMELS,
        densities: Sequence[float] = HELD_OUT_DENSITIES,
        repeats: int = 5,
    ) -> TimedPrices:
        """Times every call of the codec on this machine, on one thread; medians. Takes seconds."""
        found: dict[tuple[CodecOp, str], np.ndarray] = {}
        with torch_threads(1):
            for i, numel in enumerate(numels):
                for call in codec_calls(numel, densities, torch.device("cpu")):
                    table = found.setdefault(
                        (call.op, call.format), np.zeros((len(numels), len(densities)))
                    )
                    # Copies and additions know no density.
                    at = densities.index(call.density) if call.density in densities else slice(None)
                    table[i, at] = _median_s(call.run, repeats) / numel
        return cls(tuple(numels), tuple(densities), found)

    def call_s(self, call: Call) -> float:
        """Seconds of a call."""
        if call.numel <= 0:
            return 0.0
        size = int(np.abs(np.log(np.array(self.numels) / call.numel)).argmin())
        rate_D = self.seconds[call.op, call.format][size]
        density = max(call.density, self.densities[0])
        return call.numel * float(np.interp(np.log(density), np.log(self.densities), rate_D))

    def measure(self, scale: float) -> Measure:
        """See `CodecPrices`."""

        def seconds(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
            calls = calls_of(func, args, kwargs, result)
            return sum(self.call_s(replace(call, numel=call.numel * scale)) for call in calls)

        return seconds


def _median_s(run: Callable[[], object], repeats: int) -> float:
    """Median of the thread's own time, which excludes other programs."""
    run()
    spent = []
    for _ in range(repeats):
        start_s = time.thread_time()
        run()
        spent.append(time.thread_time() - start_s)
    return float(np.median(spent))


def calls_of(func: Any, args: tuple, kwargs: dict, result: Any) -> list[Call]:
    """The codec's calls for a tensor operation; none if the operation belongs to another call."""
    name = func._schema.name.split("::")[1]
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if func.namespace == "megatron_sparse":
        if name == "decode_sum_":
            return _added(given)
        found = _CALLS.get(name)
        return [] if found is None else [found(given, result)]
    if name in ("add_", "add"):
        return [Call(CodecOp.ADD, "dense", given["self"].numel(), 1.0)]
    if name in ("copy_", "zero_", "clone"):
        return [Call(CodecOp.COPY, "dense", given["self"].nbytes / 4, 1.0)]
    if name == "index_add_":  # ZEN's server, from pairs
        positions = given["self"].numel()
        return [_at(CodecOp.DECODE_ADD, "pairs", positions, given["index"].numel())]
    return []


def _at(op: CodecOp, name: str, numel: float, nnz: float) -> Call:
    return Call(op, name, numel, nnz / numel if numel else 0.0)


def _encoded(op: CodecOp, given: dict, nnz: float) -> Call:
    return _at(op, _rate_of(given["out"]), given["grad"].numel(), nnz)


def _rate_of(records: torch.Tensor) -> str:
    """The format of the first record, as codec rates name it."""
    if not records.numel():
        return "dense"
    header = Header.unpack(records[:HEADER_BYTES].numpy().tobytes(), 0)
    if header.format == FORMAT_RICE and header.dtype in RICE_BITS:
        return "rice_q4" if records[HEADER_BYTES] else "dense_q4"
    return FORMAT_NAMES[header.format]


def _decoded(given: dict, _: Any) -> Call:
    return _decoded_one(given["message"], given["acc"], fresh=given.get("fresh", False))


def _added(given: dict) -> list[Call]:
    """Several messages: as one after the other, as the cost models have it."""
    fresh = given.get("fresh", True)
    return [
        _decoded_one(records, given["acc"], fresh=fresh and number == 0)
        for number, records in enumerate(given["messages"])
    ]


def _decoded_one(records: torch.Tensor, acc_M: torch.Tensor, *, fresh: bool) -> Call:
    op = CodecOp.DECODE if fresh else CodecOp.DECODE_ADD
    return _at(op, _rate_of(records), acc_M.numel(), records_nnz(records))


def _added_bitmap(given: dict, _: Any) -> Call:
    # With one partition it is ZEN's server, to which sums by position were pushed.
    name = "pairs" if given["partitions"] == 1 else "hash_bitmap"
    positions = given["acc"].numel() / given["partitions"]
    return _at(CodecOp.DECODE_ADD, name, positions, given["nnz"])


_CALLS: dict[str, Callable[[dict, Any], Call]] = {
    "prune_encode": lambda given, result: _encoded(CodecOp.SELECT, given, float(result[1].sum())),
    "encode": lambda given, _: _encoded(CodecOp.ENCODE, given, float(given["nnz"].sum())),
    "prune_encode_rice": lambda given, result: _encoded(
        CodecOp.SELECT, given, float(result[1].sum())
    ),
    "encode_rice": lambda given, result: _encoded(CodecOp.ENCODE, given, float(result[1].sum())),
    "decode_add_": _decoded,
    "hash_partition_of": lambda given, _: _at(
        CodecOp.PARTITION, "pairs", given["numel"], given["elements"].numel()
    ),
    "hash_bitmap_pack": lambda given, result: _at(
        CodecOp.ENCODE, "hash_bitmap", given["values"].numel(), float(result)
    ),
    "hash_bitmap_add_": _added_bitmap,
}
