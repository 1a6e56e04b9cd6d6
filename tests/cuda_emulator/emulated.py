"""The emulated CUDA launchers, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.cuda_emulator import ledger
from tests.cuda_emulator.arguments import (
    Buffer,
    DecodeArguments,
    EncodeArguments,
    PruneArguments,
    Rice,
    ThresholdArguments,
)

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DENSE, COO, PICI, BLOCKS, PICI_PAPER, ADAPTIVE = 0, 1, 2, 3, 0x12, 0xFF
IN_ORDER, REVERSED, RANDOM = range(3)


@dataclass(frozen=True)
class Encoded:
    """An encoder's outputs."""

    records: list[bytes]
    segment_bytes: list[int]
    nnz: list[int]
    status: list[int]
    residual: torch.Tensor | None = None


@dataclass(frozen=True)
class Expecting:
    """The facts that a decoder's caller knows: fields of `DecodeArguments`."""

    segments: Sequence[int]
    value_dtype: int = 0
    step: int = 7
    base: int = 0
    slots: Sequence[int] | None = None


class EmulatorError(Exception):
    """The emulator found a forbidden action of a kernel."""


class Codecs:
    """The launchers of encode, prune_encode and decode_add_."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        encoders = ("encode", "prune_encode", "rice_encode", "rice_prune_encode", "prune_tile")
        for name in (*encoders, "decode_add", "decode_sum", "decode_place", "sample_threshold"):
            getattr(self.library, name).restype = ctypes.c_char_p
        for name in ("encode", "rice_encode", "decode", "threshold"):
            getattr(self.library, f"workspace_of_{name}").restype = ctypes.c_int64

    def schedule(
        self, order: int, seed: int = 0, resident_blocks: int = 4, multiprocessors: int = 1
    ) -> None:
        """Chooses how threads and blocks take turns from now on."""
        self.library.emulator_schedule(
            order, ctypes.c_uint64(seed), resident_blocks, multiprocessors
        )

    def encode(
        self,
        grad_N: torch.Tensor,
        segments: Sequence[int],
        kinds: Sequence[int],
        value_dtype: torch.dtype,
        *,
        capacity: int,
        step: int = 7,
        block_size: int = 0,
        shift: int = 0,
        prune: dict | None = None,
        slots: Sequence[int] | None = None,
        most_nnz: Sequence[int] | None = None,
        rice: Rice | None = None,
    ) -> Encoded:
        """Runs encode or, with `prune`, prune_encode; with `rice` those of messages of kind Rice.

        Args:
            grad_N: the gradient.
            segments: offsets that cut it.
            kinds: the requested formats, one for each segment.
            value_dtype: of the message's values; with `rice`, of the staged values.
            capacity: bytes of the output.
            step: the header's.
            block_size: of blocks, 0 for none.
            shift: elements by which gradient and residual miss a 256-byte border.
            prune: residual, ranges, thresholds, tie_chances (may be missing), leak, key,
                residual_shift.
            slots: where records begin; the result's records are then the slots.
            most_nnz: the most non-zero elements of each segment.
            rice: of messages of kind Rice.
        """
        grad, out = Buffer.of(grad_N, shift), Buffer(capacity)
        offsets = Buffer.of(torch.tensor(segments, dtype=torch.int64))
        wanted = Buffer.of(torch.tensor(kinds, dtype=torch.uint8))
        count = len(kinds)
        sizes, nnz, status = Buffer(8 * count), Buffer(8 * count), Buffer(32)
        buffers = [grad, out, offsets, wanted, sizes, nnz, status]
        places, most = _table(slots), _table(most_nnz)
        arguments = EncodeArguments(
            grad.pointer,
            grad_N.numel(),
            DTYPE_CODES[grad_N.dtype],
            DTYPE_CODES[value_dtype],
            offsets.pointer,
            wanted.pointer,
            count,
            step,
            block_size,
            out.pointer,
            capacity,
            None,
            sizes.pointer,
            nnz.pointer,
            status.pointer,
            _pointer(places),
            _pointer(most),
        )
        rest_N = prune["residual"] if prune is not None else rice.residual if rice else None
        rest_shift = (prune or {}).get("residual_shift", shift)
        residual = None if rest_N is None else Buffer.of(rest_N, rest_shift)
        buffers += [table for table in (places, most, residual) if table is not None]
        prefix, calls = "", [ctypes.byref(arguments)]
        if rice is not None:
            rest_code = 0 if rest_N is None else DTYPE_CODES[rest_N.dtype]
            coding = rice.arguments(_pointer(residual), rest_code, (prune or {}).get("key", -1))
            prefix, calls = "rice_", [*calls, ctypes.byref(coding)]
        workspace = Buffer(getattr(self.library, f"workspace_of_{prefix}encode")(*calls))
        arguments.workspace = workspace.pointer
        buffers.append(workspace)
        if prune is None:
            self.run(f"{prefix}encode", buffers, *calls)
        else:
            assert residual is not None
            ranges = Buffer.of(torch.tensor(prune["ranges"], dtype=torch.int64))
            limits = Buffer.of(torch.tensor(prune["thresholds"], dtype=torch.float32))
            chances = None
            if prune.get("tie_chances") is not None:
                chances = Buffer.of(torch.tensor(prune["tie_chances"], dtype=torch.float32))
                buffers.append(chances)
            buffers += [ranges, limits]
            pruning = PruneArguments(
                residual.pointer,
                ranges.pointer,
                limits.pointer,
                _pointer(chances),
                len(prune["thresholds"]),
                prune["leak"],
                prune["key"],
                DTYPE_CODES[prune["residual"].dtype],
            )
            self.run(f"{prefix}prune_encode", buffers, *calls, ctypes.byref(pruning))
        assert torch.equal(grad.read(torch.uint8), _bytes(grad_N)), "the gradient was changed"
        found = sizes.read(torch.int64).tolist() if count else []
        records, at = [], 0
        state = status.read(torch.int64).tolist()
        lengths = found if slots is None else torch.tensor(slots).diff().tolist()
        for size in lengths if state[0] == 0 else []:
            records.append(bytes(out.data[at : at + size].numpy().tobytes()))
            at += size
        if slots is None or state[0] == 0:
            assert bool((out.data[at:] == 0xCD).all()), "bytes behind the message were written"
        return Encoded(
            records,
            found,
            nnz.read(torch.int64).tolist() if count else [],
            state,
            residual.read(rest_N.dtype) if residual and rest_N is not None else None,
        )

    def decode_add(
        self,
        acc_M: torch.Tensor,
        message: bytes,
        segments: Sequence[int],
        value_dtype: torch.dtype | int,
        *,
        step: int = 7,
        base: int = 0,
        fresh: bool = False,
        shift: int = 0,
        slots: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, list[int]]:
        """Runs decode_add_ on a copy of `acc_M`; returns it and the status.

        `value_dtype` is a dtype or, as Rice's quantised ones are none of torch, a code.
        """
        acc = Buffer.of(acc_M, shift)
        code = value_dtype if isinstance(value_dtype, int) else DTYPE_CODES[value_dtype]
        record = Expecting(segments, code, step, base, slots)
        call, status, buffers = self._decode_call(acc, message, record, fresh)
        self.run("decode_add", buffers, ctypes.byref(call))
        return acc.read(torch.float32), status.read(torch.int64).tolist()

    def decode_sum(
        self,
        acc_M: torch.Tensor,
        messages: Sequence[bytes],
        records: Sequence[Expecting],
        *,
        apart: bool = False,
        shift: int = 0,
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Runs decode_sum_ or, with `apart`, its form for messages that share no element.

        Returns:
            A copy of `acc_M` with the sum in it, and the status of every message.
        """
        acc = Buffer.of(acc_M, shift)
        calls = [
            self._decode_call(acc, message, record, fresh=True)
            for message, record in zip(messages, records, strict=True)
        ]
        buffers = [acc, *(buffer for _, _, more in calls for buffer in more[1:])]
        arguments = (DecodeArguments * len(calls))(*(call for call, _, _ in calls))
        name = "decode_place" if apart else "decode_sum"
        self.run(name, buffers, ctypes.byref(arguments), ctypes.c_int64(len(calls)))
        states = [status.read(torch.int64).tolist() for _, status, _ in calls]
        return acc.read(torch.float32), states

    def _decode_call(
        self, acc: Buffer, message: bytes, record: Expecting, fresh: bool
    ) -> tuple[DecodeArguments, Buffer, list[Buffer]]:
        """The arguments, the status, and all buffers, `acc` first."""
        data = Buffer.of(torch.tensor(list(message), dtype=torch.uint8))
        offsets = Buffer.of(torch.tensor(record.segments, dtype=torch.int64))
        status, places = Buffer(32), _table(record.slots)
        count = len(record.segments) - 1
        workspace = Buffer(self.library.workspace_of_decode(ctypes.c_int64(count)))
        call = DecodeArguments(
            acc.pointer,
            acc.data.numel() // 4,
            data.pointer,
            len(message),
            offsets.pointer,
            count,
            record.base,
            record.value_dtype,
            record.step,
            fresh,
            workspace.pointer,
            status.pointer,
            _pointer(places),
        )
        buffers = [acc, data, offsets, status, workspace]
        return call, status, [*buffers, *([] if places is None else [places])]

    def sample_threshold(
        self,
        grad_N: torch.Tensor,
        residual_N: torch.Tensor | None,
        range_offsets: torch.Tensor,
        densities_R: torch.Tensor,
        samples: int,
        keys_R: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs sample_threshold, as its binding makes the call."""
        given = [Buffer.of(each) for each in (grad_N, range_offsets, densities_R, keys_R)]
        grad, offsets, densities, keys = given
        residual = None if residual_N is None else Buffer.of(residual_N)
        thresholds, chances, ties = (Buffer(width * densities_R.numel()) for width in (4, 4, 8))
        call = ThresholdArguments(
            grad.pointer,
            DTYPE_CODES[grad_N.dtype],
            _pointer(residual),
            0 if residual_N is None else DTYPE_CODES[residual_N.dtype],
            grad_N.numel(),
            offsets.pointer,
            densities.pointer,
            keys.pointer,
            densities_R.numel(),
            samples,
            thresholds.pointer,
            chances.pointer,
            ties.pointer,
            None,
        )
        workspace = Buffer(self.library.workspace_of_threshold(ctypes.byref(call)))
        call.workspace = workspace.pointer
        buffers = [
            *given,
            thresholds,
            chances,
            ties,
            workspace,
            *([] if residual is None else [residual]),
        ]
        self.run("sample_threshold", buffers, ctypes.byref(call))
        return (
            thresholds.read(torch.float32),
            chances.read(torch.float32),
            ties.read(torch.int64),
        )

    def prune_tile(
        self,
        grad_N: torch.Tensor,
        residual_N: torch.Tensor,
        begin: int,
        limit: tuple[float, float],
        leak: float,
        key: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the pruning source on one tile that begins at element `begin` of a bucket.

        `limit` is its threshold and tie chance. fp32 gradient, bf16 residual, bf16 grid,
        stochastic; returns both afterwards.
        """
        grad, residual, out = Buffer.of(grad_N), Buffer.of(residual_N), Buffer.of(grad_N)
        self.run(
            "prune_tile",
            [grad, residual, out],
            ctypes.c_void_p(grad.pointer),
            ctypes.c_void_p(residual.pointer),
            ctypes.c_void_p(out.pointer),
            ctypes.c_int64(begin),
            len(grad_N),
            *map(ctypes.c_float, limit),
            ctypes.c_float(leak),
            ctypes.c_int64(key),
        )
        return out.read(torch.float32), residual.read(torch.bfloat16)

    def run(self, name: str, buffers: Sequence[Buffer], *arguments: object) -> None:
        """Calls a launcher; neither guard of any buffer may be read (under ASan) or written."""
        guards = [guard for buffer in buffers for guard in buffer.guards()]
        for guard in guards:
            self._poison(guard, 1)
        complaint = self._call(name, buffers, arguments)
        for guard in guards:
            self._poison(guard, 0)
        if complaint is not None:
            raise EmulatorError(complaint.decode())
        for guard in guards:
            assert bool((guard == 0xA5).all()), f"{name} wrote outside a buffer"

    def _call(
        self, name: str, buffers: Sequence[Buffer], arguments: Sequence[object]
    ) -> bytes | None:
        """Calls a launcher and enters its work into this thread's ledger, if it has one."""
        counted, launch = ledger.current(), getattr(self.library, name)
        if counted is None:
            return launch(*arguments)
        watches = hasattr(self.library, "emulator_watch")
        for buffer in buffers if watches else ():
            self.library.emulator_watch(
                ctypes.c_void_p(buffer.pointer), ctypes.c_size_t(buffer.data.numel())
            )
        self.library.emulator_count(1)
        complaint = launch(*arguments)
        numbers = (ctypes.c_int64 * 5)()
        self.library.emulator_counted(numbers)
        self.library.emulator_count(0)
        if watches:
            self.library.emulator_unwatch()
        counted.add_launcher(*numbers)
        return complaint

    def _poison(self, guard: torch.Tensor, on: int) -> None:
        self.library.emulator_poison(
            ctypes.c_void_p(guard.data_ptr()), ctypes.c_size_t(guard.numel()), on
        )


def _table(numbers: Sequence[int] | None) -> Buffer | None:
    return None if numbers is None else Buffer.of(torch.tensor(numbers, dtype=torch.int64))


def _pointer(buffer: Buffer | None) -> int | None:
    return None if buffer is None else buffer.pointer


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
