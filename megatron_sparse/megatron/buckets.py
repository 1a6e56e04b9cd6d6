"""Makes the plugin's buckets (`Bucket`) over Megatron's; `host` is an object of Megatron's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_sparse.bucket import Bucket, CollectiveOp, ParameterSlice, Reduction
from megatron_sparse.collectives import check_op
from megatron_sparse.compression.parameters import ParameterFilter
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import HostError
from megatron_sparse.megatron import refusals
from megatron_sparse.megatron.pieces import in_pieces


@dataclass
class GroupBuckets:
    """One of Megatron's bucket groups (`host`), and the reducer's buckets over its gradients.

    Attributes:
        process_group: the ranks that the gradients are reduced over.
        expert: whether the parameters are those of experts.
        instances_group: this rank and those that own the same shard in the other instances of the
            distributed optimizer; None if there is one instance.
        attributes: names of the attributes of `host` that hold its process groups.
        accumulated: name -> parameter, for parameters whose reduced gradient Megatron copies from
            the bucket to a separate fp32 `main_grad`.
    """

    host: Any
    process_group: torch.distributed.ProcessGroup
    buckets: list[Bucket]
    expert: bool = False
    instances_group: torch.distributed.ProcessGroup | None = None
    attributes: tuple[str, ...] = ()
    accumulated: dict[str, Any] = field(default_factory=dict)


def collect(chunks: list[Any], config: SparseConfig) -> list[GroupBuckets]:
    """Returns all bucket groups of the DDP-wrapped model chunks, in Megatron's order.

    Changes nothing of Megatron's.

    Raises:
        ConfigError: patterns for two kinds of parameter match the same one, or the scheme cannot
            do the buckets' collective (all-reduce or reduce-scatter).
        HostError: a chunk is not Megatron's DistributedDataParallel, or uses a feature that the
            plugin refuses, or a bucket group's class is not Megatron's own.
    """
    result = []
    for chunk_index, chunk in enumerate(chunks):
        check_supported(chunk)
        prefix = f"chunk{chunk_index}." if len(chunks) > 1 else ""
        parameters = _ChunkParameters(chunk, prefix, ParameterFilter(config.compression))
        experts = getattr(chunk, "expert_parallel_bucket_groups", [])
        for kind, hosts in (("group", chunk.bucket_groups), ("expert", experts)):
            for index, host in enumerate(hosts):
                name = f"{prefix}{kind}{index}"
                is_expert = kind == "expert"
                result.append(_group_buckets(name, host, parameters, config, expert=is_expert))
    return result


def _group_buckets(
    name: str, host: Any, parameters: _ChunkParameters, config: SparseConfig, *, expert: bool
) -> GroupBuckets:
    """Makes the reducer's buckets for one of Megatron's bucket groups; cuts large ones."""
    _check_own(host)
    attributes = _group_attributes(host.ddp_config)
    process_group = getattr(host, attributes[0])
    instances_group = getattr(host, attributes[1]) if len(attributes) > 1 else None
    buckets: list[Bucket] = []
    for bucket in _buckets(name, host, parameters, process_group.size()):
        check_op(config.scheme, config.planner, bucket.op)
        buckets += in_pieces(bucket, config)
    accumulated = parameters.accumulated_in(host)
    return GroupBuckets(
        host, process_group, buckets, expert, instances_group, attributes, accumulated
    )


class _ChunkParameters:
    """The parameters of a model chunk: their names, and where they lie in Megatron's buffers.

    Megatron has a few long gradient buffers for each chunk; a bucket is a stretch of a buffer.
    """

    def __init__(self, chunk: Any, prefix: str, parameter_filter: ParameterFilter) -> None:
        self._names = {p: prefix + name for name, p in chunk.module.named_parameters()}
        # Start and stop of each parameter in its buffer, then the number of its bucket.
        self._places: dict[torch.nn.Parameter, tuple[int, ...]] = {}
        for buffer in [*chunk.buffers, *getattr(chunk, "expert_parallel_buffers", [])]:
            self._places.update(buffer.param_index_map)
        self._is_tensor_parallel = chunk.tp_group.size() > 1
        self._filter = parameter_filter

    def accumulated_in(self, host: Any) -> dict[str, Any]:
        """The value of `GroupBuckets.accumulated` for one of Megatron's bucket groups.

        Set by Megatron's --ddp-param-name-patterns-for-fp32-local-accumulation.
        """
        return {
            self._names[parameter]: parameter
            for host_bucket in host.buckets
            for parameter in getattr(host_bucket, "params_with_extra_main_grads", ())
        }

    def slices_of(self, host_bucket: Any) -> tuple[ParameterSlice, ...]:
        """The slices of one of Megatron's buckets that hold its parameters, in ascending order."""
        slices = []
        for parameter in host_bucket.params_list:
            name, shape = self._names[parameter], parameter.shape
            replicated = self._is_tensor_parallel and _is_replicated(parameter)
            # `_places` counts elements of the whole buffer, a slice those of the bucket.
            start, stop = (place - host_bucket.offset for place in self._places[parameter][:2])
            slices.append(self._filter.slice_of(name, start, stop, shape, replicated))
        return tuple(sorted(slices, key=lambda piece: piece.start))


