"""The class of each `compression.method`."""

from __future__ import annotations

from megatron_sparse.compression.dgc import DGC
from megatron_sparse.compression.method import CompressionMethod, SampledTopK
from megatron_sparse.compression.residual import OF_INSTANCES, ResidualStore
from megatron_sparse.compression.tail_fit import SIDCo
from megatron_sparse.compression.threshold_reuse import ThresholdReuse
from megatron_sparse.config.level import NODE_INSTANCE
from megatron_sparse.config.sparse import CompressionConfig

METHODS: dict[str, type[SampledTopK]] = {
    "topk": SampledTopK,
    "threshold_reuse": ThresholdReuse,
    "sidco": SIDCo,
    "dgc": DGC,
}
"""The classes of `config.METHODS`."""


def method_of(config: CompressionConfig, residuals: ResidualStore) -> CompressionMethod:
    """The configured method; one for all reducers that share the residuals.

    At level `node+instance` sums of instances are selected from by sampled top-k, whichever method
    selects from gradients: velocities of DGC, for example, are in these sums already.
    """
    method = METHODS[config.method](config, residuals)
    if config.level == NODE_INSTANCE:
        second = ResidualStore(residuals.dtype, undo=residuals.undo, outcome=residuals.outcome)
        method.of_instances = SampledTopK(config, second)
        method.stores[OF_INSTANCES] = second
    return method
