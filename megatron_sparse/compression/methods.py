"""The class of each `compression.method`."""

from __future__ import annotations

from megatron_sparse.compression.dgc import DGC
from megatron_sparse.compression.method import CompressionMethod, SampledTopK
from megatron_sparse.compression.residual import ResidualStore
from megatron_sparse.compression.tail_fit import SIDCo
from megatron_sparse.compression.threshold_reuse import ThresholdReuse
from megatron_sparse.config.sparse import CompressionConfig

METHODS: dict[str, type[SampledTopK]] = {
    "topk": SampledTopK,
    "threshold_reuse": ThresholdReuse,
    "sidco": SIDCo,
    "dgc": DGC,
}
"""The classes of `config.METHODS`."""


def method_of(config: CompressionConfig, residuals: ResidualStore) -> CompressionMethod:
    """The configured method; one for all reducers that share the residuals."""
    return METHODS[config.method](config, residuals)
