"""Times the codec's calls as training makes them, and fits their cost by number of elements.

The calls' vectors hold normal values at independent uniform positions. Selection is training's
(sampled threshold, error feedback, one pass), with leak 0: only rounding errors stay, so
repetitions select nearly the same. A sum's non-zeros are counted before it is encoded, as
collectives do. ZEN cuts a vector by a hash into partitions, with a position in it for each element;
its records are timed for one of `PARTITIONS` partitions, by number of positions. Rice records are
timed with fp32 values and with values of 4 bits, which stand for any number of bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.selection import MessageSpec, Selector
from megatron_sparse.config.sparse import CompressionConfig
from megatron_sparse.cuda_ext.ops import message_capacity
from megatron_sparse.cuda_ext.record_spec import Expected, RecordSpec, Segments
from megatron_sparse.formats import hash_bitmap, hash_pairs, hierarchical_hash
from megatron_sparse.formats.hash_partition import HASH_SEED, PermutationHash
from megatron_sparse.formats.hash_record import PartitionRecord
from megatron_sparse.formats.hierarchical_hash import entries
from megatron_sparse.formats.message import Message, MessageBuffers, decode_add_, encode_segments
from megatron_sparse.planner.link_timing import Clock, Measuring, gather_rows
from megatron_sparse.pricing.cluster import CodecOp, CodecRate
from megatron_sparse.recording import StageTimer
from megatron_sparse.transport import Transport

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.15, 0.3, 0.5, 0.75, 1.0)
PARTITIONS = 4
NO_TIME_S = 1e-15
"""Less than the time of any call or element: a fitted rate below it is noise."""
STEP = 1


@dataclass(frozen=True)
class CodecSizes:
    """The sizes and repetitions to measure.

    Attributes:
        numels: elements of the vectors; two at least, in ascending order.
        windows: how often each call is timed.
        window_s: seconds for which a call is repeated at least: a few of the scheduler's time
            slices, which show what sharing cores with other ranks costs.
    """

    numels: Sequence[int]
    windows: int
    window_s: float


QUICK = CodecSizes((2**13, 2**19), windows=3, window_s=4e-3)
FULL = CodecSizes((2**12, 2**17, 2**22), windows=3, window_s=20e-3)
KINDS = {
    **{form: MessageSpec(1.0, format=form) for form in ("dense", "coo", "pici", "blocks", "rice")},
    "rice_q4": MessageSpec(1.0, format="rice", value_bits=4),
}
"""Messages whose size depends on the density, by `CodecRate.format`; densities are set later."""


@dataclass(frozen=True)
class CodecCall:
    """One call that can be repeated.

    Attributes:
        op: as in `CodecRate`.
        format: as in `CodecRate`.
        density: as in `CodecRate`.
        run: makes the call; on CUDA the device may still work when it returns.
    """

    op: CodecOp
    format: str
    density: float
    run: Callable[[], object]


def codec_calls(
    numel: int, densities: Sequence[float], device: torch.device
) -> Iterator[CodecCall]:
    """Yields calls of each operation on fp32 vectors: at each density, or once if none matters."""
    acc_N, other_N = (torch.zeros(numel, device=device) for _ in range(2))
    yield CodecCall(CodecOp.ADD, "dense", 1.0, lambda: acc_N.add_(other_N))
    yield CodecCall(CodecOp.COPY, "dense", 1.0, lambda: acc_N.copy_(other_N))
    # Rice records that hold every element, in 4 bits: outside the loop, as no density changes them.
    whole = MessageSpec(1.0, format="rice", value_bits=4, whole=True)
    yield from _segment_calls(numel, 1.0, device, {"dense_q4": whole})
    for density in densities:
        yield from _segment_calls(numel, density, device, KINDS)
        yield from _partition_calls(numel, density, device)


def measure_codec(
    transport: Transport, sweep: CodecSizes, clock: Clock
) -> Measuring[tuple[CodecRate, ...]]:
    """Times every call on all ranks at once, as in training; returns rates, the same on all ranks.

    `clock` is this rank's, in seconds. Suffixes: N sizes of vectors, K calls.
    """
    calls: list[CodecCall] = []
    times_NK: list[list[float]] = []
    for numel in sweep.numels:
        calls, times_K = yield from _times_s(transport, sweep, clock, numel)
        times_NK.append(times_K)
    # The calls are the same ones, in the same order, for every number of elements.
    times_KN = zip(*times_NK, strict=True)
    return tuple(
        fit_rate(call, sweep.numels, times_N) for call, times_N in zip(calls, times_KN, strict=True)
    )


def _times_s(
    transport: Transport, sweep: CodecSizes, clock: Clock, numel: int
) -> Measuring[tuple[list[CodecCall], list[float]]]:
    """Times all calls on vectors of `numel`; returns calls and their seconds (ranks' median)."""
    yield from gather_rows([0.0], transport)  # a barrier
    calls, times_K = [], []
    for call in codec_calls(numel, DENSITIES, transport.device):
        times_K.append(seconds_of(call, sweep, clock))
        # Drops the call's vectors: those of all calls together take 3 GiB on each rank.
        calls.append(replace(call, run=lambda: None))
    rows = yield from gather_rows(times_K, transport)
    return calls, rows.median(0).values.tolist()


def fit_rate(call: CodecCall, numels: Sequence[int], times_s: Sequence[float]) -> CodecRate:
    """Fits seconds of a call and of an element to `times_s`, by least squares of relative errors.

    Neither is negative; both are rounded to five digits. Suffix: N sizes of vectors.
    """
    times_N, numels_N = np.array(times_s), np.array(numels, dtype=float)
    # For each number of elements, (per_call + numel per_element) / time should be 1.
    terms_N2 = np.stack([1 / times_N, numels_N / times_N], axis=1)
    per_call, per_element = np.linalg.lstsq(terms_N2, np.ones_like(times_N), rcond=None)[0]
    if per_call < 0 or per_element < 0:
        # The negative term becomes 0; the other one is fitted alone, by least squares.
        alone_2 = terms_N2.sum(0) / (terms_N2**2).sum(0)
        per_call, per_element = (0.0, alone_2[1]) if per_call < 0 else (alone_2[0], 0.0)
    seconds = [
        float(f"{value:.5g}") if value > NO_TIME_S else 0.0 for value in (per_call, per_element)
    ]
    return CodecRate(call.op, call.format, call.density, *seconds)


def seconds_of(call: CodecCall, sweep: CodecSizes, clock: Clock) -> float:
    """Seconds of a call: the median over windows of the mean in each window."""
    call.run()  # a first run is slower, and not counted
    means_s = []
    for _ in range(sweep.windows):
        start_s, count, spent_s = clock(), 0, 0.0
        while spent_s < sweep.window_s:
            call.run()
            count += 1
            spent_s = clock() - start_s
        means_s.append(spent_s / count)
    return median(means_s)


def sparse_vector(numel: int, density: float, device: torch.device) -> torch.Tensor:
    """fp32 [N], the same on all ranks: normal at `density` of positions (at least one), else 0."""
    generator = torch.Generator().manual_seed(numel)
    values_N = torch.randn(numel, generator=generator)
    chosen = torch.randperm(numel, generator=generator)[: max(round(density * numel), 1)]
    sparse_N = torch.zeros(numel)
    sparse_N[chosen] = values_N[chosen]
    return sparse_N.to(device)


def _segment_calls(
    numel: int, density: float, device: torch.device, specs: Mapping[str, MessageSpec]
) -> Iterator[CodecCall]:
    """Yields calls that select from a full vector, and encode, decode and add a sparse one.

    `density` is that of the selection, and of the sparse vector. `specs` are messages by
    `CodecRate.format`; their density is replaced.
    """
    specs = {form: replace(spec, density=density) for form, spec in specs.items()}
    select = _selection(sparse_vector(numel, 1.0, device))
    for form, spec in specs.items():
        yield CodecCall(CodecOp.SELECT, form, density, partial(select, spec))
    sparse_N, acc_N = sparse_vector(numel, density, device), torch.zeros(numel, device=device)
    # The vector is one segment; its flag 0 says that the record need not be dense.
    offsets, dense = torch.tensor([0, numel]), torch.zeros(1, dtype=torch.uint8)
    record_specs = {form: spec.record_spec(torch.float32, STEP) for form, spec in specs.items()}
    most_bytes = max(message_capacity(offsets, spec.value_dtype) for spec in record_specs.values())
    out = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
    for form, record_spec in record_specs.items():

        def encode(record_spec: RecordSpec = record_spec) -> int:
            """Writes the record into `out`; returns its bytes."""
            segments = Segments(offsets, dense)
            return int(encode_segments(sparse_N, segments, None, record_spec, out).sum())

        record = out[: encode()].clone()  # `out` will have another format's record
        expected = Expected(offsets, record_spec.value_dtype, STEP, rank=0)
        decode = partial(decode_add_, acc_N, record, expected)
        yield CodecCall(CodecOp.ENCODE, form, density, encode)
        yield CodecCall(CodecOp.DECODE, form, density, partial(decode, fresh=True))
        yield CodecCall(CodecOp.DECODE_ADD, form, density, partial(decode, fresh=False))


def _selection(grad_N: torch.Tensor) -> Callable[[MessageSpec], Message]:
    """Makes a function that selects from this gradient, with leak 0, into a specified message."""
    slices = [ParameterSlice("w", 0, grad_N.numel())]
    bucket = Bucket("codec", grad_N, slices, CollectiveOp.ALL_REDUCE, 1)
    residuals = ResidualStore(torch.float32)
    selector = Selector(CompressionConfig(leak=0.0), residuals, rank=0, buffers=MessageBuffers())
    return lambda spec: selector.select(bucket, spec, step=STEP, timer=StageTimer(grad_N.device))


def _partition_calls(numel: int, density: float, device: torch.device) -> Iterator[CodecCall]:
    """Yields ZEN's calls: cutting a message into partitions; encoding and adding one partition."""
    sparse_N = sparse_vector(numel, density, device)
    # `MessageSpec` has density 1: it selects all non-zero elements of `sparse_N`.
    message = _selection(sparse_N)(MessageSpec(1.0, format="coo"))
    own_hash = PermutationHash(numel, PARTITIONS, HASH_SEED)

    def partition() -> object:
        return hierarchical_hash.split(own_hash, *entries(message))

    yield CodecCall(CodecOp.PARTITION, "pairs", density, partition)

    # The records hold partition 0 of a segment so long that the partition has `numel` positions.
    # `sparse_N` has the partition's values in the order of the positions.
    wide_hash = PermutationHash(numel * PARTITIONS, PARTITIONS, HASH_SEED)
    spec = PartitionRecord(wide_hash, 0, torch.float32, offset=0, step=STEP)
    positions_K = sparse_N.nonzero().squeeze(1)
    # Pairs hold ascending elements of the segment.
    elements_K, order_K = wide_hash.element_at(0, positions_K).sort()
    values_K = sparse_N[positions_K][order_K]
    # Pairs are added to the partition [P], by position; a bitmap to the segment [M], by element.
    sum_P, sum_M = torch.zeros(numel, device=device), torch.zeros(wide_hash.numel, device=device)
    for form, encode, add, acc in (
        ("pairs", partial(hash_pairs.encode, elements_K, values_K), hash_pairs.accumulate_, sum_P),
        ("hash_bitmap", partial(hash_bitmap.encode, sparse_N), hash_bitmap.decode_add_, sum_M),
    ):
        # The record to decode is made here, once, outside of the timed call.
        decode_add = partial(add, acc, encode(spec), spec, rank=0)
        yield CodecCall(CodecOp.ENCODE, form, density, partial(encode, spec))
        yield CodecCall(CodecOp.DECODE_ADD, form, density, decode_add)
