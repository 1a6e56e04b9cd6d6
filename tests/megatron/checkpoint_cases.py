"""Shared parts of the checkpoint tests: the plugin's state alone, and what a checkpoint holds."""

import logging
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint

from megatron_sparse.megatron import checkpoint_folder
from tests.megatron.train_ranks import logged


def save(attachment, folder, mode="full"):
    """Saves the plugin's state alone, as Megatron saves it with its own."""
    from megatron.core import dist_checkpointing

    from megatron_sparse.megatron import checkpoint

    attachment.config.compression.residual_checkpoint = mode
    folder.mkdir(exist_ok=True, parents=True)
    dist.barrier()
    dist_checkpointing.save({checkpoint.KEY: checkpoint.sharded_state(attachment)}, str(folder))


@contextmanager
def loaded(folder, running, level=logging.INFO):
    """A run (`train_ranks.running`) with a checkpoint's state, and what loading logged."""
    from megatron_sparse.megatron import checkpoint

    with running as run:
        with logged(level) as lines:
            checkpoint.load(run.attachment, folder, iteration=77)
        yield run, lines


def saved_tensors(run: Path, iteration: int) -> dict[str, torch.Tensor]:
    """All tensors of a run's distributed checkpoint: weights, optimizer state and residuals."""
    folder = checkpoint_folder.checkpoint(run / "checkpoints", iteration)
    reader = torch_checkpoint.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, torch_checkpoint.metadata.TensorStorageMetadata)
    }
    torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state
