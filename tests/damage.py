"""Good messages of every format, and what can be wrong with them: a table that all codecs share."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_sparse.wire import HEADER_BYTES, VERSION, rice_parameter, rice_value_words
from tests.codec import ORACLE, RICE_NAMES, Case, rice_spec, segments_of, spec_of
from tests.cuda_ext import cases

PLAIN_NUMEL = 5000
"""Elements of `plain`: two tiles, 904 elements in the second."""
RICE_NUMEL = 10_000
"""Elements of `rice`: three chunks of 4096 elements, the last one of 1808."""
PREFIX = HEADER_BYTES + 2 * 512
"""Pici's prefix sums, behind the words of two tiles."""
TABLE, WORDS = HEADER_BYTES + 16, HEADER_BYTES + 16 + 32
OFFSET_AT, CHUNKS_AT, WORDS_AT = 32, HEADER_BYTES + 4, HEADER_BYTES + 8
RICE_FORMS = [*((code, False) for code in RICE_NAMES), (3, True), (4, True)]
"""Value dtypes, and whether every element has a value."""
RICE_IDS = [*RICE_NAMES.values(), "q8-whole", "q4-whole"]


@dataclass(frozen=True)
class Damage:
    """A damaged message.

    `fields`: what a codec may name; None where it may be right, or anything may be named.
    """

    message: bytes
    fields: frozenset[str] | None
    what: object = ""


def sealed(data: bytes | bytearray, *records: int) -> bytes:
    """With right checksums of the headers at these places, by default of the first."""
    data = bytearray(data)
    for at in records or (0,):
        data[at + 44 : at + 48] = struct.pack("<I", zlib.crc32(bytes(data[at : at + 44])))
    return bytes(data)


