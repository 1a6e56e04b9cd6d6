"""`attach` and `detach`, for a `DistributedDataParallel` of Megatron-core in a loop of your own.

Scripts that run Megatron's `pretrain` use `install` (`plugin`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_sparse.collectives import check
from megatron_sparse.config.parameters import COMPRESSED
from megatron_sparse.config.sparse import SparseConfig
from megatron_sparse.errors import ConfigError
from megatron_sparse.megatron import checkpoint_process
from megatron_sparse.megatron.attachment import Attachment
from megatron_sparse.megatron.host_symbols import log_untested_megatron, require_host_symbols
from megatron_sparse.megatron.units import divides_by_tokens, is_fp16, may_repeat_or_skip
from megatron_sparse.recording import NullSink, RecordSink


def attach(
    model: Any,
    optimizer: Any = None,
    config: SparseConfig | str | None = None,
    *,
    sink: RecordSink | None = None,
    **overrides: Any,
) -> Attachment:
    """Compresses the gradient synchronisation of a model that Megatron's DDP wraps.

    Collective: every rank must call it, with the same configuration. Buffers are allocated when
    they are first needed.

    Args:
        model: a `megatron.core.distributed.DistributedDataParallel` or a list of them.
        optimizer: Megatron's optimizer, whose steps may be skipped; a skipped step's selections
            are undone. Without it every selection is final, so fp16 with loss scaling is refused,
            and parameters are gathered raw.
        config: a `SparseConfig`, or the name of a preset, e.g. `"safe"`.
        sink: receives the time and bytes of each bucket.
        **overrides: see `SparseConfig.from_overrides`; they win over those of a preset.

    Returns:
        The attachment; `detach` it, or switch it with `attachment.enabled`.

    Raises:
        HostError: Megatron lacks a function that the plugin hooks, or the model is of a kind that
            the plugin refuses.
        ConfigError: a value is refused, or fp16 without the optimizer.

    Example:
        >>> attachment = attach(ddp_model, optimizer, density=0.01)  # doctest: +SKIP
    """
    require_host_symbols("attach")
    config = check(SparseConfig.given("attach", config, overrides))
    chunks = list(model) if isinstance(model, Sequence) else [model]
    method = config.parameters.method
    for what, needs_it, more in (
        ("fp16 training", any(map(is_fp16, chunks)), ", whose loss scaling skips steps"),
        ("a loss per token", any(map(divides_by_tokens, chunks)), ": residuals change their unit"),
        (f"parameters.method={method}", method in COMPRESSED, ", or set parameters.method=raw"),
    ):
        if needs_it and optimizer is None:
            raise ConfigError(
                f"{what} needs the optimizer",
                expected="attach(model, optimizer, ...)",
                got="no optimizer",
                remedy=f"pass Megatron's optimizer{more}",
            )
    log_untested_megatron()
    checkpoint_process.end_with_rank()
    attachment = Attachment(chunks, config, sink or NullSink())
    if optimizer is not None:
        attachment.bind_optimizer(optimizer, undo=may_repeat_or_skip(optimizer))
    return attachment


def detach(attachment: Attachment) -> None:
    """Undoes `attach` and drops the residual. To send the residual first, set `attachment.enabled =
    False` and train one more step.
    """
    attachment.close()
