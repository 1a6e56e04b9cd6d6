"""A plan that is taken from a file and followed without pricing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_sparse.bucket import Bucket
from megatron_sparse.collectives import SCHEMES
from megatron_sparse.config.sparse import CompressionConfig, SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.plan import Choice, Planner
from megatron_sparse.planner.plan_state import read_plan
from megatron_sparse.pricing.cluster import ClusterModel


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
