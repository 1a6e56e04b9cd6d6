"""Expected bytes that each rank sends, by scheme, from the bucket's sizes and the target density.

A bucket has N elements of b bytes, on n ranks. A message of density d has m(d) bytes an element,
the smallest of dense (b), COO (d (4 + b)) and Pici (d b + 1/8). Positions count as independent and
uniform, so the sum has the density D = 1 - (1 - d)^n (ZEN, definition 4). An all-reduce sends:

- `dense`, a ring: 2 (n - 1) / n N b;
- `agsparse`: (n - 1) N m(d);
- `direct`: (n - 1) / n N (m(d) + m(D)).

With `compression.value_bits` m(d) is that of a Rice record with values in few bits
(`pricing.records`), and m(D) of one with whole values, or with values of `scheme.sum_bits`.

A reduce-scatter sends half of that for `dense`, and (n - 1) / n N m(d) for the others (SparCML,
Renggli et al. 2019, section 5; ZEN, table 3). Headers are left out. Overlapping positions make D
smaller, so `direct` is never worse than predicted. With `scheme.capacity` c, messages and sums have
their maximum size: d becomes min(c d, 1), and D becomes min(n c d, 1). If the distributed optimizer
has k instances, every scheme sends 2 (k - 1) / k N g / n more, g bytes a gradient element. The
density of a lossless parameter is assumed to be that of the pruned ones; with `planner.cluster` it
is sampled.
"""

from megatron_sparse.bucket import Bucket, CollectiveOp
from megatron_sparse.config.sparse import SchemeConfig
from megatron_sparse.formats.message import VALUE_DTYPES, wire_dtype_of
from megatron_sparse.pricing.records import KEPT_BYTES, record_bytes


def dense_wire_bytes(bucket: Bucket, element_bytes: int) -> float:
    """Bytes that each rank sends for the whole bucket in a dense ring collective.

    The sum over instances of the distributed optimizer is included.
    """
    scatter = (bucket.world_size - 1) / bucket.world_size * bucket.numel * element_bytes
    # An all-reduce gathers the sums afterwards, which takes as many bytes.
    in_instance = scatter if bucket.op is CollectiveOp.REDUCE_SCATTER else 2 * scatter
    return in_instance + _instances_wire_bytes(bucket)


def _instances_wire_bytes(bucket: Bucket) -> float:
    """Bytes of a ring all-reduce of this shard, in the gradient's dtype; see `reduction.level`."""
    shard_bytes = bucket.numel / bucket.world_size * bucket.grad_N.element_size()
    return 2 * (bucket.instances - 1) / bucket.instances * shard_bytes


def predicted_bytes(
    bucket: Bucket, density: float, scheme: SchemeConfig, value_bits: int | None = None
) -> dict[str, float]:
    """Bytes that each rank sends, by scheme, if pruned parameters have the given density.

    `density` is that of the pruned parameters; the values of the bucket's gradient do not matter.
    `scheme` has the options that messages depend on.
    """
    n = bucket.world_size
    element_bytes = VALUE_DTYPES[wire_dtype_of(bucket.grad_N.dtype, scheme.wire_dtype)].itemsize
    kept = sum(piece.numel for piece in bucket.parameters if piece.keep)
    pruned = sum(piece.numel for piece in bucket.parameters) - kept

    form = scheme.format if value_bits is None else "rice"
    # `agsparse` and `direct` can both send slots, messages of fixed size.
    factor = scheme.capacity_on(bucket.grad_N.device.type, takes_slots=True)

    def message_bytes(density: float, bits: int | None, form: str) -> float:
        bytes_of_kept = element_bytes if bits is None else KEPT_BYTES
        bytes_of_pruned = record_bytes(density, element_bytes, form, bits, factor is not None)
        return kept * bytes_of_kept + pruned * bytes_of_pruned

    sent_density, sum_density = density, 1 - (1 - density) ** n
    if factor is not None:  # capacity mode: full slots are sent
        sent_density = min(factor * density, 1)
        sum_density = min(n * sent_density, 1)
    message = message_bytes(sent_density, value_bits, form)
    other_ranks_part = (n - 1) / n
    if bucket.op is CollectiveOp.REDUCE_SCATTER:
        agsparse = direct = other_ranks_part * message
    else:
        agsparse = (n - 1) * message
        # Sums have format `rice` if messages have it, else the smallest format.
        sum_form = form if form == "rice" else "auto"
        sums = message_bytes(sum_density, scheme.given_sum_bits, sum_form)
        direct = other_ranks_part * (message + sums)
    dense = dense_wire_bytes(bucket, element_bytes)
    over_instances = _instances_wire_bytes(bucket)  # `dense` has them already
    agsparse += over_instances
    direct += over_instances
    return {"dense": dense, "agsparse": agsparse, "direct": direct}
