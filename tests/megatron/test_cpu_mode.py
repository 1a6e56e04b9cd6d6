"""CPU mode and the repairs of Megatron, each in its own process, because neither can be undone."""

import logging
import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_sparse.errors import HostError
from megatron_sparse.megatron import cpu_mode, repairs
from tests import ranks
from tests.megatron.parallel_gpt import SHARDED, Layout, ParallelGPT
from tests.megatron.train_ranks import equal, on_ranks

STEPS = 3


def zeros_of(numel: int) -> torch.Tensor:
    return torch.zeros(numel)


@ranks.on_ranks(1)
def test_cuda_calls_are_answered_by_the_cpu(rank):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cpu_mode.enable()
    cpu_mode.enable()  # idempotent
    assert not torch.cuda.is_available()
    device = torch.cuda.current_device()
    made = [
        *(torch.zeros(2, device=each) for each in ("cuda", device, torch.device("cuda", 0))),
        *(torch.zeros(2).cuda(), torch.zeros(2).to("cuda:0"), torch.zeros(2).to(device=0)),
        torch.nn.Linear(2, 2).cuda(device).weight,
    ]
    assert {x.device.type for x in made} == {"cpu"}
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2).type(torch.float64).dtype == torch.float64
    assert torch.zeros(2).to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.jit.script(zeros_of)(2).tolist() == [0.0, 0.0]

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return torch.full((2,), 2.0, device=torch.cuda.current_device()) * grad

    leaf = torch.zeros(2, requires_grad=True)
    Doubled.apply(leaf).sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0], "also inside a backward pass"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_event(None)
    torch.cuda.synchronize()
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3)), "the CPU generator stands in for the GPU one"


def _start_with(policy):
    """A rank inherits the policy of the process that tests, which may be batch work itself."""
    os.sched_setscheduler(0, policy, os.sched_param(0))


@pytest.mark.parametrize(
    ("given", "expected"),
    [(os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)],
    ids=["the default", "another"],
)
@ranks.on_ranks(1)
def test_ranks_are_batch_work_unless_they_have_a_policy(rank, given, expected):
    """So no rank takes a core from the one whose message has woken it."""
    _start_with(given)
    cpu_mode.enable()
    assert os.sched_getscheduler(0) == expected
    with ThreadPoolExecutor(1) as later:
        inherited = later.submit(os.sched_getscheduler, 0).result()
    assert inherited == expected, "threads that start later inherit it"


@ranks.on_ranks(1)
def test_a_sandbox_without_policies_costs_time_only(rank):
    def refuse(*arguments):
        raise OSError("Invalid argument")

    _start_with(os.SCHED_OTHER)
    logged = []
    logger = logging.getLogger(cpu_mode.__name__)
    logger.addFilter(lambda record: logged.append(record.getMessage()))
    with mock.patch.object(os, "sched_setscheduler", refuse):
        cpu_mode.enable()
    assert torch.zeros(2).cuda().device.type == "cpu"
    (said,) = logged
    assert "Invalid argument" in said
    assert "train more slowly" in said


@ranks.on_ranks(1)
def test_adam_is_fused_unless_it_is_told_otherwise(rank):
    cpu_mode.enable()
    ways = ({}, {"foreach": True}, {"differentiable": True}, {"fused": False})
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        found = [kind([torch.ones(1)], **way).defaults["fused"] for way in ways]
        assert found == [True, False, False, False]


@ranks.on_ranks(1)
def test_it_has_to_come_before_megatron(rank):
    import megatron.core  # noqa: F401

    with pytest.raises(HostError, match="CPU mode was enabled too late") as caught:
        cpu_mode.enable()
    assert "before anything imports megatron" in str(caught.value)


def test_training_needs_the_mode_first(monkeypatch):
    monkeypatch.setattr(cpu_mode, "_applied", {"torch.zeros"})  # a mode that failed half-way
    with pytest.raises(HostError, match="not enabled"):
        cpu_mode.enable_training()


def test_a_machine_with_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(HostError, match="CUDA_VISIBLE_DEVICES"):
        cpu_mode.enable()


@pytest.mark.parametrize("symbol", ["torch.cuda.no_such_function", "no_such_module.function"])
def test_a_missing_symbol_is_named(symbol):
    patch = cpu_mode.Patch(symbol, lambda original: original, "the test")
    with pytest.raises(HostError) as caught:
        cpu_mode._apply([patch])
    assert symbol in str(caught.value)
    assert "the test" in str(caught.value)


