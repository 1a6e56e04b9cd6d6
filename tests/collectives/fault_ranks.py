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
from megatron_sparse.reduction.progress import ProgressThread
from megatron_sparse.reduction.reducer import Groups
from megatron_sparse.transport import ProcessGroupTransport
from tests.collectives.faults import (
    Fault,
    FaultyTransport,
    kill_process,
    kill_process_soon,
    stop_process,
)
from tests.reduction.reducers import at_target, reducer_of
from tests.straggler.settings import section_for

NUMEL = 12_000
SLOW_S = 0.2


class Reducing:
    """One rank's transport, thread and reducer, for one attempt.

    Args:
        scheme: its name.
        timeout_s: of transport and thread.
        fault: the transport's fault.
        wire_dtype: see `SchemeConfig`.
        value_bits: see `CompressionConfig`.
    """

    def __init__(
        self,
        scheme: str,
        timeout_s: float,
        fault: Fault | None = None,
        wire_dtype: str | None = None,
        value_bits: int | None = None,
    ) -> None:
        import torch.distributed as dist

        config = at_target(
            scheme=scheme,
            density=1.0,
            value_bits=value_bits,
            wire_dtype=wire_dtype,
            timeout_s=timeout_s,
            # Not rank 0: it would finish first, and it informs the others of lost ranks.
            straggler=section_for(scheme, rank=dist.get_world_size() - 1),
        )
        cpu = torch.device("cpu")
        assert dist.group.WORLD is not None
        self.transport = ProcessGroupTransport(dist.group.WORLD, timeout_s, cpu)
        self.progress = ProgressThread(cpu, timeout_s)
        acts = {
            "kill": kill_process,
            "stop": stop_process,
            "slow": partial(time.sleep, SLOW_S),
            "kill while sending": kill_process_soon,
        }
        wrapped: Any = FaultyTransport(self.transport, fault or Fault("none", 0, 0), acts)
        self.faulty = wrapped
        planner = Planner(config.compression, config.scheme)
        self.reducer = reducer_of(config, Groups(wrapped), progress=self.progress, planner=planner)

    def reduce(self, bucket: Bucket, step: int = 0) -> dict[str, Any]:
        """Synchronises a bucket; returns the outcome and the time."""
        gradients = (gradient_of(rank, bucket.numel) for rank in range(bucket.world_size))
        start_s = time.monotonic()
        try:
            self.reducer.start(bucket, step).wait()
            kind, text = None, ""
        except MegatronSparseError as error:
            kind, text = type(error).__name__, str(error)
        return {
            "kind": kind,
            "text": text,
            "seconds": time.monotonic() - start_s,
            "posted": self.faulty.posted,
            "struck": self.faulty.struck,
            "right": torch.equal(bucket.grad_N, sum(gradients, torch.zeros(bucket.numel))),
        }

    def close(self, *, broken: bool = False) -> float:
        """Ends the thread and gives the group back; returns the time.

        Args:
            broken: the group has failed, on another rank.
        """
        start_s = time.monotonic()
        broken = broken or self.progress.broken
        self.progress.close()
        self.transport.close(broken=broken)
        return time.monotonic() - start_s


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
    side = Reducing(scheme, timeout_s, fault)
    result = side.reduce(bucket_of(rank, world_size, numel))
    result["close_s"] = side.close()
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
        side = Reducing(scheme, timeout_s, fault)
        results.append(side.reduce(bucket_of(rank, world_size, numel)))
        # A rank that got its sum must not reuse the group, which has failed on another rank.
        spoils = fault.kind not in ("none", "slow")
        results[-1]["close_s"] = side.close(broken=spoils)
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
        wire = "bf16" if other_dtype and not whole else None
        bits = 8 if other_dtype and whole else None
        numel = NUMEL + 240 if differs and what == "size" else NUMEL
        side = Reducing(named, timeout_s, wire_dtype=wire, value_bits=bits)
        step = 1 if differs and what == "step" else 0
        results.append(side.reduce(bucket_of(rank, world_size, numel), step))
        results[-1]["close_s"] = side.close()
        dist.barrier()
    return results


OTHER = {"agsparse": "direct", "direct": "dense", "dense": "dense_ring"}
"""The scheme that the last rank uses; the others use `agsparse`."""
