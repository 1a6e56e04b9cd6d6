"""Runs one collective on the virtual cluster at reduced size and prices it at full size: a MODEL.

A bucket of some mebibytes stands for one of gibibytes. The registered collective really encodes,
sends, decodes and adds it. In an alpha-beta model the time has two parts: the rounds, which do not
depend on the size, and the bytes, which grow with it. So each byte of a message counts `scale`
times (full size over simulated size); latencies and the agreement's all-gathers count once. The
error is in the headers (48 bytes a record), which count `scale` times too much. Dense collectives
have no headers and are exact.

Local work: `ChargingTimer` prices the tensor operations within a collective's stages and
advances the rank's clock; here the price is the bytes that they read and write, divided by a rate
(`memory_bound`). This models a GPU whose kernels are bound by memory. Launches cost nothing, and
network time is not hidden behind codecs within a round (with SpCCL's slices, launches cost time and
network time is hidden). No GPU codec was measured for this rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES, Exchange, Input
from megatron_sparse.collectives.base import Steps
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.cuda_ext.codec_cuda import STATUS_WORDS
from megatron_sparse.formats.header import Header
from megatron_sparse.formats.message import Message, MessageBuffers, encode, record_spec
from megatron_sparse.recording import StageTimer
from megatron_sparse.simulate.machines import Machine
from megatron_sparse.transport import Link, VirtualCluster
from megatron_sparse.transport.virtual import VirtualTransport
from megatron_sparse.wire import HEADER_BYTES

SECTOR_BYTES = 32
"""The least bytes that a GPU moves for one scattered element."""
_WRITE_ONLY = ("copy_", "zero_", "fill_")  # operations that overwrite a tensor without reading it
_RESIDUAL = 10  # index of the residual among the arguments of `prune_encode`
_FRESH = 6  # index of `fresh` among the arguments of `decode_`
_FREE = ("empty", "detach", "lift_fresh", "resize_")  # operations that move no bytes


Measure = Callable[[Any, tuple, dict, Any], float]
"""Maps an operation, its positional and keyword arguments and its result to bytes or seconds."""


class OperationMeter(TorchDispatchMode):
    """Adds up, in `total`, what `measure` returns for each tensor operation in its `with` block."""

    def __init__(self, measure: Measure) -> None:
        super().__init__()
        self._measure = measure
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.total += self._measure(func, args, kwargs or {}, result)
        return result


def memory_bound(seconds_a_byte: float) -> Measure | None:
    """Prices of operations by the bytes that they move; None where they are free."""
    if not seconds_a_byte:
        return None
    return lambda *operation: moved_bytes(*operation) * seconds_a_byte


def moved_bytes(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
    """Bytes that one tensor operation moves between a GPU and its memory.

    - In general: inputs are read once and outputs written once; a tensor that is updated in place
      counts twice. Views and allocations are free.
    - Encoding (`encode`, `prune_encode`) reads the elements and writes the records; with pruning it
      also reads and writes the residual.
    - `sample_threshold` reads a sector (`SECTOR_BYTES`) of gradient and residual for each sample.
    - Adding records or bitmaps to a sum (`decode_`, `hash_bitmap_add_`) reads them, and for each
      element reads and writes a sector of the sum, at most all of it; a fresh one is written whole.
    """
    name = func._schema.name.split("::")[1]
    codec_name = name if func.namespace == "megatron_sparse" else ""
    if func.is_view or name.startswith(_FREE):
        return 0.0
    if codec_name in ("encode", "prune_encode"):
        sizes_S = result[STATUS_WORDS:].view(2, -1)[0]  # bytes of each record; counts follow
        updated = args[_RESIDUAL].nbytes if codec_name == "prune_encode" else 0
        return args[0].nbytes + 2.0 * updated + float(sizes_S.sum())
    if codec_name == "decode_":
        # Counted as one pass for each message, as in the cost models.
        passes_bytes, fresh = 0.0, args[_FRESH]
        for records in args[1]:
            passes_bytes += _added_bytes(args[0], records, fresh=fresh)
            fresh = False  # only the first message overwrites the sum
        return passes_bytes
    if codec_name == "sample_threshold":
        grad_N, residual_N, samples = args[0], args[1], args[4]
        segments = args[2].numel() - 1  # from the segments' offsets
        read_bytes = SECTOR_BYTES * min(samples * segments, grad_N.numel())
        return float(read_bytes * (1 if residual_N is None else 2))
    if codec_name == "hash_bitmap_add_":
        acc_M, words, values, nnz = args[0], args[1], args[2], args[4]
        return words.nbytes + values.nbytes + float(min(2 * acc_M.nbytes, 2 * SECTOR_BYTES * nnz))
    # Any other operation: the schema says which arguments it updates in place.
    total = 0.0
    for argument, value in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        times = 2 if is_written and not name.startswith(_WRITE_ONLY) else 1
        total += times * _nbytes(value)
    total += _nbytes(list(kwargs.values()))
    if all(returned.alias_info is None for returned in func._schema.returns):
        total += _nbytes(result)  # new memory, not an argument that was counted
    return total


def _added_bytes(acc_M: torch.Tensor, records: torch.Tensor, *, fresh: bool) -> float:
    """Bytes of adding records to a sum; a fresh sum is written whole, and not read."""
    whole = acc_M.nbytes if fresh else 2 * acc_M.nbytes
    touched = 2 * SECTOR_BYTES * records_nnz(records)
    return float(records.nbytes + (whole if fresh else min(whole, touched)))


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


def records_nnz(records: torch.Tensor) -> int:
    """Counts the non-zero elements of records (uint8 on the CPU, back to back) by their headers."""
    position = total = 0
    while position < records.numel():
        packed = records[position : position + HEADER_BYTES].numpy().tobytes()
        header = Header.unpack(packed, rank=0)
        position += HEADER_BYTES + header.payload_bytes
        total += header.nnz
    return total


class ChargingTimer(StageTimer):
    """Stands in for a bucket's timer: adds the price of local work to a rank's modelled clock.

    `price` returns the seconds of an operation; None makes local work free. `charged_s` are the
    seconds added to the clock so far.
    """

    def __init__(self, transport: VirtualTransport, price: Measure | None) -> None:
        super().__init__()
        self._transport = transport
        self._price = price
        self.charged_s = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the price of the tensor operations in its `with` block to the clock, at its end."""
        if self._price is None:
            yield
            return
        with OperationMeter(self._price) as meter:
            yield
        self._transport.charge(meter.total)
        self.charged_s += meter.total


