"""Measures the cluster that the ranks run on: a `ClusterModel`, the same on all of them.

Links and the backend's all-reduce (`planner.link_timing`), the host (`host`) and the codec
(`codec`), one after the other, by all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_sparse.calibration import codec as calibration_codec
from megatron_sparse.calibration.codec import CodecSizes, held_out, measure_codec
from megatron_sparse.calibration.host import measure_host
from megatron_sparse.planner import link_timing
from megatron_sparse.planner.fingerprint import fingerprint
from megatron_sparse.planner.link_timing import LinkSweep, complete, host_clock, measure_links
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.reduction.progress import Progress
from megatron_sparse.transport import ProcessGroupTransport


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        links: messages.
        codec: vectors.
        host_repeats: repetitions of the host's measurements.
    """

    links: LinkSweep
    codec: CodecSizes
    host_repeats: int


QUICK = Effort(link_timing.QUICK, calibration_codec.QUICK, 11)
FULL = Effort(link_timing.FULL, calibration_codec.FULL, 31)


def calibrate(
    transport: ProcessGroupTransport,
    progress: Progress,
    effort: Effort,
    name: str,
    tell: Callable[[str], None],
) -> ClusterModel:
    """Measures; every rank of the group calls it, and gets the same numbers.

    Args:
        transport: the group, 2 ranks at least.
        progress: the thread that drives collectives.
        effort: how much.
        name: of the cluster.
        tell: progress callback; the last call receives the prediction error of the codec's rates.

    Raises:
        ConfigError: there is one rank only.
        CommunicationError: a rank is gone.
    """
    clock = host_clock(transport.device)
    tell("measuring: links")
    links = complete(measure_links(transport, effort.links, clock))
    tell("measuring: host")
    per_message_s, per_bucket_s = measure_host(transport, progress, effort.host_repeats, clock)
    tell("measuring: codec")
    codec = complete(measure_codec(transport, effort.codec, clock))
    cluster = ClusterModel(
        name=name,
        device=transport.device.type,
        **vars(links),
        host_s_per_message=per_message_s,
        host_s_per_bucket=per_bucket_s,
        codec=codec,
        ring_densities={},
        fingerprint=fingerprint(transport),
    )
    tell(complete(held_out(transport, cluster, effort.codec, clock)))
    return cluster
