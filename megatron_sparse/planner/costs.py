"""Predicted times of every registered collective, from a bucket's shape and sparsity: a MODEL.

`predict` runs a collective's rounds on modelled clocks of all ranks. It moves no data; it uses the
message sizes that the profile predicts (`cost` in the scheme's file). On one level of links and
without codecs, these costs reduce to the papers' equations. A time spans from the final gradient to
the dense sum. A sparse scheme's time includes selection; dense schemes select nothing, they send
gradient and residual whole (`Selector.take_whole`).

On the same kind of CPU, ranks with the same inputs make the same prediction, bit for bit: it uses
no measurement, no random number and no iteration over a set.

Cost of a prediction: O(n) steps of numpy on n ranks; if the ranks of a node share a network card,
every message is modelled. All schemes on 64 ranks: 0.13 s, with shared cards 0.6 s (one core).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.densities import SumDensities, without_chance
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.levels import lane_cluster
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape, Prediction


def predict(
    scheme: str,
    shape: BucketShape,
    profile: SparsityProfile,
    cluster: ClusterModel,
    options: SchemeConfig,
) -> Prediction:
    """The time of one collective on one bucket.

    Args:
        scheme: a name in `SCHEMES`.
        shape: the bucket; with `lanes`, that of a lane, which is priced on its share of the links.
        profile: the sparsity of its gradients. `profile.numel` tells whether it covers the whole
            bucket or only the pruned part.
        cluster: links, codecs and host, of all ranks, those of other lanes too.
        options: the same that collectives get; they name the inner scheme of `hierarchical`.

    Raises:
        ConfigError: the scheme is unknown, lacks the form, or does not fit the options; the profile
            is of another bucket; or the cluster file lacks a codec.

    Example:
        >>> from megatron_sparse.config.sparse import SchemeConfig
        >>> from megatron_sparse.pricing.cluster import find
        >>> shape = BucketShape(2**24, 0, 4, CollectiveOp.ALL_REDUCE, 8)
        >>> profile = SparsityProfile.uniform(2**24, 0.01, 8)
        >>> options, cluster = SchemeConfig(), find("ethernet_25gbit")
        >>> sparse = predict("direct", shape, profile, cluster, options)
        >>> sparse.total_s < predict("dense", shape, profile, cluster, options).total_s
        True
    """
    if scheme not in SCHEMES:
        raise ConfigError(
            f"there is no cost model of {scheme!r}", expected=" | ".join(SCHEMES), got=scheme
        )
    if not fits(scheme, shape.op, options, shape.value_bits):
        able = (name for name in SCHEMES if fits(name, shape.op, options, shape.value_bits))
        raise ConfigError(
            f"scheme {scheme} cannot be priced: it has no model, no {shape.op}, no messages "
            "of fixed size for scheme.capacity, or no values in compression.value_bits",
            expected=" | ".join(able),
            got=scheme,
        )
    cluster = cluster_of(shape, cluster)
    if profile.numel not in (shape.numel, shape.pruned_numel):
        raise ConfigError(
            "the sparsity profile is of another bucket",
            expected=f"{shape.numel} elements, or {shape.pruned_numel} that may be pruned",
            got=profile.numel,
            remedy="profile this model again",
        )

    entry, lasting = SCHEMES[scheme], without_chance(profile)
    factor = options.capacity_on(cluster.device, takes_slots=entry.takes_slots)
    options = replace(options, capacity=factor)
    assert entry.cost is not None, "as `fits` has found"
    cost = entry.cost

    def until_last_rank_s(*, charged: bool, hosted: bool) -> float:
        run = DryRun(
            shape,
            SumDensities(lasting, shape),
            cluster,
            options,
            cluster.topology(shape.world_size),
            charged=charged,
            hosted=hosted,
        )
        if entry.takes is Input.SPARSE:
            own = run.messages(entry.message_format(options))
            run.select(run.whole_messages() if entry.sends_whole else own)
        cost(run)
        return float(run.clocks.now_n.max())

    network_s = until_last_rank_s(charged=False, hosted=False)
    local_s = until_last_rank_s(charged=True, hosted=False)
    all_s = local_s
    if cluster.host_s_per_message:
        all_s = until_last_rank_s(charged=True, hosted=True)
    host_s = all_s - local_s + cluster.host_s_per_bucket
    return Prediction(network_s, local_s - network_s, host_s)


def predict_all(
    shape: BucketShape,
    profile: SparsityProfile,
    cluster: ClusterModel,
    options: SchemeConfig,
    schemes: Collection[str] | None = None,
) -> dict[str, Prediction]:
    """`predict` for every scheme that has the form and fits the options.

    Args:
        shape: see `predict`.
        profile: see `predict`.
        cluster: see `predict`.
        options: see `predict`.
        schemes: the schemes to price; None for all of `SCHEMES`. Schemes that do not fit are left
            out.
    """
    wanted = SCHEMES if schemes is None else schemes
    return {
        name: predict(name, shape, profile, cluster, options)
        for name in SCHEMES
        if name in wanted and fits(name, shape.op, options, shape.value_bits)
    }


def cluster_of(shape: BucketShape, cluster: ClusterModel) -> ClusterModel:
    """The cluster that a bucket is exchanged on: a lane's share of it, or all of it."""
    if shape.lanes == 1:
        return cluster
    return lane_cluster(cluster, shape.lanes, shape.world_size)


def fits(
    scheme: str, op: CollectiveOp, options: SchemeConfig, value_bits: int | None = None
) -> bool:
    """Whether a scheme has a model, supports the form, and has the messages that are asked for:
    of fixed size with `scheme.capacity`, with values of few bits with `compression.value_bits`.

    `straggler` and `straggler_direct` have no model here: their time depends on the delay of a rank
    that is known to be late (`straggler.cost`).
    """
    entry = SCHEMES[scheme]
    if entry.cost is None:
        return False
    has_size = options.given_capacity is None or entry.takes is Input.DENSE or entry.takes_slots
    has_bits = value_bits is None or entry.own_format is None
    return op in entry.ops and has_size and has_bits