@pytest.mark.parametrize("kind", ["Stream", "Event"])
def test_the_stand_ins_have_what_megatron_calls(kind):
    """By names in its sources: what stands behind `..._stream.` or `..._event.`."""
    specification = find_spec("megatron.core")
    assert specification is not None
    assert specification.origin is not None
    core = Path(specification.origin).parent
    called = {
        name
        for folder in (core, core.parent / "training")
        for path in folder.rglob("*.py")
        for name in re.findall(rf"{kind.lower()}(?:\(\))?\.([a-z]\w+)\(", path.read_text("utf-8"))
    }
    called &= set(dir(getattr(torch.cuda, kind)))
    # Without this one, experts with an all-to-all have ended in an AttributeError.
    assert {"Stream": "record_event", "Event": "record"}[kind] in called
    assert called <= set(dir(getattr(cpu_mode, f"_{kind}")))


@on_ranks(1)
def test_training_patches_are_applied_once(rank):
    cpu_mode.enable_training()
    import megatron.training.training as host
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as optimizer

    before = host.initialize_megatron, optimizer.load_state_dict, optimizer.state_dict
    assert before[0].keywords == {"allow_no_cuda": True}
    cpu_mode.enable_training()
    assert before == (host.initialize_megatron, optimizer.load_state_dict, optimizer.state_dict)


def test_the_index_builder_is_compiled_only_where_the_source_is(tmp_path):
    """Or where the library is missing. The wheel has no Makefile, a checkout of Megatron has."""
    calls = []
    repaired = repairs.unless_built(lambda: calls.append("make"), tmp_path)
    library = tmp_path / "helpers_cpp.cpython-312.so"
    library.touch()
    repaired()
    assert calls == []
    library.unlink()
    repaired()
    assert calls.pop() == "make"
    (tmp_path / "Makefile").touch()
    repaired()
    assert calls == ["make"]


@pytest.mark.parametrize(
    ("groups", "made"),
    [
        ({"momentum": 0.9}, {"momentum_buffer": 0.0}),
        ({"momentum": 0}, {}),
        ({"betas": (0.9, 0.999)}, None),
    ],
)
def test_only_the_state_of_sgd_is_made(groups, made):
    parameter = torch.ones(3)
    sgd = SimpleNamespace(param_groups=[{"params": [parameter], **groups}], state=defaultdict(dict))
    megatrons = SimpleNamespace(optimizer=sgd, init_state_fn=None)

    def sharded_state_dict(self):
        self.init_state_fn(self.optimizer, None)
        return {name: value.sum().item() for name, value in sgd.state[parameter].items()}

    repaired = repairs.with_sgd_state(sharded_state_dict)
    if made is None:
        with pytest.raises(TypeError, match="not callable"):
            repaired(megatrons)
    else:
        assert repaired(megatrons) == made


@pytest.mark.parametrize("left_out", [None, "with_state", "without_grad", "with_own_steps"])
@on_ranks(2)
def test_resuming_the_distributed_optimizer_needs_each_repair(rank, left_out, tmp_path):
    """With torch's Adam: right with the three of them, wrong without any one."""
    from megatron.core import dist_checkpointing

    def sharded(toy: ParallelGPT, is_loading: bool):
        model = toy.chunks[0].module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        optimizer = toy.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def resume():
        state = dist_checkpointing.load(sharded(resumed, True), str(tmp_path))
        resumed.chunks[0].module.load_state_dict(state["model"])
        resumed.optimizer.load_state_dict(state["optimizer"])

    if left_out is not None:
        pytest.MonkeyPatch().setattr(repairs, left_out, lambda function: function)
    repairs.apply()
    layout = Layout(ddp=SHARDED)
    toy = ParallelGPT(layout)
    for _ in range(STEPS):
        toy.step()
    dist_checkpointing.save(sharded(toy, False), str(tmp_path))
    steps = [toy.batches() for _ in range(STEPS)]
    for batches in steps:
        toy.step(batches)

    resumed = ParallelGPT(layout, seed=8)
    # A fresh optimizer cannot load; gradients' leaves cannot be written.
    errors = {"with_state": (AssertionError, ""), "without_grad": (RuntimeError, "leaf Variable")}
    if left_out in errors:
        kind, words = errors[left_out]
        with pytest.raises(kind, match=words):
            resume()
        return
    resume()
    for batches in steps:
        resumed.step(batches)
    same = equal(toy.weights(), resumed.weights())
    assert same is (left_out is None), "with a shared step the weights differ"
