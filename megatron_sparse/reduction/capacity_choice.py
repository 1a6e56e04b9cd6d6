"""Messages of fixed size on GPUs need the compiled codec on every rank."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_sparse.collectives import check
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.formats.codec_choice import is_compiled

logger = logging.getLogger("megatron_sparse")


def with_agreed_capacity(
    config: SparseConfig, device: torch.device, group: dist.ProcessGroup | None = None
) -> SparseConfig:
    """The configuration with `scheme.capacity=null` for `auto` where a rank lacks the codec.

    Ranks with and without fixed sizes would wait for one another. On CUDA with `auto` this is
    collective over the group, and the host waits for one number; else it does nothing.

    Args:
        config: as the user gave it; not changed.
        device: of the gradients.
        group: the ranks that will exchange messages; None takes all.

    Raises:
        ConfigError: `scheme.nccl_engine` is set, which needs messages of fixed size.
    """
    if device.type != "cuda":
        return config
    if config.scheme.capacity != "auto":
        return config
    if _on_every_rank(is_compiled(device), device, group):
        return config
    logger.warning(
        "scheme.capacity=auto: ranks exchange message sizes, and the host waits for them, because "
        "the compiled codec does not work on every rank's GPU (megatron-sparse doctor)"
    )
    return check(replace(config, scheme=replace(config.scheme, capacity=None)))


def _on_every_rank(own: bool, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    able = torch.tensor([int(own)], device=device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN, group=group)
    return bool(able.item())
