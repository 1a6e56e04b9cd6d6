"""The properties of the running ranks that a calibration depends on."""

import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sparse.transport import ProcessGroupTransport
from megatron_sparse.transport.netbed import NETBED_LINKS

CPU_INFO = Path("/proc/cpuinfo")


def fingerprint(transport: ProcessGroupTransport) -> dict[str, str]:
    """The properties that must match for a calibration to stay valid; see `check_fingerprint`.

    It tells whether there are several nodes (`hosts`), but not how many nodes and ranks: a cluster
    is measured on a few nodes and used on many.
    """
    links = os.environ.get(NETBED_LINKS)  # set where the network is emulated
    return {
        "processor": processor(transport.device),
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "transport": str(dist.get_backend(transport.group)),
        "hosts": "several" if len(set(transport.nodes)) > 1 else "one",
        "network": "its own" if links is None else f"test bed, {links}",
    }


def processor(device: torch.device) -> str:
    """The model of the GPU or CPU; the CPU's architecture if the system reports no model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()
