"""A planner's knowledge and decisions about each bucket, as in checkpoints and `plan.json`.

The state is the same on every rank: it depends only on shapes, the configuration, and numbers that
the ranks have exchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sparse.bucket import Bucket
from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing.profile import SparsityProfile

PLAN_FILE = "plan.json"


@dataclass
class BucketState:
    """What a planner knows and has decided about one bucket. Times are microseconds.

    Attributes:
        numel: elements of the bucket.
        op: all-reduce or reduce-scatter.
        world_size: ranks.
        chosen: the scheme, None before the first choice.
        reason: why it was chosen, in words.
        predicted_us: every candidate's predicted time when the scheme was chosen.
        profile: the last sampled profile, None before the first.
        profile_density: the target density of the step that sampled it, or at which the bucket was
            found hopeless.
        hopeless: True if no candidate would beat dense even if all ranks selected the same
            elements.
        lanes: as `Bucket.lanes`.
        nodes: ranks on each node of its group; empty where prices use the cluster file's nodes.
    """

    numel: int
    op: str
    world_size: int
    chosen: str | None = None
    reason: str = ""
    predicted_us: dict[str, float] = field(default_factory=dict)
    profile: SparsityProfile | None = None
    profile_density: float = 1.0
    hopeless: bool = False
    lanes: int = 1
    nodes: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, bucket: Bucket, nodes: Sequence[int] = ()) -> BucketState:
        """The state before anything is known."""
        ranks, lanes = bucket.world_size, bucket.lanes
        return cls(bucket.numel, str(bucket.op), ranks, lanes=lanes, nodes=[*nodes])

    def fits(self, bucket: Bucket, nodes: Sequence[int] = ()) -> bool:
        """Whether the state is this bucket's: in another model, cut or group its name may recur."""
        own = (self.numel, self.op, self.world_size, self.lanes, self.nodes)
        wanted = (bucket.numel, str(bucket.op), bucket.world_size, bucket.lanes, [*nodes])
        return own == wanted

    def to_dict(self) -> dict[str, Any]:
        """Plain values, by field; a copy."""
        profile = None if self.profile is None else self.profile.to_dict()
        copies = {"predicted_us": dict(self.predicted_us), "nodes": [*self.nodes]}
        return vars(self) | {"profile": profile} | copies

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BucketState:
        """The inverse of `to_dict`.

        Raises:
            TypeError, KeyError: a field is missing or unknown.
            ProfileError: the profile is invalid.
        """
        plain = values["profile"]
        profile = None if plain is None else SparsityProfile.from_dict(plain)
        return cls(**{**values, "profile": profile})


def read_plan(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a `plan.json`, by bucket; `path` is the file, or the run's folder.

    Raises:
        ConfigError: the file is missing, or it is not a plan.
    """
    file = path / PLAN_FILE if path.is_dir() else path
    needed = {"numel", "op", "world_size", "density", "chosen", "predicted_us"}
    try:
        found = {row["bucket"]: row for row in json.loads(file.read_text("utf-8"))["buckets"]}
        for name, row in found.items():
            if lacking := sorted(needed - row.keys()):
                raise ValueError(f"bucket {name} has no {', '.join(lacking)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no plan",
            expected=f"the {PLAN_FILE} of a run of this version",
            got=" ".join(f"{type(error).__name__}: {error}".split()),
            remedy="name a run's folder, or its plan.json; a run writes it when it ends",
        ) from None
    return found
