"""Warp instructions that a kernel takes for a tile of 4,096 elements, counted in its machine code.

nvcc compiles the kernel and nvdisasm names each instruction's source lines, inlined ones included.
An instruction counts once for each warp of the block, times the trips of the loops around it, times
the shares of its source lines.
"""

import functools
import importlib.util
import math
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from megatron_sparse.cuda_ext import build, sources
from megatron_sparse.errors import DependencyError

HEAD = """
## Instructions

Of warps, for a tile of 4,096 elements, in the machine code for sm_90: a script multiplies each by
the trips of the loops around it, for entries at random places
(`tests/cuda_emulator/instructions.py`). Both ways of a branch count unless one is known to be rare,
so the numbers are a little high. Compilers differ.

| kernel | instructions a tile |
|---|---|
"""
_LINE = re.compile(r'//## File "(.+?)", line (\d+)( inlined at)?')
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\d )?(\S+)(?:.*`\((\S+?)\))?")


class Kernel(NamedTuple):
    """A kernel and what its machine code does not say.

    Attributes:
        unit: its `.cu` file.
        symbol: a part of its mangled name.
        warps: of a block, over the tiles that it takes in a trip of `tile_loop`.
        tile_loop: the beginning of the source line that jumps back for the next tile, if one does.
        trips: of each loop, by a part of the source line that jumps back; the mean of the block's
            warps, of which each goes on as long as one of its lanes.
        shares: how often code runs, by a part of a source line that it is from or inlined at.
    """

    unit: str
    symbol: str
    warps: int
    tile_loop: str
    trips: dict[str, float]
    shares: dict[str, float]


KERNELS = {
    "pruning and coding Rice, 4 bits, 22 %": Kernel(
        "rice_encode",
        "16rice_once_kernelILi0ELi0ELi4E",
        4,  # 8 for a chunk of two tiles
        "if (place.slot >= slots) return;",
        {
            "for (const int end = at + share;": 4,  # 8 groups of a warp, two a trip
            "for (int from = 0; from < entries;": 1,
            "word != 0; ++k": 12,  # the fullest of 32 words
            "for (int first = warp * kRiceGroup; first < count;": 15 / 8,  # groups, by 8 warps
            "plane < r; plane += 4": 1,
            "while (numel - entries > entries << (r + 1))": 1,  # r is 1 at 22 %
            "k < unary_words; k += kRiceThreads": 5 / 8,  # 144 words
            "while (high - low > 1)": 4,  # a few segments
            "for (int64_t last = tile - 1;;": 1.5,  # looking back
            "while ((state = read_state(": 1,
            "&& left != 0; ++k": 0,  # of a capacity that is exceeded
            "for (; left != 0; left &= left - 1)": 0,
        },
        {
            "take_place(work, call, memory.places[(round": 1 / 8,  # one warp
            "look_back(work.chunk_states": 1 / 8,
            "number_entries(": 1 / 8,
            "take_back<RESIDUAL>(": 0,
            "keep_last_group(": 0,
            "const unsigned stay =": 0,
            "list_entries<false>": 0,
            "places[k]": 6 / 8,  # 1,802 entries, 11 a thread
            "1} << place % 32": 6 / 8,
            "return {clamped": 1 / 8,
            "const float clamped": 1 / 8,
            "prune_chunk<GRAD, RESIDUAL, false>": 0,  # several ranges
            "find_limits(": 0,
            "prune(std::true_type())": 0,  # ties and NaN
            "static bool any_tie(": 0,
            "static F to_float(": 0,
            "(draw < limit.chance)": 0,
            "drop = L::select(drawn": 0,
            "round_chunk(": 0,  # segments that are sent whole
            "to[i] = i < count ? first[i] : 0": 0,  # unaligned buckets
            "if (i < count) first[i] = ": 0,
        },
    ),
    "sum of 8 Rice records, 4 bits, 22 %": Kernel(
        "decode",
        "10sum_kernelILi3ELb1ELi16E",
        8,
        "if (finds) places[warp].number +=",
        {
            "while (high - low > 1)": 4,  # a few segments
            "for (int first = 0, here;": 1,  # 8 records at a time
            "for (int k = 0; k < here;": 1,  # places of all records fit
            "while (k < listed)": 8,  # records
            "p < r; ++p": 1,  # r is 1 at 22 %
            "p = 2; p <= r": 0,
            "while (numel - entries > entries << (r + 1))": 1,
            # A chunk has 8,192 elements, 144 words and 57 sets.
            "for (int begin = 0; begin < chunk.words;": 1,
            "for (int s = 2 * lane; s": 1,
            "for (int s = lane; s": 2,
            # A tile has 74 words, of which a warp takes 32 at a time; the fullest has 17.8 entries,
            # and 4 take one trip.
            "for (int w = thread;": 3,
            "while (left != 0)": 17.8 / 4,
            "g * kRiceGroup < last;": 8.2 / 8,  # groups, by 8 warps
        },
        {
            "find_tile(batch.call": 1 / 8,  # one warp
            "find_rice_chunk(*seen": 1 / 8,  # one warp
            "!ends_right(": 1 / 2,  # the last tile of a chunk
            "for (int p = 2; p <= r": 2 / 7,  # its test alone
            "const DecodeRecord* record = warp < here": 0,  # other formats
            "find_part<VALUE>(": 0,
            "memory.parts[warp] = {": 0,
            "if (part.kind == ": 0,
            "add_dense_part(": 0,
            "for (int k = 0; k < here; ++k)": 0,
            "const int count = __ffs(": 0,  # records without indices
            "add_all_values(": 0,
            "out[at] = sums[at]": 0,  # unaligned buckets
            "const int64_t before = c * value_words(": 0,
            "value_words(record.dtype, found.begin)": 0,
            "return (entries + 1) / 2;": 0,  # raw values
            "values[s] = value(code, bits)": 0,  # of 8 bits
            "report(first + warp)": 0,  # errors
        },
    ),
}


class _Instruction(NamedTuple):
    text: str
    target: str  # label of a jump or call
    lines: tuple[str, ...]  # of source: its own, the one that this is inlined at, and so on


def tool(name: str) -> Path:
    """A tool of CUDA's that comes with triton.

    Raises:
        DependencyError: it is not installed.
    """
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    path = folder / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise DependencyError(f"there is no {name}", expected="triton's", got=path)
    return path


def _disassembled(unit: str, folder: Path) -> str:
    """The machine code of a unit, with source lines."""
    cubin = folder / f"{unit}.cubin"
    flags = [flag for flag in sources.NVCC_FLAGS if not flag.startswith("-gencode")]
    nvcc = [build.find_cuda().nvcc, "-ccbin", build.find_cxx(), *flags, build.INCLUDE]
    source = sources.SOURCES / f"{unit}.cu"
    build.run([*nvcc, "-arch=sm_90", "-lineinfo", "-cubin", source, "-o", cubin], verbose=False)
    return build.run([tool("nvdisasm"), "--print-line-info-inline", cubin], verbose=False)


def _parsed(code: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Instructions, and the number of the instruction behind each label."""
    texts = functools.cache(lambda name: Path(name).read_text("utf-8").splitlines())
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    lines: tuple[str, ...] = ()
    goes_on = False
    for row in code.splitlines():
        if found := _LINE.search(row):
            name, number, inlined = found.groups()
            lines = (*(lines if goes_on else ()), texts(name)[int(number) - 1].strip())
            goes_on = inlined is not None
        elif found := _INSTRUCTION.match(row):
            instructions.append(_Instruction(found[1], found[2] or "", lines))
        elif found := re.match(r"(\S+):$", row):
            labels[found[1]] = len(instructions)
    return instructions, labels


def count(kernel: Kernel) -> dict[tuple[str, ...], float]:
    """Warp instructions a tile, by the source lines they come from.

    Raises:
        ValueError: a loop that runs is not in `kernel.trips`, or there is no such source line.
    """
    with tempfile.TemporaryDirectory() as folder:
        sections = _disassembled(kernel.unit, Path(folder)).split("\n\t.section")
    wanted = re.compile(rf"\t\.text\.\w*{kernel.symbol}")
    code, labels = _parsed(next(section for section in sections if wanted.match(section)))
    functions = sorted(at for label, at in labels.items() if label.startswith("$"))
    functions.append(len(code))
    known = {line for instruction in code for line in instruction.lines}
    for part in (*kernel.trips, *kernel.shares, kernel.tile_loop):
        if not any(part in line for line in known):
            raise ValueError(f"no code is from a line with {part!r}")
    weights, tile = [1.0] * len(code), range(functions[0])
    for at, (_, _, lines) in enumerate(code):
        for part, share in kernel.shares.items():
            weights[at] *= share if any(part in line for line in lines) else 1
    for at, (text, target, lines) in enumerate(code):
        if not text.startswith("BRA") or labels[target] > at or weights[at] == 0:
            continue
        # nvcc lays a loop out in one piece, from the target of the jump back to the jump.
        loop = range(labels[target], at + 1)
        if kernel.tile_loop and lines[0].startswith(kernel.tile_loop):
            tile = loop
            continue
        unknown = math.nan if re.match("for |while |do ", lines[0]) else 1
        trips = next((each for part, each in kernel.trips.items() if part in lines[0]), unknown)
        for inside in loop:
            weights[inside] *= trips
    counts: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def add(run: range, times: float, calls: tuple[str, ...] = ()) -> None:
        for at in run:
            text, target, lines = code[at]
            if math.isnan(weights[at]):
                raise ValueError(f"how often does this loop run? {lines}")
            counts[*lines, *calls] += times * weights[at]
            # A division has a slow path, of subnormal numbers.
            if text.startswith("CALL") and weights[at] and "slowpath" not in target:
                begin = labels[target]
                end = next(other for other in functions if other > begin)
                add(range(begin, end), times * weights[at], (*lines, *calls))

    add(tile, kernel.warps)
    return counts


def counts() -> dict[str, int]:
    """Warp instructions a tile of each kernel."""
    return {name: round(sum(count(kernel).values())) for name, kernel in KERNELS.items()}


def rows(counts: dict[str, int]) -> str:
    """The rows of the page's table behind `HEAD`."""
    return "".join(f"| {name} | {number:,} |\n" for name, number in counts.items())
