"""The groups of ranks with which a reducer works."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_sparse.reduction.level import LevelGroups
from megatron_sparse.transport import Transport


@dataclass(frozen=True)
class Groups:
    """The groups of ranks with which a bucket is synchronised.

    Attributes:
        data_parallel: the ranks whose gradients are summed.
        tensor_parallel: the ranks that agree on thresholds, for `threshold_scope=tp_group`.
        instances: the ranks that own the same shard in the other instances of the distributed
            optimizer; None if there is one instance, or if the level is `instance`.
        level: of a level above `rank`; None for `rank`.
    """

    data_parallel: Transport
    tensor_parallel: Transport | None = None
    instances: Transport | None = None
    level: LevelGroups | None = None
