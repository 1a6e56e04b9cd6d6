"""Makes the reducer's buckets from Megatron's: names, slices, shards, dense parameters."""

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
    """One Megatron bucket group and its buckets for the reducer.

    `expert` marks parameters that the ranks of the expert data-parallel group share. The ranks of
    `instances_group` own the same shards in other instances of the distributed optimizer; None for
    one instance. `attributes` are those of `host` that hold its process groups. `accumulated` are
    the parameters, by name, whose gradient Megatron copies from the bucket to an fp32 `main_grad`
    of its own after the sum.
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

    Makes the reducer's buckets over Megatron's gradients, some of them cut into pieces. Changes
    nothing of Megatron's.

    Raises:
        ConfigError: patterns for two kinds of parameter match the same one, or the scheme has no
            form for the buckets' collective.
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
                _check_own(host)
                attributes = _group_attributes(host.ddp_config)
                process_group, *others = (getattr(host, name) for name in attributes)
                instances = others[0] if others else None  # the group across instances
                buckets = _buckets(f"{prefix}{kind}{index}", host, parameters, process_group.size())
                for bucket in buckets:
                    check_op(config.scheme, config.planner, bucket.op)
                pieces = [piece for bucket in buckets for piece in in_pieces(bucket, config)]
                is_expert = kind == "expert"
                result.append(
                    GroupBuckets(
                        host,
                        process_group,
                        pieces,
                        is_expert,
                        instances,
                        attributes,
                        parameters.accumulated_in(host),
                    )
                )
    return result


class _ChunkParameters:
    """The parameters of a model chunk: their names, and where they lie in Megatron's buffers."""

    def __init__(self, chunk: Any, prefix: str, parameter_filter: ParameterFilter) -> None:
        self._names = {p: prefix + name for name, p in chunk.module.named_parameters()}
        self._places: dict[torch.nn.Parameter, tuple[int, ...]] = {}
        for buffer in [*chunk.buffers, *getattr(chunk, "expert_parallel_buffers", [])]:
            self._places.update(buffer.param_index_map)
        self._is_tensor_parallel = chunk.tp_group.size() > 1
        self._filter = parameter_filter

    def accumulated_in(self, host: Any) -> dict[str, Any]:
        """Those of a bucket group with --ddp-param-name-patterns-for-fp32-local-accumulation."""
        return {
            self._names[parameter]: parameter
            for host_bucket in host.buckets
            for parameter in getattr(host_bucket, "params_with_extra_main_grads", ())
        }

    def slices_of(self, host_bucket: Any) -> tuple[ParameterSlice, ...]:
        """Where the parameters of one of Megatron's buckets lie in it, in ascending order."""
        slices = []
        for parameter in host_bucket.params_list:
            start, stop = self._places[parameter][:2]  # in the whole buffer
            slices.append(
                self._filter.slice_of(
                    self._names[parameter],
                    start - host_bucket.offset,
                    stop - host_bucket.offset,
                    parameter.shape,
                    self._is_tensor_parallel and _is_replicated(parameter),
                )
            )
        return tuple(sorted(slices, key=lambda piece: piece.start))


def _check_own(group: Any) -> None:
    """Refuses a bucket group whose class is not Megatron's own."""
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
    """Names of a bucket group's attributes that hold its process groups.

    First that of the group which is reduced over; with several instances of the distributed
    optimizer also that of the group across them.
    """
    reduced = "data_parallel_group"
    if ddp_config.use_distributed_optimizer:
        reduced = "intra_distributed_optimizer_instance_group"
    across = "inter_distributed_optimizer_instance_group"
    return (reduced, across) if _instances(ddp_config) > 1 else (reduced,)


def device_of(buckets: Sequence[Bucket]) -> torch.device:
    """Where the gradients are; on a rank without buckets, where those of the other ranks are."""
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
    """The reducer's buckets `NAME.0`, `NAME.1`, ... for those of one Megatron bucket group.

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
