"""`megatron-sparse doctor --memory OVERRIDE...`: what the plugin would hold in a run.

Takes the arguments of `train`, starts nothing, and needs neither Megatron nor a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.markup import escape

from megatron_sparse.bucket import Bucket
from megatron_sparse.config.level import INSTANCE
from megatron_sparse.config.run import RunConfig
from megatron_sparse.doctor.checks import console, table
from megatron_sparse.errors import ConfigError
from megatron_sparse.planner.levels import shapes_of
from megatron_sparse.reduction.level_choice import choose_level
from megatron_sparse.reduction.level_parts import instance_part, node_part
from megatron_sparse.reduction.memory import ITEMS, MemoryAccount, MemoryShare, account
from megatron_sparse.telemetry.quantities import size


def run(overrides: Sequence[str], json: Path | None = None) -> int:
    """Prints the account as a table and, if asked, as JSON lines.

    Args:
        overrides: as of `train`.
        json: file for one JSON object an item: `item`, `bytes`, `bytes_per_parameter`.

    Returns:
        The exit code: 0.

    Raises:
        ConfigError: the configuration is wrong, or it trains without the plugin.
        DatasetError: neither the model nor the data gives a vocabulary.
    """
    from megatron_sparse.run import composition
    from megatron_sparse.run.rows import write_rows

    config = composition.compose(overrides)
    found = of_run(config)
    shown = table(
        f"memory of the plugin, of one of {config.cluster.world_size} ranks",
        *("item", "bytes a parameter", "in all", "what for", "how to do with less"),
    )
    for item, nbytes in found.nbytes.items():
        purpose, without = ITEMS[item]
        shown.add_row(
            item, f"{found.of_parameter(nbytes):.2f}", size(nbytes), purpose, escape(without)
        )
    total = f"{found.of_parameter(found.total):.2f}"
    shown.add_row("total", total, size(found.total), f"{found.parameters:,} parameters a rank", "")
    console().print(shown)
    for note in found.notes:
        console().print(escape(note))
    rows = [
        {"item": item, "bytes": nbytes, "bytes_per_parameter": found.of_parameter(nbytes)}
        for item, nbytes in [*found.nbytes.items(), ("total", found.total)]
    ]
    write_rows(json, rows)
    return 0


def of_run(config: RunConfig) -> MemoryAccount:
    """The account of a run's first pipeline stage.

    `cluster.device=cuda` needs no GPU here: another machine's run may be asked about.

    Raises:
        ConfigError: the run trains without the plugin, or settings contradict one another.
        DatasetError: neither the model nor the data gives a vocabulary.
    """
    from megatron_sparse.megatron import predicted_buckets, training
    from megatron_sparse.megatron.pieces import in_pieces
    from megatron_sparse.megatron.units import check_undo
    from megatron_sparse.planner.configured import with_swept_thresholds
    from megatron_sparse.run import preparation

    if not config.plugin:
        raise ConfigError(
            "the run trains without the plugin",
            expected="plugin=true",
            got="plugin=false",
            remedy="leave plugin out: plain Megatron has nothing to count",
        )
    if config.cluster.device == "auto":
        config = preparation.decide(config)
    config = preparation.with_precision(config)
    vocab_size = config.model.vocab_size or training.find_data(config)[0]
    sparse = with_swept_thresholds(config.sparse)
    predicted = predicted_buckets.predicted_buckets(config, vocab_size)
    buckets = [piece for bucket in predicted for piece in in_pieces(bucket, sparse)]
    undo = predicted_buckets.may_undo(config)
    check_undo(config.compression, undo=undo)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.training.precision)
    shares = _shares(buckets, config)
    return account(sparse, shares, undo=undo, parameter_dtype=dtype or torch.float32)


def _shares(buckets: Sequence[Bucket], config: RunConfig) -> list[MemoryShare]:
    """What the first rank selects from; Megatron numbers tensor-parallel ranks first."""
    nodes = tuple(
        rank * config.training.tensor_parallel // config.cluster.ranks_per_node
        for rank in range(buckets[0].world_size)
    )
    sparse = config.sparse
    choice = choose_level(sparse, nodes, buckets[0].instances, shapes_of(buckets, sparse))
    if choice.level == INSTANCE:
        return [MemoryShare(0, [instance_part(bucket, 0) for bucket in buckets], buckets)]
    parts, members = list(buckets), range(len(nodes))
    if len(choice.nodes) > 1:
        parts = [node_part(bucket, len(choice.nodes[0]), 0) for bucket in buckets]
        members = choice.across(0)
    return [MemoryShare(0, parts, buckets, nodes=tuple(nodes[rank] for rank in members))]
