"""Shared parts of the checkpoint tests: checkpoints of small models, and their content."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint

from megatron_sparse.megatron import cpu_mode
from tests.megatron.train_ranks import AT_TARGET, logged

MODES = ("full", "sum", "none")
STEPS = 3
OPTIONS = AT_TARGET | {"density": 0.05, "scheme": "agsparse"}


def attached(bucket_size=40_000, **options):
    """A fresh model on this rank, and its attachment."""
    cpu_mode.enable()
    from megatron_sparse.megatron import attach
    from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig

    model = SmallGPT(SmallGPTConfig(bucket_size=bucket_size, overlap=True))
    return model, attach(model.ddp, model.optimizer, **(OPTIONS | options))


def pruned_stores(attachment):
    """Copies of the residuals, by parameter."""
    return {
        f"residual.{parameter}": view.clone()
        for parameter, view in attachment.residuals.by_parameter()
    }


def save(attachment, folder, mode="full"):
    """Saves the plugin's state alone, as Megatron saves it with its own."""
    from megatron.core import dist_checkpointing

    from megatron_sparse.megatron import checkpoint

    attachment.config.compression.residual_checkpoint = mode
    folder.mkdir(exist_ok=True, parents=True)
    dist.barrier()
    dist_checkpointing.save({checkpoint.KEY: checkpoint.sharded_state(attachment)}, str(folder))


def gradient_numel(attachment):
    """Elements of all parameters of all buckets."""
    return sum(p.stop - p.start for bucket in attachment.buckets for p in bucket.parameters)


def load_and_go_on(folder, **options):
    """Loads into a fresh model; returns the restored state, the log, and one more step's result."""
    model, attachment = attached(**options)
    from megatron_sparse.errors import CheckpointError
    from megatron_sparse.megatron import checkpoint, detach

    with logged() as messages:
        try:
            checkpoint.load(attachment, folder, iteration=77)
        except CheckpointError as error:
            return {"error": str(error)}
    result = {
        "step": attachment.step,
        "norms": list(attachment.usual_norm.norms),
        "stores": pruned_stores(attachment),
        "messages": messages,
        "goes on": model.step()[1],
        "after": pruned_stores(attachment),
    }
    detach(attachment)
    return result


def saved_tensors(run: Path, iteration: int) -> dict[str, torch.Tensor]:
    """All tensors of a run's distributed checkpoint: weights, optimizer state and residuals."""
    reader = torch_checkpoint.FileSystemReader(_folder(run, iteration))
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, torch_checkpoint.metadata.TensorStorageMetadata)
    }
    torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def saved_object(run: Path, iteration: int, key: str) -> Any:
    """An object of a run's distributed checkpoint, by its key and shard."""
    state: dict[str, Any] = {key: io.BytesIO()}
    reader = torch_checkpoint.FileSystemReader(_folder(run, iteration))
    torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    found = state[key]
    if isinstance(found, io.BytesIO):
        found.seek(0)
        found = torch.load(found, weights_only=True)
    return found[0]


def _folder(run: Path, iteration: int) -> Path:
    return run / f"checkpoints/iter_{iteration:07d}"
