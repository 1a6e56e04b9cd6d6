"""The host waits for no bucket: `torch.cuda.set_sync_debug_mode("error")`, or its emulation.

And what a reducer holds after steps on a GPU is the account of its memory.
"""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.collectives.base import without
from megatron_sparse.config.scheme import AUTO_CAPACITY
from megatron_sparse.cuda_ext.reports import HostCopy
from megatron_sparse.doctor.memory import bytes_on_virtual_ranks
from megatron_sparse.recording import BucketRecord
from megatron_sparse.reduction.job import Gate
from megatron_sparse.reduction.level_choice import choose_level
from megatron_sparse.reduction.memory import held, item_of
from megatron_sparse.reduction.progress import InOrderProgress
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.transport import VirtualCluster
from tests.cuda_emulator.bucket_rank import NUMEL, Rank
from tests.cuda_emulator.device import GPU, NotWaiting, OnDevice, Place, sync_debug_error, to_gpu
from tests.cuda_emulator.emulator import EmulatedDevice
from tests.records import Kept
from tests.reduction.reducers import at_target, reducer_of

RANKS, STEPS = 3, 3
IN_CAPACITY = [
    (name, op)
    for name, scheme in SCHEMES.items()
    for op in CollectiveOp
    if scheme.takes_slots and op in scheme.ops
]


class Ranks:
    """The ranks of a virtual cluster on the GPU."""

    def __init__(
        self, op: CollectiveOp, dtype: torch.dtype = torch.float32, **overrides: Any
    ) -> None:
        self._cluster = VirtualCluster(RANKS, device=GPU)
        options = {"sum_bits": None} | overrides
        self.each = [Rank(each, op, dtype, **options) for each in self._cluster.transports]

    def fill(self, step: int) -> None:
        """The backward pass on every rank."""
        for rank in self.each:
            rank.fill(step)

    def step(self, step: int) -> list[BucketRecord]:
        """The progress thread's work on the bucket, on every rank."""
        return self._cluster.run(lambda each: without(self.each[each.rank].steps(step), Gate))


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(("name", "op"), IN_CAPACITY)
def test_a_bucket_in_capacity_mode(
    not_waiting: NotWaiting, name: str, op: CollectiveOp, sealed: bool
) -> None:
    check(not_waiting, Ranks(op, scheme=name, capacity=1.5, checksum=sealed))


