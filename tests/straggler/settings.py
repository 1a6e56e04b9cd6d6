"""Settings that the straggler-aware schemes need beside their name."""

from megatron_sparse.collectives import skips_straggler
from megatron_sparse.config.sparse import StragglerConfig


def section_for(scheme: str, rank: int = 0) -> StragglerConfig:
    """A rank pinned for a scheme that must know a straggler; nothing for the others."""
    if skips_straggler(scheme):
        return StragglerConfig(mode="pinned", rank=rank)
    return StragglerConfig()
