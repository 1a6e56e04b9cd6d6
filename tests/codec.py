"""Codecs under test: one input, encoded and decoded by each, compared bit for bit.

A `Case` is a bucket and how it is encoded. A codec is the oracle, or the package's ops on one
instruction set of this CPU or on a GPU (or the emulated one). `check` names cases and codecs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.cuda_ext.slots import Slots
from megatron_sparse.errors import WireFormatError
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import rice_message
from megatron_sparse.reference.prune import prune, prune_limited
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    FORMAT_RICE,
    HEADER_BYTES,
    RICE_BITS,
)
from tests.cuda_ext import cases

STEP, RANK = 2**32 + 5, 3  # the step's lower half travels
KEY = 0x1234_5678_9ABC_DEF0
FORMS = {
    "coo": {"record_format": FORMAT_COO},
    "linear": {"record_format": FORMAT_PICI},
    "paper": {"record_format": FORMAT_PICI, "paper_order": True},
    "blocks64": {"record_format": FORMAT_BLOCKS, "block_size": 64},
    "blocks4096": {"record_format": FORMAT_BLOCKS, "block_size": 4096},
    "adaptive": {"record_format": FORMAT_ADAPTIVE},
    "dense": {"record_format": FORMAT_DENSE},
}
"""Requested formats of fp32, bf16 and fp16 values: arguments of `RecordSpec`."""
SLOTTED = [name for name in FORMS if not name.startswith("blocks")]
RICE = {"fp32": 0, "bf16": 1, "fp16": 2, "q8": 3, "q4": 4, "q3": 5, "q2": 6}
"""Value dtypes of records of format Rice."""
QUANTISED = tuple(RICE_BITS)
RICE_NAMES = {code: name for name, code in RICE.items()}
rice_dtypes = pytest.mark.parametrize("value_dtype", RICE.values(), ids=RICE)
RICE_TYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.bfloat16),
]
"""Dtypes of gradient and residual, for Rice records."""
pruned_already = pytest.mark.parametrize(
    ("value_dtype", "with_residual"),
    [*((code, False) for code in RICE_NAMES), *((code, True) for code in QUANTISED)],
)
"""For `encode`; a residual takes what quantised values lose."""
POISON = 0xEE
MARGIN = 64
"""Bytes behind every buffer that nothing may touch."""


def spec_of(value_dtype: int, form: str = "coo") -> RecordSpec:
    """The spec of a message in one of `FORMS`."""
    return RecordSpec(value_dtype, STEP, **FORMS[form])


def rice_spec(
    value_dtype: int, log2_span: int = 12, *, without_indices: bool = False
) -> RecordSpec:
    return RecordSpec(
        value_dtype, STEP, FORMAT_RICE, log2_span=log2_span, without_indices=without_indices
    )


def segments_of(offsets: Sequence[int] | torch.Tensor, dense: Sequence[int] = ()) -> Segments:
    """Segments at these offsets; none is kept whole unless `dense` says so."""
    offsets = torch.as_tensor(offsets)
    flags = torch.tensor(dense or [0] * (offsets.numel() - 1), dtype=torch.uint8)
    return Segments(offsets, flags)


def pruning_of(
    residual_N: torch.Tensor,
    threshold: float,
    leak: float = 1.0,
    key: int = -1,
    chance: float | None = None,
) -> Pruning:
    """One threshold for everything; what ties with it is kept with this chance, if there is one."""
    whole, thresholds_R = torch.tensor([0, residual_N.numel()]), torch.tensor([float(threshold)])
    chances_R = None if chance is None else torch.tensor([chance])
    return Pruning(residual_N, whole, thresholds_R, leak, key, tie_chances_R=chances_R)


@dataclass(frozen=True)
class Case:
    """A bucket and how it is encoded.

    `grad_N` may be values that are pruned already: `pruning` is then None, and `residual_N` takes
    what quantised ones lose. With slots each record has its place. `what` names the case in an
    error.
    """

    grad_N: torch.Tensor
    segments: Segments
    spec: RecordSpec
    pruning: Pruning | None = None
    residual_N: torch.Tensor | None = None
    what: object = ""

    @property
    def is_rice(self) -> bool:
        """Whether the ops of Rice records make it."""
        return self.spec.record_format == FORMAT_RICE

    @property
    def room(self) -> int:
        """The most bytes of its message."""
        if self.segments.slots is not None:
            return int(self.segments.slots[-1])
        return ops.message_capacity(self.segments.offsets, self.spec.value_dtype)

    @property
    def numel(self) -> int:
        return self.grad_N.numel()

    def with_slots(self, capacity_S: torch.Tensor | None = None) -> Case:
        """The same in slots for these numbers of elements, by default for the pruning's limits."""
        if capacity_S is None:
            limits = None if self.pruning is None else self.pruning.capacity_S
            capacity_S = self.segments.offsets.diff() if limits is None else limits
        pieces = self.segments
        slots = Slots.of(pieces.offsets, pieces.dense, capacity_S, self.spec).offsets
        return replace(self, segments=replace(pieces, slots=slots))

    def expected(self, rank: int = RANK) -> Expected:
        """What a decoder is told of its message."""
        return Expected(
            self.segments.offsets,
            self.spec.value_dtype,
            STEP,
            rank,
            self.segments.slots,
            self.spec.checksum,
        )