@dataclass(frozen=True)
class Job:
    """One collective on one machine.

    `full_bytes` is the size of the fp32 bucket that is priced, `numel` the elements of the one that
    is simulated, a multiple of `world_size`. `format` is that of sparse messages, as in
    `scheme.format`. `charged`: whether local work takes time.
    """

    machine: Machine
    world_size: int
    full_bytes: float
    numel: int
    op: CollectiveOp = CollectiveOp.ALL_REDUCE
    format: str = "auto"
    charged: bool = True

    @property
    def scale(self) -> float:
        """How many bytes one simulated byte stands for."""
        return self.full_bytes / (4 * self.numel)

    @property
    def seconds_a_byte(self) -> float:
        """The price of local work."""
        return self.scale / self.machine.codec_rate if self.charged else 0.0


@dataclass(frozen=True)
class JobCost:
    """The cost of a job at full size.

    Attributes:
        time_s: modelled seconds until the last rank was done.
        local_s: modelled seconds charged for local work, of the rank with the most; the network may
            hide part of them.
        wire_bytes: sent by the busiest rank in pairwise messages.
    """

    time_s: float
    local_s: float
    wire_bytes: float


Gradients = Callable[[int], torch.Tensor]
"""Makes the gradient of a rank: fp32, `Job.numel` elements, mostly zeros."""


def price(job: Job, scheme: str, gradients: Gradients, *, late_s: float | None = None) -> JobCost:
    """Runs a scheme on the virtual cluster with the job's machine; returns its cost at full size.

    Encoding the selection is part of it. `gradients` makes each rank's gradient. With `late_s` the
    last rank is the straggler and starts this many seconds after the others.
    """
    entry = SCHEMES[scheme]
    options = SchemeConfig(name=scheme, format=job.format, capacity=None)  # sizes are exchanged
    straggler = None if late_s is None else job.world_size - 1
    topology = job.machine.topology(job.world_size)
    cluster = VirtualCluster(job.world_size, topology, message_scale=job.scale)
    timers: list[ChargingTimer] = []

    def start(transport: VirtualTransport) -> Steps:
        """Encodes one rank's gradient and runs the scheme; returns the bytes that the rank sent."""
        timer = ChargingTimer(transport, memory_bound(job.seconds_a_byte))
        timers.append(timer)
        if transport.rank == straggler:
            transport.charge(late_s or 0.0)  # its clock starts late
        bucket, buffers = make_bucket(job, gradients(transport.rank)), MessageBuffers()
        exchange = Exchange(bucket, transport, buffers, timer, options, straggler=straggler)
        if entry.takes is Input.DENSE:
            return (yield from entry.run(exchange, bucket.grad_N, 0))  # in step 0
        form = entry.message_format(options)
        message = make_message(bucket, entry.is_sharded(job.op), form, buffers, timer)
        return (yield from entry.run(exchange, message))

    sent = cluster.run(start)
    local_s = max(timer.charged_s for timer in timers)
    return JobCost(cluster.modelled_s, local_s, max(sent) * job.scale)


def seconds_of_ring(world_size: int, nbytes: float, links: tuple[Link, ...]) -> float:
    """Seconds of a dense ring's all-gather or reduce-scatter on the virtual cluster, by a formula.

    A rank starts a step when it has sent and received the messages of the step before. So all ranks
    keep the pace of the slowest link, and n - 1 pieces cross that link one after another. A
    simulation of thousands of ranks would take millions of messages; this formula takes none.

    `world_size`: n, each rank is once in the ring. `nbytes`: of the whole buffer. `links`: the
    kinds of links in the ring; no two ranks use a link at once.

    Example:
        >>> seconds_of_ring(4, 400.0, (Link(1.0, 0.01), Link(0.5, 0.01)))
        6.0
    """
    piece = nbytes / world_size
    step_s = max(link.alpha_s + link.beta_s * piece for link in links)
    return (world_size - 1) * step_s


def make_bucket(job: Job, grad_N: torch.Tensor) -> Bucket:
    """A bucket with one parameter."""
    whole = [ParameterSlice("w", 0, job.numel)]
    return Bucket("b", grad_N, whole, job.op, job.world_size)


def make_message(
    bucket: Bucket, sharded: bool, form: str, buffers: MessageBuffers, timer: StageTimer
) -> Message:
    """Encodes a bucket's non-zero elements as an fp32 message, in shards if `sharded`."""
    layout = bucket.layout(sharded)
    with timer.stage("encode"):
        return encode(bucket, layout, record_spec("fp32", step=0, record_format=form), buffers)
