"""On CUDA: the streams of an exact gather, and what they wait for."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.collectives import POSTED
from megatron_sparse.parameters import gather
from megatron_sparse.parameters.agreement import Announcement
from megatron_sparse.parameters.gather import ExactGather, Way
from megatron_sparse.recording import NullSink
from megatron_sparse.reduction.progress import ProgressThread
from tests.reduction.fake_cuda import DEVICE, Driver, FakeCuda, StreamWork, drivers


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


RECORD = torch.zeros(64, dtype=torch.uint8).as_subclass(OnGpu)


class Transport:
    """Rank 0 of two."""

    rank, world_size = 0, 2

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def all_gather(self, *_: torch.Tensor) -> StreamWork:
        return StreamWork(lambda: self._cuda.note("raw arrival"))


def ends_at_once(*_: Any, **__: Any) -> Iterator[StreamWork]:
    yield from ()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Every step of a gather only writes down its stream; the tensors are on the CPU."""
    fake = FakeCuda(monkeypatch)
    number = 0

    def noted(what: str, result: Any = None) -> Callable[..., Any]:
        def step(*_: Any, **__: Any) -> Any:
            fake.note(f"{what} {number}")
            return result

        return step

    def agree(own: Announcement, *_: Any):
        nonlocal number
        number = own.number + 1
        yield StreamWork(lambda: None)
        return [own, own]

    def exchange(own, room, sizes, group, arrived, **_: Any):
        yield POSTED
        yield StreamWork(noted("arrival"))
        arrived(1, RECORD)

    used = noted("use of the record")
    monkeypatch.setattr(gather, "encode_moves", noted("encode", RECORD))
    monkeypatch.setattr(gather, "coders_of", ends_at_once)
    monkeypatch.setattr(gather, "apply_moves_", noted("decode"))
    monkeypatch.setattr(gather, "check_applied", ends_at_once)
    monkeypatch.setattr(
        gather, "used_here", lambda tensors: used() if tensors[0] is RECORD else None
    )
    monkeypatch.setattr(gather, "exchange_announcements", agree)
    monkeypatch.setattr(gather, "pairwise_all_gather", exchange)
    return fake


@drivers
def test_a_gather_lies_between_the_optimizer_and_the_forward_pass(
    cuda: FakeCuda, driver: Driver
) -> None:
    values_N = torch.zeros(64, dtype=torch.bfloat16)
    bucket = Bucket("b", torch.zeros(64), (), CollectiveOp.REDUCE_SCATTER, 2)
    progress = driver(DEVICE, 30)
    way, transport = Way(verify_every=100), cast(Any, Transport(cuda))
    exact = ExactGather(bucket, values_N, transport, way, progress, NullSink())
    for step in range(3):
        cuda.note(f"optimizer {step}")
        exact.start(step).wait()
        cuda.note(f"forward {step}")
    progress.close()
    assert cuda.precedes("launching: optimizer 0", "network: raw arrival")
    assert cuda.precedes("network: raw arrival", "launching: forward 0")
    for step in (1, 2):
        cuda.assert_order(
            [
                f"launching: optimizer {step}",
                f"codec: encode {step}",
                f"network: use of the record {step}",
                f"network: arrival {step + 1}",
                f"network: decode {step + 1}",
                f"launching: forward {step}",
            ]
        )
    # The copy that gather 1 keeps is what gather 2 encodes against.
    assert cuda.precedes("network: decode 2", "codec: encode 2")


class Copy:
    """A copy to the CPU that ends when the log has an entry."""

    def __init__(self, cuda: FakeCuda, entry: str) -> None:
        self._cuda, self._entry = cuda, entry

    def ready(self) -> bool:
        return self._entry in self._cuda.log

    def when_ready(self, wake: Callable[[], None]) -> None:
        pass

    def finish(self) -> None:
        assert self.ready()
        self._cuda.note("end of the copy")


@pytest.mark.parametrize("step", ["exchange_announcements", "coders_of", "check_applied"])
def test_while_a_copy_comes_in_the_next_bucket_is_encoded(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    progress, way, transport = ProgressThread(DEVICE, 30), Way(verify_every=100), Transport(cuda)

    def gather_of(name: str) -> ExactGather:
        bucket = Bucket(name, torch.zeros(64), (), CollectiveOp.REDUCE_SCATTER, 2)
        values_N = torch.zeros(64, dtype=torch.bfloat16)
        return ExactGather(bucket, values_N, cast(Any, transport), way, progress, NullSink())

    first, second = gather_of("first"), gather_of("second")
    for each in (first, second):
        each.start(0).wait()
    original, encode = getattr(gather, step), gather.encode_moves

    def copied(*given: Any, **options: Any) -> Iterator[Any]:
        result = yield from original(*given, **options)
        yield Copy(cuda, "codec: second encoding")
        return result

    def encoded(*given: Any, **options: Any) -> torch.Tensor:
        cuda.note(f"{next(names)} encoding")
        return encode(*given, **options)

    names = iter(["first", "second"])
    monkeypatch.setattr(gather, step, copied)
    monkeypatch.setattr(gather, "encode_moves", encoded)
    gathers = [each.start(1) for each in (first, second)]
    for pending in gathers:
        pending.wait()
    progress.close()
    assert cuda.log.count("network: end of the copy") == 2
