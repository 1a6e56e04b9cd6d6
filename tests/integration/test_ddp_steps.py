"""Plain DDP: passes that were not used leave no trace, on two gloo ranks."""

import copy
import io
import logging
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

import megatron_sparse
from megatron_sparse.config.sparse import StragglerConfig
from megatron_sparse.errors import ConfigError, HostError
from megatron_sparse.reduction import host_state
from megatron_sparse.transport import groups
from tests.ranks import on_ranks

SIDE = 64
AT_ONCE = {"warmup_iters": 0, "ramp_iters": 0, "keep_below_numel": 0, "scheme": "agsparse"}
FIVE_PERCENT = AT_ONCE | {"density": 0.05, "value_bits": None, "timeout_s": 30.0}


def _hooked(optimizer=torch.optim.SGD, **options):
    """A linear model of zeros in DDP, its optimizer (learning rate 1), and the state of its hook.

    `optimizer`: None for none of torch's.
    """
    from torch.nn.parallel import DistributedDataParallel

    model = torch.nn.Linear(SIDE, SIDE, bias=False)
    torch.nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    stepper = None if optimizer is None else optimizer(ddp.parameters(), lr=1.0)
    state = megatron_sparse.DDPState(ddp, **options)
    ddp.register_comm_hook(state, megatron_sparse.ddp_hook)
    return ddp, stepper, state


def _loop(rank, passes, *, undo="auto", by_hand=False, scale=None):
    """Trains on passes; returns the weights, and this rank's residual.

    A pass is a factor of the gradient, and what the loop does with it. `use`: a step; `skip`: none,
    the gradient is cleared; `clear`: the same, zeros in place; `add`: none, the next pass adds to
    the gradient; `discard`: as `skip`, and the state is told. `by_hand` updates without an
    optimizer of torch's.
    """
    optimizer = None if by_hand else torch.optim.SGD
    ddp, stepper, state = _hooked(optimizer, undo=undo, **FIVE_PERCENT)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    weight, draw = ddp.module.weight, torch.Generator().manual_seed(rank)
    for factor, use in passes:
        gradient = torch.randint(-9, 10, (SIDE, SIDE), generator=draw).float() * factor
        loss = (ddp(torch.eye(SIDE)) * gradient).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if use == "add":
            continue
        if use == "use" and stepper is None:
            weight.data -= weight.grad
        elif use == "use":
            stepper.step()
        if use == "discard":
            state.discard_step()
        ddp.zero_grad(set_to_none=use != "clear")
    return weight.detach().clone(), state.residuals["bucket0"].view(SIDE, SIDE).clone()


USED = [(1.0, "use")] * 3


def _with(use, factor=1000.0):
    return [USED[0], (factor, use), *USED[1:]]


@pytest.mark.parametrize(
    ("passes", "options"),
    [
        (_with("skip", 1e38), {}),
        (_with("skip", float("nan")), {}),
        (_with("clear"), {}),
        (_with("discard"), {"by_hand": True}),
        ([(1000.0, "skip"), *USED], {}),
        ([(1.0, "add"), (1.0, "use"), (2.0, "use")], {}),
    ],
    ids=["overflow", "nan", "zeros in place", "told", "first", "added"],
)
@on_ranks(2)
def test_weights_and_residuals_balance_whatever_passes_are_used(rank, passes, options):
    """As if a pass that was not used had not been: each is a sum of small integers.

    Without `no_sync` DDP sums the gradient that it holds again: two passes are the mean of both.
    """
    draw, total = torch.Generator().manual_seed(rank), torch.zeros(SIDE, SIDE)
    for factor, use in passes:
        gradient = torch.randint(-9, 10, (SIDE, SIDE), generator=draw).float() * factor
        if use in ("use", "add"):
            total += gradient.T
    weights, left = _loop(rank, passes, **options)
    left *= 2  # the residual is a contribution to the average
    for each in (total, left):
        dist.all_reduce(each)
    assert torch.equal(-weights * 2 + left, total)
    assert left.any()
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, src=0)
    assert torch.equal(weights, of_rank_0)


OVERFLOWS = [(1.0, "use"), (1e30, "skip"), (1e30, "skip"), *USED]
"""Under a scale of 2^40: both gradients in the middle leave fp32's range, and the scale halves."""


@pytest.mark.parametrize("finds_inf", [False, True])
@on_ranks(2)
def test_under_a_grad_scaler_steps_that_overflow_are_skipped(rank, finds_inf):
    """Fused Adam looks for an overflow itself, so its `step` is called all the same."""
    optimizer = partial(torch.optim.Adam, fused=True) if finds_inf else torch.optim.SGD
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    ddp, stepper, state = _hooked(optimizer, scaler=scaler, **FIVE_PERCENT)
    gradient = torch.arange(SIDE * SIDE).view(SIDE, SIDE).float().T
    for factor, _ in OVERFLOWS:
        scaler.scale((ddp(torch.eye(SIDE)) * gradient * factor).sum()).backward()
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
    assert scaler.get_scale() == 2.0**38
    weights = ddp.module.weight.detach()
    left = state.residuals["bucket0"] * 2 / scaler.get_scale()
    assert weights.isfinite().all()
    assert 0 < float(left.abs().max()) <= 4 * SIDE * SIDE
    if not finds_inf:
        # Both ranks have the same gradients.
        assert torch.equal(-weights.view(-1) + left, 4.0 * torch.arange(SIDE * SIDE))


