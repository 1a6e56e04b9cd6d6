"""Fuzzes every decoder as Python calls it, with the compiled library under sanitizers.

    bash scripts/fuzz.sh                                             (builds, preloads, runs this)
    python -m tests.cuda_ext.fuzz_records --library FILE --seconds S [--first SEED]

Half of the seeds are messages, on which the oracle must agree. The others are records whose heads
are read in Python (hash bitmap, pairs, row-sparse, moves, quantised) and wrong arguments. Each seed
makes a valid record, damages it, mostly repairs the header's checksum, and decodes it from memory
of exactly its size. Allowed are a right answer, `WireFormatError`, and, where arguments were
damaged, `ExtensionError`. A refused record must leave the accumulator, or the parameters held, as
they were.
The current seed is kept in a file, because a sanitizer ends the process.
"""

import argparse
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

from megatron_sparse import cuda_ext
from megatron_sparse.cuda_ext import ops
from megatron_sparse.cuda_ext.record_spec import Expected, Pruning, RecordSpec, Segments
from megatron_sparse.errors import ExtensionError, WireFormatError
from megatron_sparse.formats import hash_bitmap, hash_pairs, moves, quantised
from megatron_sparse.formats.hash_partition import PermutationHash
from megatron_sparse.formats.hash_record import FORM_BITMAP, SECTIONS_AT, PartitionRecord
from megatron_sparse.formats.row_record import RowPart
from megatron_sparse.formats.row_sparse import RowSparse
from megatron_sparse.reference import message as message_oracle
from megatron_sparse.reference import moves as oracle
from megatron_sparse.wire import (
    FORMAT_BLOCKS,
    FORMAT_COO,
    FORMAT_DENSE,
    FORMAT_PICI,
    FORMAT_RICE,
    HEADER_BYTES,
    PICI_TILE,
    QUANTISED_BITS,
    RICE_BITS,
    payload_bytes,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HOSTILE = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, -1e-40, 3e38, 65504.0, 1.0, -3.0)
NUMELS = (0, 1, 2, 63, 64, 65, 4095, 4096, 4097)
STEP, OFFSET = 7, 1000
UNTOUCHED = 0.5
FORM_AT = 68  # in a record of a hash partition; docs/wire-format.md


def main() -> int:
    """Runs until the time is up; prints a summary and returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", type=Path, required=True, help="made with build --sanitize")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--seed-file", type=Path, default=Path("fuzz_records.seed"))
    chosen = parser.parse_args()
    torch.ops.load_library(str(chosen.library))
    cuda_ext._loaded.add("cpu")  # so that no other library is loaded beside this one
    torch.set_num_threads(1)

    executions: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    seed, stop_s = chosen.first, time.monotonic() + chosen.seconds
    with chosen.seed_file.open("w") as seed_file:
        while time.monotonic() < stop_s:
            seed_file.seek(0)
            seed_file.write(f"{seed}\n")
            seed_file.flush()
            name = list(DECODERS)[seed // 2 % len(DECODERS) if seed % 2 else 0]
            try:
                refused[name] += DECODERS[name](random.Random(seed))
            except Exception as error:
                print(f"fuzz_records: seed {seed}, {name}: {error!r}", file=sys.stderr)
                raise
            executions[name] += 1
            seed += 1
    chosen.seed_file.unlink()
    print(f"fuzz_records: {seed - chosen.first} executions, 0 crashes")
    for name, count in executions.items():
        print(f"fuzz_records: {name}: {count} executions, {refused[name]} refused")
    return 0


def make_values(rng: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of which none, some or all are zero, hostile ones among them."""
    density = rng.choice((0.0, 0.01, 0.1, 0.5, 1.0))
    draw = torch.Generator().manual_seed(rng.getrandbits(32))
    values = torch.tensor(HOSTILE)[torch.randint(len(HOSTILE), (count,), generator=draw)]
    return torch.where(torch.rand(count, generator=draw) < density, values, 0).to(dtype)


