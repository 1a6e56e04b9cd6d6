"""Writes the inputs that `fuzz_decode.cpp` starts from: valid messages of the oracle.

    python -m tests.cuda_ext.fuzz_corpus FOLDER

An input is 8 bytes, from which `read_control` reads dtype and sizes, and a message of two segments.
"""

import random
import sys
from pathlib import Path

import torch

from megatron_sparse.cuda_ext.record_spec import RecordSpec, Segments
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import rice_message
from megatron_sparse.wire import (
    FORMAT_ADAPTIVE,
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    FORMAT_RICE,
)
from tests.cuda_ext.fuzz_records import STEP, make_values

FORMATS = (FORMAT_ADAPTIVE, FORMAT_DENSE, FORMAT_COO, FORMAT_PICI, FORMAT_BLOCKS, FORMAT_RICE)
INPUTS = 400
BEGIN = 1000
"""Where the segments begin in the bucket."""
QUANTISED = 32
"""The option of messages of few bits; their dtypes begin at 3."""


def make_input(rng: random.Random) -> bytes:
    """Mostly short segments of up to 767 elements, some of several of Rice's chunks."""
    is_quantised, form, remainder = rng.random() < 0.4, rng.choice(FORMATS), rng.randrange(3)
    code, options = rng.randrange(4 if is_quantised else 3), QUANTISED * is_quantised
    thirds = [rng.randrange(rng.choice((256, 256, 256, 4096))) for _ in range(2)]
    sizes = bytes(byte for third in thirds for byte in third.to_bytes(2, "little"))
    offsets = torch.tensor([0, BEGIN, *(3 * third + remainder for third in thirds)]).cumsum(0)
    values_N = make_values(rng, int(offsets[-1]), torch.float32)
    kept = torch.tensor([0, *(is_quantised and rng.random() < 0.1 for _ in range(2))])
    segments = Segments(offsets, kept.to(torch.uint8))
    if is_quantised or form == FORMAT_RICE:
        dtype, span = code + 3 * is_quantised, rng.choice((12, 12, 12, 13, 17))
        without_indices = dtype in (3, 4) and rng.random() < 0.5
        spec = RecordSpec(dtype, STEP, FORMAT_RICE, log2_span=span, without_indices=without_indices)
        residual_N = torch.zeros_like(values_N)
        records, _ = rice_message.encode_segments(values_N, residual_N, segments, spec)
    else:
        paper_order, block_size = rng.random() < 0.5, 64 << rng.randrange(7)
        spec = RecordSpec(code, STEP, form, paper_order=paper_order, block_size=block_size)
        nnz_S = torch.stack(
            [part.count_nonzero() for part in values_N.split(offsets.diff().tolist())]
        )
        records = message_oracle.encode(values_N, segments, nnz_S, spec)
    return bytes([code, options, remainder, rng.randrange(256)]) + sizes + b"".join(records[1:])


def main(folder: Path) -> None:
    """Writes them, the same every time."""
    folder.mkdir()
    for seed in range(INPUTS):
        (folder / f"valid_{seed}").write_bytes(make_input(random.Random(seed)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
