"""The links that a lane uses at a level.

At `compression.level=node` a bucket of N elements is added densely inside each node of m ranks.
Then each of the m ranks holds N / m elements of the node's sum, and the k ranks with the same place
in the k nodes, a lane, exchange them compressed. `instance` is the same with an instance of the
distributed optimizer in the node's place.

All lanes exchange at the same time. Where the ranks of a node share its network card
(`Topology.nic` is `node`: alpha and beta of `inter` are then the card's), a lane gets an even share
of it: its beta is that of the card, times the lanes that the node's ranks are in. Where each rank
has a card of its own (`rank`), a lane has its rank's card to itself. The backend's own collective
among the ranks of a lane is priced in the same way, from the backend's ring over all ranks, of
which one link leaves each node; it is never faster than the lane's link.

So a lane is a cluster of k ranks, and every scheme's cost model prices it as it is.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.transport.topology import Link


def lane_cluster(cluster: ClusterModel, lanes: int, ranks: int) -> ClusterModel:
    """The ranks of one lane, with its share of the links.

    Args:
        cluster: of all `lanes` x `ranks` ranks.
        lanes: ranks of a node or instance, each in a lane of its own.
        ranks: of the lane: nodes or instances.

    Raises:
        ConfigError: a node holds a part of an instance and a part of another one.

    Example:
        >>> from megatron_sparse.pricing.cluster import find
        >>> whole = find("perlmutter")
        >>> lane = lane_cluster(whole, 4, 16)
        >>> lane.topology(16).node_sizes[:3], round(lane.inter.beta_s / whole.inter.beta_s)
        ((1, 1, 1), 4)
    """
    size = cluster.topology(lanes * ranks).node_sizes[0]
    if lanes % size and size % lanes:
        raise ConfigError(
            "a lane of compression.level has no price",
            expected=f"instances of whole nodes of {size} ranks, or nodes of whole instances",
            got=f"{lanes} ranks an instance",
        )
    here = max(size // lanes, 1)  # ranks of the lane on a node: those of whole instances there
    sharing = min(lanes, size) if cluster.nic == "node" else 1
    beta_s = sharing * cluster.inter.beta_s
    dense_beta_s = max(sharing * cluster.dense.beta_s, beta_s)
    return replace(
        cluster,
        nodes=(here,) * (ranks // here) if ranks >= here else (ranks,),
        inter=Link(cluster.inter.alpha_s, beta_s),
        dense=Link(cluster.dense.alpha_s, dense_beta_s),
    )
