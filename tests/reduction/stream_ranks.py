"""One rank of `test_streams_on_gpu`: several buckets a step, launched beside other GPU work.

Checks on every step that sum = sum over ranks of (gradient + residual before - residual after), in
small integers, so exactly; and that the host waits for the device nowhere between the launch of
the first bucket and the stream's wait for the last one.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.reduction.host_state import check_kernels_of_all
from megatron_sparse.reduction.progress import progress_on
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.transport import ProcessGroupTransport
from tests.reduction.reducers import at_target, reducer_of

BUCKETS, NUMEL, STEPS, BUSY_SIZE = 4, 2**20, 6, 2048
"""In step 0 torch and NCCL allocate, which waits."""


def main() -> None:
    """Trains nothing: gradients are drawn."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    engine = os.environ.get("ENGINE") == "1"
    config = at_target(density=0.05, leak=1.0, scheme="direct", nccl_engine=engine, timeout_s=60.0)
    world = dist.group.WORLD
    assert world is not None, "just made"
    check_kernels_of_all(device)
    transport = ProcessGroupTransport(world, 60.0, device, nccl_engine=config.scheme.nccl_engine)
    progress = progress_on(device, 60.0)
    reducer = reducer_of(config, Groups(transport), progress=progress, is_reported=False)
    residuals, buckets = reducer.selector.residuals, []
    for number in range(BUCKETS):
        grad_N, pieces = torch.zeros(NUMEL, device=device), [ParameterSlice(f"w{number}", 0, NUMEL)]
        name = f"bucket{number}"
        buckets.append(Bucket(name, grad_N, pieces, CollectiveOp.ALL_REDUCE, ranks))
    matrix = torch.ones(BUSY_SIZE, BUSY_SIZE, device=device, dtype=torch.bfloat16)
    draws = torch.Generator(device).manual_seed(rank)
    for step in range(STEPS):
        expected = []
        for bucket in buckets:
            drawn_N = torch.randint(-8, 9, (NUMEL,), device=device, generator=draws)
            bucket.grad_N.copy_(drawn_N)
            held = residuals[bucket.name] if bucket.name in residuals else torch.zeros_like(drawn_N)
            expected.append(drawn_N.float() + held)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        pending = []
        for bucket in buckets:
            torch.mm(matrix, matrix)
            pending.append(reducer.start(bucket, step))
        for each in pending:
            each.wait_until_queued()
        sums = [bucket.grad_N.clone() for bucket in buckets]
        torch.cuda.set_sync_debug_mode("default")
        for each in pending:
            each.confirm()
        for bucket, sum_N, expected_N in zip(buckets, sums, expected, strict=True):
            expected_N -= residuals[bucket.name]
            dist.all_reduce(expected_N)
            assert torch.equal(sum_N, expected_N), f"step {step}, {bucket.name}"
            assert bool(sum_N.any())
    progress.close()
    transport.close()
    print(f"rank {rank}: {STEPS * BUCKETS} exact sums")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
