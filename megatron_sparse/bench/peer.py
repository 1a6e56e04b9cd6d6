"""The two-shot all-reduce over peer memory, on virtual ranks of one GPU; with events, and checked.

    python -m megatron_sparse.bench.peer [--megabytes 64] [--ranks 2,4,8] [--density 0.01,0.1]
        [--iters 20] [--json FILE]

Virtual ranks share one GPU's memory and caches. So this is what the kernels cost, of all ranks
together, and not a bandwidth of NVLink, nor how anything scales. `floor` is the fewest bytes that
all ranks must move: each gradient and each message read once, each message written once; each sum
written once and read by every rank; each output written once. `copy` is a plain copy of as many.
`host` is the time of the call, which waits for nothing. Each row's result is compared with the sum
in rank order first, bit by bit; a wrong row is not timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_sparse.bench.codecs import cuda
from megatron_sparse.bench.table import copy_action
from megatron_sparse.cuda_ext.peer_ops import Operation, PeerLayout
from megatron_sparse.errors import ConfigError, DependencyError, MegatronSparseError
from megatron_sparse.transport.peer_memory import PeerMemory, VirtualRanks
from megatron_sparse.wire import FORMAT_COO, FORMAT_DENSE, FORMAT_PICI, HEADER_BYTES, payload_bytes

DEADLINE_S = 10.0
HEADER = (
    "# ranks  density    size(B)   floor(B)  time(us)  copy(us)  of copy  host(us)  windows(B)  "
    "#wrong"
)


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
) -> dict[str, Any]:
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
    row: dict[str, Any] = {
        "op": "all_reduce",
        "scheme": "peer_two_shot",
        "dtype": "fp32",
        "density": density,
        "count": numel,
        "bytes": 4 * numel,
        "world_size": ranks,
        "bytes_moved": moved,
        "time_us": None,
        "copy_us": None,
        "host_us": None,
        "window_bytes": peers.nbytes,
        "transport": "virtual ranks on one GPU",
        "modelled": False,
        "wrong": wrong,
    }
    if wrong:
        return row
    times_us, copies_us = cuda.time_in_turn([action, copy_action(moved, device)], warmup, iters)
    hosts_us = []
    for _ in range(iters):
        torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        action()
        hosts_us.append((time.perf_counter() - start_s) * 1e6)
    peers.check("bench", 0)
    row |= {
        "time_us": median(times_us),
        "copy_us": median(copies_us),
        "host_us": median(hosts_us),
    }
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    times = "       -         -        -         -"
    if not row["wrong"]:
        share = row["copy_us"] / row["time_us"]
        times = f"{row['time_us']:8.1f}  {row['copy_us']:8.1f}  {share:6.0%}  {row['host_us']:8.1f}"
    return (
        f"{row['world_size']:7}  {row['density']:7g}  {row['bytes']:9}  {row['bytes_moved']:9}  "
        f"{times}  {row['window_bytes']:10}  {row['wrong']:6}"
    )


def run(
    megabytes: int,
    ranks: Sequence[int],
    densities: Sequence[float],
    iters: int,
    json_path: Path | None,
    device: torch.device,
) -> list[dict[str, Any]]:
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
    print(HEADER, flush=True)
    rows = []
    for count in ranks:
        for density in densities:
            rows.append(measure(megabytes * 2**18, count, density, device, 3, iters))
            print(line(rows[-1]), flush=True)
    peak = torch.cuda.max_memory_allocated(device) / 2**20
    print(f"# at most {peak:.0f} MiB of memory, gradients and results of all ranks included")
    if json_path is not None:
        json_path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 where a row is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_sparse.bench.peer",
        description="Times the two-shot all-reduce on virtual ranks of one GPU.",
    )
    parser.add_argument("--megabytes", type=int, default=64, metavar="N", help="of a gradient")
    parser.add_argument("--ranks", default="2,4,8", metavar="N,...")
    parser.add_argument("--density", default="0.01,0.1", metavar="D,...")
    parser.add_argument("--iters", type=int, default=20, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args(arguments)
    try:
        ranks, densities = _numbers("--ranks", chosen.ranks), _numbers("--density", chosen.density)
        rows = run(
            chosen.megabytes,
            [int(n) for n in ranks],
            densities,
            chosen.iters,
            chosen.json,
            torch.device("cuda"),
        )
    except MegatronSparseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 1 if any(row["wrong"] for row in rows) else 0


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{option} is no list of numbers", expected="numbers with commas between", got=text
        ) from None


if __name__ == "__main__":
    sys.exit(main())
