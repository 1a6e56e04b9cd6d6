"""The plugin's overhead without compression: `scheme=dense` compared with Megatron alone.

Two copies of the same small GPT live in each rank, one plain and one with `scheme=dense`. They
train turn by turn on the same batches, so that noise hits both; each pair gives one ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sparse.megatron import cpu_mode


def measure(iterations: int, warmup: int, *, overlap: bool) -> dict[str, float]:
    """Times pairs of iterations. Collective; needs an initialised process group.

    Returns:
        Medians over the pairs: `plain_ms`, `plugin_ms`, and `ratio` (of each pair, not of the
        medians), with the ratios' quartiles `ratio_q1`, `ratio_q3`, and `losses_equal` (1 or 0).
    """
    from megatron_sparse.megatron.attachment import attach, detach
    from megatron_sparse.megatron.small_gpt import SmallGPT, SmallGPTConfig

    setting = SmallGPTConfig(
        layers=4, hidden=256, sequence=256, vocabulary=8192, overlap=overlap, bucket_size=1_000_000
    )
    plain, plugged = SmallGPT(setting), SmallGPT(setting)
    attachment = attach(plugged.ddp, plugged.optimizer, scheme="dense")
    plain_ms, plugin_ms, equal = [], [], True
    order = [(plain, plain_ms), (plugged, plugin_ms)]
    for index in range(warmup + iterations):
        order.reverse()  # the second one finds warmer caches
        losses = []
        for model, times in order:
            dist.barrier()
            start_s = time.perf_counter()
            losses.append(model.step()[0])  # reads the loss, so the step has ended
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
    """Measures without and with overlap, as one rank of a torchrun launch; rank 0 prints a table.

    `python -m torch.distributed.run ... -m <this>`
    """
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
