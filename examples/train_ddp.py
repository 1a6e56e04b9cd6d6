"""A small language model under torch's own DDP, with the plugin's two lines.

    torchrun --nproc-per-node 2 examples/train_ddp.py --steps 200

It learns to guess the next byte of the Python files of the standard library, on as many ranks as
are started: over NCCL with a GPU for each, over gloo on CPUs. With `--dense` it runs as it was
before the two lines. The embeddings have sparse gradients: one for each byte, and one for each pair
of bytes, of which a batch touches few.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import megatron_sparse

CONTEXT, BATCH, CORPUS_BYTES = 8, 64, 2_000_000


class NextByte(nn.Module):
    """Bytes [B, CONTEXT] -> logits [B, 256], from embeddings of bytes and of adjacent pairs."""

    def __init__(self, width: int = 32, hidden: int = 512) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width, sparse=True)
        self.pairs = nn.Embedding(256 * 256, width, sparse=True)
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT * width + (CONTEXT - 1) * width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, 256),
        )

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits of the byte that follows."""
        pairs = text[:, :-1] * 256 + text[:, 1:]
        return self.layers(torch.cat([self.bytes(text), self.pairs(pairs)], 1).flatten(1))


def corpus() -> torch.Tensor:
    """The first bytes of the standard library's modules, in alphabetical order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8).long()


def main() -> None:
    """Trains, and prints the mean loss of the first and of the last twenty steps."""
    parser = argparse.ArgumentParser(description="Next-byte model under DDP.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--dense", action="store_true", help="train without the plugin")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(NextByte().to(device), bucket_cap_mb=0.5)
    # Adam has no form for sparse gradients, SGD takes both kinds.
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    if not args.dense:
        steps = args.steps // 10
        state = megatron_sparse.DDPState(  # line 1
            ddp, density=args.density, warmup_iters=steps, ramp_iters=steps
        )
        ddp.register_comm_hook(state, megatron_sparse.ddp_hook)  # line 2

    text = corpus()
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(text.numel() - CONTEXT - 1, (BATCH,), generator=draw)
        windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].to(device)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(windows[:, :-1]), windows[:, -1])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    ends = torch.stack([torch.stack(losses[:20]).mean(), torch.stack(losses[-20:]).mean()])
    dist.all_reduce(ends)
    first, last = (ends / dist.get_world_size()).tolist()
    if dist.get_rank() == 0:
        print(f"loss {first:.3f} -> {last:.3f} in {args.steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