def put(message: bytes, at: int, value: int, width: int = 4, record: int = 0) -> bytes:
    """With an integer written, modulo its width, `at` bytes into a record, and a right checksum."""
    data = bytearray(message)
    data[record + at : record + at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    return sealed(data, record)


def word(message: bytes, at: int, width: int = 4) -> int:
    return int.from_bytes(message[at : at + width], "little")


def plain(form: str) -> tuple[Case, bytes]:
    """1 in 10 elements, and gaps of whole blocks; the last block reaches past the end."""
    grad_N = cases.pruned_grad(PLAIN_NUMEL, 0.1, torch.float32)
    grad_N[64:2048], grad_N[-1] = 0, 1
    case = Case(grad_N, segments_of([0, PLAIN_NUMEL]), spec_of(0, form))
    return case, ORACLE.encode(case).bytes


def rice(value_dtype: int, whole: bool = False) -> tuple[Case, bytes]:
    """5 entries in the first chunk, none in the second, 45 in the third, its last among them."""
    grad_N = torch.zeros(RICE_NUMEL)
    grad_N[[7, 8, 1000, 1001, 4000]] = torch.tensor([1.0, -2.0, 3.0, 4.0, -5.0])
    grad_N[8192:] = torch.arange(1808) % 41 == 3
    grad_N[-1] = 6.0
    spec = rice_spec(value_dtype, without_indices=whole)
    case = Case(grad_N, segments_of([0, RICE_NUMEL]), spec)
    return case, ORACLE.encode(case).bytes


def headers(good: bytes, numel: int, record: int = 0) -> Iterator[Damage]:
    """Every field of a record's header, under a right checksum; the checksum, and the size."""
    for field, at, width, value in (
        ("magic", 0, 4, 0),
        ("magic", 0, 4, 0x12345678),
        ("version", 4, 1, 1),
        ("version", 4, 1, VERSION + 1),
        ("format", 5, 1, 9),
        ("dtype", 6, 1, good[record + 6] ^ 1),
        ("dtype", 6, 1, 7),
        ("flags", 7, 1, 2),
        ("flags", 7, 1, 0x80),
        ("numel", 8, 8, numel + 1),
        ("numel", 8, 8, 2**63),
        ("nnz", 16, 8, numel + 1),
        ("nnz", 16, 8, 2**62),
        ("payload_bytes", 24, 8, 0),
        ("payload_bytes", 24, 8, 5),
        ("payload_bytes", 24, 8, 16),
        ("payload_bytes", 24, 8, 2**64 - 16),
        ("offset", OFFSET_AT, 8, 3),
        ("step", 40, 4, 6),
    ):
        named = {field, *(["size"] if field == "payload_bytes" else [])}
        yield Damage(put(good, at, value, width, record), frozenset(named), (field, value))
    for at in (0, 4, 5, 7, 8, 16, 24, 32, 40, 44, 47):
        unsealed = bytearray(good)
        unsealed[record + at] ^= 1
        field = {0: "magic", 4: "version"}.get(at, "checksum")  # these are looked at first
        yield Damage(bytes(unsealed), frozenset({field}), f"byte {at}, not sealed")
    if record:
        return
    sizes = frozenset({"size", "payload_bytes"})
    for length in (0, 16, 47, 48, 63, 64, 100, len(good) - 16, len(good) - 1):
        yield Damage(good[:length], sizes, f"{length} bytes")
    yield Damage(good + bytes(16), frozenset({"size"}), "bytes behind")


def sections(form: str, good: bytes) -> Iterator[Damage]:
    """What is wrong behind the header of `plain`'s message."""
    yield from {"coo": _coo, "linear": _pici, "paper": _pici, "blocks64": _blocks}[form](good)


def _named(*faults: tuple[int, int, int, str], good: bytes, also: str = "") -> Iterator[Damage]:
    for at, value, width, field in faults:
        fields = frozenset({field, *([also] if also else [])})
        yield Damage(put(good, at, value, width), fields, (at, value))


def _coo(good: bytes) -> Iterator[Damage]:
    first, last = HEADER_BYTES, HEADER_BYTES + 4 * (word(good, 16, 8) - 1)
    places = [(at, value) for at in (first, first + 20, last) for value in (-1, PLAIN_NUMEL)]
    places += [(first, 2**31 - 1), (first, -(2**31)), (first + 4, word(good, first))]
    yield from _named(*((at, value, 4, "indices") for at, value in places), good=good)


def _pici(good: bytes) -> Iterator[Damage]:
    nnz, middle = word(good, 16, 8), word(good, PREFIX + 4)
    assert word(good, PREFIX) == 0
    assert word(good, PREFIX + 8) == nnz
    prefixes = [(0, 1), (1, middle + 1), (1, 2**32 - 1), (2, nnz + 1), (2, 0)]
    faults = [(PREFIX + 4 * entry, value, 4, "prefix") for entry, value in prefixes]
    faults += [(PREFIX, 2**64 - 1, 8, "prefix"), (HEADER_BYTES, 2**64 - 1, 8, "prefix")]
    faults += [(HEADER_BYTES + 7, good[HEADER_BYTES + 7] ^ 1, 1, "prefix")]
    yield from _named(*faults, good=good)
    # A count that is one off, in header and prefix, where padding leaves the size as it is.
    for change in (-1, 1):
        other = put(put(good, 16, nnz + change, 8), PREFIX + 8, nnz + change)
        yield Damage(other, frozenset({"prefix", "payload_bytes"}), f"nnz {change}")
    # Element 4096 + 4095: no such element, though bits and counts agree.
    beyond = bytearray(good)
    beyond[HEADER_BYTES + 8 * 127 + 7] |= 0x80
    beyond = bytearray(put(put(bytes(beyond), 16, nnz + 1, 8), PREFIX + 8, nnz + 1))
    section = -(-4 * (nnz + 1) // 16) * 16
    beyond = beyond[: PREFIX + 16].ljust(PREFIX + 16 + section, b"\1")
    sized = put(bytes(beyond), 24, len(beyond) - HEADER_BYTES, 8)
    yield Damage(sized, frozenset({"words"}), "a bit beyond the end")
    # The other order is another valid message of linear order: the same bits, other elements.
    yield Damage(put(good, 7, good[7] ^ 1, 1), None, "the other order")


def _blocks(good: bytes) -> Iterator[Damage]:
    blocks, index = word(good, 52), HEADER_BYTES + 16
    # A wider block is refused for its number or for the size that follows from it.
    yield from _named(
        (48, 0, 4, "block_size"),
        (56, 1, 8, "block_size"),
        (48, 128, 4, "n_blocks"),
        (48, 1, 4, "n_blocks"),
        (48, 60, 4, "n_blocks"),
        (52, blocks - 1, 4, "payload_bytes"),
        (52, 80, 4, "n_blocks"),
        (52, 2**32 - 1, 4, "n_blocks"),
        (index, 79, 4, "indices"),
        (index, -1, 4, "indices"),
        (index + 4, 0, 4, "indices"),
        (index + 4 * (blocks - 1), 79, 4, "indices"),
        (len(good) - 4 * 56, 1, 1, "block padding"),
        (len(good) - 1, 0x80, 1, "block padding"),
        good=good,
        also="payload_bytes",
    )
    yield Damage(put(good, 7, 1, 1), frozenset({"flags"}), "a flag of Pici")


def rice_table(good: bytes) -> Iterator[Damage]:
    """The table and the rows of `rice`'s message, unless it is without indices."""
    rows = struct.unpack_from("<8I", good, TABLE)
    assert rows[::2] == (0, 5, 5, 50)
    wrong = [(0, 1), (1, 1), (2, 4097), (2, 2**32 - 1), (3, rows[7] + 1), (3, 2**32 - 1), (4, 4)]
    wrong += [(5, rows[5] - 1), (6, 49), (7, rows[7] - 1)]
    yield from _named(*((TABLE + 4 * row, value, 4, "table") for row, value in wrong), good=good)
    yield from _named((16, 49, 8, "table"), good=good)
    # Rows that ascend, but are not those of the words.
    others = [(2, 4), (2, 51), (4, 6), (5, rows[5] + 1), (3, rows[3] - 1)]
    faults = [(TABLE + 4 * row, value, 4, "table") for row, value in others]
    yield from _named(*faults, good=good, also="rice")


def third_chunk(good: bytes, value_dtype: int) -> tuple[int, int, int, int]:
    """Of `rice`'s: its values, remainders (five words for 32 of them) and unary part; its end."""
    begin, end = struct.unpack_from("<8I", good, TABLE)[5::2]
    values = WORDS + 4 * begin
    remainders = values + 4 * rice_value_words(45, value_dtype)
    assert rice_parameter(1808, 45) == 5
    return values, remainders, remainders + 4 * 5 * 2, WORDS + 4 * end


def rice_words(good: bytes, value_dtype: int) -> Iterator[Damage]:
    """The unary part and the remainders of the third chunk."""
    _, remainders, unary, end = third_chunk(good, value_dtype)
    last, ones = word(good, end - 4), word(good, unary)
    top = 1 << last.bit_length() - 1
    for at, value in (
        (unary, ones & ones - 1),  # one too few
        (unary, 0),
        (unary, 2**32 - 1),
        (end - 4, 0),  # the last word is empty
        (end - 4, last | 1 << 31),  # a bit after the last one
        (end - 4, (last ^ top) | 1 << 31),  # the last element is past the end
        (remainders + 36, 1 << 12 | word(good, remainders + 36)),
    ):
        yield Damage(put(good, at, value), frozenset({"rice"}), (at, value))
    # The last entry is element 1807 of 1808: one more is one too many.
    data, place = bytearray(good), 44 - 32
    at = [remainders + 4 * (5 + p) + place // 8 for p in range(5)]
    gap = sum((good[a] >> place % 8 & 1) << p for p, a in enumerate(at))
    assert gap < 31
    for p, a in enumerate(at):
        data[a] = data[a] & ~(1 << place % 8) | (gap + 1 >> p & 1) << place % 8
    yield Damage(bytes(data), frozenset({"rice"}), "the last remainder")


def rice_sub_header(good: bytes, whole: bool) -> Iterator[Damage]:
    """The 16 bytes behind the header of `rice`'s message."""
    chunk = [(0, 2, 1), (1, 11, 1), (1, 13, 1), (1, 25, 1), (1, 255, 1), (2, 1, 2), (2, 1, 1)]
    chunk += [(4, 2, 4), (4, 4, 4), (4, 0, 4), (4, 2**32 - 1, 4), (3, 1, 1)]
    faults = [(HEADER_BYTES + at, value, width, "chunk") for at, value, width in chunk]
    yield from _named(*faults, good=good)
    words = (0, 1, 10**6, 2**32, 2**62, 2**63, 2**64 - 1)
    yield from _named(
        *((WORDS_AT, each, 8, "table") for each in words), good=good, also="payload_bytes"
    )
    other = put(good, HEADER_BYTES, int(whole), 1)
    yield Damage(other, frozenset({"chunk", "table", "payload_bytes"}), "with indices or without")


def rice_damages(good: bytes, value_dtype: int, whole: bool) -> list[Damage]:
    """All of the above that a message of Rice records can have."""
    found = [*headers(good, RICE_NUMEL), *rice_sub_header(good, whole)]
    if not whole:
        found += [*rice_table(good), *rice_words(good, value_dtype)]
        # Words of all kinds; a few leave the message right.
        begin, end = WORDS, third_chunk(good, value_dtype)[3]
        for at in (*range(begin, begin + 80, 4), *range(end - 64, end, 4)):
            was = word(good, at)
            for value in (was ^ 1, was ^ 1 << 12, was ^ 1 << 31, 0, 2**32 - 1, was << 1):
                found.append(Damage(put(good, at, value), None, (at, value)))
    return found