def _check_own(group: Any) -> None:
    """Refuses a bucket group of another class, whose methods `swap_in` would replace."""
    if type(group) is not _ParamAndGradBucketGroup:
        raise HostError(
            "a bucket group is not Megatron's own",
            expected="_ParamAndGradBucketGroup",
            got=type(group).__qualname__,
            remedy="detach first; another plugin may have replaced it too",
        )


def _instances(ddp_config: Any) -> int:
    return getattr(ddp_config, "num_distributed_optimizer_instances", 1)


def _group_attributes(ddp_config: Any) -> tuple[str, ...]:
    """The names of a bucket group's attributes that hold its process groups.

    The first is the group to reduce over. The second, only with several instances of the
    distributed optimizer, is the group across the instances.
    """
    reduced = "data_parallel_group"
    if ddp_config.use_distributed_optimizer:
        reduced = "intra_distributed_optimizer_instance_group"
    across = "inter_distributed_optimizer_instance_group"
    return (reduced, across) if _instances(ddp_config) > 1 else (reduced,)


def device_of(buckets: Sequence[Bucket]) -> torch.device:
    """The device of the gradients; for a rank without buckets, the device its backend works on."""
    if buckets:
        return buckets[0].grad_N.device
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_supported(chunk: Any) -> None:
    """Refuses models that the plugin cannot synchronise correctly.

    Raises:
        HostError: names the model's class or the setting, and what to change.
    """
    refusals.check_chunk(chunk)
    if not hasattr(chunk, "bucket_groups") or not hasattr(chunk, "buffers"):
        raise HostError(
            "a model chunk cannot be attached to",
            expected="megatron.core.distributed.DistributedDataParallel",
            got=f"{type(chunk).__module__}.{type(chunk).__qualname__}",
            remedy="attach after Megatron's DDP wrap; to PyTorch's own register the hook "
            "megatron_sparse.ddp_hook (docs/ddp.md); FSDP2 and --use-megatron-fsdp or "
            "--use-torch-fsdp2 have no such buckets: use DDP, Megatron's or PyTorch's own",
        )


def _buckets(name: str, host: Any, parameters: _ChunkParameters, world_size: int) -> list[Bucket]:
    """Makes a bucket `NAME.0`, `NAME.1`, ... over each bucket of one of Megatron's bucket groups.

    `world_size` ranks reduce them together.
    """
    ddp_config = host.ddp_config
    sharded, averages = ddp_config.use_distributed_optimizer, ddp_config.average_in_collective
    return [
        Bucket(
            f"{name}.{index}",
            host_bucket.grad_data.view(-1),
            parameters.slices_of(host_bucket),
            CollectiveOp.REDUCE_SCATTER if sharded else CollectiveOp.ALL_REDUCE,
            world_size,
            Reduction.AVG if averages else Reduction.SUM,
            instances=_instances(ddp_config),
            fp32_sums=getattr(ddp_config, "reduce_scatter_with_fp32_accumulation", False),
        )
        for index, host_bucket in enumerate(host.buckets)
    ]


def _is_replicated(parameter: torch.nn.Parameter) -> bool:
    """Whether tensor parallelism holds a copy of the parameter on each of its ranks."""
    is_expert = not getattr(parameter, "allreduce", True)
    return not is_expert and not getattr(parameter, "tensor_model_parallel", False)