@pytest.mark.parametrize(
    "overrides",
    [
        {"ramp_iters": 5},
        {"wire_dtype": "bf16", "residual_dtype": "bf16"},
        {"dtype": torch.bfloat16, "format": "coo"},
        {"format": "rice"},
        {"value_bits": 4, "sum_bits": 8},
        {"value_bits": 2, "dtype": torch.bfloat16},
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_every_way_of_selecting(not_waiting: NotWaiting, overrides: dict[str, Any]) -> None:
    check(
        not_waiting,
        Ranks(CollectiveOp.ALL_REDUCE, **{"scheme": "direct", "capacity": 1.5} | overrides),
    )


@pytest.mark.parametrize("name", [name for name in SCHEMES if name.startswith("dense_")])
@pytest.mark.parametrize("op", list(CollectiveOp))
def test_a_dense_bucket(not_waiting: NotWaiting, name: str, op: CollectiveOp) -> None:
    check(not_waiting, Ranks(op, scheme=name))


def check(not_waiting: NotWaiting, ranks: Ranks) -> None:
    """Steps in which the host waits for nothing; in the first one torch itself may wait."""
    for step in range(STEPS):
        ranks.fill(step)
        with not_waiting() if step else nullcontext():
            records = ranks.step(step)
        assert all(record.nnz and record.wire_bytes for record in records)
    assert all(bool(rank.part().any()) for rank in ranks.each)


@pytest.mark.parametrize("name", ["direct", "auto"])
def test_auto_fixes_sizes_on_a_gpu(not_waiting: NotWaiting, name: str) -> None:
    check(not_waiting, Ranks(CollectiveOp.ALL_REDUCE, scheme=name))


ACCOUNTS: list[tuple[CollectiveOp, dict[str, Any]]] = [
    *((op, {"scheme": name, "capacity": 1.5}) for name, op in IN_CAPACITY),
    (CollectiveOp.ALL_REDUCE, {"scheme": "direct", "capacity": 1.5, "ramp_iters": 2}),
    (CollectiveOp.ALL_REDUCE, {"scheme": "direct", "capacity": "auto"}),
    (CollectiveOp.ALL_REDUCE, {"scheme": "direct", "capacity": 1.5, "dtype": torch.bfloat16}),
    (CollectiveOp.ALL_REDUCE, {"scheme": "direct", "wire_dtype": "bf16", "warmup_iters": 1}),
]


@pytest.mark.parametrize(("op", "overrides"), ACCOUNTS)
def test_the_account_is_what_is_held(place: Place, op: CollectiveOp, overrides) -> None:
    """To the byte of what virtual ranks hold on a CPU: in capacity mode all sizes are known."""
    ranks = Ranks(op, **overrides)
    for step in range(STEPS):
        ranks.fill(step)
        ranks.step(step)
    config = at_target(samples=200, **{k: v for k, v in overrides.items() if k != "dtype"})
    nodes = (0,) * RANKS
    if config.scheme.capacity == "auto":
        config.scheme.capacity = AUTO_CAPACITY
    taken = bytes_on_virtual_ranks(config, ranks.each[0].bucket, nodes, choose_level(config, nodes))
    expected = Counter()
    for purpose, nbytes in taken.items():
        expected[item_of(purpose)] += nbytes
    found = Counter()
    for each in ranks.each:
        found |= Counter(held(each.reducer.selector.residuals, [each.reducer]))
    assert found == expected


def test_between_launch_and_update_the_host_waits_for_nothing(
    not_waiting: NotWaiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From `start` to the stream's wait, while the device has not come to the reports."""
    config = at_target(value_bits="auto", samples=200, scheme="direct")
    sink, progress = Kept(), InOrderProgress(GPU, 30)
    groups = Groups(VirtualCluster(1, device=GPU).transports[0])
    reducer = reducer_of(config, groups, sink, progress, is_reported=False)
    grad_N, pieces = torch.zeros(NUMEL, device=GPU), [ParameterSlice("w", 0, NUMEL)]
    bucket = Bucket("b", grad_N, pieces, CollectiveOp.ALL_REDUCE, 1)
    has_come = [True]
    monkeypatch.setattr(HostCopy, "ready", lambda copy: has_come[0])
    for step in range(STEPS):
        has_come[0] = step == 0
        generator = torch.Generator().manual_seed(step)
        bucket.grad_N.copy_(torch.randn(NUMEL, generator=generator))
        with not_waiting() if step else nullcontext():
            pending = reducer.start(bucket, step)
            pending.wait_until_queued()
        assert len(sink.buckets) == step
        has_come[0] = True
        pending.confirm()
        assert sink.buckets[step].nnz > 0
    assert bool(bucket.grad_N.any())
    progress.close()


def test_without_capacity_sizes_are_waited_for(not_waiting: NotWaiting) -> None:
    ranks = Ranks(CollectiveOp.ALL_REDUCE, scheme="direct", capacity=None)
    ranks.fill(0)
    ranks.step(0)
    with not_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        ranks.step(1)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.zeros(4)),
        lambda x: torch.zeros(4).copy_(x),
        lambda x: torch.zeros(4).copy_(x, non_blocking=True),
        lambda x: torch.ones(4).to(x.device, non_blocking=True),
        lambda x: torch.ones(4).to(x.device),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: torch.repeat_interleave(x.long()),
    ],
)
def test_waiting_is_detected(emulated_gpu: EmulatedDevice, wait) -> None:
    x = to_gpu(torch.tensor([1.0, 0.0, 2.0, 0.0]))
    wait(x)
    with sync_debug_error(), pytest.raises(RuntimeError, match="synchronizing"):
        wait(x)


@pytest.mark.parametrize(
    "go_on",
    [
        lambda x: x + 1,
        lambda x: x.sort().values.cumsum(0)[x.long()],
        lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
        lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True),
        lambda x: x.copy_(x.clone()),
        lambda x: torch.repeat_interleave(x.long(), output_size=3),
        lambda x: torch.zeros(3).sum().item(),
        lambda x: torch.arange(3, device=x.device),
        lambda x: torch.full((3,), 1.0, device=x.device),
    ],
)
def test_operations_that_do_not_wait_pass(emulated_gpu: EmulatedDevice, go_on) -> None:
    x: OnDevice = to_gpu(torch.tensor([1.0, 0.0, 2.0, 0.0]))
    with sync_debug_error():
        go_on(x)
