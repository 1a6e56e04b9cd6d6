"""Windows of peer memory for a reducer, where its planner may choose a scheme that needs them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives.peer_windows import ProcessRanks, open_windows
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError, DependencyError, HostError
from megatron_sparse.planner import Planner
from megatron_sparse.planner.plan import Windows
from megatron_sparse.transport import Transport
from megatron_sparse.transport.peer_memory import PeerMemory

logger = logging.getLogger("megatron_sparse")


def windows_for(
    buckets: Sequence[Bucket], config: SparseConfig, planner: Planner, transport: Transport
) -> PeerMemory | None:
    """The windows for all buckets of a group; None where no scheme needs or can have any.

    Collective over the group; waits for the device if windows are made. Marks the buckets then.

    Args:
        buckets: all that will ever be synchronised; their sizes must not change.
        config: `scheme` and `straggler` decide what the windows look like.
        planner: says whether a scheme may need windows.
        transport: the group.

    Raises:
        ConfigError: a scheme needs windows, and the group cannot have any.
        HostError: the ranks cannot reach one another's memory.
        DependencyError: this torch has no such memory.
    """
    wanted = planner.windows(transport)
    if wanted is Windows.NONE or not buckets:
        return None
    try:
        peers = open_windows(
            cast("ProcessRanks", transport),
            buckets,
            config.scheme,
            in_order_of_coming=config.scheme.peer_in_order_of_coming
            or config.straggler.leaves_behind,
        )
    except (ConfigError, HostError, DependencyError) as error:
        if wanted is Windows.REQUIRED:
            raise
        if transport.rank == 0:
            logger.warning(
                "the planner cannot choose schemes that need windows of peer memory: %s (got: %s)",
                error.what,
                error.got,
            )
        return None
    for bucket in buckets:
        bucket.has_windows = True
    return peers
