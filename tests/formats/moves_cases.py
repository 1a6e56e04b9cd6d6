"""Numbers before and after a step, and damaged records, for the tests of moves."""

import struct

import numpy as np
import pytest
import torch

from megatron_sparse.errors import WireFormatError
from megatron_sparse.formats.moves import decode_moves_, encode_moves, keep_moves_
from megatron_sparse.reference import moves as oracle
from tests.damage import sealed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPOCH = 7


def bits(numbers):
    """As unsigned integers of NumPy, without a copy."""
    signed = {2: torch.int16, 4: torch.int32}[numbers.element_size()]
    return numbers.view(signed).numpy().view(f"<u{numbers.element_size()}")


def from_bits(integers, dtype):
    signed = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(integers.astype(f"<u{dtype.itemsize}").view(signed)).view(dtype)


def adam_like(numel, dtype, lr=3e-4, seed=0):
    """Weights as a GPT's, and an update as Adam's."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(numel, generator=generator) * 0.02
    update = torch.randn(numel, generator=generator) * 0.3 * lr
    return weights.to(dtype), (weights + update).to(dtype)


def any_bits(numel, dtype, seed=0):
    """Any bit patterns: NaN of every payload, infinities, both zeros; moves of every length."""
    rng = np.random.default_rng(seed)
    top = 1 << 8 * dtype.itemsize
    return tuple(from_bits(rng.integers(0, top, numel), dtype) for _ in range(2))


def mixed(numel, dtype):
    """All kinds of moves in one record: none, small, all bits; whole chunks of each."""
    old, new = adam_like(numel, dtype)
    wild = any_bits(numel, dtype)
    third = numel // 3
    old[:third], new[:third] = wild[0][:third], wild[1][:third]
    new[third : 2 * third] = old[third : 2 * third]
    new[-1:] = float("nan")
    old[-2:-1], new[-2:-1] = 0.0, -0.0
    return old, new


def record_as(coder, numel):
    """A coded record of bf16 numbers, or one that is raw as coding does not pay; the old ones."""
    old, new = (adam_like if coder == "rans" else any_bits)(numel, torch.bfloat16)
    return encode_moves(old, new, epoch=EPOCH), old


def repaired(record):
    """With right checksums: of the header, and of the words behind it."""
    data = bytearray(record.numpy() if isinstance(record, torch.Tensor) else record)
    data[48:52] = struct.pack("<I", oracle.checksum(bytes(data[48:])))
    return torch.tensor(list(sealed(data)), dtype=torch.uint8)


def written(record, at, value):
    """The record with these bytes somewhere, and right checksums."""
    data = bytearray(record.numpy().tobytes())
    data[at : at + len(value)] = value
    return repaired(data)


def of_which_a_part_is_counted():
    """Many numbers, and moves that no counted block has."""
    old, new = adam_like(oracle.COUNT_ALL + 3000, torch.bfloat16, lr=1e-5)
    skipped = slice(1024, 1024 + 64)
    old[skipped], new[skipped] = any_bits(64, torch.bfloat16)
    return old, new


def every_bfloat16():
    """All 65536 patterns as old numbers; all of them as moves, and the smallest moves."""
    old = np.arange(65536)
    new = np.random.default_rng(3).permutation(65536)
    return tuple(from_bits(each, torch.bfloat16) for each in (old, new, old ^ 1))


def last_directions(numel):
    """Whether each of so many numbers moved down last: any booleans, the same in each call."""
    return np.random.default_rng(numel).integers(0, 2, numel, bool)


def packed(down):
    """As the codec wants them."""
    padded = np.pad(down, (0, -down.size % 32))
    return torch.from_numpy(np.packbits(padded, bitorder="little").view("<i4"))


def check(old, new, wanted, place, *shift):
    """Encoding makes these bytes, and decoding them turns the old numbers into the new ones.

    Sender and receiver note the directions. `place` puts tensors on a device, `shift` elements
    behind an aligned address.
    """
    directions = last_directions(old.numel())
    was, now, down = place(old, *shift), place(new, *shift), place(packed(directions))
    record = encode_moves(was, now, epoch=EPOCH, down=down)
    assert record.device == was.device
    assert record.cpu().numpy().tobytes() == wanted
    for left, given in ((was, old), (now, new)):
        assert np.array_equal(bits(left.cpu()), bits(given)), "only read"
    integers = (bits(each).astype(np.int64) for each in (old, new))
    turned = packed(oracle.directions(*integers, DTYPES.index(old.dtype), directions))
    kept, kept_down = place(old, *shift), place(packed(directions))
    decode_moves_([record], [was], epoch=EPOCH, down=[down])
    keep_moves_(kept, now, kept_down)
    for held, noted in ((was, down), (kept, kept_down)):
        assert np.array_equal(bits(held.cpu()), bits(new))
        assert torch.equal(noted.cpu(), turned)


def decode_one_(record, held, *, epoch, rank):
    decode_moves_([record], [held], epoch=epoch, ranks=[rank])


def refusal(record, held, epoch=EPOCH, decode_=decode_one_):
    """The error of a record that must be refused without a change of what is held."""
    before = bits(held.cpu()).copy()
    with pytest.raises(WireFormatError, match="rank 3: field") as caught:
        decode_(record, held, epoch=epoch, rank=3)
    assert np.array_equal(bits(held.cpu()), before), "a refused record changed what is held"
    return str(caught.value)
