"""`bench peer`: the two-shot all-reduce over peer memory; with events, and checked.

Virtual ranks share one GPU's memory and caches. So this is what the kernels cost, of all ranks
together, and not a bandwidth of NVLink, nor how anything scales. `floor` is the fewest bytes that
all ranks must move: each gradient and each message read once, each message written once; each sum
written once and read by every rank; each output written once. `copy` is a plain copy of as many.
`host` is the time of the call, which waits for nothing. Each row's result is compared with the sum
in rank order first, bit by bit; a wrong row is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch

from megatron_sparse.bench.codec import frame
from megatron_sparse.bench.peer.options import PeerOptions
from megatron_sparse.bench.table import Columns, TableRow, copy_action, print_table
from megatron_sparse.cuda_ext.peer_ops import Operation, PeerLayout
from megatron_sparse.errors import DependencyError
from megatron_sparse.transport.peer_memory import PeerMemory, VirtualRanks
from megatron_sparse.wire import FORMAT_COO, FORMAT_DENSE, FORMAT_PICI, HEADER_BYTES, payload_bytes

DEADLINE_S = 10.0
WARMUP = 3


@dataclass(kw_only=True)
class PeerRow(TableRow):
    """One case; times are medians in microseconds, null where wrong.

    Attributes:
        density: of each rank's gradient.
        count: elements.
        bytes: of the gradient.
        world_size: virtual ranks.
        bytes_moved: the floor, see the module's docstring.
        time_us: of the device, for all ranks together.
        copy_us: of a plain copy of `bytes_moved`.
        host_us: of the call.
        window_bytes: memory of the windows.
        wrong: elements of all results that differ.
    """

    COLUMNS = Columns(
        "world_size >7 ranks | density >7g | bytes >9 size(B) | bytes_moved >9 floor(B) | "
        "time_us >8.1f time(us) | copy_us >8.1f copy(us) | copy_us/time_us >7.0% of copy | "
        "host_us >8.1f host(us) | window_bytes >10 windows(B) | wrong >6 #wrong",
        gap="  ",
    )

    op: str = "all_reduce"
    scheme: str = "peer_two_shot"
    dtype: str = "fp32"
    density: float
    count: int
    bytes: int
    world_size: int
    bytes_moved: int
    time_us: float | None = None
    copy_us: float | None = None
    host_us: float | None = None
    window_bytes: int
    transport: str = "virtual ranks on one GPU"
    modelled: bool = False
    wrong: int


def even_layout(numel: int, ranks: int) -> PeerLayout:
    """One segment for each shard, as long as can be."""
    offsets = torch.tensor([numel * rank // ranks for rank in range(ranks + 1)])
    dense = torch.zeros(ranks, dtype=torch.uint8)
    return PeerLayout.of(offsets, dense, range(ranks + 1), 0)


def record_bytes(numel: int, nnz: int) -> int:
    """Of an fp32 record in the smallest format."""
    forms = (FORMAT_DENSE, FORMAT_COO, FORMAT_PICI)
    return HEADER_BYTES + min(payload_bytes(form, numel, nnz, 0) for form in forms)


def floor_bytes(grads: Sequence[torch.Tensor], total_N: torch.Tensor, layout: PeerLayout) -> int:
    """The fewest bytes that all ranks of an all-reduce must move, in all."""
    moved = 2 * sum(grad.nbytes for grad in grads)
    for rank in range(layout.world_size):
        shard = layout.shard(rank)
        numel = shard.stop - shard.start
        for grad in grads:
            moved += 2 * record_bytes(numel, int(grad[shard].count_nonzero()))
        moved += (1 + len(grads)) * record_bytes(numel, int(total_N[shard].count_nonzero()))
    return moved


def measure(
    numel: int, ranks: int, density: float, device: torch.device, warmup: int, iters: int
) -> PeerRow:
    """One row; see the module's docstring.

    Raises:
        CommunicationError: a virtual rank did not come.
    """
    generator = torch.Generator(device).manual_seed(ranks)
    grads = [
        torch.randn(numel, generator=generator, device=device)
        * (torch.rand(numel, generator=generator, device=device) < density)
        for _ in range(ranks)
    ]
    outs = [torch.full_like(grad, torch.nan) for grad in grads]
    layout = even_layout(numel, ranks)
    peers = PeerMemory(VirtualRanks(ranks, device), {"bench": layout}, DEADLINE_S)

    def action() -> None:
        peers.run(Operation.ALL_REDUCE, "bench", grads, outs, 0)

    action()
    peers.check("bench", 0)
    total_N = torch.zeros_like(grads[0])
    for grad in grads:
        total_N += grad
    wrong = sum(int((out.view(torch.int32) != total_N.view(torch.int32)).sum()) for out in outs)
    moved = floor_bytes(grads, total_N, layout)
    row = PeerRow(
        density=density,
        count=numel,
        bytes=4 * numel,
        world_size=ranks,
        bytes_moved=moved,
        window_bytes=peers.nbytes,
        wrong=wrong,
    )
    if wrong:
        return row
    times_us, copies_us = frame.device_time_in_turn(
        [action, copy_action(moved, device)], warmup, iters
    )
    hosts_us = []
    for _ in range(iters):
        torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        action()
        hosts_us.append((time.perf_counter() - start_s) * 1e6)
    peers.check("bench", 0)
    row.time_us, row.copy_us = median(times_us), median(copies_us)
    row.host_us = median(hosts_us)
    return row


def run(options: PeerOptions, json_path: Path | None, device: torch.device) -> list[PeerRow]:
    """Prints the table and returns its rows.

    Raises:
        DependencyError: there is no GPU.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DependencyError(
            "there is no GPU",
            expected="a CUDA device",
            got="none",
            remedy="run it where there is one; the tests run the kernels in an emulator",
        )
    print("# virtual ranks on one GPU: the kernels' cost for all ranks together, not NVLink's")
    cases = product(options.ranks, options.density)
    measured = (
        measure(options.megabytes * 2**18, n, density, device, WARMUP, options.iters)
        for n, density in cases
    )
    rows = print_table(PeerRow.COLUMNS, measured, json_path)
    peak = torch.cuda.max_memory_allocated(device) / 2**20
    print(f"# at most {peak:.0f} MiB of memory, gradients and results of all ranks included")
    return rows
