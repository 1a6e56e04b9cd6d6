"""`bench parameters`: bits of parameters' moves, and how fast they are coded.

Each row is one coder on one pair of old and new parameters. `entropy` is the order-0
entropy of the moves given the old exponent, in bits: the least that a coder can reach that looks at
no more than that. zstd (level 3) gets the moves themselves, as integers in zigzag order (0, -1, 1,
...), in the parameters' width: far better for it than the parameters' own bytes. Its times are
without the subtraction that makes the moves. On a GPU only the plugin's own coder has rows; their
times include reading the record's size and status on the host.

The parameters are synthetic: normal weights of RMS 0.02 in fp32, normal updates of RMS 0.3 times
the learning rate (measured for AdamW), both rounded to the dtype. `measure` takes any other pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import batched
from statistics import median
from typing import Any

import numpy as np
import torch

from megatron_sparse.bench.codec.frame import DTYPES, differing, time_in_turn
from megatron_sparse.bench.codec.options import ParameterSweep
from megatron_sparse.bench.table import Action, local
from megatron_sparse.extras import is_installed
from megatron_sparse.formats.moves import decode_moves_, encode_moves
from megatron_sparse.reference import moves as oracle
from megatron_sparse.run.rows import CellRow, cell, show_progress

WEIGHT_RMS, UPDATE_SHARE = 0.02, 0.3
RANS, ZSTD = "rans", "zstd"
ENTROPY_NUMEL = 2**24
"""Of more numbers the entropy is that of the first so many."""
COMPARED_NUMEL = 2**20 + 17
"""Numbers whose record on a GPU is compared with the CPU's."""


@dataclass(frozen=True)
class ParameterPair:
    """Old and new parameters, 1-D, and their name in the table."""

    name: str
    old_N: torch.Tensor
    new_N: torch.Tensor

    def on_host(self, numel: int) -> ParameterPair:
        """The first numbers, on the CPU."""
        return ParameterPair(self.name, self.old_N[:numel].cpu(), self.new_N[:numel].cpu())


@dataclass
class ParameterRow(CellRow):
    """One line of the table and one JSON object; rates are 1e9 bytes of parameters in a second.

    `entropy` is null for fp32, where nearly every move is another.
    """

    parameters: str = cell("the pair's name, such as a learning rate", "<48")
    coder: str = cell("that made the bytes", "<6")
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
    """Weights and an update as AdamW's at this learning rate; a pure function."""
    draw = torch.Generator(device).manual_seed(11)
    weight_N = torch.randn(numel, generator=draw, device=device) * WEIGHT_RMS
    update_N = torch.randn(numel, generator=draw, device=device) * UPDATE_SHARE * rate
    return ParameterPair(f"lr {rate:g}", weight_N.to(dtype), (weight_N + update_N).to(dtype))


def measure(
    case: ParameterPair, coders: list[str], warmup: int, iters: int
) -> Iterator[ParameterRow]:
    """The rows of one pair; coders are timed in turn, so that all see the same machine."""
    show_progress(case.name)
    numel, device = case.old_N.numel(), case.old_N.device
    host = case if device.type == "cpu" else case.on_host(ENTROPY_NUMEL)
    z_N = moves_of(host)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == case.old_N.dtype)
    entropy = None if dtype == "fp32" else conditional_entropy(host, z_N)
    made = [_coder(name, case, z_N) for name in coders]
    actions = [action for coder in made for action in coder.actions]
    medians_us = map(median, time_in_turn(actions, warmup, iters, device))
    for coder, (encode_us, _, decode_us) in zip(made, batched(medians_us, 3), strict=True):
        yield ParameterRow(
            parameters=case.name,
            coder=coder.name,
            dtype=dtype,
            numel=numel,
            bits=8 * len(coder.record) / max(numel, 1),
            entropy=entropy,
            encode_gbps=case.old_N.nbytes / encode_us / 1e3,
            decode_gbps=case.old_N.nbytes / decode_us / 1e3,
            wrong=coder.count_wrong(coder.result),
        )