def damaged(
    rng: random.Random, record: torch.Tensor, places: Sequence[int] = (0,)
) -> tuple[torch.Tensor, bool]:
    """The record, intact or with some bytes changed or cut off; and whether it is intact.

    A message has records at several places; of all of them the checksum is mostly repaired.
    """
    data = bytearray(record.numpy().tobytes())
    whole = bytes(data)
    if rng.random() < 0.9:
        for _ in range(rng.choice((1, 1, 2, 4))):
            # Headers, first sections and ends are where most decisions are taken.
            begin = rng.choice((*places, len(data) - 160))
            at = rng.randrange(len(data)) if rng.random() < 0.3 else begin + rng.randrange(160)
            if not 0 <= at < len(data):
                continue
            match rng.randrange(5):
                case 0:
                    data[at] = rng.choice((0, 0xFF, rng.getrandbits(8)))
                case 1:
                    data[at] ^= 1 << rng.randrange(8)
                case 2:
                    move_bit(rng, data, at, rng.choice((8, 64, 512)))
                case _:
                    change_number(rng, data, rng.choice(places))
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data) + 1)] + bytes(rng.choice((0, 0, 16)))
        for at in places:
            if rng.random() < 0.8 and len(data) >= at + HEADER_BYTES:
                data[at + 44 : at + 48] = zlib.crc32(data[at : at + 44]).to_bytes(4, "little")
    copy = torch.empty(len(data), dtype=torch.uint8)  # exact, so overruns are found
    if data:
        copy.copy_(torch.frombuffer(data, dtype=torch.uint8))
    return copy, bytes(data) == whole


