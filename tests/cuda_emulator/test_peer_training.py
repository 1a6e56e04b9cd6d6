"""`scheme.name=peer_two_shot` from the configuration to the sum, on an emulated GPU.

Ranks are threads with a reducer each. Unlike on a GPU, the progress thread has no
stream, and there are no providers: windows lie in the memory that all threads share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import peer_windows
from megatron_sparse.compression.residual import Outcome, ResidualStore
from megatron_sparse.config.sparse import PEER_WINDOWS, PlannerConfig, SparseConfig
from megatron_sparse.errors import CommunicationError, ConfigError, HostError
from megatron_sparse.planner.configured import planner_of
from megatron_sparse.recording import NullSink, StageTimer
from megatron_sparse.reduction.job import GATE, Job
from megatron_sparse.reduction.pending import Pending
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.reduction.reducer import GradientReducer, Groups
from megatron_sparse.transport import Transport
from megatron_sparse.transport.peer_memory import PeerWindows
from tests.cuda_emulator.device import GPU, EmulatedGpu, sync_debug_error
from tests.cuda_emulator.op_calls import EmulatedDevice
from tests.cuda_emulator.test_peer_ops import gpu, in_threads  # noqa: F401 - a fixture

RANKS = 2
NUMELS = (6000, 2400)
"""Of two buckets, so that one set of windows serves both."""


class Meeting:
    """Where the ranks' windows are exchanged."""

    def __init__(self) -> None:
        self.windows: list[torch.Tensor] = [torch.empty(0)] * RANKS
        self.all_here = threading.Barrier(RANKS)


