"""Predicted times of every registered collective, from a bucket's shape and sparsity: a MODEL.

Pure functions of a bucket's shape, its profile and the cluster; and the comparison of candidates:
the planner in training, the command `plan` and the bench of the planner all use them.

`predict` runs a collective's rounds on modelled clocks of all ranks. It moves no data; it uses the
message sizes that the profile predicts (`cost` in the scheme's file). On one level of links and
without codecs, these costs reduce to the papers' equations. A time spans from the final gradient to
the dense sum. A sparse scheme's time includes selection; dense schemes select nothing, they send
gradient and residual whole (`Selector.take_whole`).

On the same kind of CPU, ranks with the same inputs make the same prediction, bit for bit: it uses
no measurement, no random number and no iteration over a set.

Cost of a prediction: O(n) steps of numpy on n ranks; if the ranks of a node share a network card,
every message is modelled. All schemes on 64 ranks: 0.1 s, with shared cards 0.5 s (one core).
"""

from collections.abc import Collection
from dataclasses import replace

from megatron_sparse.bucket import CollectiveOp
from megatron_sparse.collectives import SCHEMES, Input, registry
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.pricing.cluster import ClusterModel
from megatron_sparse.pricing.densities import SumDensities, without_chance
from megatron_sparse.pricing.dry_run import DryRun
from megatron_sparse.pricing.profile import SparsityProfile
from megatron_sparse.pricing.shape import BucketShape
from megatron_sparse.transport.topology import Link, Topology

DENSE = "dense"
"""The backend's own collective; the planner must not choose a slower scheme."""


def predict(
    scheme: str,
    shape: BucketShape,
    profile: SparsityProfile,
    cluster: ClusterModel,
    options: SchemeConfig,
) -> float:
    """Seconds of one collective on one bucket, from a final gradient until the last rank is done.

    Args:
        scheme: a name in `SCHEMES`.
        shape: the bucket; with `lanes`, that of a lane, which is priced on its share of the links.
        profile: the sparsity of its gradients. `profile.numel` tells whether it covers the whole
            bucket or only the pruned part.
        cluster: the costs of links, codecs and CPU; it has the ranks of all lanes.
        options: the scheme's options, as its collective gets them.

    Returns:
        A MODEL's seconds: of the links, of local work that they do not hide, and of the CPU.

    Raises:
        ConfigError: the scheme is unknown, lacks `shape.op`, or does not fit the options; the
            profile is of another bucket; or the cluster file lacks a codec.

    Example:
        >>> from megatron_sparse.config.sparse import SchemeConfig
        >>> from megatron_sparse.pricing.cluster import find
        >>> shape = BucketShape(2**24, 0, 4, CollectiveOp.ALL_REDUCE, 8)
        >>> profile = SparsityProfile.uniform(2**24, 0.01, 8)
        >>> options, cluster = SchemeConfig(), find("ethernet_25gbit")
        >>> sparse_s = predict("direct", shape, profile, cluster, options)
        >>> sparse_s < predict("dense", shape, profile, cluster, options)
        True
    """
    if scheme not in SCHEMES or not fits(scheme, shape.op, options, shape.value_bits):
        able = (name for name in SCHEMES if fits(name, shape.op, options, shape.value_bits))
        raise ConfigError(
            f"scheme {scheme} cannot be priced: it is unknown, or has no model, no {shape.op}, no "
            "messages of fixed size for scheme.capacity, or no values in compression.value_bits",
            expected=" | ".join(able),
            got=scheme,
        )
    if shape.lanes > 1:
        cluster = lane_cluster(cluster, shape.lanes, shape.world_size)
    if profile.numel not in (shape.numel, shape.pruned_numel):
        raise ConfigError(
            "the sparsity profile is of another bucket",
            expected=f"{shape.numel} elements, or {shape.pruned_numel} that may be pruned",
            got=profile.numel,
            remedy="profile this model again",
        )

    entry = SCHEMES[scheme]
    densities = SumDensities(without_chance(profile), shape)
    # `capacity=auto` becomes the factor of this device and scheme, or None.
    factor = options.capacity_on(cluster.device, takes_slots=entry.takes_slots)
    options = replace(options, capacity=factor)
    assert entry.cost is not None, "as `fits` has found"
    run = DryRun(shape, densities, cluster, options, cluster.topology(shape.world_size))
    if entry.takes is Input.SPARSE:
        sparse_form = run.messages(entry.message_format(options))
        # Adds the time of selection and encoding; a whole message holds every element, quantised.
        run.select(run.whole_messages() if entry.sends_whole else sparse_form)
    entry.cost(run)  # moves the ranks' clocks by the scheme's rounds
    return float(run.clocks.now_n.max()) + cluster.host_s_per_bucket


