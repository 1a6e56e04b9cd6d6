"""The CUDA ops of hashing and of row-sparse gradients, run in the emulator.

Each method takes and returns what the op of its name does, tensors of CPU memory all of them, and
does the same as the op's binding: buffers, launch, and the error text from the kernels' findings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from tests.cuda_emulator.arguments import Buffer
from tests.cuda_emulator.emulated import DTYPE_CODES, Codecs

PERMUTE, UNPERMUTE, PARTITION, GENERAL = range(4)
NOTHING_FOUND = -1
_VALUE_BYTES = {0: 4, 1: 2, 2: 2}
_LAUNCHERS = (
    "hash_map",
    "hash_split",
    "hash_memory",
    "hash_bitmap_pack",
    "hash_bitmap_add",
    "hash_bitmap_elements",
    "row_sparse_match",
    "row_sparse_expand",
    "row_sparse_sum",
    "row_sparse_union",
)
_REFUSALS = ("entry", "set", "missing", "absent", "cut")


class HashOps:
    """The launchers of `csrc/hash_launch.h` and `csrc/row_sparse_launch.h`, called as ops."""

    def __init__(self, codecs: Codecs, shift: int = 0) -> None:
        """`shift`: bytes, a multiple of 4, by which inputs and outputs miss a 256-byte border."""
        self._codecs, self._shift = codecs, shift
        for name in _LAUNCHERS:
            getattr(codecs.library, name).restype = ctypes.c_char_p
        for name in ("hash_split", "hash_memory", "bitmap", "row_union"):
            getattr(codecs.library, f"workspace_of_{name}").restype = ctypes.c_int64
        for name in _REFUSALS:
            getattr(codecs.library, f"refusal_of_{name}").restype = ctypes.c_char_p

    def ops(self) -> dict[str, Callable[..., object]]:
        """The ops by the name they are registered under."""
        names = (
            "hash_permute",
            "hash_unpermute",
            "hash_partition_of",
            "hash_split",
            "hash_memory",
            "hash_bitmap_pack",
            "hash_bitmap_elements",
            "hash_bitmap_add_",
            "row_sparse_sum",
            "row_sparse_union",
            "row_sparse_match",
            "row_sparse_expand",
        )
        return {name: getattr(self, name) for name in names}

    def hash_permute(self, elements: torch.Tensor, numel: int, seed: int) -> torch.Tensor:
        return self._map(PERMUTE, elements, numel, 1, seed, "hash_permute: elements")

    def hash_unpermute(self, positions: torch.Tensor, numel: int, seed: int) -> torch.Tensor:
        return self._map(UNPERMUTE, positions, numel, 1, seed, "hash_unpermute: positions")

    def hash_partition_of(
        self, elements: torch.Tensor, numel: int, partitions: int, seed: int, general: bool
    ) -> torch.Tensor:
        kind = GENERAL if general else PARTITION
        return self._map(kind, elements, numel, partitions, seed, "hash_partition_of: elements")

    def hash_split(
        self, partition_of: torch.Tensor, partitions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = partition_of.numel()
        order, offsets, status = Buffer(8 * count), Buffer(8 * (partitions + 1)), Buffer(8)
        self._launch(
            "hash_split",
            self._input(partition_of),
            count,
            partitions,
            order,
            offsets,
            status,
            self._workspace("hash_split", count),
        )
        self._check(_words(status)[0], partition_of, partitions, "hash_split: partition_of")
        return _words(order), _words(offsets)

    def hash_memory(
        self,
        indices: torch.Tensor,
        partition_of: torch.Tensor,
        numel: int,
        partitions: int,
        parallel_slots: int,
        serial_slots: int,
        rehashes: int,
        seed: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = indices.numel()
        entries, offsets = Buffer(8 * count), Buffer(8 * (partitions + 1))
        counts, status = Buffer(16), Buffer(16)
        slots = parallel_slots + serial_slots
        self._launch(
            "hash_memory",
            self._input(indices),
            self._input(partition_of),
            count,
            numel,
            partitions,
            parallel_slots,
            serial_slots,
            rehashes,
            seed,
            entries,
            offsets,
            counts,
            status,
            self._workspace("hash_memory", count, partitions, slots),
        )
        found = _words(status)
        self._check(found[0], indices, numel, "hierarchical_hash: indices")
        self._check(found[1], partition_of, partitions, "hierarchical_hash: partition_of")
        return _words(entries), _words(offsets), _words(counts)

    def hash_bitmap_pack(
        self, values: torch.Tensor, words: torch.Tensor, packed: torch.Tensor
    ) -> torch.Tensor:
        bits, rest = self._output(words.numel()), self._output(packed.numel())
        nnz = Buffer(8)
        self._launch(
            "hash_bitmap_pack",
            self._input(values),
            _Int(DTYPE_CODES[values.dtype]),
            values.numel(),
            bits,
            rest,
            nnz,
            self._workspace("bitmap", values.numel()),
        )
        used = int(_words(nnz)) * values.element_size()
        assert bool((rest.data[used:] == 0xCD).all()), "what lies behind the values was written"
        words.copy_(bits.data)
        packed[:used].copy_(rest.data[:used])
        return _words(nnz)

    def hash_bitmap_elements(
        self,
        words: torch.Tensor,
        nnz: int,
        numel: int,
        partition: int,
        partitions: int,
        seed: int,
        index_set: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        elements = Buffer(8 * nnz)
        status = self._read(
            "hash_bitmap_elements",
            words,
            nnz,
            numel,
            partition,
            partitions,
            seed,
            index_set,
            None,
            0,
            None,
            elements,
        )
        return _words(elements), status

    def hash_bitmap_add_(
        self,
        acc: torch.Tensor,
        words: torch.Tensor,
        values: torch.Tensor,
        value_dtype: int,
        nnz: int,
        partition: int,
        partitions: int,
        seed: int,
        index_set: torch.Tensor | None,
    ) -> torch.Tensor:
        assert values.numel() == nnz * _VALUE_BYTES[value_dtype], "the binding refuses others"
        sums = self._input(acc)
        status = self._read(
            "hash_bitmap_add",
            words,
            nnz,
            acc.numel(),
            partition,
            partitions,
            seed,
            index_set,
            self._input(values),
            value_dtype,
            sums,
            None,
        )
        acc.copy_(sums.read(torch.float32))
        return status

    def row_sparse_sum(
        self, rows: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        segments, width = offsets.numel() - 1, rows.shape[1]
        out, status = self._output(segments * width * rows.element_size()), Buffer(16)
        self._launch(
            "row_sparse_sum",
            self._input(rows),
            rows.shape[0],
            width,
            _Int(DTYPE_CODES[rows.dtype]),
            self._input(order),
            order.numel(),
            self._input(offsets),
            segments,
            out,
            status,
        )
        found = _words(status)
        self._check(found[0], order, rows.shape[0], "row_sparse_sum: order")
        if found[1] != NOTHING_FOUND:
            self._refuse("cut", found[1], order.numel(), offsets[found[1]])
        return out.read(rows.dtype).view(segments, width)

    def row_sparse_union(
        self, indices: torch.Tensor, offsets: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = indices.numel()
        merged, status = Buffer(8 * count), Buffer(48)
        self._launch(
            "row_sparse_union",
            self._input(indices),
            count,
            self._input(offsets),
            offsets.numel() - 1,
            num_rows,
            merged,
            status,
            self._workspace("row_union", count),
        )
        words = _words(status)
        return _words(merged)[: int(words[0])], words[2:]

    def row_sparse_match(self, local: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
        positions, status = Buffer(8 * local.numel()), Buffer(24)
        self._launch(
            "row_sparse_match",
            self._input(local),
            local.numel(),
            self._input(union),
            union.numel(),
            positions,
            status,
        )
        found = _words(status)
        self._check_ascends(found[0], local, "row_sparse_match: local")
        self._check_ascends(found[1], union, "row_sparse_match: union")
        if found[2] != NOTHING_FOUND:
            self._refuse("missing", local[found[2]])
        return _words(positions)

    def row_sparse_expand(
        self, local: torch.Tensor, rows: torch.Tensor, union: torch.Tensor
    ) -> torch.Tensor:
        row_bytes = rows.shape[1] * rows.element_size()
        out, status = self._output(union.numel() * row_bytes), Buffer(24)
        self._launch(
            "row_sparse_expand",
            self._input(local),
            local.numel(),
            self._input(union),
            union.numel(),
            self._input(rows),
            out,
            row_bytes,
            status,
        )
        found = _words(status)
        self._check_ascends(found[0], local, "row_sparse_expand: local")
        self._check_ascends(found[1], union, "row_sparse_expand: union")
        if found[2] != local.numel():
            self._refuse("absent", local.numel(), found[2])
        return out.read(rows.dtype).view(union.numel(), rows.shape[1])

    def _map(
        self, kind: int, entries: torch.Tensor, numel: int, partitions: int, seed: int, name: str
    ) -> torch.Tensor:
        out, status = Buffer(8 * entries.numel()), Buffer(8)
        self._launch(
            "hash_map",
            _Int(kind),
            self._input(entries),
            entries.numel(),
            numel,
            partitions,
            seed,
            out,
            status,
        )
        self._check(_words(status)[0], entries, numel, name)
        return _words(out)

    def _read(
        self,
        name: str,
        words: torch.Tensor,
        nnz: int,
        numel: int,
        partition: int,
        partitions: int,
        seed: int,
        index_set: torch.Tensor | None,
        values: Buffer | None,
        value_dtype: int,
        acc: Buffer | None,
        elements: Buffer | None,
    ) -> torch.Tensor:
        first, end = (-(-p * numel // partitions) for p in (partition, partition + 1))
        positions = end - first if index_set is None else index_set.numel()
        assert words.numel() == 8 * -(-positions // 64), "the binding refuses others"
        status = Buffer(16)
        self._launch(
            name,
            self._input(words),
            positions,
            nnz,
            numel,
            first,
            seed,
            None if index_set is None else self._input(index_set),
            values,
            _Int(value_dtype),
            acc,
            elements,
            status,
            self._workspace("bitmap", positions),
        )
        return _words(status)

    def _input(self, content: torch.Tensor) -> Buffer:
        content = content.contiguous().view(-1).view(torch.uint8)
        return Buffer(content.numel(), content, self._shift)

    def _output(self, nbytes: int) -> Buffer:
        return Buffer(nbytes, shift=self._shift)

    def _workspace(self, name: str, *sizes: int) -> Buffer:
        count = getattr(self._codecs.library, f"workspace_of_{name}")
        return Buffer(count(*map(ctypes.c_int64, sizes)))

    def _launch(self, name: str, *values: int | _Int | Buffer | None) -> None:
        buffers = [value for value in values if isinstance(value, Buffer)]
        self._codecs.run(name, buffers, ctypes.byref(_arguments(values)))

    def _check(self, found: torch.Tensor, entries: torch.Tensor, limit: int, name: str) -> None:
        if found != NOTHING_FOUND:
            self._refuse("entry", name, found, limit, entries[found])

    def _check_ascends(self, found: torch.Tensor, indices: torch.Tensor, name: str) -> None:
        if found != NOTHING_FOUND:
            before = -1 if found == 0 else indices[found - 1]
            self._refuse("set", name, found, before, indices[found])

    def _refuse(self, kind: str, *values: str | int | torch.Tensor) -> None:
        text = getattr(self._codecs.library, f"refusal_of_{kind}")(
            *(v.encode() if isinstance(v, str) else ctypes.c_int64(int(v)) for v in values)
        )
        raise RuntimeError(text.decode())


class _Int(int):
    """A field of the C type int."""


def _arguments(values: tuple[int | _Int | Buffer | None, ...]) -> ctypes.Structure:
    """A struct of these fields, in order; the C compiler's layout."""
    types = [
        ctypes.c_int
        if isinstance(value, _Int)
        else ctypes.c_int64
        if isinstance(value, int)
        else ctypes.c_void_p
        for value in values
    ]
    fields = [(f"field_{number}", kind) for number, kind in enumerate(types)]
    struct = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    return struct(*(value.pointer if isinstance(value, Buffer) else value for value in values))


def _words(buffer: Buffer) -> torch.Tensor:
    return buffer.read(torch.int64)
