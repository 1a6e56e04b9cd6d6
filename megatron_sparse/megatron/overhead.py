"""The plugin's overhead without compression: `scheme=dense` compared with Megatron alone.

Two copies of the same small GPT live in each rank, one plain and one with `scheme=dense`. They
train turn by turn on the same batches, so that noise hits both; each pair gives one ratio.
"""

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_sparse.megatron import cpu_mode

SEQUENCE, VOCABULARY, MICRO_BATCH = 256, 8192, 4


class SmallGPT:
    """A small GPT with DDP wrap, optimizer and data, by megatron.core alone.

    One process can hold several, unlike with Megatron's `pretrain`. The weights are the same on
    every rank and in every copy. Needs an initialised process group and, without a GPU, CPU mode.
    """

    def __init__(self, *, overlap: bool) -> None:
        # Not at the top: CPU mode must be enabled before anything imports megatron.
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        torch.manual_seed(7)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        config = TransformerConfig(
            num_layers=4,
            hidden_size=256,
            num_attention_heads=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
        )
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
        )
        wrap = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=1_000_000)
        self.ddp = DistributedDataParallel(config, wrap, model)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), [self.ddp])
        # Each data-parallel rank has data of its own.
        self._generator = torch.Generator().manual_seed(100 + dist.get_rank())

    def step(self) -> float:
        """One training step on new tokens; the loss averaged over ranks."""
        from megatron.core.distributed import finalize_model_grads

        shape = (MICRO_BATCH, SEQUENCE)
        # In CPU mode, `.cuda()` and device="cuda" mean the CPU.
        tokens = torch.randint(0, VOCABULARY, shape, generator=self._generator).cuda()
        positions = torch.arange(SEQUENCE, device="cuda").expand(shape)
        everywhere = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda")
        mask = torch.triu(everywhere, 1)  # true hides a later position
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.ddp(tokens, positions, mask, labels=tokens).float().mean()
        loss.backward()
        finalize_model_grads([self.ddp])
        self.optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()


def measure(iterations: int, warmup: int, *, overlap: bool) -> dict[str, float]:
    """Times pairs of steps, without and with the plugin. Collective over the process group.

    Returns:
        Medians over the pairs: `plain_ms`, `plugin_ms`, and `ratio` (of each pair, not of the
        medians), with the ratios' quartiles `ratio_q1`, `ratio_q3`, and `losses_equal` (1 or 0).
    """
    from megatron_sparse.megatron.attachment import attach, detach

    plain, plugged = SmallGPT(overlap=overlap), SmallGPT(overlap=overlap)
    attachment = attach(plugged.ddp, plugged.optimizer, scheme="dense")
    plain_ms, plugin_ms, equal = [], [], True
    order = [(plain, plain_ms), (plugged, plugin_ms)]
    for index in range(warmup + iterations):
        order.reverse()  # be fair: the second model finds warmer caches
        losses = []
        for model, times in order:
            dist.barrier()
            start_s = time.perf_counter()
            losses.append(model.step())  # reads the loss, so the step has ended
            dist.barrier()
            if index >= warmup:
                times.append((time.perf_counter() - start_s) * 1e3)
        equal = equal and losses[0] == losses[1]
    detach(attachment)
    pairs = zip(plain_ms, plugin_ms, strict=True)
    ratios = [with_plugin / alone for alone, with_plugin in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "plain_ms": statistics.median(plain_ms),
        "plugin_ms": statistics.median(plugin_ms),
        "ratio": middle,
        "ratio_q1": low,
        "ratio_q3": high,
        "losses_equal": float(equal),
    }


def main() -> None:
    """Measures without and with overlap on the ranks of torchrun; rank 0 prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        cpu_mode.enable()
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    rows = []
    for overlap in (False, True):
        result = measure(arguments.iters, arguments.warmup, overlap=overlap)
        ranks = dist.get_world_size()
        row = {"op": "overhead", "scheme": "dense", "overlap": overlap, "world_size": ranks}
        rows.append(row | result)
    if dist.get_rank() == 0:
        print(
            f"# {'overlap':>8} {'plain(ms)':>10} {'plugin(ms)':>10} {'ratio':>7} {'quartiles':>15}"
        )
        for row in rows:
            quartiles = f"{row['ratio_q1']:.3f}..{row['ratio_q3']:.3f}"
            print(
                f"  {row['overlap']!s:>8} {row['plain_ms']:10.1f} {row['plugin_ms']:10.1f} "
                f"{row['ratio']:7.3f} {quartiles:>15}"
            )
        if arguments.json:
            arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
