"""`scheme.nccl_engine` from the configuration to the sum, on an emulated GPU.

Ranks are threads with a reducer and a communicator each; NCCL is the one of `tests/fake_nccl`.
Unlike on a GPU there are no streams, no binding in C++, and no real NCCL.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives.base import without
from megatron_sparse.errors import CommunicationError, MegatronSparseError, WireFormatError
from megatron_sparse.recording import BucketRecord, StageTimer
from megatron_sparse.reduction.job import GATE, Gate
from megatron_sparse.transport import VirtualCluster
from megatron_sparse.transport.nccl_communicator import NcclCommunicator
from megatron_sparse.transport.nccl_library import NcclLibrary
from megatron_sparse.transport.operation import Operation
from tests import fake_nccl
from tests.cuda_emulator.bucket_rank import Rank
from tests.cuda_emulator.device import GPU, EmulatedGpu, sync_debug_error
from tests.cuda_emulator.emulator import IN_ORDER, EmulatedDevice, Emulator
from tests.waiting import DEADLINE_S

STEPS = 2


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fake_nccl.build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def gpu(emulated_gpu: EmulatedDevice, emulator: Emulator) -> EmulatedDevice:
    emulator.schedule(IN_ORDER, 0, resident_blocks=4, multiprocessors=4)
    return emulated_gpu


class Group:
    """Ranks whose transports have a communicator of the fake NCCL.

    `timeout_s` of every call may be changed. `make`: the rank that is given its transport.
    """

    def __init__(
        self, nccl: Any, ranks: int, make: Callable[[Any], Rank], timeout_s: float = 60
    ) -> None:
        library = NcclLibrary(nccl)
        told: list[bytes] = []
        heard = threading.Barrier(ranks)
        self.timeout_s = timeout_s
        # The emulator's encoder of a gradient is for one thread at a time.
        self.selecting = threading.Lock()
        self.ranks: list[Rank | None] = [None] * ranks

        def broadcast(text: bytes) -> bytes:
            if text:
                told.append(text)
            heard.wait(DEADLINE_S)
            return told[0]

        def join(rank: int) -> None:
            communicator = NcclCommunicator(
                library,
                rank,
                ranks,
                GPU,
                30,
                broadcast,
                lambda name: Operation(name, None, self.timeout_s),
            )
            self.ranks[rank] = make(
                SimpleNamespace(
                    rank=rank,
                    world_size=ranks,
                    device=GPU,
                    nodes=(0,) * ranks,
                    communicator=communicator,
                )
            )

        on_all(range(ranks), join)

    def step(self, step: int) -> list[BucketRecord]:
        """A step on all ranks; waiting for the device is an error, except in the first step."""
        records: dict[int, BucketRecord] = {}

        def run(rank: int) -> None:
            self.ranks[rank].fill(step)
            with sync_debug_error() if step else nullcontext():
                records[rank] = self.drive(rank, step)

        on_all(range(len(self.ranks)), run)
        return [records[rank] for rank in range(len(self.ranks))]

    def drive(self, rank: int, step: int) -> BucketRecord:
        """A step of one rank."""
        running = self.ranks[rank].steps(step)
        with self.selecting:
            assert next(running) is GATE
        try:
            while True:
                next(running)
        except StopIteration as ended:
            return ended.value

    def close(self) -> None:
        on_all(range(len(self.ranks)), lambda r: self.ranks[r].transport.communicator.close())


@contextmanager
def group_of(*arguments: Any, **options: Any) -> Iterator[Group]:
    group = Group(*arguments, **options)
    try:
        yield group
    finally:
        group.close()


def on_all(ranks: Any, call: Callable[[int], None]) -> None:
    """Runs it in a thread for each rank; raises the error of the lowest rank that failed."""
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            with EmulatedGpu():
                call(rank)
        except BaseException as error:  # for the test's own thread
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]


CASES = [
    (name, op, ranks, {})
    for name in ("direct", "agsparse")
    for op in CollectiveOp
    for ranks in (1, 3, 4)
] + [
    ("direct", CollectiveOp.ALL_REDUCE, 3, {"wire_dtype": "bf16"}),
    ("direct", CollectiveOp.ALL_REDUCE, 3, {"dtype": torch.bfloat16}),
    ("agsparse", CollectiveOp.ALL_REDUCE, 3, {"dtype": torch.bfloat16}),
    ("direct", CollectiveOp.REDUCE_SCATTER, 3, {"dtype": torch.bfloat16, "format": "coo"}),
    ("direct", CollectiveOp.ALL_REDUCE, 4, {"format": "pici", "density": 0.5}),
]


@pytest.mark.parametrize(("name", "op", "ranks", "overrides"), CASES)
def test_the_sum_is_the_collectives_own_bit_for_bit(
    gpu: EmulatedDevice,
    nccl: Any,
    name: str,
    op: CollectiveOp,
    ranks: int,
    overrides: dict[str, Any],
) -> None:
    settings = {"scheme": name, "dtype": torch.float32, "capacity": 1.5} | overrides
    dtype = settings.pop("dtype")
    cluster = VirtualCluster(ranks, device=GPU)
    virtual = [Rank(each, op, dtype, **settings) for each in cluster.transports]

    def oracle(rank: Rank, step: int) -> Iterator[Any]:
        rank.fill(step)
        return (yield from without(rank.steps(step), Gate))

    engine = settings | {"nccl_engine": True}
    with group_of(nccl, ranks, lambda transport: Rank(transport, op, dtype, **engine)) as group:
        for step in range(STEPS):
            expected = cluster.run(lambda each, step=step: oracle(virtual[each.rank], step))
            found = group.step(step)
            assert [each.wire_bytes for each in found] == [each.wire_bytes for each in expected]
            assert [each.nnz for each in found] == [each.nnz for each in expected]
            for one, other in zip(virtual, group.ranks, strict=True):
                wanted, found_part = one.part().cpu(), other.part().cpu()
                assert bool(wanted.any())
                assert torch.equal(wanted.view(torch.uint8), found_part.view(torch.uint8))


def direct_group(
    nccl: Any, ranks: int, timeout_s: float = 60, op: CollectiveOp = CollectiveOp.ALL_REDUCE
) -> Any:
    settings = {"scheme": "direct", "nccl_engine": True, "capacity": 1.5}
    return group_of(nccl, ranks, lambda transport: Rank(transport, op, **settings), timeout_s)


def errors_of(group: Group, step: int, ranks: Iterable[int]) -> dict[int, BaseException]:
    """The errors of the ranks that take part in a step."""
    raised: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        group.ranks[rank].fill(step)
        try:
            group.drive(rank, step)
        except MegatronSparseError as error:
            raised[rank] = error

    on_all(ranks, run)
    return raised


def test_a_silent_rank_is_an_error_of_the_others_within_the_deadline(
    gpu: EmulatedDevice, nccl: Any
) -> None:
    with direct_group(nccl, 3) as group:
        group.step(0)
        group.timeout_s = 1
        began_s = time.monotonic()
        raised = errors_of(group, 1, (0, 2))
        assert set(raised) == {0, 2}
        assert 1 <= time.monotonic() - began_s < DEADLINE_S
        for rank in raised:
            assert isinstance(raised[rank], CommunicationError)
            assert "direct of bucket b failed" in str(raised[rank])
            assert "no answer within 1 s" in str(raised[rank])
            communicator = group.ranks[rank].transport.communicator
            assert nccl.fake_nccl_is_aborted(communicator.words[2].item())
            with pytest.raises(CommunicationError, match="direct of bucket b failed"):
                communicator.check()
        again = errors_of(group, 2, (0,))
        assert "direct of bucket b failed" in str(again[0]), "nothing is posted any more"


def test_an_error_that_nccl_reports_ends_the_wait(gpu: EmulatedDevice, nccl: Any) -> None:
    remote_error = 6
    with direct_group(nccl, 2) as group:
        communicator = group.ranks[0].transport.communicator
        notice = threading.Timer(
            0.5, nccl.fake_nccl_notice, (communicator.words[2].item(), remote_error)
        )
        notice.start()
        raised = errors_of(group, 0, (0,))
        notice.join()
        assert "network error (ncclResult_t 6)" in str(raised[0])
        assert nccl.fake_nccl_is_aborted(communicator.words[2].item())


def test_a_post_that_nccl_refuses(gpu: EmulatedDevice, nccl: Any) -> None:
    with direct_group(nccl, 2, timeout_s=1) as group:
        nccl.fake_nccl_refuse(group.ranks[1].transport.communicator.words[2].item(), 3)
        raised = errors_of(group, 0, (0, 1))
        assert "internal error (ncclResult_t 3)" in str(raised[1])
        assert "no answer within 1 s" in str(raised[0])


def test_ranks_with_other_capacities_end_in_an_error(gpu: EmulatedDevice, nccl: Any) -> None:
    def make(transport: Any) -> Rank:
        options = {"scheme": "direct", "nccl_engine": True, "capacity": 1.5 + transport.rank}
        return Rank(transport, CollectiveOp.ALL_REDUCE, **options)

    with group_of(nccl, 2, make) as group:
        raised = errors_of(group, 0, (0, 1))
        assert set(raised) == {0, 1}
        assert all("invalid argument" in str(error) for error in raised.values())


@pytest.mark.parametrize("op", list(CollectiveOp))
def test_a_damaged_record_names_its_rank_and_spoils_the_sum_for_everyone(
    gpu: EmulatedDevice, nccl: Any, op: CollectiveOp
) -> None:
    with direct_group(nccl, 3, op=op) as group:
        selector = group.ranks[2].reducer.selector
        select = selector.select

        def select_and_damage(*arguments: Any, **options: Any) -> Any:
            message = select(*arguments, **options)
            message.buffer[0] = 0  # the magic number of the message to rank 0
            return message

        selector.select = select_and_damage
        raised = errors_of(group, 0, range(3))
        assert isinstance(raised[0], WireFormatError)
        assert "rank 2" in str(raised[0])
        if op is CollectiveOp.REDUCE_SCATTER:
            assert set(raised) == {0}, "the others have not met it"
            return
        for rank in (1, 2):
            assert isinstance(raised[rank], WireFormatError)
            assert "rank 0" in str(raised[rank]), "whose sum it is"
        # The communicator still works; the reducer must refuse to continue.
        for rank in group.ranks:
            rank.transport.communicator.check()


def test_a_late_rank_is_waited_for_and_every_stage_is_timed(gpu: EmulatedDevice, nccl: Any) -> None:
    with direct_group(nccl, 2) as group:
        for rank in group.ranks:
            rank.timer = StageTimer(GPU)

        waits = group.ranks[0].transport.communicator

        def run(rank: int) -> None:
            group.ranks[rank].fill(0)
            if rank:
                while not waits._pending:
                    time.sleep(0.01)
                time.sleep(1)
            group.drive(rank, 0)

        began_s = time.monotonic()
        on_all(range(2), run)
        first, second = (rank.bucket.grad_N.cpu() for rank in group.ranks)
        assert bool(first.any())
        assert torch.equal(first, second)
        spent_us = 1e6 * (time.monotonic() - began_s)
        stages = [rank.timer.times_us() for rank in group.ranks]
        for stage in ("network", "decode", "encode"):
            assert all(each[stage] > 0 for each in stages), stage
        assert stages[0]["network"] > 0.9e6, "rank 0 has waited for rank 1"
        assert all(sum(each.values()) < spent_us for each in stages)
