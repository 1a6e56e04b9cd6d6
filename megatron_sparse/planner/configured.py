"""Makes the planner of a configuration, and takes the ring's thresholds from a cluster file."""

import logging
from dataclasses import replace

from megatron_sparse.collectives import AUTO
from megatron_sparse.config.scheme import RING_DENSITIES
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.planner.choice import PricedPlanner
from megatron_sparse.planner.plan import Planner
from megatron_sparse.pricing.cluster import find

logger = logging.getLogger("megatron_sparse")


def with_swept_thresholds(config: SparseConfig) -> SparseConfig:
    """Sets the thresholds of `adaptive_ring` from the cluster file, for the format in use.

    The configuration is returned unchanged if it sets a threshold itself, if there is no cluster
    file, or if that file has no results of `calibrate --sweep`.

    Raises:
        ConfigError: the cluster file cannot be read.
    """
    scheme, cluster = config.scheme, config.planner.cluster
    names = ("ring_intra_density", "ring_inter_density", "ring_gather_density")
    is_set = any(getattr(scheme, name) is not None for name in names)
    if cluster is None or is_set:
        return config
    # Other formats, such as `auto`, take the thresholds that were swept with Pici.
    form = scheme.format if scheme.format in RING_DENSITIES else "pici"
    swept = find(cluster).ring_densities.get(form)
    if swept is None:
        return config
    return replace(config, scheme=replace(scheme, **dict(zip(names, swept, strict=True))))


def basis(config: SparseConfig) -> str:
    """A sentence for the log: what `scheme.name=auto` compares, bytes or predicted times.

    Raises:
        ConfigError: the cluster file cannot be read.
    """
    planner = config.planner
    if planner.cluster is None:
        return "scheme auto compares bytes: planner.cluster names no costs of links and codecs"
    cluster = find(planner.cluster)
    kind = "a model, not measured" if cluster.is_model else "measured"
    return (
        "scheme auto takes the least predicted time, with the links and codecs of "
        f"{planner.cluster} ({kind})"
    )


def planner_of(config: SparseConfig, *, logs: bool) -> Planner:
    """The planner that `scheme.name` and `planner.cluster` ask for; with `logs` it logs changes.

    Raises:
        ConfigError: the cluster file cannot be read.
    """
    compression, scheme, planner = config.compression, config.scheme, config.planner
    if logs and scheme.name == AUTO:
        logger.info(basis(config))
    cluster = None if planner.cluster is None else find(planner.cluster)
    if scheme.name == AUTO and cluster is not None:
        return PricedPlanner(compression, scheme, planner, cluster, logs=logs)
    return Planner(compression, scheme, cluster)