class SharedWindows:
    """A provider whose ranks are threads; its group is (the meeting, the rank)."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._meeting, self.first_rank = group
        self.world_size, self.local_ranks, self.device = RANKS, 1, device

    def open(self, nbytes: int) -> PeerWindows:
        own = torch.zeros(nbytes, dtype=torch.uint8, device=GPU)
        self._meeting.windows[self.first_rank] = own
        self._meeting.all_here.wait()
        return PeerWindows((own,), tuple(w.data_ptr() for w in self._meeting.windows))


class Inline:
    """Replaces the progress thread: a job runs when it is launched.

    The emulator's encoder is for one thread at a time, which has the lock until its gate.
    """

    def __init__(self, encoder: threading.Lock) -> None:
        self._encoder = encoder

    def submit(
        self,
        name: str,
        job: Job,
        timer: StageTimer,
        on_done: Callable[[], None] | None = None,
        after: Pending | None = None,
    ) -> Pending:
        assert after is None or after.done(), "jobs run one after another here"
        pending, steps = Pending(name, timer, None, on_done), job()
        try:
            with self._encoder:
                assert next(steps) is GATE
            for _ in steps:
                pass
        except BaseException as error:
            pending.end(error)
        else:
            pending.end(None)
        return pending


class Rank:
    """One rank's buckets and reducer."""

    def __init__(
        self,
        rank: int,
        op: CollectiveOp,
        meeting: Meeting,
        encoder: threading.Lock,
        nodes: Sequence[int] = (0,) * RANKS,
        **overrides: Any,
    ) -> None:
        config = SparseConfig.from_overrides(
            scheme="peer_two_shot",
            density=0.1,
            warmup_iters=0,
            ramp_iters=0,
            samples=500,
            keep_below_numel=0,
            **overrides,
        )
        transport = SimpleNamespace(
            rank=rank, world_size=RANKS, device=GPU, nodes=tuple(nodes), group=(meeting, rank)
        )
        self._has_capacity = config.scheme.capacity is not None
        self.residuals = ResidualStore(torch.float32, undo=False, outcome=Outcome.ASSUMED)
        self.buckets = [
            Bucket(
                f"b{index}",
                torch.zeros(numel, device=GPU),
                [
                    ParameterSlice(f"w{index}", 0, numel - 100),
                    ParameterSlice(f"n{index}", numel - 100, numel, keep=True),
                ],
                op,
                RANKS,
            )
            for index, numel in enumerate(NUMELS)
        ]
        self.reducer = GradientReducer(
            config,
            Groups(cast("Transport", transport)),
            planner_of(config, logs=False),
            self.residuals,
            NullSink(),
            cast("ProgressThread", Inline(encoder)),
        )

    def step(self, step: int, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Synchronises both buckets; returns what this rank sent of each."""
        sent = []
        for bucket, grad in zip(self.buckets, grads, strict=True):
            before = self._residual(bucket)
            bucket.grad_N.copy_(grad)
            with sync_debug_error() if self._has_capacity else nullcontext():
                self.reducer.start(bucket, step).wait()
            sent.append(grad + before - self._residual(bucket))
        return sent

    def _residual(self, bucket: Bucket) -> torch.Tensor:
        if bucket.name not in self.residuals:
            return torch.zeros(bucket.numel)
        return self.residuals[bucket.name].cpu()


def small_integers(rank: int, step: int) -> list[torch.Tensor]:
    """Gradients whose sums are exact for any selection."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    return [torch.randint(-7, 8, (n,), generator=generator).float() for n in NUMELS]


@pytest.fixture
def shared(gpu: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:  # noqa: F811
    monkeypatch.setattr(peer_windows, "PROVIDERS", {"cuda_ipc": SharedWindows})
    return gpu


def on_all(call: Callable[[int], None]) -> None:
    """Runs it in a thread for each rank; raises the error of the first that failed."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with EmulatedGpu():
                call(rank)
        except BaseException as error:  # for the test's own thread
            errors.append(error)

    in_threads([lambda rank=rank: run(rank) for rank in range(RANKS)])
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    ("op", "overrides"),
    [
        (CollectiveOp.ALL_REDUCE, {}),
        (CollectiveOp.ALL_REDUCE, {"capacity": 3.0, "peer_in_order_of_coming": True}),
        (CollectiveOp.REDUCE_SCATTER, {"format": "coo", "peer_windows": "cuda_ipc"}),
    ],
)
def test_what_all_ranks_select_is_summed_step_after_step(
    shared: EmulatedDevice, op: CollectiveOp, overrides: dict[str, Any]
) -> None:
    """With the residual of earlier steps, in windows that were made once.

    With a capacity the host never waits.
    """
    meeting, encoder, steps = Meeting(), threading.Lock(), 3
    sent: dict[tuple[int, int], list[torch.Tensor]] = {}
    found: dict[tuple[int, int], list[torch.Tensor]] = {}

    def train(number: int) -> None:
        rank = Rank(number, op, meeting, encoder, **overrides)
        rank.reducer.open_windows(rank.buckets)
        assert all(bucket.has_windows for bucket in rank.buckets)
        peers = rank.reducer.windows
        assert peers is not None
        assert peers.in_order_of_coming is overrides.get("peer_in_order_of_coming", False)
        assert rank.reducer.window_bytes == peers.nbytes > 2 * 4 * NUMELS[0]
        for step in range(steps):
            sent[number, step] = rank.step(step, small_integers(number, step))
            found[number, step] = [bucket.grad_N.cpu().clone() for bucket in rank.buckets]

    on_all(train)
    for step in range(steps):
        for index, numel in enumerate(NUMELS):
            expected = torch.stack([sent[rank, step][index] for rank in range(RANKS)]).sum(0)
            assert int(expected.count_nonzero()) > 100
            for rank in range(RANKS):
                shard = slice(rank * numel // RANKS, (rank + 1) * numel // RANKS)
                here = shard if op is CollectiveOp.REDUCE_SCATTER else slice(None)
                assert torch.equal(found[rank, step][index][here], expected[here])


def test_a_rank_that_stops_is_named_by_the_others_wait(shared: EmulatedDevice) -> None:
    meeting, encoder = Meeting(), threading.Lock()

    def train(number: int) -> None:
        rank = Rank(number, CollectiveOp.ALL_REDUCE, meeting, encoder, timeout_s=1.0)
        rank.reducer.open_windows(rank.buckets)
        if number == 0:
            rank.step(0, small_integers(0, 0))

    with pytest.raises(CommunicationError, match=r"bucket b0: .*rank 1 did not come") as caught:
        on_all(train)
    assert "scheme.timeout_s" in str(caught.value.remedy)


def test_ranks_of_two_machines_are_refused_when_it_is_attached(shared: EmulatedDevice) -> None:
    rank = Rank(0, CollectiveOp.ALL_REDUCE, Meeting(), threading.Lock(), nodes=(0, 1))
    with pytest.raises(ConfigError, match="peer_two_shot needs the memory of GPUs") as caught:
        rank.reducer.open_windows(rank.buckets)
    assert caught.value.got == "a group of 2 ranks on 2 machines"


def test_a_bucket_that_came_later_has_no_windows(shared: EmulatedDevice) -> None:
    meeting, encoder = Meeting(), threading.Lock()

    def train(number: int) -> None:
        rank = Rank(number, CollectiveOp.ALL_REDUCE, meeting, encoder)
        rank.reducer.open_windows(rank.buckets[:1])
        rank.step(0, small_integers(number, 0))

    with pytest.raises(ConfigError, match="bucket b1: the windows were made for other buckets"):
        on_all(train)


class NoWindows(SharedWindows):
    """A provider by which the ranks cannot reach one another."""

    def open(self, nbytes: int) -> PeerWindows:
        raise HostError("no way", got="no peer access")


def test_only_a_scheme_set_by_name_must_have_windows(
    shared: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The planner continues with the other candidates, and does not require windows."""
    monkeypatch.setattr(peer_windows, "PROVIDERS", {"cuda_ipc": NoWindows})
    rank = Rank(0, CollectiveOp.ALL_REDUCE, Meeting(), threading.Lock())
    with pytest.raises(HostError, match="no way"):
        rank.reducer.open_windows(rank.buckets)
    for schemes, told in ((None, False), (["direct", "peer_two_shot"], True)):
        caplog.clear()
        config = SparseConfig.from_overrides(
            planner=PlannerConfig(cluster="perlmutter", schemes=schemes)
        )
        rank.reducer.planner = planner_of(config, logs=False)
        rank.reducer.open_windows(rank.buckets)
        assert not any(bucket.has_windows for bucket in rank.buckets)
        assert rank.reducer.window_bytes == 0
        assert ("no peer access" in caplog.text) is told


def test_every_provider_has_a_name_in_the_configuration() -> None:
    assert ("auto", *peer_windows.PROVIDERS) == PEER_WINDOWS
