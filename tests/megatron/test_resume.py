"""Resuming in Megatron's own loop: tensor and pipeline parallel, bf16 and fp16, changed settings.

`test_pretrain.py` has overlap and distributed optimizer on and off, with a run that is stopped.
Here a run resumes from a checkpoint that another run saved before its end.
"""

import json
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from megatron_sparse.errors import CheckpointError
from megatron_sparse.megatron.checkpoint_folder import track
from tests.megatron.checkpoint_cases import saved_tensors
from tests.megatron.test_pretrain import ITERATIONS, PRUNED, lines, losses, train
from tests.megatron.train_ranks import equal

SAVED_AT = 3
TARGET = (*PRUNED, f"training.save_interval={SAVED_AT}")
PLANNED = (
    "scheme=auto",
    "planner.cluster=ethernet_25gbit",
    "planner.schemes=[direct,ssar_rd]",
    # Buckets for which pruning pays, by that cluster's prices.
    "data.vocab_size=4096",
    "compression.ramp_iters=0",
)
LAYOUTS = {
    "tensor parallel, bf16, planned": (
        "cluster.ranks_per_node=4",
        "training.tensor_parallel=2",
        "training.precision=bf16",
        "model.dropout=0.1",
        *PLANNED,
    ),
    "pipeline parallel, fp16, values of 4 bits": (
        "compression.value_bits=4",
        "cluster.ranks_per_node=4",
        "training.pipeline_parallel=2",
        "training.precision=fp16",
        "scheme=agsparse",
        "training.use_distributed_optimizer=true",
        "parameters.method=exact",
        "parameters.verify_every=1",
        "megatron.hysteresis=1",
        "megatron.initial_loss_scale=4194304",
        "megatron.loss_scale_window=2",
    ),
    "the optimizer's momentum, values of 3 bits": (
        "compression.value_bits=3",
        "scheme=direct",
        "scheme.sum_bits=4",
        "megatron.optimizer=sgd",
    ),
    # Loaders with workers and validation draw from the generator that dropout uses on a CPU. Before
    # each validation and save Megatron gathers once more, and between them in the forward pass.
    "dropout, lossless embedding, lossy parameters": (
        "scheme=agsparse",
        "compression.lossless_patterns=[word_embeddings]",
        "model.tied_embeddings=false",
        "model.dropout=0.1",
        "megatron.num_workers=1",
        "training.eval_interval=2",
        "training.eval_iters=1",
        "training.overlap_grad_reduce=true",
        "training.use_distributed_optimizer=true",
        "megatron.overlap_param_gather=true",
        "parameters.method=lossy",
        "parameters.verify_every=1",
    ),
    # 4 ranks that count as 2 nodes.
    "level node": (
        "cluster.nodes=2",
        "cluster.ranks_per_node=2",
        "compression.level=node",
        "scheme=direct",
        "training.global_batch_size=8",
        "training.overlap_grad_reduce=true",
        "training.use_distributed_optimizer=true",
        "parameters.method=exact",
        "parameters.verify_every=1",
    ),
}
SAMPLE = ("tensor parallel, bf16, planned", "level node")
"""The other layouts are slow tests."""


def resumed_from(whole):
    """Overrides of a run that goes on from the checkpoint of `SAVED_AT`."""
    return f"training.load={whole / 'checkpoints'}", f"megatron.ckpt_step={SAVED_AT}"


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.slow) for n in LAYOUTS],
)
def test_resuming_is_bit_exact(tmp_path, layout):
    flags = (*TARGET, *LAYOUTS[layout])
    whole = train(tmp_path, "whole", *flags)
    resumed = train(tmp_path, "resumed", *flags, *resumed_from(whole))
    expected = losses(whole)
    assert losses(resumed) == {i: expected[i] for i in range(SAVED_AT + 1, ITERATIONS + 1)}
    tensors = saved_tensors(whole, ITERATIONS)
    assert equal(tensors, saved_tensors(resumed, ITERATIONS))
    residuals = [value for name, value in tensors.items() if ".residual." in name]
    assert all(len(rows) == 2 for rows in residuals), "one for each data-parallel rank or node"
    assert any(bool(rows[1].any()) for rows in residuals)
    masters = [name for name in tensors if ".master." in name]
    assert bool(masters) is ("lossy" in layout)
    if masters:
        methods = [line["param_gathers"] for line in lines(resumed, "breakdown")]
        assert all(set(counts) <= {"lossy"} for counts in methods)
    if "fp16" in layout:
        assert {line["skipped"] for line in lines(whole, "breakdown")} == {False, True}
    if "planned" in layout:
        plans = [json.loads((run / "plan.json").read_text()) for run in (whole, resumed)]
        assert plans[0] == plans[1]
        assert any(row["profile"] for row in plans[0]["buckets"])
    if "lossless" in layout:
        embedding = [name for name in tensors if "residual" in name and "word_embed" in name]
        assert len(embedding) == 1
        assert not tensors[embedding[0]].any()
    if "node" in layout:
        assert any(bool(rows[0].any()) for rows in residuals)
        said = (tmp_path / "whole.log").read_text()
        assert "level node: 2 nodes of 2 ranks" in said
        assert "once per node" in said, "parameters take the lanes"