def change_number(rng: random.Random, data: bytearray, at: int) -> None:
    """Changes nnz or a number of a record's table, mostly a little; mostly corrects the length."""

    def number(place: int) -> int:
        return int.from_bytes(data[place : place + 4], "little")

    form, code, numel, payload = data[at + 5], data[at + 6], number(at + 8), at + HEADER_BYTES
    tiles = -(-numel // PICI_TILE)
    tables = {  # the first byte, and how many numbers
        FORMAT_COO: (payload, number(at + 16)),
        FORMAT_PICI: (payload + tiles * PICI_TILE // 8, tiles + 1),
        FORMAT_BLOCKS: (payload, 4 + number(payload + 4)),
        FORMAT_RICE: (payload, 6 + 2 * number(payload + 4)),
    }
    begin, count = tables.get(form, (at + 16, 1))
    place = begin + 4 * rng.choice((0, count - 1, rng.randrange(max(count, 1))))
    if rng.random() < 0.3 or not begin <= place <= len(data) - 4:
        place = at + 16
    step = rng.choice((1, 1, 4, 40, 256, 2**14, 2**31))
    changed = (number(place) + rng.choice((-step, step))) % 2**32
    data[place : place + 4] = changed.to_bytes(4, "little")
    if rng.random() < 0.7 and form in (FORMAT_COO, FORMAT_PICI) and code < len(DTYPES):
        size = payload_bytes(form, numel, number(at + 16), code)
        data[at + 24 : at + 32] = size.to_bytes(8, "little")


def move_bit(rng: random.Random, data: bytearray, begin: int, count: int) -> None:
    """Moves a bit within so many bytes, often to the end: the number of bits stays right."""
    near = data[begin : begin + count]
    held = [bit for bit in range(8 * len(near)) if near[bit // 8] >> bit % 8 & 1]
    free = rng.choice((rng.randrange(8 * len(near)), 8 * len(near) - 1))
    if held and not near[free // 8] >> free % 8 & 1:
        for bit in (rng.choice(held), free):
            data[begin + bit // 8] ^= 1 << bit % 8


def attempt(decode: Callable[[], object], *accs: torch.Tensor, intact: bool = False) -> bool:
    """Whether the record was refused, which an intact one may not be."""
    try:
        decode()
    except WireFormatError:
        assert not intact, "a record of our own is refused"
        for acc in accs:
            assert bool((acc == UNTOUCHED).all()), "a refused record changed the accumulator"
        return True
    return False


@contextmanager
def any_isa(rng: random.Random) -> Iterator[None]:
    """One of this machine's instruction sets in the block."""
    os.environ["MEGATRON_SPARSE_ISA"] = rng.choice(ops.supported_isas())
    try:
        yield
    finally:
        del os.environ["MEGATRON_SPARSE_ISA"]


def mend_words(rng: random.Random, record: torch.Tensor, intact: bool) -> None:
    """Mostly repairs the checksum of the words behind the header."""
    if not intact and rng.random() < 0.8 and record.numel() >= 64 and record.numel() % 4 == 0:
        data = record.numpy()
        data[48:52] = list(oracle.checksum(data[48:].tobytes()).to_bytes(4, "little"))


def make_message(rng: random.Random) -> tuple[torch.Tensor, list[int], Expected]:
    """A message of two segments in any format, where its records begin, and what it must state.

    The first slot of a message in slots may be too short for its record.
    """
    code, numel = rng.choice((0, 1, 2, *range(7))), rng.choice((*NUMELS, 300, 9000, 9000))
    offsets = torch.tensor([0, rng.randrange(numel + 1), numel])
    others = (FORMAT_COO, FORMAT_PICI, FORMAT_BLOCKS)  # dense where that is smaller
    spec = RecordSpec(
        code,
        STEP,
        FORMAT_RICE if code in RICE_BITS or rng.random() < 0.2 else rng.choice(others),
        paper_order=rng.random() < 0.5,
        block_size=rng.choice((64, 256, 4096)),
        log2_span=rng.choice((12, 13, 17)),
        without_indices=code in (3, 4) and rng.random() < 0.3,
    )
    kept = torch.tensor([0, rng.random() < 0.2], dtype=torch.uint8)
    grad = make_values(rng, numel, rng.choice(list(DTYPES.values())))
    if rng.random() < 0.5:
        grad[: rng.randrange(numel + 1)] = 0
    nnz = torch.stack([part.count_nonzero() for part in grad.tensor_split(offsets[1:-1])])
    out = torch.empty(ops.message_capacity(offsets, code), dtype=torch.uint8)
    residual, segments = torch.zeros(numel), Segments(offsets, kept)
    with any_isa(rng):
        if rng.random() < 0.5:
            added = residual if code in RICE_BITS else None
            sizes = ops.encode(grad, segments, nnz, spec, out, residual_N=added)
        else:
            everything = Pruning(residual, torch.tensor([0, numel]), torch.zeros(1), 1.0, -1)
            sizes, _ = ops.prune_encode(grad, everything, segments, spec, out)
    first, end = sizes.cumsum(0).tolist()
    if rng.random() < 0.7:
        return out[:end], [0, first], Expected(offsets, code, STEP, rank=0)
    room = max(first + 16 * rng.randrange(-1, 3), HEADER_BYTES)
    garbage = torch.full((32,), 0xA5, dtype=torch.uint8)
    first_slot = torch.cat([out[:first], garbage])[:room]
    message = torch.cat([first_slot, out[first:end], garbage[: 16 * rng.randrange(3)]])
    slots = torch.tensor([0, room, message.numel()])
    return message, [0, int(slots[1])], Expected(offsets, code, STEP, rank=0, slots=slots)


def sum_by_oracle(
    acc: torch.Tensor, record: torch.Tensor, expected: Expected
) -> torch.Tensor | None:
    """The accumulator with the message added; None if the message is wrong."""
    slots, acc, message = expected.slots, acc.clone(), record.numpy().tobytes()
    places = [0, len(message)] if slots is None else slots.tolist()
    if places[-1] != len(message):
        return None
    try:
        for s, (begin, end) in enumerate(pairwise(places)):
            part, records = message[begin:end], expected
            if slots is not None:
                offsets = expected.segment_offsets[s : s + 2]
                part = part[: HEADER_BYTES + int.from_bytes(part[24:32], "little")]
                records = replace(expected, segment_offsets=offsets)
            message_oracle.decode_add_(acc, part, records, 0)
    except WireFormatError:
        return None
    return acc


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are, but for those of NaN: which survives differs between machines."""
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | a.isnan() & b.isnan()).all())


def decode_message(rng: random.Random) -> bool:
    """Messages in every format, also in slots, one at a time and several in one pass.

    The answers are the oracle's, bit for bit, on every instruction set.
    """
    made, places, expected = make_message(rng)
    message, _ = damaged(rng, made, places)
    untouched = torch.full((int(expected.segment_offsets[-1]),), UNTOUCHED)
    fresh, acc = rng.random() < 0.5, untouched.clone()
    start = torch.zeros_like(acc) if fresh else untouched
    is_whole = sum_by_oracle(start, made, expected) is not None
    assert is_whole or expected.slots is not None, "a message of our own is refused"
    wanted = sum_by_oracle(start, message, expected)
    with any_isa(rng):
        refused = attempt(lambda: ops.decode_add_(acc, message, expected, 0, fresh=fresh), acc)
    assert refused == (wanted is None), "the oracle judges this message otherwise"
    assert wanted is None or same(acc, wanted), "a message is added with other bits"

    messages, total, one_pass = (message, made, message), start.clone(), untouched.clone()
    for each in messages:
        with suppress(WireFormatError):
            ops.decode_add_(total, each, expected, 0)
    with any_isa(rng):
        refused_in_sum = attempt(
            lambda: ops.decode_sum_(one_pass, messages, expected, 0, range(3), fresh=fresh)
        )
    assert refused_in_sum == (refused or not is_whole), "a message of a sum is judged otherwise"
    assert same(one_pass, total), "a sum in one pass has other bits"
    return refused


def decode_arguments(rng: random.Random) -> bool:
    """The message is right, the arguments are not: views, strides, offsets that lead elsewhere."""
    numel = rng.choice((0, 1, 65, 4097))
    offsets = torch.tensor([0, numel])
    segments = Segments(offsets, torch.zeros(1, dtype=torch.uint8))
    spec = RecordSpec(0, STEP, record_format=FORMAT_DENSE)
    (record,) = message_oracle.encode(torch.ones(numel), segments, torch.tensor([numel]), spec)
    acc = torch.full((numel,), UNTOUCHED)
    message, base = torch.frombuffer(bytearray(record), dtype=torch.uint8), 0
    match rng.randrange(8):
        case 0:
            acc = torch.full((2 * numel,), UNTOUCHED)[::2]
        case 1:
            acc = torch.full((max(numel - 1, 0),), UNTOUCHED)
        case 2:
            acc = torch.full((1,), UNTOUCHED).expand(numel)
        case 3:
            message = torch.cat([message.new_zeros(3), message])[3:]  # unaligned, but right
        case 4:
            message = message.repeat_interleave(2)[::2]
        case 5:
            offsets = torch.tensor([rng.choice((-1, 1, 2**40, -(2**63))), numel])
        case 6:
            offsets = torch.tensor(rng.choice(([0], [numel, 0], [0, 2**63 - 1], [0, numel, 0])))
        case _:
            base = rng.choice((-1, 1, 2**40, -(2**63), 2**63 - 1))
    try:
        ops.decode_add_(acc, message, Expected(offsets, 0, STEP, rank=0), base)
    except (ExtensionError, WireFormatError):
        return True
    return False


def _partition(rng: random.Random) -> PartitionRecord:
    numel, partitions = rng.choice(NUMELS), rng.choice((1, 2, 3, 7, 64))
    h0 = PermutationHash(numel, partitions, rng.randrange(2**20))
    dtype = rng.choice(list(DTYPES.values()))
    return PartitionRecord(h0, rng.randrange(partitions), dtype, OFFSET, STEP)


def decode_bitmap(rng: random.Random) -> bool:
    """The hash bitmap, added to the segment or to a partition."""
    place = _partition(rng)
    values = make_values(rng, place.positions, place.value_dtype)
    numel, made = place.partition_hash.numel, hash_bitmap.encode(values, place)
    record, intact = damaged(rng, made)
    if rng.random() < 0.2 and made[FORM_AT] == FORM_BITMAP:
        data = bytearray(made.numpy())
        move_bit(rng, data, SECTIONS_AT, place.word_bytes)
        record = torch.frombuffer(data, dtype=torch.uint8).clone()
        intact = torch.equal(record, made)
    acc_M, acc_P = torch.full((numel,), UNTOUCHED), torch.full((place.positions,), UNTOUCHED)

    def decode() -> None:
        if rng.random() < 0.5:
            hash_bitmap.decode_add_(acc_M, record, place, rank=0)
            return
        hash_pairs.accumulate_(acc_P, record, place, rank=0)
        if intact:
            wanted = values.float() + UNTOUCHED
            assert torch.equal(acc_P.nan_to_num(), wanted.nan_to_num())

    return attempt(decode, acc_M, acc_P, intact=intact)


def decode_pairs(rng: random.Random) -> bool:
    """A rank's push record for a server, in the smallest form."""
    place = _partition(rng)
    values = make_values(rng, place.positions, place.value_dtype)
    positions = values.nonzero().squeeze(1)
    elements, order = place.partition_hash.element_at(place.partition, positions).sort()
    record, intact = damaged(rng, hash_pairs.encode(elements, values[positions][order], place))
    acc = torch.full((place.positions,), UNTOUCHED)

    def decode() -> None:
        hash_pairs.accumulate_(acc, record, place, rank=0)
        if intact:
            assert torch.equal(acc.nan_to_num(), (values.float() + UNTOUCHED).nan_to_num())

    return attempt(decode, acc, intact=intact)


def decode_rows(rng: random.Random) -> bool:
    """A row-sparse record, whose decoder checks rows and their order."""
    parts, num_rows = rng.choice((1, 2, 3)), rng.choice((1, 2, 40, 2**31 + 1))
    name, columns = rng.choice(list(DTYPES)), rng.choice((1, 3, 16))
    part = RowPart(num_rows, columns, name, rng.randrange(parts), parts, STEP)
    wanted = sorted({rng.randrange(num_rows) for _ in range(rng.choice((0, 1, 20)))})
    rows = make_values(rng, len(wanted) * columns, DTYPES[name]).view(-1, columns)
    gradient = RowSparse(torch.tensor(wanted, dtype=torch.int64), rows, num_rows)
    positions = part.positions(gradient)
    out = torch.empty(part.record_bytes(positions.numel()), dtype=torch.uint8)
    part.encode(gradient, positions, out)
    record, intact = damaged(rng, out)

    def decode() -> None:
        got = part.decode(record, rank=0)
        if intact:
            assert torch.equal(got.indices_K, gradient.indices_K[positions])

    return attempt(decode, intact=intact)


def decode_moves(rng: random.Random) -> bool:
    """How far parameters moved, on every instruction set."""
    with any_isa(rng):
        dtype = rng.choice(list(DTYPES.values()))
        numel = rng.choice((*NUMELS, 16384 + 256 + 5, 65536 + 33))
        spread = rng.choice((0.0, 1e-5, 1e-3, 1.0))
        draw = torch.Generator().manual_seed(rng.randrange(2**31))
        old = (torch.randn(numel, generator=draw) * 0.02).to(dtype)
        new = old + (torch.randn(numel, generator=draw) * spread).to(dtype)
        words = moves.down_words(numel)
        down = torch.randint(-(2**31), 2**31, (words,), generator=draw, dtype=torch.int32)
        made = moves.encode_moves(old, new, epoch=STEP, down=down)
        record, intact = damaged(rng, made)
        mend_words(rng, record, intact)
        held, signs = old.clone(), down.clone()
        try:
            moves.decode_moves_([record], [held], epoch=STEP, down=[signs])
        except WireFormatError:
            assert not intact, "a record of our own is refused"
            assert torch.equal(held.view(torch.uint8), old.view(torch.uint8)), "held has changed"
            assert torch.equal(signs, down), "the directions have changed"
            return True
    assert not intact or torch.equal(held.view(torch.uint8), new.view(torch.uint8))
    return False


def decode_quantised(rng: random.Random) -> bool:
    """Quantised differences, with every number of bits, on every instruction set."""
    with any_isa(rng):
        numel = rng.choice((*NUMELS, 127, 128, 129, 65536 + 130))
        new, old = make_values(rng, numel, torch.float32), torch.zeros(numel)
        bits = rng.choice(QUANTISED_BITS)
        made = quantised.encode_difference(new, old, bits=bits, epoch=STEP)
        record, intact = damaged(rng, made)
        mend_words(rng, record, intact)
        held = torch.full((numel,), UNTOUCHED)
        return attempt(
            lambda: quantised.add_difference_(record, held, epoch=STEP), held, intact=intact
        )


DECODERS: dict[str, Callable[[random.Random], bool]] = {
    "message": decode_message,
    "message, wrong arguments": decode_arguments,
    "hash bitmap": decode_bitmap,
    "hash pairs": decode_pairs,
    "row-sparse record": decode_rows,
    "moves of parameters": decode_moves,
    "quantised differences": decode_quantised,
}

if __name__ == "__main__":
    sys.exit(main())
