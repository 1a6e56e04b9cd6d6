"""Makes the planner of a configuration, one that follows a plan file among them.

Also takes the ring's thresholds from a cluster file.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import AUTO, SCHEMES
from megatron_sparse.config.sparse import (
    RING_DENSITIES,
    CompressionConfig,
    SchemeConfig,
    SparseConfig,
)
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.choice import PricedPlanner
from megatron_sparse.planner.plan import Choice, Planner
from megatron_sparse.planner.plan_state import read_plan
from megatron_sparse.pricing.cluster import ClusterModel, find

logger = logging.getLogger("megatron_sparse")


class PinnedPlanner(Planner):
    """Takes each bucket's scheme from a `plan.json`, density and phases from the configuration.

    Args:
        compression: the schedule of densities.
        scheme: options of the schemes; `name` is `auto`.
        path: the file, or the folder of a run.
        cluster: see `Planner`.

    Raises:
        ConfigError: the file is not a plan.
    """

    def __init__(
        self,
        compression: CompressionConfig,
        scheme: SchemeConfig,
        path: Path,
        cluster: ClusterModel | None = None,
    ) -> None:
        super().__init__(compression, scheme, cluster)
        self._path = path
        self._rows = read_plan(path)

    def _choose(self, bucket: Bucket, step: int, density: float) -> Choice:
        """Returns the plan file's choice.

        Raises:
            ConfigError: the plan is of another model or group, or its scheme does not exist or
                cannot do the bucket's operation.
        """
        row = self._rows.get(bucket.name)
        if row is None:
            raise self._misfit(bucket, "bucket", bucket.name, ", ".join(self._rows))
        own: dict[str, Any] = {
            "numel": bucket.numel,
            "op": str(bucket.op),
            "world_size": bucket.world_size,
        }
        for key, value in own.items():
            if row[key] != value:
                raise self._misfit(bucket, key, value, row[key])
        able = [scheme.name for scheme in SCHEMES.values() if bucket.op in scheme.ops]
        if row["chosen"] not in able:
            raise self._misfit(bucket, "scheme", " | ".join(able), row["chosen"])
        predicted_us = row["predicted_us"].get(row["chosen"])
        return Choice(row["chosen"], f"pinned by {self._path}", predicted_us)

    def _misfit(self, bucket: Bucket, what: str, expected: object, got: object) -> ConfigError:
        return ConfigError(
            f"{self._path} is not this model's plan: bucket {bucket.name} has another {what}",
            expected=expected,
            got=got,
            remedy="pin the plan of a run of the same model on as many ranks, or leave out "
            "planner.pin",
        )


def with_swept_thresholds(config: SparseConfig) -> SparseConfig:
    """Sets the thresholds of `adaptive_ring` from the cluster file, for the format in use.

    The configuration is returned unchanged if it sets a threshold itself, if there is no cluster
    file, or if that file has no results of `calibrate --sweep`.

    Raises:
        ConfigError: the cluster file cannot be read.
    """
    scheme, cluster = config.scheme, config.planner.cluster
    own = (scheme.ring_intra_density, scheme.ring_inter_density, scheme.ring_gather_density)
    if cluster is None or any(density is not None for density in own):
        return config
    form = scheme.format if scheme.format in RING_DENSITIES else "pici"
    swept = find(cluster).ring_densities.get(form)
    if swept is None:
        return config
    intra, inter, gather = swept
    return replace(
        config,
        scheme=replace(
            scheme, ring_intra_density=intra, ring_inter_density=inter, ring_gather_density=gather
        ),
    )


def basis(config: SparseConfig) -> str:
    """Says in a sentence what `scheme.name=auto` chooses by.

    Raises:
        ConfigError: the cluster file cannot be read.
    """
    planner = config.planner
    if planner.pin is not None:
        return f"scheme auto follows the plan in {planner.pin}"
    if planner.cluster is None:
        return "scheme auto compares bytes: planner.cluster names no costs of links and codecs"
    cluster = find(planner.cluster)
    kind = "a model, not measured" if cluster.is_model else "measured"
    said = (
        "scheme auto takes the least predicted time, with the links and codecs of "
        f"{planner.cluster} ({kind})"
    )
    is_rice = config.compression.given_value_bits is not None or config.scheme.format == "rice"
    if is_rice and cluster.estimates_rice:
        said += "; it has no times of rice records, which are estimated from others"
    return said


def planner_of(config: SparseConfig, *, logs: bool) -> Planner:
    """The planner that a configuration asks for.

    Args:
        config: `scheme.name`, `planner.cluster` and `planner.pin` select the planner.
        logs: whether it logs changes of plan.

    Raises:
        ConfigError: a file cannot be read, or settings contradict one another.
    """
    compression, scheme, planner = config.compression, config.scheme, config.planner
    if logs and scheme.name == AUTO:
        logger.info(basis(config))
    cluster = None if planner.cluster is None else find(planner.cluster)
    if planner.pin is not None:
        if scheme.name != AUTO:
            raise ConfigError(
                "planner.pin and scheme.name both say which scheme to take",
                expected="scheme.name=auto",
                got=scheme.name,
                remedy="leave one of them out",
            )
        return PinnedPlanner(compression, scheme, Path(planner.pin), cluster)
    if scheme.name == AUTO and cluster is not None:
        return PricedPlanner(compression, scheme, planner, cluster, logs=logs)
    return Planner(compression, scheme, cluster)
