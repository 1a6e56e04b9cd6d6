"""`bench parameters`: bits of parameters' moves, and how fast they are coded.

A parameter's move is its new bit pattern less its old one, as ordered integers (`formats.moves`).
Each row is the plugin's coder, rANS, on one pair of old and new parameters. `entropy` is the
order-0 entropy of the moves given the old exponent, in bits: the least for a coder that knows only
this exponent. On a GPU times include reading the record's size and status on the host.

The parameters are synthetic: normal weights of RMS 0.02 in fp32, normal updates of RMS 0.3 times
the learning rate (measured for AdamW), both rounded to the dtype. `measure` takes any other pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from megatron_sparse.bench.codec.frame import DTYPES, differing, time_in_turn
from megatron_sparse.bench.codec.options import ParameterSweep
from megatron_sparse.bench.table import local
from megatron_sparse.formats.message import WIRE_CODES
from megatron_sparse.formats.moves import decode_moves_, encode_moves
from megatron_sparse.reference import moves as oracle
from megatron_sparse.run.rows import CellRow, cell

WEIGHT_RMS, UPDATE_SHARE = 0.02, 0.3
ENTROPY_NUMEL = 2**22
"""Of more numbers the entropy is that of the first so many: it takes five 64-bit copies of them."""
COMPARED_NUMEL = 2**20 + 17
"""Numbers whose record on a GPU is compared with the CPU's; the last block is not full."""
EPOCH = 1
"""Any number: a record is decoded only with the one that it was encoded with."""


@dataclass(frozen=True)
class ParameterPair:
    """Old and new parameters, 1-D, and their name in the table."""

    name: str
    old_N: torch.Tensor
    new_N: torch.Tensor

    def first(self, numel: int) -> ParameterPair:
        """The first `numel` numbers, as views."""
        return ParameterPair(self.name, self.old_N[:numel], self.new_N[:numel])

    def on_host(self) -> ParameterPair:
        """The same on the CPU."""
        return ParameterPair(self.name, self.old_N.cpu(), self.new_N.cpu())


@dataclass
class ParameterRow(CellRow):
    """One line of the table and one JSON object; rates are 1e9 bytes of parameters in a second.

    `entropy` is null for fp32, where nearly every move is another.
    """

    parameters: str = cell("the pair's name, such as a learning rate", "<48")
    coder: str = cell("that made the bytes: `rans`", "<6")
    dtype: str = cell("of the parameters", ">5")
    numel: int = cell("parameters", ">10")
    bits: float = cell("on the wire, of each parameter; headers included", ">6.2f")
    entropy: float | None = cell(
        "least bits of a coder that knows the old exponent", ">7.2f | bits/entropy >9.2f ratio"
    )
    encode_gbps: float = cell("median", ">12.2f encode(GB/s)")
    decode_gbps: float = cell("median", ">12.2f decode(GB/s)")
    wrong: int = cell("bytes of parameters that are wrong after decoding", ">6")


def synthetic(numel: int, rate: float, dtype: torch.dtype, device: str = "cpu") -> ParameterPair:
    """Makes weights before and after an update of AdamW's size; the same ones on every call."""
    draw = torch.Generator(device).manual_seed(11)
    weight_N = torch.randn(numel, generator=draw, device=device) * WEIGHT_RMS
    update_N = torch.randn(numel, generator=draw, device=device) * UPDATE_SHARE * rate
    return ParameterPair(f"lr {rate:g}", weight_N.to(dtype), (weight_N + update_N).to(dtype))


def measure(pair: ParameterPair, warmup: int, iters: int) -> ParameterRow:
    """Encodes and decodes the moves of a pair in `warmup` rounds and in `iters` that are timed.

    Returns its row of the table, with medians.
    """
    record, parameters_N = encoded(pair), torch.empty_like(pair.old_N)

    def encode() -> None:
        encoded(pair)

    def restore_old() -> None:
        """Undoes `decode`, which changes the old parameters into the new ones in place."""
        parameters_N.copy_(pair.old_N)

    def decode() -> None:
        decode_moves_([record], [parameters_N], epoch=EPOCH)

    times_us = time_in_turn([encode, restore_old, decode], warmup, iters, pair.old_N.device)
    encode_us, _, decode_us = map(median, times_us)
    name_of = {dtype: name for name, dtype in DTYPES.items()}
    dtype = name_of[pair.old_N.dtype]
    numel, nbytes = pair.old_N.numel(), pair.old_N.nbytes
    sampled = pair.first(ENTROPY_NUMEL).on_host()
    return ParameterRow(
        parameters=pair.name,
        coder="rans",
        dtype=dtype,
        numel=numel,
        bits=8 * len(record) / max(numel, 1),
        entropy=None if dtype == "fp32" else conditional_entropy(sampled, WIRE_CODES[dtype]),
        encode_gbps=nbytes / encode_us / 1e3,  # bytes/us = MB/s
        decode_gbps=nbytes / decode_us / 1e3,
        wrong=_wrong_bytes(pair, parameters_N),  # as the last round decoded them
    )


def _wrong_bytes(pair: ParameterPair, decoded_N: torch.Tensor) -> int:
    """The number of bytes in which the decoded parameters differ from the new ones.

    On a GPU it adds the bytes in which the record of the first `COMPARED_NUMEL` numbers differs
    from the CPU's record of them.
    """
    wrong = int((decoded_N.view(torch.uint8) != pair.new_N.view(torch.uint8)).sum())
    if pair.old_N.is_cuda:
        compared = pair.first(COMPARED_NUMEL)
        wrong += differing(encoded(compared), encoded(compared.on_host()))
    return wrong


def encoded(pair: ParameterPair) -> torch.Tensor:
    """The record of the pair, bytes on its device."""
    return encode_moves(pair.old_N, pair.new_N, epoch=EPOCH)


def moves_of(pair: ParameterPair, code: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a pair's moves as zigzag numbers (0, 1, 2 for 0, -1, 1), and the old exponents.

    The pair has numbers of 16 bits, on the CPU; `code` is that of their dtype in `WIRE_CODES`.
    """
    old, new = _bits_of(pair.old_N), _bits_of(pair.new_N)
    return oracle.zigzag(old, new, code), oracle.exponents(old, code)


def _bits_of(numbers_N: torch.Tensor) -> np.ndarray:
    """The bits of 16-bit numbers, unsigned, in int64."""
    return numbers_N.view(torch.int16).numpy().view("<u2").astype(np.int64)


def conditional_entropy(pair: ParameterPair, code: int) -> float:
    """Bits of a move given the old exponent: H(exponent, move) - H(exponent); see `moves_of`."""
    moves, exponents = moves_of(pair, code)
    return _entropy(exponents << 16 | moves) - _entropy(exponents)


def _entropy(symbols: np.ndarray) -> float:
    """Shannon's entropy of the symbols' frequencies, in bits a symbol."""
    counts = np.unique(symbols, return_counts=True)[1]
    shares = counts / max(symbols.size, 1)
    return float(-(shares * np.log2(shares)).sum())


def _rows(sweep: ParameterSweep) -> Iterator[ParameterRow]:
    """One row for each learning rate."""
    for rate in sweep.rates:
        pair = synthetic(sweep.elements, rate, DTYPES[sweep.dtype], sweep.device)
        yield measure(pair, sweep.warmup, sweep.iters)


run = local(lambda sweep: f"{sweep.device}; synthetic: normal weights and updates", _rows)
