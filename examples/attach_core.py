"""`attach` in a loop of your own: distributed optimizer, save and resume.

    torchrun --nproc-per-node 2 examples/attach_core.py --steps 10 --folder /tmp/attach
    torchrun --nproc-per-node 2 examples/attach_core.py --steps 20 --folder /tmp/attach

The second command goes on from the checkpoint of the first. Where there is no GPU it trains on the
CPU. Lines that end with `# plugin` are all that compression needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    from megatron_sparse.megatron import cpu_mode

    cpu_mode.enable()

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sparse.megatron import attach, checkpoint, repairs  # plugin

SEQUENCE, VOCABULARY = 32, 128
METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}
"""Megatron's default for the distributed optimizer's state: for the same number of ranks."""


def build():
    """The model in Megatron's DDP, and its distributed optimizer."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    layers = get_gpt_layer_local_spec()
    model = GPTModel(config, layers, VOCABULARY, SEQUENCE)
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=40_000
    )
    ddp = DistributedDataParallel(config, options, model.cuda())
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [ddp]
    )
    return ddp, optimizer


def train_step(ddp, optimizer, step):
    """One step on tokens whose odd positions follow from the even ones; returns the loss."""
    random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, VOCABULARY, (4, SEQUENCE), generator=random) % 17
    tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % VOCABULARY
    tokens = tokens.cuda()
    positions = torch.arange(SEQUENCE).expand_as(tokens).cuda()
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1).cuda()
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    loss = ddp(tokens, positions, mask, labels=tokens).float().mean()
    loss.backward()
    finalize_model_grads([ddp])
    optimizer.step()
    dist.all_reduce(loss.detach())
    return loss.item() / dist.get_world_size()


def state_of(ddp, optimizer, *, is_loading):
    """What a checkpoint holds of Megatron: names and shards, filled by `load`."""
    model = ddp.module.sharded_state_dict()
    sharded = optimizer.sharded_state_dict(model, is_loading, metadata=METADATA)
    return {"model": model, "optimizer": sharded}


def save(folder, ddp, optimizer, step):
    """One distributed checkpoint of Megatron's, with the plugin's state in the optimizer's."""
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state_of(ddp, optimizer, is_loading=False), str(folder))
    if dist.get_rank() == 0:
        (folder.parent / "latest").write_text(str(step))
    dist.barrier()


def load(folder, ddp, optimizer, attachment, step):
    """Restores what `save` wrote."""
    state = dist_checkpointing.load(state_of(ddp, optimizer, is_loading=True), str(folder))
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    checkpoint.load(attachment, folder, step)  # plugin


def main():
    """Trains to the given step, from the latest checkpoint in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    has_gpu = torch.cuda.device_count() > 0 and torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    if has_gpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    repairs.apply()  # plugin: lets torch's Adam load a checkpoint before its first step
    ddp, optimizer = build()
    attachment = attach(ddp, optimizer, density=0.05, warmup_iters=0, ramp_iters=0)  # plugin
    latest, first = options.folder / "latest", 0
    if latest.is_file():
        first = int(latest.read_text())
        load(options.folder / f"step_{first}", ddp, optimizer, attachment, first)
    checkpoint.save_with(attachment, optimizer)  # plugin
    for step in range(first, options.steps):
        loss = train_step(ddp, optimizer, step)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    if first < options.steps:
        folder = options.folder / f"step_{options.steps}"
        save(folder, ddp, optimizer, options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
