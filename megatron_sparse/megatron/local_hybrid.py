"""Megatron's `HybridModel` of attention and MLP layers without Transformer Engine.

megatron-core builds a `HybridModel` from layers of Transformer Engine only, and its stack makes its
last norm with Transformer Engine whatever the spec says. `local_stack_spec` has Megatron's own
layers instead, those that `GPTModel` gets with --transformer-impl local, so a `HybridModel` trains
on a CPU, and on GPUs without Transformer Engine. Pattern `*-` repeated n times is then a GPT of n
layers. It has no layers of other kinds: Mamba and the like need kernels for GPUs.

For Megatron's own scripts, with --hybrid-layer-pattern:

    --spec megatron_sparse.megatron.local_hybrid local_stack_spec
"""

from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


class LocalHybridStack(HybridStack):
    """Megatron's `HybridStack`, but with a last norm that needs no Transformer Engine."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        post_layer_norm: bool = True,
        **options: Any,
    ) -> None:
        # With True the base class would make Transformer Engine's norm.
        super().__init__(config, submodules, post_layer_norm=False, **options)
        self.post_layer_norm = post_layer_norm  # the base class reads it in `forward`
        if self.post_process and post_layer_norm:
            rms_norm = config.normalization == "RMSNorm"
            norm: Any = LocalSpecProvider().layer_norm(rms_norm=rms_norm, for_qk=False)
            self.final_norm = norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )


def _stack_spec() -> ModuleSpec:
    """The stack's layers: Megatron's local GPT layer split into an attention and an MLP layer."""
    parts = get_gpt_layer_local_submodules()
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm,
        self_attention=parts.self_attention,
        self_attn_bda=parts.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
    )
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


local_stack_spec = _stack_spec()
"""What --spec and `HybridModelConfig.hybrid_stack_spec` take."""