@dataclass
class Coder:
    """A way to code one pair's moves.

    Attributes:
        name: in the table.
        encode: makes the bytes.
        decode: makes the moves of them, or the new parameters.
        count_wrong: the numbers of a result that are wrong.
        prepare: what decoding needs, and is not timed.
        record: the bytes that were made last.
        result: what was decoded last.
    """

    name: str
    encode: Callable[[], Any]
    decode: Callable[[Any], Any]
    count_wrong: Callable[[Any], int]
    prepare: Action = lambda: None
    record: Any = None
    result: Any = None

    @property
    def actions(self) -> tuple[Action, Action, Action]:
        """Encodes, prepares and decodes; the first and the last one are timed."""

        def encode() -> None:
            self.record = self.encode()

        def decode() -> None:
            self.result = self.decode(self.record)

        return encode, self.prepare, decode


def _coder(name: str, case: ParameterPair, z_N: np.ndarray) -> Coder:
    """The plugin's own coder, or zstd on the moves `z_N`."""
    if name == RANS:
        held = torch.empty_like(case.old_N)

        def decode(record: torch.Tensor) -> torch.Tensor:
            decode_moves_(record, held, epoch=1)
            return held

        def wrong(result: torch.Tensor) -> int:
            count = int((result.view(torch.uint8) != case.new_N.view(torch.uint8)).sum())
            if case.old_N.is_cuda:  # its record is also the CPU's
                first = slice(COMPARED_NUMEL)
                part = ParameterPair(case.name, case.old_N[first], case.new_N[first])
                count += differing(encoded(part), encoded(case.on_host(COMPARED_NUMEL)))
            return count

        def hold_old() -> None:
            held.copy_(case.old_N)

        return Coder(name, lambda: encoded(case), decode, wrong, prepare=hold_old)
    moves = z_N.tobytes()

    def wrong_moves(data: bytes) -> int:
        return int((np.frombuffer(data, z_N.dtype) != z_N).sum())

    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    return Coder(name, lambda: compressor.compress(moves), decompressor.decompress, wrong_moves)


def encoded(case: ParameterPair) -> torch.Tensor:
    """The record of the pair, on its device."""
    return encode_moves(case.old_N, case.new_N, epoch=1)


def bit_patterns(values_N: torch.Tensor) -> np.ndarray:
    """The same memory as unsigned integers."""
    signed = {2: torch.int16, 4: torch.int32}[values_N.element_size()]
    return values_N.view(signed).numpy().view(f"<u{values_N.element_size()}")


def moves_of(case: ParameterPair) -> np.ndarray:
    """The moves in zigzag order, in the parameters' width."""
    code = list(DTYPES.values()).index(case.old_N.dtype)
    old, new = (bit_patterns(side) for side in (case.old_N, case.new_N))
    found = []
    for at in range(0, max(old.size, 1), 2**20):  # NumPy's integers of 64 bits stay in the cache
        was, now = (side[at : at + 2**20].astype(np.int64) for side in (old, new))
        found.append(oracle.zigzag(was, now, code))
    return np.concatenate(found).astype(old.dtype)


def conditional_entropy(case: ParameterPair, z_N: np.ndarray) -> float:
    """Bits of the moves given the old exponent, for 16-bit numbers."""
    code = list(DTYPES.values()).index(case.old_N.dtype)
    old = bit_patterns(case.old_N)[:ENTROPY_NUMEL].astype(np.int64)
    context = oracle.exponents(old, code)
    return _entropy(context << 16 | z_N[:ENTROPY_NUMEL]) - _entropy(context)


def _entropy(symbols: np.ndarray) -> float:
    counts = np.unique(symbols, return_counts=True)[1]
    shares = counts / max(symbols.size, 1)
    return float(-(shares * np.log2(shares)).sum())


def _rows(sweep: ParameterSweep) -> Iterator[ParameterRow]:
    coders = [RANS]
    if sweep.device == "cpu":
        if is_installed("zstandard"):
            coders.append(ZSTD)
        else:
            print("# no rows of zstd: pip install 'megatron-sparse[bench]'")
    for rate in sweep.rates:
        case = synthetic(sweep.elements, rate, DTYPES[sweep.dtype], sweep.device)
        yield from measure(case, coders, sweep.warmup, sweep.iters)


run = local(lambda sweep: f"{sweep.device}; synthetic: normal weights and updates", _rows)
