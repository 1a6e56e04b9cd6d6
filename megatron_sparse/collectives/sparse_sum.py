"""The fp32 sum that a sparse collective adds up, and the records of complete sums.

Partial sums travel in fp32, or in bf16 where `scheme.wire_dtype=bf16` narrows an fp32 gradient
(`partial_dtype`), rounded to nearest even. Final sums travel in the message's dtype: for a bf16
gradient that is the one rounding at the end. Their records are described in `records`.

In *capacity mode* (`scheme.capacity`) records lie in slots of fixed size, and codec calls write
errors to device memory (`Message.reports`) instead of raising them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from megatron_sparse.collectives.accumulator import partial_name
from megatron_sparse.collectives.base import Exchange, names_of
from megatron_sparse.collectives.records import Cut, sum_step
from megatron_sparse.config.compression import dense_value_bits
from megatron_sparse.cuda_ext.record_spec import DEFAULT_BLOCK_SIZE, Expected, RecordSpec, Segments
from megatron_sparse.cuda_ext.slots import TABLES, Slots
from megatron_sparse.formats.message import (
    QUANTISED,
    VALUE_DTYPES,
    WIRE_CODES,
    Message,
    decode_add_,
    decode_sum_,
    encode_segments,
)
from megatron_sparse.formats.rounding import round_into, unify_nan_
from megatron_sparse.wire import FORMAT_ADAPTIVE, FORMAT_DENSE, FORMAT_RICE, RICE_SPANS


class SparseSum:
    """The fp32 sum that a sparse collective adds up for one bucket, and its records.

    The memory is not cleared. So the first records that are added to a cut must be passed with
    `fresh=True`: they replace its old values.

    Attributes:
        exchange: whose bucket receives the sum.
        message: this rank's contribution.
        sum_N: fp32, the whole bucket; undefined at first. The gradient itself where that is fp32.
        partial_dtype: dtype in which partial sums travel.
        final_dtype: dtype of complete sums.
        gather_dtype: dtype in which complete sums are gathered: the same, or with `scheme.sum_bits`
            a quantised one.

    Args:
        exchange: see above.
        message: see above.
        form: format code of the sum's records; a segment that is not smaller in this format than
            dense is dense.
        block_size: of `FORMAT_BLOCKS`.
        whole: the messages hold every element, so complete sums travel dense, or quantised without
            indices; `form` is ignored.
    """

    def __init__(
        self,
        exchange: Exchange,
        message: Message,
        *,
        form: int = FORMAT_ADAPTIVE,
        block_size: int = DEFAULT_BLOCK_SIZE,
        whole: bool = False,
    ) -> None:
        bucket, sum_bits = exchange.bucket, exchange.options.given_sum_bits
        self._bucket, self.message = bucket, message
        self.exchange, self._timer = exchange, exchange.timer
        log2_span = RICE_SPANS[0]  # `rice_span` of density 1; only Rice records use it
        if whole:
            form = FORMAT_DENSE if sum_bits is None else FORMAT_RICE
        elif message.log2_span is not None and form in {FORMAT_ADAPTIVE, FORMAT_RICE}:
            form = FORMAT_RICE  # the messages are Rice records, so sums are too
            log2_span = sum_span(message.log2_span, bucket.world_size)
        self.partial_dtype = partial_name(bucket, message.sum_dtype)
        self.final_dtype = self.gather_dtype = message.sum_dtype
        if sum_bits is not None and form == FORMAT_RICE:
            bits = dense_value_bits(sum_bits) if whole else sum_bits  # without indices: 8 or 4
            self.gather_dtype = QUANTISED[bits]
        self._sum_spec = RecordSpec(
            WIRE_CODES[self.gather_dtype],  # `encode` replaces dtype and step
            step=0,
            record_format=form,
            block_size=block_size,
            log2_span=log2_span,
            without_indices=whole,
            checksum=message.checksum,
        )
        if bucket.grad_N.dtype == torch.float32:
            self.sum_N = bucket.grad_N
        else:
            self.sum_N = self.take("sum", bucket.numel, torch.float32)

    def take(self, purpose: str, numel: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """See `Exchange.take`."""
        return self.exchange.take(purpose, numel, dtype)

    def add_message(
        self, records: torch.Tensor, cut: Cut, rank: int, *, fresh: bool = False
    ) -> None:
        """Decodes the records of `rank`'s own message for one cut, and adds them to the sum.

        Raises:
            WireFormatError: the records are not what that rank announced.
        """
        self._decode(records, cut, self._expected(cut, rank), fresh=fresh)

    def add_messages(self, records: Sequence[torch.Tensor], cut: Cut, ranks: Sequence[int]) -> None:
        """Replaces the values of a cut by the sum of these ranks' own messages, in this order.

        One pass over the sum.

        Raises:
            WireFormatError: a rank's records are not what it announced.
        """
        sum_M, expected = self.sum_N[cut.elements], self._expected(cut, ranks[0])
        reports = self.message.reports
        with self._timer.stage("decode"):
            decode_sum_(sum_M, records, expected, ranks, reports=reports)

    def _expected(self, cut: Cut, rank: int) -> Expected:
        message = self.message
        slots_S = None if message.slots is None else message.slots.part(cut.segments)
        return message.expected(cut.offsets, rank, slots_S)

    def add_sum(
        self,
        records: torch.Tensor,
        cut: Cut,
        value_dtype: str,
        rank: int,
        *,
        fresh: bool = False,
        slots_S: torch.Tensor | None = None,
    ) -> None:
        """Decodes the records of a sum that `rank` has encoded, and adds them to this sum.

        The records lie back to back, or at the offsets `slots_S`.

        Raises:
            WireFormatError: the records are not what that rank announced.
        """
        step = sum_step(self.message.step, cut)
        code = WIRE_CODES[value_dtype]
        expected = Expected(cut.own_offsets, code, step, rank, slots_S, self.message.checksum)
        self._decode(records, cut, expected, fresh=fresh)

    def add_dense(self, sum_M: torch.Tensor, cut: Cut) -> None:
        """Adds a sum that arrived as dense values, without records."""
        with self._timer.stage("decode"):
            self.sum_N[cut.elements].add_(sum_M)

    def slots_of_sum(self, cut: Cut) -> torch.Tensor | None:
        """In capacity mode `Slots.offsets` of the records of a cut's complete sum, else None.

        A slot holds as many non-zero elements as all ranks' messages together, the most of a sum.
        """
        slots = self.message.slots
        if slots is None:
            return None
        return sum_slots(slots, cut, self._bucket.world_size, self._sum_spec).offsets

    def sum_writer(
        self, cuts: Sequence[Cut], *, dense: bool = False
    ) -> Callable[[int, torch.Tensor], None]:
        """The callback of an all-gather of complete sums, in which rank i sends the sum of cut i.

        It decodes a rank's records into this sum and into the gradient. That includes this rank's
        own records, so that every rank has the same bits. `dense` sums are not encoded: their
        length is known without a slot.
        """
        names = names_of(self.exchange.transport)

        def write_sum(rank: int, records: torch.Tensor) -> None:
            """Replaces the values of `cuts[rank]` by these records, here and in the gradient."""
            cut = cuts[rank]
            slots_S = None if dense else self.slots_of_sum(cut)
            value_dtype = self.final_dtype if dense else self.gather_dtype
            self.add_sum(records, cut, value_dtype, names[rank], fresh=True, slots_S=slots_S)
            self.write(cut.elements)

        return write_sum

    def round_partial(self, cut: Cut) -> None:
        """Rounds a partial sum in place as peers receive it, so that all add the same values."""
        if self.partial_dtype != "fp32":
            part = self.sum_N[cut.elements]
            part.copy_(part.to(VALUE_DTYPES[self.partial_dtype]))

    def unify_bits(self, cut: Cut) -> None:
        """Gives a complete sum equal bits on all ranks: rounds to its records' dtype, unifies NaN.

        Some ranks keep the sum that they added up, others decode its records. Call it

        - where the sum was added up, before encoding: the bits of a sum of two NaN depend on their
          order, which differs between ranks;
        - on the peers, after decoding: on a GPU decoding a NaN may change its bits.
        """
        if self.sum_N is not self._bucket.grad_N:
            return  # `write` rounds to the gradient's dtype, in which complete sums travel
        part, dtype = self.sum_N[cut.elements], VALUE_DTYPES[self.final_dtype]
        with self._timer.stage("decode"):
            if dtype != part.dtype:
                part.copy_(part.to(dtype))
            unify_nan_(part)

    def encode(
        self,
        cut: Cut,
        value_dtype: str,
        out: torch.Tensor,
        *,
        dense: bool = False,
        slots_S: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Encodes the sum of a cut into `out`, and returns the records, a view of `out`.

        On CUDA the CPU waits for their size, but not in capacity mode. A quantised sum has error
        feedback, like a selection: this rank's residual is added to the elements that are sent, and
        receives their rounding errors.

        Args:
            cut: which part of the sum.
            value_dtype: dtype of the values; the sum itself is left unrounded.
            out: uint8, at least the cut's capacity, or with slots up to their end. Mutated.
            dense: send every segment whole; the records' size is then the capacity.
            slots_S: offsets of the records; None for back to back.
        """
        reports, residual_M = self.message.reports, None
        if value_dtype in QUANTISED.values() and self.message.residual_N is not None:
            residual_M = self.message.residual_N[cut.elements]
        spec = replace(
            self._sum_spec,
            value_dtype=WIRE_CODES[value_dtype],
            step=sum_step(self.message.step, cut),
        )
        keep = cut.keep
        if dense:
            spec = replace(spec, record_format=FORMAT_DENSE, without_indices=False)
            keep = torch.ones_like(keep)
        with self._timer.stage("encode"):
            sizes = encode_segments(
                self.sum_N[cut.elements],
                Segments(cut.own_offsets, keep, slots_S),
                None,
                spec,
                out,
                reports,
                residual_N=residual_M,
            )
            if reports is None:
                return out[: int(sizes.sum())]
            # Capacity mode. This sum may contain a peer's bad records, whose error the CPU has not
            # read yet. `spoil_` then makes the encoded sum invalid, so that every rank refuses it.
            assert dense or slots_S is not None, "in capacity mode sums have slots or are dense"
            nbytes = cut.capacity(value_dtype) if slots_S is None else int(slots_S[-1])
            reports.spoil_(out[:nbytes])
            return out[:nbytes]

    def write(self, elements: slice) -> None:
        """Rounds part of the sum to the gradient's dtype and writes it to the gradient."""
        if self.sum_N is not self._bucket.grad_N:
            with self._timer.stage("decode"):
                round_into(self._bucket.grad_N[elements], self.sum_N[elements])

    def _decode(self, records: torch.Tensor, cut: Cut, expected: Expected, *, fresh: bool) -> None:
        sum_M, reports = self.sum_N[cut.elements], self.message.reports
        with self._timer.stage("decode"):
            decode_add_(sum_M, records, expected, fresh=fresh, reports=reports)


def sum_span(log2_span: int, ranks: int) -> int:
    """The `RecordSpec.log2_span` of a sum of so many messages, from that of the messages.

    A sum may have `ranks` times as many non-zero elements, so its spans are that much shorter.

    Example:
        >>> sum_span(17, 5)
        15
    """
    return max(log2_span - (ranks.bit_length() - 1), RICE_SPANS[0])


@lru_cache(TABLES)
def sum_slots(slots: Slots, cut: Cut, ranks: int, spec: RecordSpec) -> Slots:
    """The slots behind `SparseSum.slots_of_sum`, for `ranks` messages; cached for later steps."""
    return Slots.of(cut.own_offsets, cut.keep, slots.capacity_S[cut.segments] * ranks, spec)