@pytest.mark.parametrize(("before", "after"), [(8.0, 2.0), (8.0, None), (None, 8.0)])
@on_ranks(1)
def test_a_loaded_residual_follows_another_scale(rank, before, after):
    """It was saved under one scale; a pass with another scaler sends and keeps it."""
    scaler = None if after is None else torch.amp.GradScaler("cpu", init_scale=after)
    ddp, _, state = _hooked(scaler=scaler, **FIVE_PERCENT)
    residual = torch.arange(1.0, SIDE * SIDE + 1)
    held = {"scale": before, "residuals": {"weight": residual * (before or 1.0)}}
    state.load_state_dict(state.state_dict() | held)
    loss = ddp(torch.zeros(1, SIDE)).sum()
    (scaler.scale(loss) if scaler else loss).backward()
    sent, left = ddp.module.weight.grad.view(-1), state.residuals["bucket0"]
    assert torch.equal((sent + left) / (after or 1.0), residual)
    assert left.any()


@on_ranks(1)
def test_what_would_corrupt_residuals_is_refused(rank):
    for passes, options, told in (
        (USED, {"scale": 2.0}, "a GradScaler scales the loss"),
        (_with("discard"), {"undo": "never"}, "discarded step is not kept"),
    ):
        with pytest.raises(ConfigError, match=told):
            _loop(rank, passes, **options)


@on_ranks(1)
def test_a_loop_whose_passes_nobody_uses_is_told_once(rank):
    logged = []
    logger = logging.getLogger("megatron_sparse")
    logger.addFilter(lambda record: logged.append(record.getMessage()))
    _loop(rank, [USED[0], *[(1.0, "skip")] * 20, USED[1]])
    assert len(logged) == 1
    assert "8 backward passes in a row" in logged[0]


@on_ranks(1)
def test_a_saved_state_has_nothing_of_a_pass_that_was_not_used(rank):
    """It is saved after an unused first pass, a used one, and another unused one."""
    ddp, stepper, state = _hooked(**FIVE_PERCENT)
    saved = []
    for factor, is_used in ((1000.0, False), (1.0, True), (1000.0, False)):
        gradient = torch.arange(SIDE * SIDE).view(SIDE, SIDE) * factor
        (ddp(torch.eye(SIDE)) * gradient).sum().backward()
        if is_used:
            stepper.step()
        stepper.zero_grad()
        saved.append(state.state_dict()["residuals"])
    first, used, unused = saved
    assert not first
    assert used["weight"].any()
    assert torch.equal(unused["weight"], used["weight"])


@on_ranks(2)
def test_a_model_with_the_hook_is_copied_and_saved(rank):
    """Averaged weights, a saved whole model; a copied state says what it is."""
    ddp, _, state = _hooked(None, **FIVE_PERCENT)
    torch.nn.init.normal_(ddp.module.weight)
    ddp(torch.eye(SIDE)).square().sum().backward()
    torch.optim.swa_utils.AveragedModel(ddp)
    torch.save(copy.deepcopy(ddp), io.BytesIO())
    copied = copy.deepcopy(state)
    with pytest.raises(HostError, match="is a copy"):
        copied.state_dict()
    ddp(torch.eye(SIDE)).square().sum().backward()
    assert state.step == 2


@on_ranks(1)
def test_a_closed_state_leaves_no_hook_on_the_parameters(rank):
    ddp, _, state = _hooked(**FIVE_PERCENT)
    hooks = ddp.module.weight._backward_hooks
    assert len(hooks) == 1
    state.close()
    assert not hooks


@on_ranks(1)
def test_a_run_that_was_switched_off_is_off_when_it_goes_on(rank):
    *_, state = _hooked(**FIVE_PERCENT)
    state.enabled = False
    *_, again = _hooked(**FIVE_PERCENT)
    again.load_state_dict(state.state_dict())
    assert again.enabled is False


@on_ranks(1)
def test_a_state_that_is_closed_twice_leaves_others_their_group(rank):
    *_, first = _hooked(**FIVE_PERCENT)
    first.close()
    *_, second = _hooked(**FIVE_PERCENT)
    first.close()
    assert second._transport.group in groups._lent


@on_ranks(1)
def test_a_refused_state_gives_its_thread_and_group_back(rank):
    with pytest.raises(ConfigError, match=r"straggler\.rank"):
        _hooked(straggler=StragglerConfig(mode="pinned", rank=99))
    assert not groups._lent
    assert "megatron_sparse" not in [thread.name for thread in threading.enumerate()]


@on_ranks(1)
def test_a_scaler_that_is_switched_off_is_none(rank):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    weights, _ = _loop(rank, USED)
    assert not scaler.is_enabled()
    assert weights.any()


@on_ranks(1)
def test_a_state_that_is_refused_without_a_thread_gives_its_group_back(rank):
    def refuse(*_):
        raise ConfigError("no", expected="a", got="b")

    host_state.check_kernels_of_all = refuse
    with pytest.raises(ConfigError):
        _hooked(**FIVE_PERCENT)
    assert not groups._lent