@pytest.mark.parametrize(("override", "kind"), [(2, None), (0, None), (2, "global")])
def test_residuals_come_from_the_folder_that_was_loaded(tmp_path, monkeypatch, override, kind):
    """`--override-ckpt-iteration` sets what Megatron's load returns. Starts no run."""
    from megatron_sparse.megatron import plugin

    arguments = SimpleNamespace(
        load=str(tmp_path),
        override_ckpt_iteration=override,
        non_persistent_ckpt_type=kind,
        non_persistent_global_ckpt_dir=None,
    )
    folder, loaded = (tmp_path, SAVED_AT) if kind is None else (tmp_path / "non_persistent", 5)
    folder.mkdir(exist_ok=True)
    track(folder, loaded)
    taken = []
    monkeypatch.setattr(plugin, "get_args", lambda: arguments)
    monkeypatch.setattr(plugin, "get_loaded_iteration", lambda: SAVED_AT)
    monkeypatch.setattr(plugin.checkpoint, "load", lambda _, *given: taken.append(given))
    load = {"load_checkpoint": lambda model, load_arg="load": (override, 0)}
    plugin.Plugin._load_checkpoint(SimpleNamespace(_originals=load, attachment=object()), None)
    assert taken == [(folder / f"iter_{loaded:07d}", override)]


@pytest.mark.parametrize("of_megatron", [True, False])
def test_a_damaged_file_is_a_typed_error(of_megatron, monkeypatch):
    from megatron_sparse.megatron import plugin

    def fail(*_):
        raise CheckpointException("read", {1: _wrap_exception(ValueError("no zip\nat all"))})

    def load(load_arg="load"):
        return fail() if of_megatron else (SAVED_AT, 0)

    arguments = SimpleNamespace(load="folder")
    monkeypatch.setattr(plugin, "_arguments", lambda: arguments)
    monkeypatch.setattr(plugin, "_loaded_checkpoint", lambda *_: "folder")
    monkeypatch.setattr(plugin.checkpoint, "load", fail)
    host = SimpleNamespace(_originals={"load_checkpoint": load}, attachment=object())
    with pytest.raises(CheckpointError, match=r"ValueError: no zip\n.*older checkpoint"):
        plugin.Plugin._load_checkpoint(host)


def test_a_checkpoint_is_converted_without_training(monkeypatch):
    """With --skip-train nothing is attached."""
    from megatron_sparse.megatron import plugin

    arguments = SimpleNamespace(ckpt_format="torch")
    monkeypatch.setattr(plugin, "_arguments", lambda: arguments)
    save = {"save_checkpoint": lambda iteration, model: (iteration, model)}
    host = SimpleNamespace(_originals=save, attachment=None, telemetry=None)
    assert plugin.Plugin._save_checkpoint(host, 3, None) == (3, None)


@pytest.mark.slow
def test_a_checkpoint_resumes_with_one_rank_and_without_the_plugin(tmp_path):
    flags = ("scheme=agsparse", *TARGET, "compression.residual_checkpoint=sum")
    first = train(tmp_path, "first", *flags, "megatron.exit_interval=3")
    load = (
        f"training.load={first / 'checkpoints'}",
        "cluster.ranks_per_node=1",
        "megatron.ddp_bucket_size=80000",
    )
    alone = train(tmp_path, "alone", *flags, *load)
    assert min(losses(alone)) == SAVED_AT + 1
    text = (tmp_path / "alone.log").read_text()
    assert "residuals restored from their sum" in text
    assert "of 2 ranks (dense) and are of 1 ranks (dense)" in text
    plain = train(tmp_path, "plain", "plugin=false", f"training.save_interval={ITERATIONS}", *load)
    assert not any("megatron_sparse" in name for name in saved_tensors(plain, ITERATIONS))
    assert any("megatron_sparse" in name for name in saved_tensors(alone, ITERATIONS))


def test_another_number_of_ranks_loads_the_distributed_optimizer(tmp_path):
    flags = (
        "scheme=dense",
        "compression.residual_checkpoint=none",
        "training.use_distributed_optimizer=true",
        f"training.save_interval={SAVED_AT}",
    )
    whole = train(tmp_path, "whole", *flags)
    alone = train(tmp_path, "alone", *flags, *resumed_from(whole), "cluster.ranks_per_node=1")
    expected = {i: loss for i, loss in losses(whole).items() if i > SAVED_AT}
    assert losses(alone) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_asynchronous_and_temporary_checkpoints_hold_the_residual(tmp_path):
    """Megatron's `global` non-persistent checkpoints, written while training goes on."""
    flags = ("scheme=agsparse", *TARGET[:-1], f"training.save_interval={ITERATIONS}")
    first = train(
        tmp_path,
        "first",
        *flags,
        "megatron.async_save=true",
        "megatron.async_strategy=mcore",
        "megatron.non_persistent_save_interval=2",
        "megatron.non_persistent_ckpt_type=global",
    )
    tensors = saved_tensors(first, ITERATIONS)
    # As if the run had been killed before its last checkpoint was complete.
    (first / "checkpoints/latest_checkpointed_iteration.txt").unlink()
    resumed = train(
        tmp_path,
        "resumed",
        *flags,
        f"training.load={first / 'checkpoints'}",
        "megatron.non_persistent_ckpt_type=global",
    )
    assert losses(resumed) == {ITERATIONS: losses(first)[ITERATIONS]}
    assert equal(tensors, saved_tensors(resumed, ITERATIONS))
    assert any("megatron_sparse.residual." in name for name in tensors)