@dataclass(frozen=True)
class Made:
    """What an encoder makes: records, their non-zero elements, and the residual afterwards."""

    records: list[bytes]
    nnz: list[int]
    residual_N: torch.Tensor | None = None

    @property
    def bytes(self) -> bytes:
        """The message, records back to back."""
        return b"".join(self.records)

    def message(self, case: Case) -> bytes:
        """The message; in slots, with bytes behind the records that nobody may read."""
        if case.segments.slots is None:
            return self.bytes
        rooms = case.segments.slots.diff().tolist()
        return b"".join(r.ljust(n, b"\xa5") for r, n in zip(self.records, rooms, strict=True))


class Oracle:
    """The reference that is written for reading."""

    name = "oracle"

    def encode(self, case: Case) -> Made:
        """The case's message; the case is left as it was."""
        if case.is_rice:
            return self._rice(case)
        values_N, rest_N = case.grad_N, None
        if case.pruning is not None and case.pruning.capacity_S is not None:
            values_N, rest_N = prune_limited(
                values_N, case.pruning, case.spec.value_dtype, case.segments.offsets
            )
        elif case.pruning is not None:
            values_N, rest_N, _ = prune(values_N, case.pruning, case.spec.value_dtype)
        nnz_S = cases.count_nonzero(values_N, case.segments.offsets)
        records = message_oracle.encode(values_N, case.segments, nnz_S, case.spec)
        return Made(records, nnz_S.tolist(), rest_N)

    def _rice(self, case: Case) -> Made:
        values_N, spec = case.grad_N, case.spec
        if case.pruning is not None:
            made = rice_message.prune_encode(values_N, case.pruning, case.segments, spec)
        else:
            residual_N = torch.zeros(case.numel) if case.residual_N is None else case.residual_N
            made = rice_message.encode_segments(values_N, residual_N, case.segments, spec)
        nnz = [int.from_bytes(record[16:24], "little") for record in made[0]]
        return Made(made[0], nnz, made[1])

    def decode_(
        self, acc: torch.Tensor, message: bytes, expected: Expected, base: int = 0, *, fresh=False
    ) -> None:
        """Adds a message to a tensor on the CPU; with `fresh`, replaces what is there.

        In slots, the records must fill theirs. A bad message may be half added.
        """
        if fresh:
            first, *_, last = expected.segment_offsets.tolist()
            acc[first - base : last - base] = 0
        message_oracle.decode_add_(acc, message, expected, base)