def lane_cluster(cluster: ClusterModel, lanes: int, ranks: int) -> ClusterModel:
    """The ranks of one lane as a cluster, with the lane's share of the links.

    At `compression.level=node` a bucket of N elements is added densely inside each node of m ranks.
    Then each of the m ranks holds N / m elements of the node's sum, and the k ranks with the same
    number in the k nodes, a lane, exchange them compressed. `instance` is the same with instances
    of the distributed optimizer instead of nodes.

    All lanes exchange at the same time. If the ranks of a node share its network card,
    `Topology.nic` is `node`, and `inter` is the card's link. A lane then gets an even share of the
    card: its beta is the card's, times the number of lanes that the node's ranks are in. If each
    rank has its own card (`nic` is `rank`), a lane has its rank's card to itself. The backend's own
    collective (`dense`) is a ring over all ranks with one link out of each node: its beta grows in
    the same way, and is at least that of the lane's `inter`.

    Args:
        cluster: of all `lanes` x `ranks` ranks.
        lanes: ranks of a node or instance, each in a lane of its own.
        ranks: of the lane, one for each node or instance.

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
    # The lane has one rank of each node or, with whole instances on a node, one of each instance.
    node_ranks = max(size // lanes, 1)
    sharing = min(lanes, size) if cluster.nic == "node" else 1  # lanes that use one card
    beta_s = sharing * cluster.inter.beta_s
    dense_beta_s = max(sharing * cluster.dense.beta_s, beta_s)
    return replace(
        cluster,
        nodes=Topology.even(ranks, node_ranks, cluster.intra, cluster.inter).node_sizes,
        inter=Link(cluster.inter.alpha_s, beta_s),
        dense=Link(cluster.dense.alpha_s, dense_beta_s),
    )


def predict_all(
    shape: BucketShape,
    profile: SparsityProfile,
    cluster: ClusterModel,
    options: SchemeConfig,
    schemes: Collection[str],
) -> dict[str, float]:
    """Predicted seconds (`predict`) of each scheme in `schemes` that `fits` accepts, by scheme."""
    return {
        name: predict(name, shape, profile, cluster, options)
        for name in SCHEMES
        if name in schemes and fits(name, shape.op, options, shape.value_bits)
    }


def fits(
    scheme: str, op: CollectiveOp, options: SchemeConfig, value_bits: int | None = None
) -> bool:
    """Whether a scheme can be priced and used: it has a cost model, supports `op`, and has messages
    of fixed size if `scheme.capacity` asks for them, and quantised ones if `value_bits` does.

    `straggler` and `straggler_direct` have no model here: their time depends on the delay of a rank
    that is known to be late (`straggler.cost`). `sparse_ps` has none because `direct` is faster.
    """
    entry = SCHEMES[scheme]
    if entry.cost is None:
        return False
    needs_slots = options.given_capacity is not None and entry.takes is Input.SPARSE
    if needs_slots and not entry.takes_slots:
        return False
    if value_bits is not None and entry.own_format is not None:
        return False  # only `rice` has quantised values
    return op in entry.ops


def candidates(schemes: Collection[str] | None, value_bits: int | None) -> list[str]:
    """The schemes to choose from, in the order of the registry; always includes `dense`.

    Args:
        schemes: as `planner.schemes`; None takes all schemes.
        value_bits: as `compression.value_bits`; if this and `schemes` are None, schemes that send
            every element quantised (`Scheme.sends_whole`) are left out: nobody asked for rounding.
    """
    names = registry.candidates()
    if schemes is not None:
        return [name for name in names if name in {*schemes, DENSE}]
    if value_bits is not None:
        return names
    return [name for name in names if not SCHEMES[name].sends_whole]


def prices_us(
    shape: BucketShape,
    profile: SparsityProfile,
    *,
    cluster: ClusterModel,
    options: SchemeConfig,
    names: Collection[str],
) -> dict[str, float]:
    """Predicted microseconds of the schemes in `names` that fit the operation and `options`.

    Raises:
        ConfigError: the cluster file lacks a rate.
    """
    found = predict_all(shape, profile, cluster, options, names)
    return {name: time_s * 1e6 for name, time_s in found.items()}


def least(prices: dict[str, float], names: Collection[str]) -> str:
    """The name with the lowest price; among equals the first."""
    return min(names, key=lambda name: prices[name])


def prior(shape: BucketShape, density: float) -> SparsityProfile:
    """The profile assumed until a bucket is sampled: independent, uniform positions."""
    return SparsityProfile.uniform(shape.pruned_numel or shape.numel, density, shape.world_size)


def fully_overlapping(profile: SparsityProfile) -> SparsityProfile:
    """The profile if all ranks selected the same elements: a sum is as sparse as one rank's."""
    return replace(
        profile,
        densification=dict.fromkeys(profile.densification, 1.0),
        overlap=(1.0,) * len(profile.overlap),
        sum_skewness=dict(profile.skewness),
        sum_block_density=dict(profile.block_density),
    )


def alike(first: SparsityProfile, second: SparsityProfile, tolerance: float) -> bool:
    """Whether the numbers that cost models read differ by at most the fraction `tolerance`."""

    def costs(profile: SparsityProfile) -> list[float]:
        """The numbers that cost models read, in the same order for every profile."""
        n = profile.world_size
        ratios = [*profile.skewness.values(), *profile.sum_skewness.values()]
        blocks = [*profile.block_density.values(), *profile.sum_block_density.values()]
        return [profile.density, profile.sum_density(n), *ratios, *blocks]

    if (first.numel, first.world_size) != (second.numel, second.world_size):
        return False
    pairs = zip(costs(first), costs(second), strict=True)
    return all(abs(a - b) <= tolerance * max(a, b) for a, b in pairs)


def explain(chosen: str, prices: dict[str, float], basis: str) -> str:
    """The reason in words: the times of the chosen scheme, dense and the next best; the `basis`."""
    times = [f"{chosen} {prices[chosen]:.0f} us"]
    others = [name for name in prices if name not in (chosen, DENSE)]
    if chosen != DENSE:
        times.append(f"dense {prices[DENSE]:.0f} us")
    if others:
        next_best = least(prices, others)
        times.append(f"{next_best} {prices[next_best]:.0f} us")
    return f"{', '.join(times)} ({basis})"
