"""Pretraining in the manner of Megatron-LM's `pretrain_gpt.py`, with the plugin's two lines.

    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --num-layers 24 --hidden-size 1024 ...

It takes Megatron's own flags and nothing else. With --hybrid-layer-pattern it trains Megatron's
HybridModel, which replaces GPTModel; the two lines are the same. On a machine without a GPU add
`--distributed-backend gloo` and the flags of `docs/cpu.md`, and keep the three lines on top.
"""

import functools

import torch

if not torch.cuda.is_available():  # only to try this script where there is no GPU
    from megatron_sparse.megatron import cpu_mode

    cpu_mode.enable()
    cpu_mode.enable_training()

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

import megatron_sparse


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, **_):
    """Builds one pipeline stage of a GPTModel."""
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
    )


def datasets_provider(samples, vp_stage=None):
    """Builds the training, validation and test datasets."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, lambda: True, config).build()


datasets_provider.is_distributed = True


def loss_func(loss_mask, losses):
    """The summed loss, its number of tokens, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    """One forward pass."""
    assert mpu.get_tensor_model_parallel_world_size() == 1, "this example has no tensor parallelism"
    batch = {key: value.cuda() for key, value in next(data_iterator).items()}
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, functools.partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    hybrid = args.hybrid_layer_pattern is not None  # Megatron's own builder then makes the model
    plugin = megatron_sparse.install("safe", warmup_iters=500, ramp_iters=1000)  # line 1
    pretrain(
        pretrain_cfg_container_from_args(args, hybrid_config_from_args(args) if hybrid else None),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=None if hybrid else model_provider,
    )
    plugin.close()  # line 2: prints where the time went
