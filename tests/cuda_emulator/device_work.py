"""What one rank gives a GPU to do for a bucket: launches, and bytes of device memory an element.

`docs/device-work.md` shows it: `python -m tests.cuda_emulator.device_work` writes it anew.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice, Reduction
from megatron_sparse.cuda_ext.arguments import overload
from megatron_sparse.formats.moves import down_words
from megatron_sparse.reduction.job import GATE
from megatron_sparse.transport import VirtualCluster
from megatron_sparse.wire import FORMAT_RICE, MOVES_CODERS
from tests import fake_nccl
from tests.cuda_emulator import instructions
from tests.cuda_emulator.bucket_rank import Rank
from tests.cuda_emulator.compilation import compile_library
from tests.cuda_emulator.device import GPU, EmulatedGpu, pretend_driver, to_gpu
from tests.cuda_emulator.emulator import COO, IN_ORDER, EmulatedDevice, Emulator
from tests.cuda_emulator.ledger import Ledger, counting
from tests.cuda_emulator.test_nccl_emulated import Group, group_of, on_all
from tests.formats.moves_cases import adam_like

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "device-work.md"
RANKS, NUMEL = 8, 8 * 8192
FLOOR_BYTES = 16
COUNTED_STEP = 1
"""By then tables are on the device and residuals are not zero."""
SETTINGS: dict[str, Any] = {"density": 0.01, "capacity": 1.25, "samples": 500}


@dataclass(frozen=True)
class Way:
    """A way of a bucket through the device, in capacity mode."""

    scheme: str
    op: CollectiveOp
    engine: bool

    def __str__(self) -> str:
        return f"`{self.scheme}`{', engine' if self.engine else ''}, {self.op.value}"


WAYS = [
    Way("direct", CollectiveOp.ALL_REDUCE, True),
    Way("direct", CollectiveOp.ALL_REDUCE, False),
    Way("direct", CollectiveOp.REDUCE_SCATTER, True),
    Way("agsparse", CollectiveOp.ALL_REDUCE, True),
    Way("agsparse", CollectiveOp.ALL_REDUCE, False),
]
"""The other schemes with slots forward what they receive in the order of a stream, which the
virtual cluster does not keep."""


class WorkRank(Rank):
    """A rank with one fp32 bucket of two parameters, and an undo copy of its residual."""

    def __init__(self, transport: Any, way: Way) -> None:
        super().__init__(
            transport, way.op, torch.float32, scheme=way.scheme, nccl_engine=way.engine, **SETTINGS
        )
        self.bucket = Bucket(
            "b",
            torch.zeros(NUMEL, device=GPU),
            [
                ParameterSlice("v", 0, NUMEL // 2 + 100),
                ParameterSlice("w", NUMEL // 2 + 100, NUMEL),
            ],
            way.op,
            RANKS,
            reduction=Reduction.AVG,
        )
        residuals = self.reducer.selector.residuals
        residuals.undo = residuals.is_reported = True

    def fill(self, step: int) -> None:
        """The optimizer has taken the step before; the backward pass."""
        self.reducer.selector.residuals.commit()
        super().fill(step)


def work_of(way: Way, nccl: Any) -> Ledger:
    """Counts the work of rank 0 of 8, in a step after the first."""
    return _with_engine(way, nccl) if way.engine else _without_engine(way)


def _with_engine(way: Way, nccl: Any) -> Ledger:
    ledger = Ledger()

    def step(group: Group, rank: int, number: int) -> None:
        group.ranks[rank].fill(number)
        if (rank, number) == (0, COUNTED_STEP):
            with counting(ledger):
                group.drive(rank, number)
        else:
            group.drive(rank, number)

    with group_of(nccl, RANKS, lambda transport: WorkRank(transport, way)) as group:
        for number in range(COUNTED_STEP + 1):
            on_all(range(RANKS), lambda rank, number=number: step(group, rank, number))
    return ledger


def _without_engine(way: Way) -> Ledger:
    ledger, cluster = Ledger(), VirtualCluster(RANKS, device=GPU)
    ranks = [WorkRank(transport, way) for transport in cluster.transports]

    def drive(rank: WorkRank, number: int) -> Iterator[Any]:
        rank.fill(number)
        counts = (rank.transport.rank, number) == (0, COUNTED_STEP)
        steps = rank.steps(number)
        while True:
            try:
                with counting(ledger if counts else None):
                    outcome = next(steps)
            except StopIteration as ended:
                return ended.value
            if outcome is not GATE:
                yield outcome

    for number in range(COUNTED_STEP + 1):
        cluster.run(lambda transport, number=number: drive(ranks[transport.rank], number))
    return ledger


MOVES_NUMEL = 2**17


def moves_work(emulator: Emulator) -> dict[str, Ledger]:
    """The work of coding moves, encoding and decoding, for bf16 numbers of each record."""
    old, new = (to_gpu(each) for each in adam_like(MOVES_NUMEL, torch.bfloat16, lr=1e-4))
    room = overload("moves_room")(MOVES_NUMEL, 1)
    out = to_gpu(torch.empty(room, dtype=torch.uint8))
    down = to_gpu(torch.zeros(down_words(MOVES_NUMEL), dtype=torch.int32))
    with counting(encoding := Ledger()):
        size = emulator.call("moves_encode", old, new, down, 0, out)
    record = to_gpu(out.inner[: int(size)])
    peers, works = RANKS - 1, {"encode": encoding}
    for name, count in (("decode", 1), (f"decode, a gather of {RANKS} ranks", peers)):
        held, signs = ([to_gpu(each.inner) for _ in range(count)] for each in (old, down))
        coders = [MOVES_CODERS.index("rans")] * count
        with counting(decoding := Ledger()):
            statuses = emulator.call("moves_decode_", held, signs, [record] * count, coders)
        assert not statuses.any()
        works[name] = decoding
    return works


MOVES_HEAD = f"""
## Records of moves

