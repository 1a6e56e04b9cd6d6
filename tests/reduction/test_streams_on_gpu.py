"""Two processes on one GPU: buckets on two streams, with one and with eight hardware queues."""

import pytest

from megatron_sparse.reduction.progress import QUEUES
from tests.gpu_ranks import on_one_gpu


@pytest.mark.gpu
@pytest.mark.parametrize(("queues", "engine"), [("1", "0"), ("8", "1"), ("8", "0")])
def test_sums_are_exact_and_the_host_waits_for_none(queues: str, engine: str) -> None:
    said = on_one_gpu(2, "-m", "tests.reduction.stream_ranks", **{QUEUES: queues, "ENGINE": engine})
    assert all("24 exact sums" in each for each in said)
