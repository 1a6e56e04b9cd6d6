"""The straggler-aware schemes over real processes and sockets."""

from __future__ import annotations

import time

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.errors import MegatronSparseError
from tests.collectives.cases import Case, assert_exact, numel_for
from tests.collectives.over_gloo import Side, run_over_gloo
from tests.ranks import run_ranks

N = 4
LATE = 2
TIMEOUT_S = 3.0
SLACK_S = 60.0
"""What a loaded machine adds to a timeout."""
NAMES = ("straggler", "straggler_direct")
CASES = [
    Case(name, N, op, *dtypes, 0.2, numel_for(N, 20_000, op), straggler=s)
    for name in NAMES
    for op in CollectiveOp
    for dtypes, s in ((("fp32", "fp32"), LATE), (("bf16", "bf16"), 0))
]


def test_exact_over_gloo_with_a_late_rank():
    """In half of the cases the late rank is the expected straggler, in the others not."""
    for case, results in zip(CASES, run_over_gloo(CASES, late=LATE), strict=True):
        assert_exact(case, results)


def _never_comes(rank: int, world_size: int) -> list[tuple[str, float]]:
    """The error that each scheme raises on a rank, and after how many seconds."""
    import torch.distributed as dist

    outcomes = []
    for name in NAMES:
        case = Case(name, N, density=0.2, numel=20_000, straggler=LATE)
        first, side = Side(20.0), Side(TIMEOUT_S)
        # Once without a fault, so that all ranks have loaded everything before the measurement.
        first.launch(case).wait()
        first.close()
        dist.barrier()
        if rank == LATE:
            # It is alive, so only the timeout can detect it.
            time.sleep(TIMEOUT_S + 1.5)
        start_s = time.monotonic()
        pending = side.launch(case)
        text = ""
        try:
            pending.wait()
        except MegatronSparseError as error:
            text = f"{type(error).__name__}: {error}"
        outcomes.append((text, time.monotonic() - start_s))
        side.close()
        dist.barrier()
    return outcomes


def test_a_straggler_that_never_comes_is_named_within_the_timeout():
    by_rank = run_ranks(_never_comes, N, linger_s=0.0)
    for index, name in enumerate(NAMES):
        for rank, outcomes in enumerate(by_rank):
            text, seconds = outcomes[index]
            assert text.startswith("CommunicationError"), (name, rank, text)
            if rank != LATE:
                assert seconds < TIMEOUT_S + SLACK_S, (name, rank)
                # The rank that times out names the rank it waited for; the others quote its error.
                assert f"ranks [{LATE}]" in text, (name, rank, text)
