"""`attach` inside Megatron-Bridge's own `pretrain`, on 2 gloo ranks; docs/megatron-bridge.md.

CI does not install Bridge: `test_parallel.py` has what it does differently on plain megatron-core.

    pip install --no-deps megatron-bridge && pip install 'transformers>=5.8,<=5.12.1'
"""

import importlib.machinery
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.megatron.train_ranks import AT_TARGET, equal, train_ranks

ABSENT = ("transformer_engine", "megatron.energon", "datasets", "modelopt", "nvidia_resiliency_ext")
"""What Bridge imports, and this test does not need."""
PLUGIN = {"dense": {"scheme": "dense"}, "sparse": {"scheme": "agsparse", "density": 0.05}}
KINDS = {
    "reduce_scatter": {"sharded": True},
    "all_reduce": {"sharded": False},
    "lora": {"sharded": True, "lora": True},
}
STEPS = 4

pytestmark = [
    pytest.mark.skipif(
        find_spec("megatron.bridge") is None, reason="megatron-bridge is not installed"
    ),
    pytest.mark.timeout(400),
]


class _Nothing(type):
    """A class whose attributes are such classes, and whose calls return None."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})

    def __call__(cls, *args, **kwargs):
        return None


class _AbsentModule(types.ModuleType):
    __path__ = ()
    __getattr__ = _Nothing.__getattr__


class _Absent:
    """Finds the modules of `ABSENT`, where the real ones are missing."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, cls) if name.startswith(ABSENT) else None

    @staticmethod
    def create_module(spec):
        return _AbsentModule(spec.name)

    @staticmethod
    def exec_module(module):
        pass


def _import_bridge():
    from megatron_sparse.megatron import cpu_mode

    cpu_mode.enable_training()
    sys.meta_path.append(_Absent)
    from megatron.bridge.peft import utils
    from megatron.bridge.training import pretrain, setup

    utils.HAVE_TE = False
    initialize = setup.initialize_megatron

    def without_gpu(**kwargs):
        with mock.patch.object(torch.cuda, "is_available", return_value=True):
            return initialize(**kwargs)

    setup.initialize_megatron = without_gpu
    return pretrain.pretrain


def _config(folder, steps, *, sharded, lora=False, base=None):
    """A recipe's settings, at the size of a test."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training import config

    return config.ConfigContainer(
        model=GPTModelProvider(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            seq_length=16,
            vocab_size=128,
            transformer_layer_spec=local_layer_spec,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        peft=LoRA(dim=4) if lora else None,
        train=config.TrainingConfig(train_iters=steps, global_batch_size=4, micro_batch_size=1),
        validation=config.ValidationConfig(eval_interval=0, eval_iters=0),
        optimizer=config.OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, clip_grad=1.0, use_distributed_optimizer=sharded
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant",
            lr_decay_iters=100,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            override_opt_param_scheduler=True,
        ),
        ddp=config.DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=True,
            overlap_param_gather=sharded,
            average_in_collective=True,
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=True,
            bucket_size=8_000,
        ),
        dataset=config.MockGPTDatasetConfig(
            random_seed=1,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            seq_length=16,
            num_dataset_builder_threads=1,
            dataloader_type="single",
            num_workers=0,
        ),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=config.CheckpointConfig(
            save=folder, load=folder, save_interval=100, pretrained_checkpoint=base
        ),
        rng=config.RNGConfig(seed=1),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
    )


def _forward(state, batches, model, return_schedule_plan=False):
    tokens = next(batches)["tokens"]
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)

    def loss_of(losses):
        loss = losses.float().mean()
        return loss, {"lm loss": loss.detach().clone().view(1)}

    return model(tokens, positions, mask, labels=tokens), loss_of


def _train(pretrain, config, options):
    """Losses, weights and residuals of one `pretrain`; the plugin comes in by callbacks."""
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.initialize import destroy_global_state

    from megatron_sparse.megatron import attach, checkpoint, detach

    found = {"losses": [], "residuals": {}}

    class Plugin(Callback):
        def on_train_start(self, context):
            if not options:
                return
            self.attachment = attach(context.model, context.optimizer, **(AT_TARGET | options))
            if step := context.state.train_state.step:
                folder = Path(config.checkpoint.load) / f"iter_{step:07d}"
                checkpoint.load(self.attachment, folder, step)
            checkpoint.save_with(self.attachment, context.optimizer)

        def on_train_step_end(self, context):
            found["losses"].append(float(context.loss_dict["lm loss"]))

        def on_train_end(self, context):
            parameters = context.model[0].module.named_parameters()
            found["weights"] = {name: each.detach().clone() for name, each in parameters}
            if options:
                residuals = self.attachment.residuals.slices()
                found["residuals"] = {name: each.clone() for (name, _), each in residuals}
                detach(self.attachment)

    pretrain(config, _forward, callbacks=[Plugin()])
    destroy_global_state()
    return found


def _matrix(rank, folder):
    pretrain, base = _import_bridge(), f"{folder}/base"
    _train(pretrain, _config(base, 1, sharded=True), {})

    def run(name, kind, steps, options):
        config = _config(f"{folder}/{name}", steps, base=base, **KINDS[kind])
        return _train(pretrain, config, options)

    reports = {}
    for kind in KINDS:
        runs = {name: run(f"{kind}-{name}", kind, STEPS, each) for name, each in PLUGIN.items()}
        runs["plain"] = run(f"{kind}-plain", kind, STEPS, {})
        for steps in (STEPS // 2, STEPS):
            runs["resumed"] = run(f"{kind}-resumed", kind, steps, PLUGIN["sparse"])
        reports[kind] = runs
    return reports


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return train_ranks(_matrix, 2, str(tmp_path_factory.mktemp("bridge")), timeout_s=390)


@pytest.mark.parametrize("kind", KINDS)
class TestBridge:
    """Each kind of training in Bridge's own loop."""

    def test_dense_is_bridge_bit_for_bit(self, matrix, kind):
        for rank in matrix:
            assert rank[kind]["dense"]["losses"] == rank[kind]["plain"]["losses"]
            assert equal(rank[kind]["dense"]["weights"], rank[kind]["plain"]["weights"])

    def test_sparse_keeps_ranks_identical_and_holds_back(self, matrix, kind):
        sparse = [rank[kind]["sparse"] for rank in matrix]
        assert equal(sparse[0]["weights"], sparse[1]["weights"])
        held = {name for name, each in sparse[0]["residuals"].items() if each.any()}
        assert held
        assert kind != "lora" or all(".adapter." in name for name in held)

    def test_resuming_is_bit_exact(self, matrix, kind):
        for rank in matrix:
            whole, resumed = rank[kind]["sparse"], rank[kind]["resumed"]
            assert resumed["losses"] == whole["losses"][STEPS // 2 :]
            assert equal(resumed["weights"], whole["weights"])
            assert equal(resumed["residuals"], whole["residuals"])
