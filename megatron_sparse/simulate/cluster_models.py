"""Writes the cluster files in `configs/cluster_models`: models, nothing in them is measured.

Most are of the papers' machines, with the links of `machines`. The backend's all-reduce is a ring
at the rate of the links between nodes. For the codec's rates each call runs on the CPU,
`moved_bytes` counts the bytes that its tensor operations move, and the model assumes that a GPU
moves them at half of its memory's peak rate (`Machine.codec_rate`). Kernel launches and other work
of the CPU cost nothing.

`python -m megatron_sparse.simulate.cluster_models` rewrites the files.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_sparse.calibration.codec import DENSITIES, CodecCall, codec_calls, fit_rate
from megatron_sparse.pricing.cluster import ClusterModel, CodecRate, shipped_file
from megatron_sparse.simulate.machines import (
    AWS_25,
    AWS_25_NODES,
    AWS_100,
    PERLMUTTER_RING,
    Machine,
)
from megatron_sparse.simulate.pricing import OperationMeter, moved_bytes

MACHINES = {
    "ethernet_25gbit": (AWS_25, 16),
    "ethernet_25gbit_8": (AWS_25_NODES, 8),
    "ethernet_100gbit": (AWS_100, 16),
    "perlmutter": (PERLMUTTER_RING, 16),
}
"""For each model cluster: the machine, and the number of nodes that the paper used; 8 for the one
that is no paper's."""
NUMELS = (2**16, 2**18)
"""Elements at which bytes are counted. Bytes are linear in them. The threshold's sample is
smaller."""


def model(name: str) -> ClusterModel:
    """Computes the model of one cluster in `MACHINES`, with its codec rates; takes seconds."""
    machine, nodes = MACHINES[name]
    return ClusterModel(
        name=name,
        device="cuda",
        nodes=(machine.ranks_per_node,) * nodes,
        nic=machine.nic,
        # With one rank in a node no message uses `intra`.
        intra=machine.inter if machine.ranks_per_node == 1 else machine.intra,
        inter=machine.inter,
        dense=machine.inter,
        host_s_per_message=0.0,
        host_s_per_bucket=0.0,
        codec=tuple(_rates(machine)),
        ring_densities={},
        fingerprint={},
    )


def comment(name: str) -> str:
    """The comment that begins the cluster file: a command that uses it, and its assumptions."""
    machine, _ = MACHINES[name]
    return (
        f"megatron-sparse plan --bucket-bytes 64M --ranks 8 --cluster {name}\n"
        f"A MODEL, not measured: {machine.name}. Made by simulate/cluster_models.py;"
        "\nlinks: simulate/machines.py. Codec: memory-bound on a GPU, bytes moved at "
        f"{machine.codec_rate / 1e9:.0f} GB/s.\nNo host overhead."
    )


def _rates(machine: Machine) -> Iterator[CodecRate]:
    """Yields the rate of each codec operation, fitted to the bytes that it moves at `NUMELS`."""
    calls: list[CodecCall] = []  # the same operations for each size
    times_by_numel_s = []
    for numel in NUMELS:
        calls = list(codec_calls(numel, DENSITIES, torch.device("cpu")))
        times_by_numel_s.append([_bytes_of(call) / machine.codec_rate for call in calls])
    for call, *times_s in zip(calls, *times_by_numel_s, strict=True):
        yield fit_rate(call, NUMELS, times_s)


def _bytes_of(call: CodecCall) -> float:
    """Bytes that one call moves; allocating its buffers is left out."""
    call.run()  # allocates them
    with OperationMeter(moved_bytes) as meter:
        call.run()
    return meter.total


if __name__ == "__main__":
    for cluster in MACHINES:
        model(cluster).save(shipped_file(cluster), comment(cluster))
