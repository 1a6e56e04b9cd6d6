"""The fp32 sum of a dense collective, and how partial sums travel.

Partial sums travel in fp32, with one exception: where `scheme.wire_dtype=bf16` narrows the values
of an fp32 gradient, partial sums are narrowed to bf16 too, rounded to nearest even. The final sum
is rounded once to the dtype of the values, and travels in that dtype.

fp16 ends at 65504. Sums of values that it holds, such as 60000 + 60000 - 60000 - 60000, leave its
range on the way, so partial sums never travel in it.
"""

import torch

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.base import Exchange, Identity, Subgroup, whole_group
from megatron_sparse.formats.message import VALUE_DTYPES, name_of
from megatron_sparse.formats.rounding import round_into


class Accumulator:
    """This rank's partial sums of a bucket.

    Attributes:
        sum_N: fp32; at first this rank's values. If they are fp32 it is the same tensor, so adding
            overwrites them.
    """

    def __init__(self, exchange: Exchange, values_N: torch.Tensor) -> None:
        self._exchange = exchange
        self._partial_dtype = partial_dtype(exchange.bucket, values_N.dtype)
        if values_N.dtype == torch.float32:
            self.sum_N = values_N
        else:
            self.sum_N = exchange.take("sum", values_N.numel(), torch.float32)
            self.sum_N.copy_(values_N)

    def outgoing(self, start: int, stop: int) -> torch.Tensor:
        """The partial sums of the elements from `start` to `stop` in the dtype on the wire.

        A view, or a rounded copy that is valid until the next call.
        """
        return as_partial(self._exchange, self.sum_N[start:stop], self._partial_dtype)

    def incoming(self, numel: int) -> torch.Tensor:
        """Room for a peer's partial sums, valid until the next call."""
        return self._exchange.take("incoming", numel, self._partial_dtype)

    def add(self, start: int, stop: int, received_M: torch.Tensor) -> None:
        """Adds a peer's partial sums of the elements from `start` to `stop`."""
        with self._exchange.timer.stage("decode"):
            self.sum_N[start:stop].add_(received_M)


def as_partial(exchange: Exchange, sum_M: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A partial sum in `dtype`, to send: itself, or a rounded copy, valid until the next call."""
    if dtype == torch.float32:
        return sum_M
    return round_into(exchange.take("outgoing", sum_M.numel(), dtype), sum_M)


def dense_group(scheme: str, exchange: Exchange, values_N: torch.Tensor, step: int) -> Subgroup:
    """All ranks, with the tag of a dense collective of this name."""
    identity = Identity.of_values(scheme, exchange, values_N, step)
    return whole_group(exchange.transport, identity.tag)


def partial_dtype(bucket: Bucket, value_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums of values of this dtype travel: fp32 or bf16."""
    is_narrowed = value_dtype != bucket.grad_N.dtype
    return torch.bfloat16 if is_narrowed and value_dtype == torch.bfloat16 else torch.float32


def partial_name(bucket: Bucket, value_dtype: str) -> str:
    """`partial_dtype`, by names: fp32, bf16 or fp16."""
    return name_of(partial_dtype(bucket, VALUE_DTYPES[value_dtype]))


def store(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies `source` to `target`, rounded to its dtype; nothing if they are the same memory."""
    if target.data_ptr() != source.data_ptr():
        round_into(target, source)
