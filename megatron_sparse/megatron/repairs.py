"""Repairs of bugs in megatron-core 0.19 from PyPI, on CPU and GPU alike.

The wheel has the compiled index builder of the datasets, but not the Makefile that Megatron calls
at every start. Without Transformer Engine and Apex the optimizer is `torch.optim.AdamW`, with which
a run on the distributed optimizer fails to resume or, worse, resumes with other numbers. A run with
SGD and without the distributed optimizer does not resume, because nothing creates the state to load
into. Each repair wraps a function; none changes behaviour that already works.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_MARK = "_megatron_sparse_repaired"


def apply() -> None:
    """Applies the repairs that this installation needs. Imports megatron. Idempotent."""
    from megatron.core.datasets import utils as datasets
    from megatron.core.optimizer import distrib_optimizer as optimizers
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if not hasattr(datasets.compile_helpers, _MARK):
        source = Path(datasets.__file__).parent
        datasets.compile_helpers = _marked(unless_built(datasets.compile_helpers, source))
    sharded: Any = optimizers.DistributedOptimizer
    adam_is_torch = not optimizers.HAVE_APEX_OR_TE
    if adam_is_torch and not hasattr(sharded.load_state_dict, _MARK):
        sharded.state_dict = with_state(sharded.state_dict)
        load_state_dict = with_own_steps(without_grad(sharded.load_state_dict))
        sharded.load_state_dict = _marked(load_state_dict)
    unsharded: list[Any] = [FP32Optimizer, Float16OptimizerWithFloat16Params]
    for kind in unsharded:
        if not hasattr(kind.sharded_state_dict, _MARK):
            kind.sharded_state_dict = _marked(with_sgd_state(kind.sharded_state_dict))


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, _MARK, True)
    return function


def unless_built(compile_helpers: Callable[[], None], source: Path) -> Callable[[], None]:
    """Wraps `compile_helpers`: does not compile where the library exists and a Makefile does not.

    That is Megatron's wheel, with which `compile_helpers` would fail. A checkout still compiles.

    Args:
        compile_helpers: runs `make` in `source`; exits the process when that fails.
        source: folder of `megatron.core.datasets`.
    """

    @functools.wraps(compile_helpers)
    def repaired() -> None:
        if (source / "Makefile").is_file() or not list(source.glob("helpers_cpp*.so")):
            compile_helpers()

    return repaired


def with_state(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optimizer's `state_dict`: first gives a fresh Adam the state of step 0.

    To load a checkpoint, Megatron first takes the state dict of a fresh optimizer. `state_dict`
    asserts that all parameters have the same `step`, but a fresh torch Adam has no `step` at all.
    """

    @functools.wraps(state_dict)
    def repaired(self: Any) -> Any:
        adam = self.optimizer
        if adam is not None and not adam.state:
            for group in adam.param_groups:
                for parameter in group["params"]:
                    adam.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return state_dict(self)

    return repaired


def with_sgd_state(sharded_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `sharded_state_dict`: creates SGD's momentum buffers, to load a checkpoint into.

    Megatron creates an optimizer's state by its `init_state_fn`, which is None for SGD. Any other
    optimizer without one keeps Megatron's error: the shape of its state is unknown here.
    """

    def init_state(sgd: Any, config: Any) -> None:
        """Makes a momentum buffer of zeros for each parameter, if its group has momentum."""
        for group in sgd.param_groups:
            if not group["momentum"]:
                continue
            for parameter in group["params"]:
                # Same as no buffer: the first step makes it momentum * 0 + gradient.
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @functools.wraps(sharded_state_dict)
    def repaired(self: Any, *args: Any, **kwargs: Any) -> Any:
        groups = getattr(self.optimizer, "param_groups", [])
        is_sgd = all("momentum" in group for group in groups)
        if self.init_state_fn is None and is_sgd:
            self.init_state_fn = init_state
        return sharded_state_dict(self, *args, **kwargs)

    return repaired


def without_grad(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `load_state_dict`: runs it under `torch.no_grad`.

    In fp32 the main parameters are views of the model's parameters, and with gradients enabled
    autograd refuses in-place writes to views of leaves.
    """
    return torch.no_grad()(load_state_dict)


def with_own_steps(load_state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `load_state_dict`: gives each parameter its group's step, in a separate tensor.

    Megatron gives all parameters the same `step` tensor, to which torch's Adam then adds one for
    each parameter. And when it loads the parameters' state, it overwrites that tensor with the
    step of the fresh optimizer, 0.
    """

    @functools.wraps(load_state_dict)
    def repaired(self: Any, state_dict: Any) -> Any:
        result = load_state_dict(self, state_dict)
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                if "step" not in group:
                    continue
                for parameter in group["params"]:
                    step = torch.tensor(float(group["step"]))
                    self.optimizer.state[parameter]["step"] = step
        return result

    return repaired