class Ops:
    """The package's ops; buffers are unaligned, poisoned, and looked at afterwards.

    `place` puts a tensor on the device, some elements behind an aligned address. `isa`: an
    instruction set of the CPU.
    """

    def __init__(
        self, name: str, place: Callable[..., torch.Tensor] | None = None, isa: str | None = None
    ) -> None:
        self.name, self._place, self._isa = name, place, isa

    def encode(self, case: Case) -> Made:
        grad, pruning, segments = self._put(case.grad_N), case.pruning, case.segments
        given_N = case.residual_N if pruning is None else pruning.residual_N
        rest = None if given_N is None else self._put(given_N, 3)
        old = None  # read instead of `rest`, in about half of the cases
        out = self._on(torch.full((case.room + MARGIN,), POISON, dtype=torch.uint8))
        if pruning is not None:
            assert rest is not None
            chances_R = pruning.tie_chances_R
            if pruning.key >= 0:
                old, rest = rest, self._put(torch.full_like(given_N, torch.nan), 3)
            pruning = replace(
                pruning,
                residual_N=rest,
                old_residual_N=old,
                thresholds_R=self._on(pruning.thresholds_R),
                tie_chances_R=None if chances_R is None else self._on(chances_R),
            )
        room = out[:-MARGIN]
        with self._isa_is_set():
            if pruning is None:
                nnz = cases.count_nonzero(case.grad_N, segments.offsets)
                given = None if case.is_rice else nnz
                sizes = ops.encode(grad, segments, given, case.spec, room, rest)
            else:
                sizes, nnz = ops.prune_encode(grad, pruning, segments, case.spec, room)
        where = f"{self.name} {case.what}"
        cases.assert_same_bits(grad.cpu(), case.grad_N, f"{where}: the gradient")
        self._look_around(where, grad, rest, old)
        if old is not None:
            cases.assert_same_bits(old.cpu(), given_N, f"{where}: the old residual")
        return Made(
            self._records(where, out.cpu(), sizes.tolist(), segments.slots),
            nnz.tolist(),
            None if rest is None else rest.cpu().clone(),
        )

    def decode_(
        self, acc: torch.Tensor, message: bytes, expected: Expected, base: int = 0, *, fresh=False
    ) -> None:
        data = torch.tensor(list(message), dtype=torch.uint8)
        there = self._put(acc, 1)
        if self._place is None:  # a GPU wants messages aligned to 16 bytes
            room = torch.empty(len(message) + 1, dtype=torch.uint8)
            room[1:] = data
            data = room[1:]
        else:
            data = self._place(data)
        try:
            with self._isa_is_set():
                ops.decode_add_(there, data, expected, base, fresh=fresh)
        except WireFormatError:
            cases.assert_same_bits(there.cpu(), acc, f"{self.name}: a bad message was added")
            raise
        finally:
            self._look_around(self.name, there)
        acc.copy_(there.cpu())

    def _records(
        self, where: str, out: torch.Tensor, sizes: list[int], slots: torch.Tensor | None
    ) -> list[bytes]:
        """The records; what is not theirs must be untouched, or cleared in a slot."""
        begins = torch.tensor([0, *sizes]).cumsum(0)[:-1] if slots is None else slots[:-1]
        free = torch.ones(len(out), dtype=torch.bool)
        records = []
        for begin, size in zip(begins.tolist(), sizes, strict=True):
            free[begin : begin + size] = False
            records.append(out[begin : begin + size].numpy().tobytes())
        if slots is not None:
            assert not out[:-MARGIN][free[:-MARGIN]].any(), f"{where}: a slot is not cleared"
            free[:-MARGIN] = False
        assert bool((out[free] == POISON).all()), f"{where}: bytes behind the message were written"
        return records

    def _put(self, tensor: torch.Tensor, shift: int = 1) -> torch.Tensor:
        return cases.unaligned(tensor) if self._place is None else self._place(tensor, shift)

    def _on(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._place is None else self._place(tensor)

    def _look_around(self, where: str, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors if self._place is None else ():
            if tensor is not None:
                assert tensor._base is not None
                assert bool(tensor._base[[0, -1]].isnan().all()), f"{where}: wrote outside"

    def _isa_is_set(self):
        if self._isa is None:
            return nullcontext()
        return mock.patch.dict(os.environ, MEGATRON_SPARSE_ISA=self._isa)


type Codec = Oracle | Ops

ORACLE = Oracle()
CPU = tuple(Ops(isa, isa=isa) for isa in cases.ISAS)
CODECS: tuple[Codec, ...] = (ORACLE, *CPU)
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def check(case: Case, *tested: Codec) -> Made:
    """Every codec, by default all of this CPU, makes the oracle's message, residual and counts.

    It also decodes to the oracle's sums. Returns what the oracle makes.
    """
    wanted = ORACLE.encode(case)
    for codec in tested or CPU:
        made, where = codec.encode(case), f"{codec.name} {case.spec} {case.what}"
        assert made.nnz == wanted.nnz, where
        assert [*map(len, made.records)] == [*map(len, wanted.records)], where
        assert comparable(made, case) == comparable(wanted, case), where
        if made.residual_N is not None:
            assert wanted.residual_N is not None
            cases.assert_same_bits(made.residual_N, wanted.residual_N, f"{where}: residual")
    check_sums(case, wanted, *tested)
    return wanted


def comparable(made: Made, case: Case) -> list[bytes]:
    """The records; on a GPU, whose additions make a NaN of their own, with one NaN for all."""
    if not torch.cuda.is_available() or case.spec.value_dtype in QUANTISED:
        return made.records
    width, infinity, nan = ((4, 0x7F800000, 0x7FC00000), (2, 0x7F80, 0x7FC0), (2, 0x7C00, 0x7E00))[
        case.spec.value_dtype
    ]
    records = []
    for record in made.records:
        words = np.frombuffer(record, f"<u{width}").copy()
        words[HEADER_BYTES // width :][
            words[HEADER_BYTES // width :] & (2 ** (8 * width - 1) - 1) > infinity
        ] = nan
        records.append(words.tobytes())
    return records


def check_densities(
    grad_N: torch.Tensor,
    residual_N: torch.Tensor,
    segments: Segments,
    counts: Sequence[int],
    spans: Sequence[int],
    value_dtype: int,
    *tested: Codec,
) -> None:
    """Rice records that keep so many elements; the spans take turns, from another for each dtype.

    `counts`: of elements that are kept; that of all for everything. `spans`: `log2_span` of the
    records.
    """
    numel = grad_N.numel()
    ordered = (grad_N + residual_N).abs().sort().values
    for turn, kept in enumerate(counts):
        threshold = -1.0 if kept == numel else float(ordered[numel - kept - 1])
        spec = rice_spec(value_dtype, spans[(turn + value_dtype) % len(spans)])
        check(Case(grad_N, segments, spec, pruning_of(residual_N, threshold), what=kept), *tested)


def check_sums(case: Case, made: Made, *tested: Codec) -> None:
    """Every codec decodes a message to the oracle's sums, from zero and beside what is there."""
    start = torch.randn(case.numel, generator=torch.Generator().manual_seed(1))
    start[::7] = -0.0  # stays where nothing is added
    packed = replace(case.expected(), slots=None)
    for fresh in (False, True):
        begin = torch.full_like(start, torch.nan) if fresh else start
        sum_N = begin.clone()
        ORACLE.decode_(sum_N, made.bytes, packed, fresh=fresh)
        for codec in tested or CPU:
            got_N = begin.clone()
            codec.decode_(got_N, made.message(case), case.expected(), fresh=fresh)
            where = f"{codec.name} {case.spec} {case.what}: the sum, fresh {fresh}"
            cases.assert_same_bits(one_nan(got_N), one_nan(sum_N), where)


def one_nan(values: torch.Tensor) -> torch.Tensor:
    """The same with one NaN: which payload survives an addition, machines decide."""
    return torch.where(values.isnan(), torch.nan, values)


def decoded(codec: Codec, message: bytes, case: Case) -> torch.Tensor:
    """What a message adds to zeros."""
    acc = torch.full((case.numel,), torch.nan)
    codec.decode_(acc, message, case.expected(), fresh=True)
    return acc


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
