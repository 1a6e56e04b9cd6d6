"""Keys and values of a released configuration that have left, each with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_sparse.errors import ConfigError

_PEER_MEMORY = (
    "use scheme.name=direct, which runs over NCCL, or compression.level=node, which leaves sums "
    "inside a node to the backend"
)

REMOVED: Mapping[str, str] = {
    "cluster.omp_num_threads": "set cluster.env.OMP_NUM_THREADS=N, or export OMP_NUM_THREADS",
    "compression.method": "leave it out: sampled top-k with leaky error feedback is the method",
    "compression.momentum": "set the optimizer's own momentum",
    "compression.momentum_masking": "leave it out: residuals have no momentum to mask",
    "compression.ramp_shape": "leave it out: the density falls by equal factors",
    "compression.reuse_iters": "set fewer compression.samples: sampling costs less then",
    "compression.threshold_scope": "leave it out: each parameter has a threshold of its own",
    "compression=dgc": "set compression=topk999, with the optimizer's own momentum",
    "compression=sidco": "set compression=topk999 or another density: thresholds are quantiles",
    "compression=threshold_reuse": "set compression=topk99, and fewer compression.samples",
    "data.num_workers": "set megatron.num_workers=N",
    "model.init_std": "set megatron.init_method_std=S",
    "model.rotary_base": "set megatron.rotary_base=N",
    "planner.hysteresis": "leave it out: a change of scheme needs a gain of 5 %",
    "planner.pin": "set scheme.name=NAME, or planner.cluster, by which a repeated run makes "
    "the same plan",
    "planner.profile_every": "leave it out: sparsity is sampled every 200 steps",
    "planner.profile_iters": "leave it out: the first 3 steps of ramp and target are sampled",
    "planner.replan_every": "leave it out: compression.density=auto compares measured times",
    "planner.retry_after": "leave it out: compression.density=auto compares measured times",
    "planner.schemes=peer_two_shot": _PEER_MEMORY,
    "scheme.hash_seed": "leave it out: the hash of zen is the same everywhere",
    "scheme.inner": "leave it out: hierarchical runs direct across the nodes",
    "scheme.name=peer_two_shot": _PEER_MEMORY,
    "scheme.peer_in_order_of_coming": _PEER_MEMORY,
    "scheme.peer_windows": _PEER_MEMORY,
    "scheme.nccl_errors": "leave it out: torch's watchdog ends the process, and its log names the "
    "operation",
    "straggler.history": "leave it out: the last 20 steps count",
    "straggler.inject_delay_ms": "export MEGATRON_SPARSE_SLOW_RANK=RANK:MILLISECONDS",
    "straggler.inject_rank": "export MEGATRON_SPARSE_SLOW_RANK=RANK:MILLISECONDS",
    "straggler.mode=dynamic": "set straggler.mode=persistent scheme.deterministic=false",
    "tracking.console=auto": "leave it out: a line every 10 iterations; `megatron-sparse view RUN "
    "--follow` draws the picture",
    "tracking.console=live": "use `megatron-sparse view RUN --follow` in another terminal",
    "tracking.flush_every": "leave it out: lines are flushed every 10 iterations, and at the end",
    "tracking.nvtx": "set megatron.profile=true under nsys, which opens NVTX ranges",
    "tracking.record_gradients": "leave it out: gradients are recorded before and after selection",
    "tracking.trace_iters": "set tracking.profile_iters=N: profile.json has the timeline",
    "tracking.wandb_entity": "export WANDB_ENTITY=NAME",
    "training.clip_grad": "set megatron.clip_grad=NORM",
    "training.log_interval": "set megatron.log_interval=N",
    "training.weight_decay": "set megatron.weight_decay=W",
}
"""`section.key`, `section.key=value` or `group=option`, with the remedy that the error gives."""


def removed(key: str, value: object = None) -> ConfigError | None:
    """The error for a key, or for one of its values, that has left; None if it has not.

    Args:
        key: `section.key`, or a group of Hydra's.
        value: what the user gave it; None asks for the key alone.
    """
    name = key if value is None else f"{key}={value}"
    if name not in REMOVED:
        return None
    return ConfigError(
        f"{name} has left megatron_sparse",
        expected="a configuration without it",
        got=name,
        remedy=REMOVED[name],
    )
