"""What the straggler-aware schemes need beside their name."""

from __future__ import annotations

from megatron_sparse.config.sparse import STRAGGLER_SCHEMES, StragglerConfig


def section_for(scheme: str, rank: int = 0) -> StragglerConfig:
    """A rank pinned for a scheme that must know a straggler; nothing for the others."""
    if scheme in STRAGGLER_SCHEMES:
        return StragglerConfig(mode="pinned", rank=rank)
    return StragglerConfig()
