"""Dense gradient synchronisation, and none of the plugin's, against Megatron's own, by element.

The cases are those of Megatron's unit tests of gradient sync (`tests/unit_tests/distributed`). All
run in one launch of two ranks. Each builds two models, one of them attached, and compares the whole
gradient buffer: the elements that the rank does not own, and the padding, too.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.megatron.train_ranks import on_ranks

WIDTH, LAYERS = 23, 6
SMALL_BUCKETS = 1000
"""Elements; two layers a bucket."""


@dataclass(frozen=True)
class Setting:
    """A case."""

    average: bool = False
    distributed: bool = False
    overlap: bool = False
    bucket_size: int | None = None
    bf16: bool = False
    fp32_accumulation: bool = False
    force_all_reduce: bool = False


def settings() -> list[Setting]:
    """Every combination that Megatron accepts."""
    cases = [
        Setting(average, distributed, overlap, bucket_size, bf16, force_all_reduce=force)
        for average, distributed, overlap, bucket_size, bf16, force in itertools.product(
            (False, True), (False, True), (False, True), (None, SMALL_BUCKETS), *[(False, True)] * 2
        )
    ]
    # Last: Megatron then replaces its reduce-scatter for the whole process.
    cases += [
        Setting(False, True, overlap, bucket_size, bf16=True, fp32_accumulation=True)
        for overlap, bucket_size in itertools.product((False, True), (None, SMALL_BUCKETS))
    ]
    return cases


def _model(setting: Setting) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    module = torch.nn.Sequential(*layers).to(torch.bfloat16 if setting.bf16 else torch.float32)
    return DistributedDataParallel(
        TransformerConfig(num_attention_heads=1, num_layers=1),
        DistributedDataParallelConfig(
            # With bf16 parameters the gradients are bf16 too.
            grad_reduce_in_fp32=False,
            use_distributed_optimizer=setting.distributed,
            overlap_grad_reduce=setting.overlap,
            bucket_size=setting.bucket_size,
            average_in_collective=setting.average,
            reduce_scatter_with_fp32_accumulation=setting.fp32_accumulation,
        ),
        module,
    )


def _step(model: Any, setting: Setting, seed: int) -> list[torch.Tensor]:
    """Synchronises random gradients once; returns the buffers."""
    for number, buffer in enumerate(model.buffers):
        generator = torch.Generator().manual_seed(10 * seed + number)
        buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=generator))
    force = setting.force_all_reduce
    groups = model.bucket_groups
    if setting.overlap:
        for group in groups:
            for parameter in group.params:
                group.register_grad_ready(parameter, force_all_reduce=force)
    model.finish_grad_sync(force_all_reduce=force)
    found = [buffer.grad_data.clone() for buffer in model.buffers]
    for group in groups:
        group.reset()
    return found


@pytest.mark.parametrize("options", [{"scheme": "dense"}, {"enabled": False}])
@on_ranks(2)
def test_every_element_of_the_buffer_is_megatrons(rank, options):
    from megatron.core import parallel_state

    from megatron_sparse.megatron import attach, detach

    parallel_state.initialize_model_parallel(1, 1)
    mismatches, most_buckets = [], 0
    for setting in settings():
        plain, attached = _model(setting), _model(setting)
        attachment = attach(attached, **options, watch_peers=False)
        most_buckets = max(most_buckets, len(attachment.buckets))
        for step in range(2):
            wanted, got = (_step(model, setting, 100 * step + rank) for model in (plain, attached))
            for number, (expected, found) in enumerate(zip(wanted, got, strict=True)):
                wrong = (expected != found).nonzero().flatten().tolist()
                if wrong:
                    mismatches.append(
                        f"{setting}, step {step}, buffer {number}: {len(wrong)} of "
                        f"{expected.numel()} elements differ, the first at {wrong[0]}: "
                        f"{found[wrong[0]]} instead of {expected[wrong[0]]}"
                    )
        detach(attachment)
    assert not mismatches, "\n".join(mismatches)
    assert most_buckets > 2, "the small buckets are several"
