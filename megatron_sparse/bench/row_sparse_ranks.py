"""Row-sparse all-reduce against torch's own sparse all_reduce and the dense one, over gloo.

    torchrun --nproc-per-node 4 -m megatron_sparse.bench.row_sparse_ranks

Every rank touches `rows` rows of an embedding, drawn with Zipf's frequencies as tokens are. Times
are medians over rounds of the slowest rank, from a sparse COO gradient to the reduced one; integers
are reduced first, and a version that is wrong is not timed. The bytes of the two rivals are computed,
not measured: torch gathers padded indices (8 bytes) and rows of all ranks everywhere, and the dense
all-reduce is counted as a ring.
"""  # noqa: E501 - a command is a line

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Reduction
from megatron_sparse.collectives.row_sparse import Way
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.recording import NullSink
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.reduction.row_sparse import RowSparseReducer
from megatron_sparse.transport import ProcessGroupTransport

Version = Callable[[torch.Tensor], tuple[torch.Tensor, int]]
"""Reduces a sparse gradient; returns the sum and the bytes that this rank sent."""


def zipf_gradient(num_rows: int, width: int, rows: int, seed: int) -> torch.Tensor:
    """An uncoalesced gradient of small integers; row i is drawn with a probability like 1 / i."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, num_rows + 1, dtype=torch.float64)
    drawn = torch.multinomial(weights, rows, replacement=True, generator=generator)
    values = torch.randint(-4, 5, (rows, width), generator=generator).float()
    return torch.sparse_coo_tensor(drawn[None], values, (num_rows, width), check_invariants=False)


def torch_sparse(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`dist.all_reduce` of a sparse tensor, which gloo alone has."""
    total = gradient.coalesce()
    most = torch.tensor([total._nnz()])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    row_bytes = 8 + total.shape[1] * total.element_size()
    dist.all_reduce(total)
    return total.coalesce(), (dist.get_world_size() - 1) * int(most) * row_bytes


def dense(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`dist.all_reduce` of the dense gradient."""
    total = gradient.to_dense()
    dist.all_reduce(total)
    n = dist.get_world_size()
    return total, round(2 * (n - 1) / n * total.nbytes)


def time_version(version: Version, gradient: torch.Tensor, rounds: int) -> tuple[float, int]:
    """Median milliseconds of the slowest rank, and the bytes of the busiest."""
    times_ms, sent = [], 0
    for _ in range(rounds):
        dist.barrier()
        start_s = time.perf_counter()
        _, sent = version(gradient)
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    worst = torch.tensor([statistics.median(times_ms), sent], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst[0]), int(worst[1])


def main() -> None:
    """Prints one line for each version."""
    parser = argparse.ArgumentParser(description="Row-sparse all-reduce over gloo.")
    parser.add_argument("--num-rows", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4096, help="tokens of each rank's batch")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    device = torch.device("cpu")
    timeout_s = SchemeConfig.timeout_s
    transport = ProcessGroupTransport(dist.group.WORLD, timeout_s, device)  # type: ignore[arg-type]
    progress = ProgressThread(device, timeout_s)

    def ours(way: Way) -> Version:
        reducer = RowSparseReducer(transport, NullSink(), progress, way)

        def run(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
            pending = reducer.start("embedding", gradient, Reduction.SUM, step=0)
            return pending.wait(), pending.record.wire_bytes

        return run

    versions: dict[str, Version] = {f"row_sparse {way}": ours(way) for way in Way}
    versions |= {"torch sparse": torch_sparse, "torch dense": dense}
    gradient = zipf_gradient(args.num_rows, args.width, args.rows, dist.get_rank())
    expected, _ = dense(gradient)
    if dist.get_rank() == 0:
        print(
            f"# {dist.get_world_size()} ranks, [{args.num_rows}, {args.width}] fp32, "
            f"{args.rows} tokens a rank\n# version  time(ms)  sent(B)  #wrong"
        )
    for name, version in versions.items():
        total, _ = version(gradient)
        wrong = int((total.to_dense() != expected).sum())
        time_ms, sent = (0.0, 0) if wrong else time_version(version, gradient, args.rounds)
        if dist.get_rank() == 0:
            print(f"{name:20} {time_ms:8.2f} {sent:12d} {wrong:6d}")
    progress.close()
    transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