The [moves](parameters.md) of {MOVES_NUMEL:,} bf16 parameters as at a learning rate of 1e-4, bytes
for each of them. A shard of millions takes less: the encoder counts a quarter of the
numbers of a long shard, 3 bytes fewer, and the decoder's tables of 73 KiB are written once, here
0.6 bytes. The gather's row is of its {RANKS - 1} records together, for each parameter of one.

| | kernels | memsets | read | written |
|---|---|---|---|---|"""


RICE_NUMEL = 2**17
ENCODINGS = {
    "COO, fp32, 1 %": (0.01, None),
    "Rice, fp32, 1 %": (0.01, (0, 17, False)),
    "Rice, 4 bits, 5 %": (0.05, (4, 15, False)),
    "Rice, 2 bits, 5 %": (0.05, (6, 15, False)),
    "Rice, 4 bits, 22 %": (0.22, (4, 13, False)),
    "Rice, 8 bits, 25 %": (0.25, (3, 12, False)),
    "Rice, 4 bits, every element": (1.0, (4, 12, True)),
}
"""Density, and Rice's dtype, span (`wire.rice_span`) and whether it goes without indices."""


def encoding_work(emulator: Emulator) -> dict[str, Ledger]:
    """The work of each encoding, which prunes fp32 gradient and residual."""
    counts: dict[str, Ledger] = {}
    grad_N = torch.randn(RICE_NUMEL, generator=torch.Generator().manual_seed(0))
    ordered = grad_N.abs().sort().values
    for name, (density, rice) in ENCODINGS.items():
        kept = int(density * RICE_NUMEL)
        threshold = -1.0 if kept == RICE_NUMEL else float(ordered[-kept - 1])
        whole = to_gpu(torch.tensor([0, RICE_NUMEL]))
        kind = to_gpu(torch.tensor([COO if rice is None else FORMAT_RICE], dtype=torch.uint8))
        out = to_gpu(torch.empty(8 * RICE_NUMEL, dtype=torch.uint8))
        limit, residual = to_gpu(torch.tensor([threshold])), to_gpu(torch.zeros(RICE_NUMEL))
        code, span, without_indices = rice or (0, 0, False)
        records = (whole, kind, code, 0, 0, span, without_indices, out, None)
        with counting(ledger := Ledger()):
            pruning = (residual, whole, limit, None, 1.0, -1)
            emulator.call("prune_encode", to_gpu(grad_N), *records, *pruning)
        counts[name] = ledger
    return counts


