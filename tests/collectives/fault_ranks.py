"""The ranks' functions in the tests of faults over real processes."""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.errors import MegatronSparseError
from megatron_sparse.planner import Planner
from tests.collectives.faults import (
    Fault,
    FaultyTransport,
    kill_process,
    kill_process_soon,
    stop_process,
)
from tests.reduction.reducers import at_target, reducer_over_gloo
from tests.straggler.settings import section_for

NUMEL = 12_000
SLOW_S = 0.2


def attempt(
    bucket: Bucket,
    scheme: str,
    timeout_s: float,
    fault: Fault | None = None,
    step: int = 0,
    *,
    is_broken: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Synchronises a bucket once; returns the outcome, and the time that it and its end took.

    `is_broken`: the group fails on another rank, and must not be used again.
    """
    # Not rank 0: it would finish first, and it informs the others of lost ranks.
    late = section_for(scheme, rank=bucket.world_size - 1)
    sent = {"density": 1.0, "value_bits": None, "timeout_s": timeout_s} | options
    config = at_target(scheme=scheme, straggler=late, **sent)
    acts = {
        "kill": kill_process,
        "stop": stop_process,
        "slow": partial(time.sleep, SLOW_S),
        "kill while sending": kill_process_soon,
    }
    fault = fault or Fault("none", 0, 0)
    made: list[FaultyTransport] = []

    def wrap(transport: Any) -> Any:
        made.append(FaultyTransport(transport, fault, acts))
        return made[0]

    planner = Planner(config.compression, config.scheme)
    with reducer_over_gloo(config, planner=planner, wrap=wrap, is_broken=is_broken) as reducer:
        start_s = time.monotonic()
        try:
            reducer.start(bucket, step).wait()
            kind, text = None, ""
        except MegatronSparseError as error:
            kind, text = type(error).__name__, str(error)
        end_s = time.monotonic()
    gradients = (gradient_of(rank, bucket.numel) for rank in range(bucket.world_size))
    return {
        "kind": kind,
        "text": text,
        "seconds": end_s - start_s,
        "close_s": time.monotonic() - end_s,
        "posted": made[0].posted,
        "struck": made[0].struck,
        "right": torch.equal(bucket.grad_N, sum(gradients, torch.zeros(bucket.numel))),
    }


def gradient_of(rank: int, numel: int) -> torch.Tensor:
    """Small integers, different on each rank; 7 first, so that `dense_q` holds them exactly."""
    generator = torch.Generator().manual_seed(rank)
    grad_N = torch.randint(-7, 8, (numel,), generator=generator).float()
    grad_N[:1] = 7
    return grad_N


def bucket_of(rank: int, world_size: int, numel: int = NUMEL) -> Bucket:
    """A rank's bucket, all of which is sent."""
    pieces = [ParameterSlice("w", 0, numel)] if numel else []
    return Bucket("b", gradient_of(rank, numel), pieces, CollectiveOp.ALL_REDUCE, world_size)


def terminal(
    rank: int, world_size: int, scheme: str, fault: Fault, numel: int, timeout_s: float, folder: str
) -> None:
    """One rank is killed or stopped; the others write down their outcomes.

    Survivors then close and end by themselves, as a script would.
    """
    result = attempt(bucket_of(rank, world_size, numel), scheme, timeout_s, fault)
    # Written atomically: the test reads the file as soon as it exists.
    draft = Path(folder) / f"draft{rank}"
    draft.write_text(json.dumps(result))
    os.replace(draft, Path(folder) / f"rank{rank}.json")


def one_after_another(
    rank: int,
    world_size: int,
    cases: list[tuple[str, Fault]],
    timeout_s: float,
    numel: int = NUMEL,
) -> list[dict[str, Any]]:
    """Runs (scheme, fault) cases of faults that a process survives; returns the rank's outcomes."""
    import torch.distributed as dist

    results = []
    for scheme, fault in cases:
        bucket = bucket_of(rank, world_size, numel)
        # A rank that got its sum must not reuse the group, which has failed on another rank.
        spoils = fault.kind not in ("none", "slow")
        results.append(attempt(bucket, scheme, timeout_s, fault, is_broken=spoils))
        # Groups over the same ranks must not be made while a peer is still in the last one.
        dist.barrier()
    return results


def disagree_everywhere(
    rank: int, world_size: int, cases: list[tuple[str, str]], timeout_s: float
) -> list[dict[str, Any]]:
    """(scheme, what) each: the last rank means another size, dtype, step or scheme."""
    import torch.distributed as dist

    results = []
    for scheme, what in cases:
        differs = rank == world_size - 1
        named = OTHER.get(scheme, "agsparse") if differs and what == "scheme" else scheme
        other_dtype, whole = differs and what == "dtype", SCHEMES[scheme].sends_whole
        options: dict[str, Any] = {}
        if other_dtype:
            options = {"value_bits": 8} if whole else {"wire_dtype": "bf16"}
        numel = NUMEL + 240 if differs and what == "size" else NUMEL
        bucket = bucket_of(rank, world_size, numel)
        step = 1 if differs and what == "step" else 0
        results.append(attempt(bucket, named, timeout_s, step=step, **options))
        dist.barrier()
    return results


OTHER = {"agsparse": "direct", "direct": "dense", "dense": "dense_ring"}
"""The scheme that the last rank uses; the others use `agsparse`."""
