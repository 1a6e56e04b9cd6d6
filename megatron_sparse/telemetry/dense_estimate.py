"""What an iteration would have taken with dense synchronisation: an estimate.

The training thread's measured iteration is replayed with other buckets. Everything that the thread
did keeps its duration, except its waits. Each bucket is launched when the thread launched it,
occupies the link for the dense collective's predicted time (`BucketRecord.dense_us`), one bucket
after the other, and the thread waits for it where it waited before, for as long as it then must.
So does a compressed gather of parameters; a raw one keeps its measured times.

The estimate leaves out that without compression the backward pass has the processor's cores, or
the GPU, for itself; so dense would have been a little faster than it says. On a GPU launches are
those of the host, which runs ahead of the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_sparse.recording import BucketRecord, GatherRecord

DENSE = "dense"


def dense_iteration_s(
    records: Sequence[BucketRecord], iteration_s: float, gathers: Sequence[GatherRecord] = ()
) -> float | None:
    """Seconds that the iteration would have taken with the backend's own collectives.

    Args:
        records: the iteration's buckets.
        iteration_s: measured seconds.
        gathers: those that the thread waited for in the iteration.

    Returns:
        The estimate; the measured seconds where every bucket was dense and every gather raw; None
        where one of them has no prediction, or where there is no bucket.

    Example:
        A bucket is launched 1.0 s before the thread waits for it, and the wait takes 0.1 s of an
        iteration of 3.0 s. A dense collective of 1.5 s would have made the thread wait 0.5 s: the
        iteration would have taken 3.4 s.
    """
    replayed = [*records, *(gather for gather in gathers if gather.method != "raw")]
    if not records or any(record.dense_us is None for record in replayed):
        return None
    if len(replayed) == len(records) and all(record.scheme == DENSE for record in records):
        return iteration_s
    events = [(record.launched_s, False, record) for record in replayed]
    events += [(record.wait_began_s, True, record) for record in replayed]
    later_s, free_s = 0.0, -math.inf
    ends_s: dict[int, float] = {}
    for at_s, is_wait, record in sorted(events, key=lambda event: event[:2]):
        now_s = at_s + later_s
        if is_wait:
            later_s += max(0.0, ends_s[id(record)] - now_s) - record.exposed_s
        else:
            assert record.dense_us is not None, "checked above"
            free_s = ends_s[id(record)] = max(now_s, free_s) + record.dense_us / 1e6
    return iteration_s + later_s