ENCODINGS_HEAD = f"""
## Encoders

Of {RICE_NUMEL:,} fp32 elements with an fp32 residual, bytes for each of them. The floor is 12:
gradient and residual are read, the residual is written. [Rice](wire-format.md#rice) records with
indices take one launch more: it measures the unary codes. Where values are quantised, the
last launch writes the residual of what is sent once more; at 5 % that touches a third of its
sectors. From 12.5 % on one launch prunes and codes instead, so that the residual is written once;
the last one moves what is coded.

| records | kernels | memsets | read | written | bytes | by the floor |
|---|---|---|---|---|---|---|"""
ENCODING_FLOOR = 12


HEAD = f"""\
# Launches and bytes of a bucket

What one rank of {RANKS} gives its GPU to do for a bucket in capacity mode: density 1 %, capacity
1.25, fp32 gradient and residual, an [undo copy](memory.md#the-undo-copy). The
[emulator](results/gpu.md) counts it; no GPU was measured. A test compares this page with the count.
After a change of a launch, write it anew:

```bash
python -m tests.cuda_emulator.device_work
```

"Engine" is `scheme.nccl_engine=true`; without it messages go through c10d.

- **Launches** are the package's kernels, its memsets and torch's operations, copies from and to the
  host included. NCCL's own kernels are not: one for each group of messages.
- **Bytes** of device memory for each element of the bucket. A kernel counts each sector of 32 bytes
  once as read and once as written: nothing stays in a cache between launches. The bucket has
  {NUMEL:,} elements, so samples and tables weigh more than in a real one. NCCL's reading and
  writing of messages is left out.
- **The floor** is {FLOOR_BYTES} bytes an element: gradient and residual are read, residual and sum
  are written, each once.
"""


class Counts(NamedTuple):
    """What the page shows, and the emulator that counted it."""

    emulator: Emulator
    ways: dict[Way, Ledger]
    encodings: dict[str, Ledger]
    moves: dict[str, Ledger]


def everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Counts it all with an emulator that is compiled to count bytes, in one schedule.

    `folder` is for the emulator's library, and an NCCL of the tests.
    """
    pretend_driver(monkeypatch)
    emulator = Emulator(compile_library(folder, counts_bytes=True, name="counting"))
    emulator.schedule(IN_ORDER, 0, resident_blocks=4, multiprocessors=4)
    encodings, moves = encoding_work(emulator), moves_work(emulator)
    nccl = fake_nccl.build(folder)
    EmulatedDevice(emulator, monkeypatch)
    with EmulatedGpu():
        return Counts(emulator, {way: work_of(way, nccl) for way in WAYS}, encodings, moves)


def page(counts: Counts) -> str:
    """The text of `docs/device-work.md`, but for the instructions."""

    def moved(ledger: Ledger, numel: int, floor: int) -> str:
        read, written = ledger.bytes_read / numel, ledger.bytes_written / numel
        total = read + written
        return f"{read:.1f} | {written:.1f} | {total:.1f} | {total / floor:.2f} |"

    rows = [
        "| path | kernels | memsets | torch's | launches | read | written | bytes | by the floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, ledger in counts.ways.items():
        rows.append(
            f"| {way} | {ledger.kernels} | {ledger.memsets} | {ledger.torch_ops} "
            f"| {ledger.launches} | {moved(ledger, NUMEL, FLOOR_BYTES)}"
        )
    rows.append(ENCODINGS_HEAD)
    for name, ledger in counts.encodings.items():
        rows.append(
            f"| {name} | {ledger.kernels} | {ledger.memsets} "
            f"| {moved(ledger, RICE_NUMEL, ENCODING_FLOOR)}"
        )
    rows.append(MOVES_HEAD)
    for way, ledger in counts.moves.items():
        read, written = ledger.bytes_read / MOVES_NUMEL, ledger.bytes_written / MOVES_NUMEL
        rows.append(f"| {way} | {ledger.kernels} | {ledger.memsets} | {read:.1f} | {written:.1f} |")
    return "\n".join([HEAD, *rows, ""])


def write_page() -> None:
    """Writes `docs/device-work.md`."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        text = page(everything(Path(name), patch))
    text += instructions.HEAD + instructions.rows(instructions.counts())
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_page()
